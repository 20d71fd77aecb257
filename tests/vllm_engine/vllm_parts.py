"""Parts of a vLLM engine without the engine: KV caches as vLLM describes them, and a rank over a store."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
    group_kernel_blocks,
)

from hicache_store.connectors.base import Connector
from hicache_store.connectors.registry import open_connector
from hicache_store.engines.options import EngineOptions
from hicache_store.engines.vllm_attach import ModelPages, attach
from hicache_store.engines.vllm_codec import LayerCache, LayerSpec, layer_caches, layer_specs
from hicache_store.engines.vllm_messages import BlockTables
from hicache_store.engines.vllm_options import VllmOptions
from hicache_store.engines.vllm_staging import Staging
from hicache_store.engines.vllm_worker import WorkerHalf
from hicache_store.layout.dtypes import DType
from hicache_store.layout.hashing import page_hashes
from hicache_store.layout.layouts import engine_layout
from hicache_store.layout.model import Attention, KVPart, ModelKV
from hicache_store.layout.namespace import namespace
from hicache_store.layout.parallel import ParallelSpec, Rank, shard
from hicache_store.layout.weights import WeightsIdentity
from hicache_store.metrics import Metrics
from hicache_store.store import PoolBuffers, Store
from hicache_store.testing.faults import CountingConnector, FaultyConnector

WAIT_S = 20.0
"""Of what must happen: only a broken test waits so long."""

_names = itertools.count()
_open: list[Rankful] = []


def until(is_so: Callable[[], bool]) -> None:
    """Return when ``is_so``."""
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)


@dataclass(frozen=True)
class Model:
    """A model's KV: K and V, or with one width a latent."""

    layers: int = 2
    heads: int = 2
    widths: tuple[int, ...] = (8, 4)
    dtype: str = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def pages(self, page: int, specs: Sequence[LayerSpec] = ()) -> ModelPages:
        """What the connector would make of this model."""
        names = ("k", "v") if len(self.widths) == 2 else ("latent",)
        parts = tuple(KVPart(name, width) for name, width in zip(names, self.widths, strict=True))
        attention = Attention.GQA if len(self.widths) == 2 else Attention.MLA
        model = ModelKV(self.layers, self.heads, parts, DType.of(self.dtype), attention)
        config = {"model_type": "llama", "num_hidden_layers": self.layers, "hidden_size": 64}
        config |= {"num_attention_heads": 8, "num_key_value_heads": self.heads, "intermediate_size": 64}
        config |= {"vocab_size": 256, "max_position_embeddings": 4096, "rope_theta": 10_000.0}
        weights = WeightsIdentity.operator("of the tests")
        facts = model.facts(page, scales="weights" if model.dtype.bits < 16 else "none")
        identity = namespace(config, weights, facts, "default")
        return ModelPages(identity, model.pool(page), tuple(specs))

    def caches(
        self, blocks: int, block: int, *, split: int = 1, heads: int | None = None, groups: Sequence[int] = ()
    ) -> tuple[LayerCache, ...]:
        """Caches of random content, K and V of a token side by side; ``groups`` names each layer's."""
        own, (first, *rest) = self.heads if heads is None else heads, self.widths
        caches = []
        for layer in range(self.layers):
            spec = FullAttentionSpec(
                block_size=block,
                num_kv_heads=own,
                head_size=first,
                head_size_v=rest[0] if rest else 0,
                dtype=self.torch_dtype,
            )
            memory = random_tensor((blocks * split, own, block // split, sum(self.widths)), self.torch_dtype)
            group = groups[layer] if groups else 0
            described = LayerSpec(f"model.layers.{layer}.attn", layer, group, spec)
            caches.append(LayerCache(described, torch.split(memory, list(self.widths), dim=-1), split))
        return tuple(caches)


def random_tensor(shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Numbers that differ nearly everywhere; of bytes, all bytes."""
    if dtype.itemsize == 1:
        return torch.randint(0, 256, tuple(shape), dtype=torch.uint8).view(dtype)
    return torch.randn(tuple(shape), dtype=torch.float32).to(dtype)


Update = Callable[..., None]


def spec_of(block: int = 32, heads: int = 2, dim: int = 8, value: int | None = None, **more: Any) -> Any:
    dtype = more.pop("dtype", torch.float32)
    return FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=dim, head_size_v=value, dtype=dtype, **more
    )


def config_of(*groups: tuple[Sequence[str], Any]) -> KVCacheConfig:
    return KVCacheConfig(1, [], [KVCacheGroupSpec(list(names), spec) for names, spec in groups])


def names_of(layers: int) -> list[str]:
    return [f"model.layers.{layer}.self_attn.attn" for layer in range(layers)]


def kernel_views(spec: Any, blocks: int, order: KVCacheLayout, layers: int, kernel: int) -> list[Any]:
    """vLLM's own views of one buffer that all layers share, with random content."""
    raw = torch.randint(-128, 128, (layers * blocks * spec.page_size_bytes,), dtype=torch.int8)
    strides = compute_layout_strides(spec, blocks, layers, order)
    place = KVCacheTensor(raw.numel(), names_of(layers), strides[0], strides[1])
    return create_kv_cache_views(raw, spec, blocks, order, place, kernel)


@dataclass
class Bound:
    """Layers as the engine has bound them to their caches, and what it registers."""

    spec: Any
    views: list[Any]
    update: Update | None
    blocks: int
    name: str = "TEST_ATTN"
    rope: int = 4

    def caches(self) -> tuple[LayerCache, ...]:
        names = names_of(len(self.views))
        specs = layer_specs(config_of((names, self.spec)), len(names))
        registered = [group_kernel_blocks(view, self.blocks) for view in self.views]
        return layer_caches(specs, self.modules(), dict(zip(names, registered, strict=True)))

    def modules(self) -> dict[str, Any]:
        impl = SimpleNamespace() if self.update is None else SimpleNamespace(do_kv_cache_update=self.update)
        backend = SimpleNamespace(get_name=lambda: self.name)
        return {
            name: SimpleNamespace(
                kv_cache=view,
                impl=impl,
                attn_backend=backend,
                isa=None,
                kv_cache_dtype="auto",
                qk_rope_head_dim=self.rope,
                _k_scale=torch.tensor(0.37),
                _v_scale=torch.tensor(2.5),
                _k_scale_float=1.0,
                _v_scale_float=1.0,
            )
            for name, view in zip(names_of(len(self.views)), self.views, strict=True)
        }


def in_rows(module: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
    """K and V of a token side by side, scaled where elements are bytes."""
    for part, rows, scale in (
        (cache[..., : key.shape[-1]], key, module._k_scale),
        (cache[..., key.shape[-1] :], value, module._v_scale),
    ):
        stored = (rows.float() / scale).to(torch.float8_e4m3fn) if part.dtype.itemsize == 1 else rows
        for row, slot in zip(stored.view(part.dtype), slots.tolist(), strict=True):
            part[slot // cache.shape[2], :, slot % cache.shape[2]] = row


def token_rows_of(caches: Sequence[LayerCache], tables: BlockTables, token: int) -> bytes:
    """All that the engine keeps of one token, head by head and layer by layer, found by division alone."""
    found = []
    for head, cache in itertools.product(range(caches[0].parts[0].shape[1]), caches):
        per_block = cache.block_tokens * cache.split
        block = tables[cache.described.group][token // per_block]
        inside = token % per_block
        kernel, row = block * cache.split + inside // cache.block_tokens, inside % cache.block_tokens
        found.extend(bytes_of(part[kernel, head, row]) for part in cache.parts)
    return b"".join(found)


def bytes_of(tensor: Any) -> bytes:
    """Its elements in their order."""
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def everything(caches: Sequence[LayerCache]) -> list[bytes]:
    """The content of all blocks of all layers."""
    return [bytes_of(part) for cache in caches for part in cache.parts]


def storage_of(kind: str, folder: Any) -> str:
    """The URL of a fresh store, ``memory`` or ``file``."""
    return f"memory://vllm-{next(_names)}" if kind == "memory" else f"file://{folder}/kv?quota=256MiB"


def faulty(url: str) -> FaultyConnector:
    """A store that fails on command. Its inner connector counts."""
    return FaultyConnector(CountingConnector(open_connector(url)))


@dataclass
class Rankful:
    """One rank: its blocks, its half of the adapter, and what it shares with other ranks of one model."""

    storage: str | Connector
    model: Model = field(default_factory=Model)
    page: int = 16
    block: int = 8
    blocks: int = 64
    groups: tuple[int, ...] = ()
    spec: ParallelSpec = field(default_factory=ParallelSpec)
    rank: Rank = field(default_factory=Rank)
    staged_pages: int = 16
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        self.metrics = Metrics()
        pages = self.model.pages(self.page)
        held = shard(pages.pool, self.spec, self.rank)
        assert held is not None
        self.caches = self.model.caches(
            self.blocks, self.block, heads=len(held.box.heads), groups=self.groups
        )
        budget = self.staged_pages * pages.pool.payload_bytes(held.box)
        self.staging = Staging(pages.pool, held.box, self.caches, budget)
        buffers = PoolBuffers(pages.pool, self.staging.layout, [self.staging.buffer])
        url = self.storage if isinstance(self.storage, str) else "memory://unused"
        options = VllmOptions(shared=EngineOptions(url=url, timeout_s=self.timeout_s), page_size=self.page)
        self.store = attach(self.storage, pages, buffers, (self.spec, self.rank), options, self.metrics)
        group_blocks = [self.block] * (max(self.groups, default=0) + 1)
        self.worker = WorkerHalf(self.store, self.staging, held, group_blocks, self.timeout_s)
        _open.append(self)

    def rows(self, tables: BlockTables, start: int, stop: int) -> list[bytes]:
        """What is kept of each token."""
        return [token_rows_of(self.caches, tables, token) for token in range(start, stop)]

    def counted(self, name: str) -> int:
        return self.metrics.get(f"engine.{name}")

    def saved(self) -> None:
        """Return when no save is under way."""
        until(lambda: all(future.done() for future in self.worker._saves))

    def ended(self, count: int = 1) -> dict[str, int | None]:
        """The next ``count`` loads that end: None for success, or the tokens that could be restored."""
        found: dict[str, int | None] = {}

        def is_enough() -> bool:
            results = self.worker.results(set())
            found.update(
                (name, results.restorable[name] if name in results.failed else None)
                for name in results.finished
            )
            return len(found) >= count

        until(is_enough)
        return found


def close_ranks() -> None:
    """Close what tests that failed left open."""
    while _open:
        _open.pop().worker.close()


def hashes_for(pages: int, page: int = 16, first: int = 0) -> tuple[str, ...]:
    """The names of a prompt's pages; prompts that begin with another token have other names."""
    return tuple(page_hashes([first, *range(1, pages * page)], page))


def pages_stored(storage: str, hashes: Sequence[str], page: int = 16, model: Model | None = None) -> int:
    """Leading pages that are there for every rank, asked by a store of its own."""
    with whole_pages(storage, page, model) as store:
        return store.contains(hashes).pages


def whole_pages(storage: str | Connector, page: int = 16, model: Model | None = None) -> Store:
    """The store as a scheduler attaches to it."""
    url = storage if isinstance(storage, str) else "memory://unused"
    options = VllmOptions(shared=EngineOptions(url=url), page_size=page)
    pages = (model or Model()).pages(page)
    pool = pages.pool
    layout = engine_layout("canonical", pool, pool.page_box, slots=1)
    buffers = PoolBuffers(pool, layout, [bytearray(pool.payload_bytes(pool.page_box))])
    return attach(storage, pages, buffers, (ParallelSpec(), Rank()), options, Metrics())
