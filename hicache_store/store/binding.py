"""A pool bound to one rank: its box, its buffers, its grid and the plans between them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from hicache_store.errors import ConfigurationError, TopologyError
from hicache_store.layout.box import Box
from hicache_store.layout.format import ObjectFormat
from hicache_store.layout.grid import Grid, fixed_grid, own_grid
from hicache_store.layout.layouts import Layout, check_layout
from hicache_store.layout.model import Pool
from hicache_store.layout.parallel import ParallelSpec, Rank, Shard, shard
from hicache_store.layout.reading import plan_piece
from hicache_store.layout.records import encode_grid
from hicache_store.limits import CANDIDATES_MAX, HINTS_MAX, SMALL_OBJECT_SHARE, TOUCH_MEMORY_MAX
from hicache_store.store.bounded import BoundedDict
from hicache_store.store.candidates import Candidate, CandidateTable
from hicache_store.store.transfer import PiecePlan, check_buffers

log = logging.getLogger("hicache_store")


@dataclass(frozen=True, slots=True)
class PoolBuffers:
    """A pool of an engine as it lies in this rank's memory.

    ``buffers`` are C-contiguous byte-addressable objects (numpy arrays, memoryviews, and for torch
    ``tensor.view(torch.uint8).numpy()``); the layout says where elements sit in them.
    """

    pool: Pool
    layout: Layout
    buffers: Sequence[object]


@dataclass(frozen=True, slots=True)
class FixedGrid:
    """A fleet-wide chunk grid: every object holds this many heads and layers."""

    heads_per_object: int
    layers_per_object: int


@dataclass(slots=True)
class Binding:
    """What the operations of a store need of one pool."""

    pool: Pool
    shard: Shard
    layout: Layout
    buffers: list[memoryview]
    grid: Grid
    table: CandidateTable
    is_writable: bool
    write_chunks: tuple[Candidate, ...]
    hints: BoundedDict[str, int] = field(default_factory=lambda: BoundedDict(HINTS_MAX))
    """Page hash to the mask of candidates last seen."""
    touched: BoundedDict[str, float] = field(default_factory=lambda: BoundedDict(TOUCH_MEMORY_MAX))
    """Page hash to the monotonic time of its last touch."""

    @property
    def box(self) -> Box:
        """The rank's box."""
        return self.shard.box

    @property
    def largest_object_bytes(self) -> int:
        """Length of the largest object this rank writes."""
        return max(chunk.object_bytes for chunk in self.write_chunks)

    def small_object_advice(self, request_cost_bytes: int) -> str | None:
        """What to say when a request costs several times the bytes of an object; ``None`` when not.

        An object below a quarter of the request's cost spends at least four fifths of its time on
        the request. Pages of more tokens make larger objects: what a rank writes of a page is one
        object already, unless a fixed grid cuts it.
        """
        pool = self.pool
        smallest = min(ObjectFormat.of(pool, chunk.box).payload_bytes for chunk in self.write_chunks)
        sensible = request_cost_bytes // SMALL_OBJECT_SHARE
        if smallest >= sensible:
            return None
        tokens = pool.page_size * -(-sensible // smallest)
        return (
            f"pool {pool.name}: an object of a page of {pool.page_size} tokens has {smallest} payload bytes, "
            f"and a request costs as much as {request_cost_bytes}; use pages of {tokens} tokens or more (a "
            "page may lie in several blocks of the engine), or storage with cheaper requests"
        )

    def use_announced(self, grids: Sequence[Grid]) -> bool:
        """Write under a grid that is announced already; ``False`` when none tiles the rank's box."""
        for grid in grids:
            if grid.pool != self.pool.key_name:
                continue
            try:
                self.write_chunks = self.table.chunks_of(grid)
            except (ConfigurationError, KeyError):
                continue
            self.grid = grid
            log.warning(
                "every grid marker slot is taken: pool %s is written under an announced grid; "
                "free slots with `hicache grids --retire`",
                self.pool.name,
            )
            return True
        return False


def bind(
    given: PoolBuffers,
    spec: ParallelSpec,
    rank: Rank,
    *,
    model_layers: int | None,
    fixed: FixedGrid | None,
    request_cost_bytes: int,
    verify: bool,
) -> Binding:
    """Validate one pool of a rank and plan it; raises :class:`ConfigurationError` naming the numbers."""
    pool, layout = given.pool, given.layout
    held = shard(pool, spec, rank, model_layers)
    if held is None:
        raise TopologyError(
            f"rank {rank.label} holds no layer of pool {pool.name} ({pool.num_layers} layers over "
            f"{spec.pp_size} stages); leave the pool out on this rank"
        )
    if not pool.is_shardable and (spec.tp_size > 1 or spec.pp_size > 1):
        raise ConfigurationError(
            f"pool {pool.name} has bytes that belong to no single head, so it cannot be cut for "
            f"{spec.label}; store it from one rank or describe its parts as kv parts of their own"
        )
    buffers = [_flat(pool, index, buffer) for index, buffer in enumerate(given.buffers)]
    _require_apart(pool, buffers)
    check_buffers(pool, layout, buffers, held.box)
    check_layout(pool, layout)
    if fixed is None:
        grid = own_grid(pool, spec, held.box)
    else:
        grid = fixed_grid(
            pool,
            heads_per_object=fixed.heads_per_object,
            layers_per_object=fixed.layers_per_object,
            stage=held.box.layers,
        )
    encode_grid(grid)
    chunks = grid.chunks_within(held.box)
    if len(chunks) > CANDIDATES_MAX:
        raise ConfigurationError(
            f"pool {pool.name}: the grid cuts a page of rank {rank.label} into {len(chunks)} objects, "
            f"at most {CANDIDATES_MAX} are looked at; give more heads or layers an object"
        )

    def plan(object_box: Box, piece: Box) -> PiecePlan:
        read = plan_piece(pool, object_box, piece, request_cost_bytes=request_cost_bytes, verify=verify)
        return PiecePlan(pool, layout, read)

    table = CandidateTable(pool, held.box, chunks, plan)
    return Binding(
        pool=pool,
        shard=held,
        layout=layout,
        buffers=buffers,
        grid=grid,
        table=table,
        is_writable=not any(buffer.readonly for buffer in buffers),
        write_chunks=table.own_chunks,
    )


def _require_apart(pool: Pool, buffers: Sequence[memoryview]) -> None:
    """Raise :class:`ConfigurationError` when two buffers share memory: one would overwrite the other."""
    starts = [np.frombuffer(buffer, np.uint8).ctypes.data if len(buffer) else 0 for buffer in buffers]
    spans = sorted(
        (start, start + len(buffer), index)
        for index, (start, buffer) in enumerate(zip(starts, buffers, strict=True))
        if len(buffer)
    )
    for (_, stop, index), (start, _, other) in pairwise(spans):
        if start < stop:
            raise ConfigurationError(
                f"pool {pool.name}: buffers {index} and {other} share {stop - start} bytes or more; give "
                "each memory of its own, or one buffer and a layout whose strides describe both"
            )


def _flat(pool: Pool, index: int, buffer: object) -> memoryview:
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigurationError(
            f"pool {pool.name}: buffer {index} ({type(buffer).__name__}) has no buffer protocol; "
            "for torch pass tensor.view(torch.uint8).numpy()"
        ) from error
    if not view.c_contiguous:
        raise ConfigurationError(
            f"pool {pool.name}: buffer {index} is not contiguous; pass its base memory and a layout whose "
            "strides describe the view"
        )
    try:
        return view.cast("B")
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"pool {pool.name}: buffer {index} of shape {view.shape} and format {view.format!r} is not plain "
            "memory; pass it as numpy uint8"
        ) from error
