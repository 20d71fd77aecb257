"""Which box of a page a rank holds, for any tensor, pipeline and context parallelism.

Head arithmetic lives here and nowhere else: a legal division, a replication, or an explicit map.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from hicache_store.errors import ConfigurationError, TopologyError
from hicache_store.layout.box import Box, Span
from hicache_store.layout.model import Pool

_BETWEEN = r"(?:\s*x\s*)?"
_TOPOLOGY = re.compile(rf"(?:tp(\d+))?(?:{_BETWEEN}pp(\d+))?(?:{_BETWEEN}cp(\d+))?")

HeadMap = tuple[tuple[int, int], ...]
"""One (start, stop) pair of heads for each tensor-parallel rank."""


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Coordinates of one process."""

    tp: int = 0
    pp: int = 0
    cp: int = 0

    @property
    def label(self) -> str:
        """``tp1pp0``, with ``cp`` only where it is not zero."""
        return f"tp{self.tp}pp{self.pp}" + (f"cp{self.cp}" if self.cp else "")


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of a page it owns, and which of how many equal holders it is."""

    box: Box
    replica: int
    replicas: int


@dataclass(frozen=True, slots=True)
class ParallelSpec:
    """Sizes of the three parallel axes.

    ``stage_starts`` gives the first model layer of every pipeline stage after the first, for
    uneven splits; without it layers are divided evenly, the earlier stages taking one more where
    they do not divide. ``head_map`` overrides the head rule.
    """

    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    stage_starts: tuple[int, ...] | None = None
    head_map: HeadMap | None = None

    def __post_init__(self) -> None:
        for name, size in (("tp", self.tp_size), ("pp", self.pp_size), ("cp", self.cp_size)):
            if size < 1:
                raise TopologyError(f"{name}_size is {size}; give at least 1")
        if self.stage_starts is not None and len(self.stage_starts) != self.pp_size - 1:
            raise TopologyError(
                f"{self.pp_size} pipeline stages need {self.pp_size - 1} stage_starts, "
                f"got {len(self.stage_starts)}: {list(self.stage_starts)}"
            )
        if self.head_map is not None and len(self.head_map) != self.tp_size:
            raise TopologyError(
                f"the head map has {len(self.head_map)} rows for tensor-parallel size {self.tp_size}; "
                "give one (start, stop) for each rank"
            )

    @classmethod
    def parse(cls, text: str) -> ParallelSpec:
        """The spec of ``tp4pp2``, ``TP4 x PP2`` or ``tp4pp2cp2``; sizes left out are 1."""
        match = _TOPOLOGY.fullmatch(text.strip().lower())
        if match is None or not any(match.groups()):
            raise ConfigurationError(f"{text!r} is not a topology; write tp4pp2, tp1 or tp2pp2cp2")
        tp, pp, cp = (int(size) if size else 1 for size in match.groups())
        return cls(tp, pp, cp)

    @property
    def label(self) -> str:
        """``tp4pp2``, with ``cp`` only where it is used."""
        return f"tp{self.tp_size}pp{self.pp_size}" + (f"cp{self.cp_size}" if self.cp_size > 1 else "")

    def ranks(self) -> Iterator[Rank]:
        """Every rank: stages outermost, then context-parallel, then tensor-parallel ranks."""
        for pp in range(self.pp_size):
            for cp in range(self.cp_size):
                for tp in range(self.tp_size):
                    yield Rank(tp, pp, cp)

    def check(self, rank: Rank) -> None:
        """Raise :class:`TopologyError` when ``rank`` is outside the spec."""
        for name, value, size in (
            ("tp", rank.tp, self.tp_size),
            ("pp", rank.pp, self.pp_size),
            ("cp", rank.cp, self.cp_size),
        ):
            if not 0 <= value < size:
                raise TopologyError(f"{name} rank {value} is outside 0..{size - 1}")


def stage_layers(spec: ParallelSpec, num_layers: int, stage: int) -> Span:
    """Model layers of one pipeline stage; raises when a stage would be empty."""
    if num_layers < spec.pp_size:
        raise TopologyError(
            f"{num_layers} layers cannot fill {spec.pp_size} pipeline stages; use at most {num_layers}"
        )
    if spec.stage_starts is None:
        base, longer = divmod(num_layers, spec.pp_size)
        start = stage * base + min(stage, longer)
        return Span(start, start + base + (1 if stage < longer else 0))
    cuts = (0, *spec.stage_starts, num_layers)
    if any(a >= b for a, b in pairwise(cuts)):
        raise TopologyError(
            f"stage_starts {list(spec.stage_starts)} do not ascend inside 1..{num_layers - 1}; "
            "every stage needs at least one layer"
        )
    return Span(cuts[stage], cuts[stage + 1])


def head_spans(num_heads: int, spec: ParallelSpec) -> tuple[Span, ...]:
    """Heads of each tensor-parallel rank.

    Legal are ``H % T == 0`` (each rank its own heads), ``T % H == 0`` (``T / H`` consecutive
    ranks replicate one head) and an explicit map whose distinct rows tile the heads.
    """
    tp = spec.tp_size
    if spec.head_map is not None:
        distinct = sorted(set(spec.head_map))
        ends = [stop for _, stop in distinct]
        starts = [start for start, _ in distinct]
        if any(a >= b for a, b in distinct) or starts != [0, *ends[:-1]] or ends[-1] != num_heads:
            raise TopologyError(
                f"the head map {list(spec.head_map)} does not tile {num_heads} KV heads: "
                "distinct rows must meet end to end from 0"
            )
        return tuple(Span(*row) for row in spec.head_map)
    if num_heads % tp == 0:
        width = num_heads // tp
        return tuple(Span(rank * width, (rank + 1) * width) for rank in range(tp))
    if tp % num_heads == 0:
        copies = tp // num_heads
        return tuple(Span(rank // copies, rank // copies + 1) for rank in range(tp))
    divisors = [str(d) for d in range(1, num_heads + 1) if num_heads % d == 0]
    raise TopologyError(
        f"{num_heads} KV heads cannot be split over tensor-parallel size {tp}; "
        f"use {', '.join(divisors)}, or a multiple of {num_heads}"
    )


def shard(pool: Pool, spec: ParallelSpec, rank: Rank, model_layers: int | None = None) -> Shard | None:
    """The box a rank holds of every page it owns, ``None`` when its stage has none of the pool's layers.

    ``model_layers`` is the number of layers that the pipeline divides (the pool's own by default,
    needed where a pool holds only some layers); packed draft layers beyond it belong to the last
    stage.
    """
    spec.check(rank)
    if model_layers is None and pool.layer_ids is not None and spec.pp_size > 1:
        raise TopologyError(
            f"pool {pool.name} holds {pool.num_layers} of a model's layers; give model_layers, the number "
            f"that {spec.pp_size} pipeline stages divide"
        )
    divided = pool.num_layers if model_layers is None else model_layers
    stage = stage_layers(spec, divided, rank.pp)
    if rank.pp == spec.pp_size - 1:
        stage = Span(stage.start, max(stage.stop, _last_layer(pool) + 1))
    layers = pool.local_layers(stage)
    if len(layers) == 0:
        return None
    spans = head_spans(pool.num_heads, spec)
    heads = spans[rank.tp]
    holders = [tp for tp, span in enumerate(spans) if span == heads]
    box = Box(heads, layers, Span(0, pool.page_size))
    return Shard(box, holders.index(rank.tp), len(holders))


def _last_layer(pool: Pool) -> int:
    return pool.num_layers - 1 if pool.layer_ids is None else pool.layer_ids[-1]


def elected_replica(page_hash: str, replicas: int) -> int:
    """Which of several equal holders writes a page: a pure function of the page, so that the load
    spreads and a restart changes nothing."""
    return int(page_hash[-8:], 16) % replicas
