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


def tp_sizes(config: ModelConfig) -> list[int]:
    """The tensor-parallel sizes that divide the model: ranks divide its KV heads or, several to a KV head,
    the query heads of each."""
    heads, group = config.num_kv_heads, config.group
    split = [size for size in range(1, heads) if heads % size == 0]
    return split + [heads * replicas for replicas in range(1, group + 1) if group % replicas == 0]


def cut_of(config: ModelConfig, pool: Pool, spec: ParallelSpec, rank: Rank) -> Cut:
    """The part of ``rank``; :class:`TopologyError` when the model cannot be divided so.

    Replicas of a KV head divide its query heads among them.
    """
    if spec.cp_size != 1:
        raise TopologyError(f"{spec.label}: the demo engine has no context parallelism; use cp1")
    _check_tp(config, spec.tp_size)
    held = shard(pool, spec, rank)
    if held is None:
        raise TopologyError(f"{rank.label} holds none of {config.num_layers} layers")
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


def _check_tp(config: ModelConfig, tp_size: int) -> None:
    sizes, heads = tp_sizes(config), config.num_kv_heads
    if tp_size in sizes:
        return
    if tp_size % heads:
        fault = f"{heads} KV heads cannot be split over tensor-parallel size {tp_size}"
    else:
        fault = f"{tp_size // heads} ranks share one KV head and cannot divide its {config.group} query heads"
    raise TopologyError(f"{fault}; use a tensor-parallel size of {', '.join(map(str, sizes))}")
