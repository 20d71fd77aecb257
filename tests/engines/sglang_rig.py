"""Real SGLang host pools and backends of a CPU, and the model that they belong to.

Every value of a model's KV is a function of (page, part, head, layer, token, dim), so what any rank must
hold of any page can be written down, and comparisons are of bytes.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Model:
    """A model's KV. ``heads`` of 1 with ``latent`` is MLA; K and V may differ in width."""

    heads: int = 8
    layers: int = 6
    k_dim: int = 16
    v_dim: int = 16
    page: int = 4
    dtype: torch.dtype = torch.bfloat16
    latent: bool = False
    rope_theta: float = 10_000.0
    weights: str = "w1"
    seed: int = 0

    def config(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": 256,
            "num_attention_heads": 16,
            "num_key_value_heads": self.heads,
            "head_dim": self.k_dim,
            "rope_theta": self.rope_theta,
        }
        if self.latent:
            rope = self.k_dim // 4
            fields |= {
                "model_type": "deepseek_v3", "kv_lora_rank": self.k_dim - rope,
                "qk_rope_head_dim": rope, "qk_nope_head_dim": 16, "num_key_value_heads": 16,
            }  # fmt: skip
        return fields

    def hashes(self, pages: int, seed: str = "") -> list[str]:
        """A chain of page hashes: only their form matters here."""
        chain, last = [], seed
        for page in range(pages):
            last = hashlib.sha256(f"{last}/{page}".encode()).hexdigest()
            chain.append(last)
        return chain

    def page_values(self, page_hash: str) -> list[np.ndarray]:
        """Bytes of a whole page for each part: (head, layer, token, bytes)."""
        digest = hashlib.sha256(f"{page_hash}{self.seed}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        widths = [self.k_dim] if self.latent else [self.k_dim, self.v_dim]
        item = self.dtype.itemsize
        return [
            rng.integers(0, 256, (self.heads, self.layers, self.page, w * item), np.uint8) for w in widths
        ]


def _dense(
    model: Model,
    heads: int,
    layers: int,
    layout: str,
    start: int,
    drafts: int,
    capacity: tuple[float, int, int | None],
) -> Any:
    ratio, device_tokens, host_tokens = capacity

    def info(count: int) -> MHABufferInfo:
        k = tuple(torch.zeros(8, heads, model.k_dim, dtype=model.dtype) for _ in range(count))
        v = tuple(torch.zeros(8, heads, model.v_dim, dtype=model.dtype) for _ in range(count))
        pointers = [torch.tensor([t.data_ptr() for t in side], dtype=torch.uint64) for side in (k, v)]
        buffers = KVBuffers(
            k=k, v=v, k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD
        )
        return MHABufferInfo(
            buffers=buffers, page_size=model.page, head_num=heads, head_dim=model.k_dim,
            v_head_dim=model.v_dim, dtype=model.dtype, device=CPU,
        )  # fmt: skip

    kind = MHATokenToKVPoolHost if model.k_dim == model.v_dim else AsymmetricMHATokenToKVPoolHost
    return kind(
        info(layers), ratio, 0, model.page, layout, pin_memory=False, device_capacity_tokens=device_tokens,
        start_layer=start, end_layer=start + layers, host_token_capacity=host_tokens,
        draft_buffer_infos=[info(1) for _ in range(drafts)],
        **({"head_group_num": math.gcd(heads, 2)} if layout == "page_unified" else {}),
    )  # fmt: skip


def _latent(model: Model, layers: int, layout: str, slots: int, start: int, drafts: int) -> Any:
    def info(count: int) -> MLABufferInfo:
        buffers = tuple(torch.zeros(8, 1, model.k_dim, dtype=model.dtype) for _ in range(count))
        return MLABufferInfo(
            buffers=buffers, data_ptrs=torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64),
            layer_indices=tuple(range(count)), device_layer_num=count, page_size=model.page,
            kv_lora_rank=model.k_dim - model.k_dim // 4, qk_rope_head_dim=model.k_dim // 4,
            kv_cache_dim=model.k_dim, dtype=model.dtype, device=CPU,
        )  # fmt: skip

    return MLATokenToKVPoolHost(
        info(layers), 1.0, 0, model.page, layout, pin_memory=False, device_capacity_tokens=8,
        start_layer=start, end_layer=start + layers, target_layer_num=layers,
        host_token_capacity=slots * model.page, draft_buffer_infos=[info(1) for _ in range(drafts)],
    )  # fmt: skip


