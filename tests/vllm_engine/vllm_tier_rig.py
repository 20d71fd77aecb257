"""vLLM's own tiering manager over its host memory tier, made as its scheduler makes it, without an engine."""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from hicache_store.engines.vllm_tier import HiCacheTier, running_engine

MODULE = "hicache_store.engines.vllm_tier"
LAYERS, HEADS, HEAD_DIM, BLOCKS = 4, 4, 32, 64
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Machine:
    """An engine as far as a tier knows it."""

    model: Path
    store: str
    tp: int = 1
    pp: int = 1
    block: int = 32
    blocks_per_chunk: int = 2
    is_canonical: bool = True
    layout: str = "LBHNC"
    algorithm: str = "sha256"
    dtype: str = "float32"
    chunks: int = 16
    lora: bool = False
    window: int | None = None
    """Of every second layer, which are then a group of their own."""
    tier: dict[str, object] = field(default_factory=dict, hash=False)

    @property
    def chunk_tokens(self) -> int:
        return self.block * self.blocks_per_chunk

    @property
    def row_bytes(self) -> int:
        """Of a whole chunk: keys and values of all layers and heads, of one group where there are two."""
        layers = LAYERS if self.window is None else LAYERS // 2
        return (
            layers
            * 2
            * HEADS
            * HEAD_DIM
            * self.chunk_tokens
            * torch.empty(0, dtype=self.torch_dtype).itemsize
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def vllm_config(self) -> Any:
        config = _vllm_config(self.model, self.tp, self.pp, self.block, self.algorithm, self.dtype, self.lora)
        config.cache_config.kv_cache_layout = self.layout
        config.kv_transfer_config.engine_id = uuid.uuid4().hex
        config.kv_transfer_config.kv_connector_extra_config = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": self.chunks * self.row_bytes,
            "blocks_per_chunk": self.blocks_per_chunk,
            "canonical_layout": self.is_canonical,
            "secondary_tiers": [
                {"type": "HiCacheTier", "module_path": MODULE, "url": self.store, **self.tier}
            ],
        }
        return config

    def kv_cache_config(self) -> KVCacheConfig:
        """What vLLM makes of this model, of the first pipeline stage's layers."""
        names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS // self.pp)]
        shape = {
            "block_size": self.block,
            "num_kv_heads": max(1, HEADS // self.tp),
            "head_size": HEAD_DIM,
            "dtype": self.torch_dtype,
        }
        groups = [(names, FullAttentionSpec(**shape))]
        if self.window is not None:
            sliding = SlidingWindowSpec(**shape, sliding_window=self.window)
            groups = [(names[::2], FullAttentionSpec(**shape)), (names[1::2], sliding)]
        layers = groups[0][0]
        page = groups[0][1].page_size_bytes
        size = page * len(layers) * BLOCKS
        tensors = [
            KVCacheTensor(size=size, layers=of_group, layer_stride=page * BLOCKS, block_stride=page)
            for of_group, _ in groups
        ]
        return KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=tensors,
            kv_cache_groups=[KVCacheGroupSpec(layer_names=of, kv_cache_spec=spec) for of, spec in groups],
        )


@cache
def _vllm_config(model: Path, tp: int, pp: int, block: int, algorithm: str, dtype: str, lora: bool) -> Any:
    return EngineArgs(
        model=str(model),
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=block,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        prefix_caching_hash_algo=algorithm,
        enable_lora=lora,
        kv_transfer_config={
            "kv_connector": "HiCacheOffloadingConnector",
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
        },
    ).create_engine_config()


@dataclass
class Rig:
    """A manager and what its scheduler and its ranks would do."""

    machine: Machine
    manager: TieringOffloadingManager

    @property
    def tier(self) -> HiCacheTier:
        (tier,) = self.manager.secondary_tiers
        assert isinstance(tier, HiCacheTier)
        return tier

    @property
    def view(self) -> np.ndarray[Any, Any]:
        """The host tier's rows. Not kept: a view that outlives the manager keeps its memory."""
        return np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def request(self, name: str, keys: Sequence[OffloadKey]) -> ReqContext:
        context = ReqContext(req_id=name)
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, (place + 1) * self.machine.chunk_tokens)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        """Step until no job is under way."""
        self.until(lambda: not self.manager.has_pending_work(), "the jobs do not end")

    def until(self, is_so: Callable[[], bool], complaint: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < end, complaint
            self.step()
            time.sleep(0.002)

    def offer(self, context: ReqContext, keys: Sequence[OffloadKey]) -> None:
        """What the ranks compute comes to the host tier, which hands it on."""
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None, "the host tier is full"
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.block_ids, strict=True):
            self.view[row] = 0xEE  # what lies behind a row's bytes must not matter
            self.view[row, : self.machine.row_bytes] = content(key, self.machine.row_bytes)
        self.manager.complete_store(prepared.keys_to_store, context)

    def store(self, name: str, keys: Sequence[OffloadKey]) -> None:
        """A request from its start to its end."""
        context = self.request(name, keys)
        self.offer(context, keys)
        self.manager.on_request_finished(context)
        self.settle()

    def found(self, context: ReqContext, keys: Sequence[OffloadKey]) -> int:
        """Leading chunks that vLLM finds, when every answer is there; asked as its scheduler asks."""
        answer: list[int] = []

        def ask() -> bool:
            hits, is_deferred = 0, False
            for key in keys:
                result = self.manager.lookup(key, context)
                if result is LookupResult.MISS:
                    break
                hits += result in (LookupResult.HIT, LookupResult.HIT_PENDING)
                is_deferred |= result is not LookupResult.HIT
            answer.append(hits)
            return not is_deferred

        self.until(ask, "the look-up does not end")
        return answer[-1]

    def load(self, name: str, keys: Sequence[OffloadKey]) -> int:
        """Leading chunks of a request that come back; each of them is what was stored."""
        context = self.request(name, keys)
        hits = self.found(context, keys)
        if hits:
            rows = self.manager.prepare_load(keys[:hits], context).block_ids
            for key, row in zip(keys[:hits], rows, strict=True):
                expected = content(key, self.machine.row_bytes)
                assert np.array_equal(self.view[row, : self.machine.row_bytes], expected), "wrong bytes"
            self.manager.complete_load(keys[:hits], context)
        self.manager.on_request_finished(context)
        self.settle()
        return hits

    def counted(self, name: str) -> int:
        return self.tier.metrics.get(f"tier.{name}")


@contextmanager
def manager_of(machine: Machine) -> Iterator[Rig]:
    """A manager as vLLM's connector makes it, shut down behind."""
    config, cache_config = machine.vllm_config(), machine.kv_cache_config()
    with running_engine(config, cache_config):
        spec = TieringOffloadingSpec(build_offloading_config(config, cache_config))
        manager = spec.get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    try:
        yield Rig(machine, manager)
    finally:
        manager.shutdown()


def chain(seed: str, chunks: int) -> list[OffloadKey]:
    """The keys of one prompt's chunks."""
    hashes, parent = [], b""
    for place in range(chunks):
        parent = hashlib.sha256(parent + f"{seed} {place}".encode()).digest()
        hashes.append(make_offload_key(parent, 0))
    return hashes


def content(key: OffloadKey, size: int) -> np.ndarray[Any, Any]:
    """The bytes of a chunk: nothing else than its key decides them."""
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def ours() -> set[str]:
    """Names of the threads that tiers started."""
    return {t.name for t in threading.enumerate() if t.name.startswith(("hicache", "vllm_offloading_lookup"))}
