"""The model, pages and stores that the benchmarks share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from hicache_store import (
    ModelKV,
    ParallelSpec,
    Placement,
    Pool,
    PoolBuffers,
    Rank,
    Store,
    WeightsIdentity,
    engine_layout,
    namespace,
    placement_of_slot,
    shard,
)
from hicache_store.connectors.base import Connector
from hicache_store.layout.namespace import Namespace

PAGE = 64


@dataclass(frozen=True)
class Model:
    """A model's KV facts and the pool and namespace they make."""

    kv: ModelKV
    pool: Pool
    namespace: Namespace


def model(layers: int, heads: int, tenant: str = "bench") -> Model:
    """bf16, head dim 128, pages of 64 tokens: 32 KiB a layer and head."""
    kv = ModelKV.dense(
        num_layers=layers, num_kv_heads=heads, head_dim=128, dtype="bfloat16", num_query_heads=4 * heads
    )
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": 512 * heads,
        "num_attention_heads": 4 * heads,
        "num_key_value_heads": heads,
        "head_dim": 128,
        "rope_theta": 10000.0,
    }
    name = namespace(config, WeightsIdentity.operator("bench"), kv.facts(PAGE), tenant)
    return Model(kv, kv.pool(PAGE), name)


def hashes(count: int, salt: str) -> list[str]:
    """Page hashes that no other salt shares."""
    return [hashlib.sha256(f"{salt}/{i}".encode()).hexdigest() for i in range(count)]


@dataclass
class RankSide:
    """One rank's buffers and where its pages lie in them."""

    buffers: list[np.ndarray]
    placements: list[Placement]
    given: PoolBuffers
    parallel: ParallelSpec
    rank: Rank

    @property
    def bytes_per_page(self) -> int:
        return self.given.pool.payload_bytes(self.given.layout.box)


def rank_side(
    made: Model,
    topology: str,
    rank: Rank,
    layout: str,
    pages: int,
    *,
    seed: int,
    head_group: int | None = None,
) -> RankSide:
    """A rank whose pages lie in shuffled slots of touched, random memory."""
    parallel = ParallelSpec.parse(topology)
    held = shard(made.pool, parallel, rank)
    assert held is not None
    lay = engine_layout(layout, made.pool, held.box, slots=pages, head_group=head_group)
    rng = np.random.default_rng(seed)
    buffers = [rng.integers(0, 256, size, dtype=np.uint8) for size in lay.buffer_bytes(made.pool.unit_bytes)]
    slots = rng.permutation(pages)
    placements = [placement_of_slot(int(slot), PAGE) for slot in slots]
    return RankSide(buffers, placements, PoolBuffers(made.pool, lay, buffers), parallel, rank)


def attach(storage: str | Connector, made: Model, side: RankSide, *, verify: bool = True) -> Store:
    """A store for one rank."""
    return Store.attach(storage, made.namespace, [side.given], side.parallel, side.rank, verify=verify)