def host_pool(
    model: Model,
    *,
    layout: str = "layer_first",
    heads: int | None = None,
    layers: int | None = None,
    start: int = 0,
    slots: int = 16,
    drafts: int = 0,
    ratio: float | None = None,
) -> Any:
    """The real host pool of a rank, filled with a byte that no test writes. With a ratio SGLang sizes it,
    and ``slots`` are those of the device; such a pool is dense."""
    count = model.layers if layers is None else layers
    if model.latent:
        pool = _latent(model, count, layout, slots, start, drafts)
    else:
        tokens = slots * model.page
        capacity = (1.0, 8, tokens) if ratio is None else (ratio, tokens, None)
        pool = _dense(model, heads or model.heads, count, layout, start, drafts, capacity)
    for buffer in pool.kv_buffer if isinstance(pool.kv_buffer, tuple) else (pool.kv_buffer,):
        buffer.view(torch.uint8).fill_(0xA5)
    return pool


def _views(pool: Any, part: int, slot: int) -> list[torch.Tensor]:
    """(head, layer, token, dim) of one part of one page, by the indexing of SGLang's own documentation: all
    heads together, or each head group of ``page_unified`` by itself."""
    page = pool.page_size
    rows = slice(slot * page, (slot + 1) * page)
    is_latent = isinstance(pool, MLATokenToKVPoolHost)
    if pool.layout == "page_unified":
        whole = pool.kv_buffer[slot]
        return [whole[None]] if is_latent else [group[:, part].permute(2, 0, 1, 3) for group in whole]
    buffer = pool.kv_buffer if is_latent else pool.kv_buffer[part]
    if pool.layout == "layer_first":
        return [buffer[:, rows].permute(2, 0, 1, 3)]
    if pool.layout == "page_first":
        return [buffer[rows].permute(2, 1, 0, 3)]
    if pool.layout == "page_first_direct":
        return [buffer[slot].permute(2, 0, 1, 3)]
    assert pool.layout == "page_head"
    return [buffer[slot].permute(0, 2, 1, 3)]


def page_bytes(pool: Any, part: int, slot: int) -> np.ndarray:
    """The bytes of a part of a page as (head, layer, token, bytes)."""
    return torch.cat(_views(pool, part, slot)).view(torch.uint8).numpy()


def fill(pool: Any, part: int, slot: int, values: np.ndarray) -> None:
    """Write (head, layer, token, bytes); packed drafts behind these layers stay as they are."""
    tensor, first = torch.from_numpy(np.ascontiguousarray(values)).view(pool.dtype), 0
    for view in _views(pool, part, slot):
        view[:, : values.shape[1]].copy_(tensor[first : first + len(view)])
        first += len(view)


@dataclass
class Rank:
    """One rank: its real host pool and its real backend, made by SGLang's factory."""

    model: Model
    pool: Any
    backend: Any
    heads: slice
    layers: slice
    slots: list[int] = field(default_factory=list)

    def indices(self, slots: Sequence[int]) -> torch.Tensor:
        page = self.model.page
        return torch.cat([torch.arange(slot * page, (slot + 1) * page) for slot in slots])

    def _mine(self, page_hash: str) -> list[np.ndarray]:
        return [part[self.heads, self.layers] for part in self.model.page_values(page_hash)]

    def write(self, hashes: Sequence[str], slots: Sequence[int], prefix: Sequence[str] = ()) -> list[bool]:
        """Fill slots with this rank's part of the pages and have SGLang's call store them."""
        for page_hash, slot in zip(hashes, slots, strict=True):
            for part, values in enumerate(self._mine(page_hash)):
                fill(self.pool, part, slot, values)
        info = HiCacheStorageExtraInfo(prefix_keys=list(prefix))
        return self.backend.batch_set_v1(list(hashes), self.indices(slots), info)

    def read(self, hashes: Sequence[str], slots: Sequence[int], prefix: Sequence[str] = ()) -> list[bool]:
        info = HiCacheStorageExtraInfo(prefix_keys=list(prefix))
        return self.backend.batch_get_v1(list(hashes), self.indices(slots), info)

    def holds(self, hashes: Sequence[str], slots: Sequence[int]) -> bool:
        """Whether the slots hold exactly this rank's part of the pages."""
        return all(
            np.array_equal(page_bytes(self.pool, part, slot)[:, : values.shape[1]], values)
            for page_hash, slot in zip(hashes, slots, strict=True)
            for part, values in enumerate(self._mine(page_hash))
        )

    def close(self) -> None:
        self.backend.close()


