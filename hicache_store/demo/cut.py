"""Which part of a Llama a rank computes. KV heads and layers come from the store's own arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_store.demo.weights import ModelConfig
from hicache_store.errors import TopologyError
from hicache_store.layout.box import Span
from hicache_store.layout.model import Pool
from hicache_store.layout.parallel import ParallelSpec, Rank, Shard, shard


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of one rank; all numbers are the model's own."""

    kv: Shard
    query_heads: tuple[int, ...]
    """Ordered so that those of one KV head are together."""
    ffn: Span
    vocab: Span
    is_first_stage: bool
    is_last_stage: bool


def _share(count: int, rank: Rank, spec: ParallelSpec) -> Span:
    return Span(rank.tp * count // spec.tp_size, (rank.tp + 1) * count // spec.tp_size)


def cut_of(config: ModelConfig, pool: Pool, spec: ParallelSpec, rank: Rank) -> Cut:
    """The part of ``rank``; :class:`TopologyError` when the model cannot be divided so.

    Replicas of a KV head divide its query heads among them.
    """
    if spec.cp_size != 1:
        raise TopologyError(f"{spec.label}: the demo engine has no context parallelism; use cp1")
    held = shard(pool, spec, rank)
    if held is None:
        raise TopologyError(f"{rank.label} holds none of {config.num_layers} layers")
    if config.group % held.replicas:
        raise TopologyError(
            f"{held.replicas} ranks share one KV head and cannot divide its {config.group} query heads; "
            f"use a tensor-parallel size of at most {config.num_query_heads}"
        )
    own = config.group // held.replicas
    first = held.replica * own
    heads = range(held.box.heads.start, held.box.heads.stop)
    return Cut(
        kv=held,
        query_heads=tuple(h * config.group + first + i for h in heads for i in range(own)),
        ffn=_share(config.ffn, rank, spec),
        vocab=_share(config.vocab, rank, spec),
        is_first_stage=rank.pp == 0,
        is_last_stage=rank.pp == spec.pp_size - 1,
    )