@functools.cache
def config_file(model: Model) -> str:
    """The model's ``config.json`` on disk, for processes in which no engine publishes it."""
    path = Path(tempfile.mkdtemp(prefix="hicache-model-")) / "config.json"
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    path.write_text(json.dumps(model.config()))
    return str(path)


def storage_config(
    model: Model, url: str, *, tp: int = 0, tp_size: int = 1, pp: int = 0, pp_size: int = 1, **extra: Any
) -> HiCacheStorageConfig:
    """What SGLang's controller hands to a backend: the operator's JSON beside the rank's coordinates."""
    keys = {
        "backend_name": "hicache_store", "module_path": "hicache_store.engines.sglang",
        "class_name": "HiCacheL3", "interface_v1": 1, "url": url, "weights": model.weights,
        "config": config_file(model), "total_kv_heads": None if model.latent else model.heads,
        "num_layers": model.layers if pp_size > 1 else None, **extra,
    }  # fmt: skip
    return HiCacheStorageConfig(
        tp_rank=tp, tp_size=tp_size, pp_rank=pp, pp_size=pp_size, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=model.latent, enable_storage_metrics=True, is_page_first_layout=False,
        model_name="served-name",
        extra_config={key: value for key, value in keys.items() if value is not None},
    )  # fmt: skip


def shard(model: Model, tp: int, tp_size: int) -> slice:
    """The heads of a rank, by SGLang's rule: a quotient, or one head for several ranks."""
    if model.latent:
        return slice(0, 1)
    if tp_size <= model.heads:
        width = model.heads // tp_size
        return slice(tp * width, (tp + 1) * width)
    return slice(tp // (tp_size // model.heads), tp // (tp_size // model.heads) + 1)


def stage(model: Model, pp: int, pp_size: int, cuts: Sequence[int] | None) -> slice:
    if cuts is not None:
        ends = [0, *cuts, model.layers]
        return slice(ends[pp], ends[pp + 1])
    size = model.layers // pp_size
    return slice(pp * size, (pp + 1) * size)


def make_rank(
    model: Model,
    url: str,
    *,
    layout: str = "layer_first",
    tp: int = 0,
    tp_size: int = 1,
    pp: int = 0,
    pp_size: int = 1,
    cuts: Sequence[int] | None = None,
    slots: int = 16,
    drafts: int = 0,
    **extra: Any,
) -> Rank:
    """One rank, attached as SGLang's controller does it."""
    heads, layers = shard(model, tp, tp_size), stage(model, pp, pp_size, cuts)
    pool = host_pool(
        model, layout=layout, heads=heads.stop - heads.start, layers=layers.stop - layers.start,
        start=layers.start, slots=slots, drafts=drafts,
    )  # fmt: skip
    backend = attach(pool, model, url, tp=tp, tp_size=tp_size, pp=pp, pp_size=pp_size, **extra)
    return Rank(model, pool, backend, heads, layers)


def attach(pool: Any, model: Model, url: str, **where: Any) -> Any:
    """A backend from SGLang's factory, with its pool; closed again if it refuses, as the controller does."""
    config = storage_config(model, url, **where)
    backend = StorageBackendFactory.create_backend("dynamic", config, pool)
    try:
        backend.register_mem_pool_host(pool)
    except BaseException:
        backend.close()
        raise
    return backend


@contextmanager
def ranks(model: Model, url: str, tp_size: int = 1, pp_size: int = 1, **kwargs: Any) -> Iterator[list[Rank]]:
    """All ranks of a deployment."""
    made: list[Rank] = []
    try:
        for pp in range(pp_size):
            for tp in range(tp_size):
                made.append(make_rank(model, url, tp=tp, tp_size=tp_size, pp=pp, pp_size=pp_size, **kwargs))
        yield made
    finally:
        for rank in made:
            rank.close()


def other(model: Model, **changes: Any) -> Model:
    return replace(model, **changes)
