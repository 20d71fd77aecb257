"""One object between a connector and a rank's buffers: the targets of reads, the sources of writes.

Both run in the connector's worker. Runs that are few and long go straight between the connector
and the slots; everything else goes through one staging block and one strided copy, taken when the
transfer starts and given back when it ends, so that the copy works on memory that is still warm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Part
from hicache_store.errors import ConfigurationError
from hicache_store.kernels.strided import pack, unpack
from hicache_store.layout.box import Box, Span
from hicache_store.layout.format import ByteRange, NameSeed, ObjectFormat
from hicache_store.layout.layouts import Layout
from hicache_store.layout.model import Pool
from hicache_store.layout.plan import CopyPlan, Placement, Run, plan_copy
from hicache_store.layout.reading import PieceRead, fillers
from hicache_store.limits import (
    DIRECT_RUN_MIN_BYTES,
    DIRECT_RUNS_MAX,
    FILLER_OWN_MAX_BYTES,
    PLAN_CACHE_MAX,
)
from hicache_store.store.bounded import BoundedDict
from hicache_store.store.staging import Block, StagingPool

_Cut = tuple[ByteRange, Run | None]


class PiecePlan:
    """How one piece of one object is read into (or, whole, written out of) a rank's buffers."""

    def __init__(self, pool: Pool, layout: Layout, read: PieceRead) -> None:
        self.read = read
        self.format: ObjectFormat = read.format
        self.object_bytes = read.format.object_bytes
        self.fetches = read.fetches
        self.fetched_bytes = read.fetched_bytes
        self.requests = len(read.fetches)
        self.ranges = tuple((fetch.start, fetch.stop) for fetch in read.fetches)
        self._pool = pool
        self._layout = layout
        self._plans: BoundedDict[tuple[int, int], CopyPlan] = BoundedDict(PLAN_CACHE_MAX)
        self.cuts = self._direct_cuts()
        self.filler_bytes = sum(len(span) for cuts in self.cuts or () for span, run in cuts if run is None)

    def copy_plan(self, start: int, count: int) -> CopyPlan:
        """The regions of the page's tokens ``start .. start + count``."""
        plan = self._plans.get((start, count))
        if plan is None:
            span = Span(start, start + count)
            plan = plan_copy(self._pool, self._layout, self.read.object_box, self.read.piece, span)
            self._plans.set((start, count), plan)
        return plan

    def is_direct(self, placement: Placement) -> bool:
        """Whether the bytes go straight between connector and slot."""
        return self.cuts is not None and len(placement) == 1

    def _direct_cuts(self) -> tuple[tuple[_Cut, ...], ...] | None:
        """For each fetch its consecutive ranges: a run of the slot, or filler that no slot wants."""
        plan = self.copy_plan(0, self._pool.page_size)
        few = plan.run_count <= DIRECT_RUNS_MAX
        long = plan.run_count == 1 or plan.shortest_run_bytes >= DIRECT_RUN_MIN_BYTES
        if not (few and long and self.read.is_exact):
            return None
        runs = plan.runs()
        cuts: list[tuple[_Cut, ...]] = []
        for fetch in self.read.fetches:
            inside: list[_Cut] = []
            for run in runs:
                span = ByteRange(run.object_offset, run.object_offset + run.length)
                if fetch.start <= span.start and span.stop <= fetch.stop:
                    inside.append((span, run))
                elif span.start < fetch.stop and fetch.start < span.stop:
                    return None  # a run across two fetches has cells that another run shares
            gaps: list[_Cut] = [(gap, None) for gap in fillers(fetch, [span for span, _ in inside])]
            cuts.append(tuple(sorted([*inside, *gaps], key=lambda cut: cut[0].start)))
        return tuple(cuts)


@dataclass(frozen=True, slots=True)
class TransferContext:
    """What all transfers of one call share."""

    buffers: list[memoryview]
    staging: StagingPool
    deadline: Deadline
    verify: bool


class PieceTarget:
    """Reads one piece: fetches, verifies, and puts it where the placement says."""

    __slots__ = ("_block", "_context", "_key", "_parts", "_placement", "_plan")

    def __init__(self, context: TransferContext, plan: PiecePlan, key: str, placement: Placement) -> None:
        self._context = context
        self._plan = plan
        self._key = key
        self._placement = placement
        self._block: Block | None = None
        self._parts: list[tuple[int, list[memoryview]]] = []

    def parts(self) -> Sequence[Part]:
        """The fetched ranges, straight into the slot or into staging."""
        plan = self._plan
        if plan.is_direct(self._placement):
            self._parts = self._direct_parts()
        else:
            fetches = plan.fetches
            base = fetches[0].start
            self._block = self._context.staging.acquire(fetches[-1].stop - base, self._context.deadline)
            view = self._block.view
            self._parts = [(fetch.start, [view[fetch.start - base : fetch.stop - base]]) for fetch in fetches]
        return self._parts

    def check(self) -> str | None:
        """Verify the trailer and every wanted cell, then copy staged bytes into the slot."""
        plan = self._plan
        if self._context.verify:
            verdict = self._verify()
            if verdict is not None:
                return verdict
        if not plan.is_direct(self._placement) and self._block is not None:
            start, base = 0, plan.fetches[0].start
            for segment in self._placement:
                regions = plan.copy_plan(start, segment.tokens)
                unpack(regions, segment, self._context.buffers, self._block.view, base)
                start += segment.tokens
        return None

    def release(self) -> None:
        """Give the staging block back."""
        if self._block is not None:
            self._context.staging.release(self._block)
            self._block = None

    def _verify(self) -> str | None:
        plan, name = self._plan, NameSeed.of(self._key)
        shape = plan.format
        trailer = self._parts[-1][1][-1][-shape.trailer_bytes :]
        verdict = shape.check_trailer(name, trailer)
        for fetch, (start, views) in zip(plan.fetches, self._parts, strict=True):
            if verdict is None and fetch.cells:
                verdict = shape.check_cells(name, trailer, fetch.cells, views, start)
        return None if verdict is None else verdict.value

    def _direct_parts(self) -> list[tuple[int, list[memoryview]]]:
        plan, segment = self._plan, self._placement[0]
        if plan.filler_bytes <= FILLER_OWN_MAX_BYTES:
            filler = memoryview(bytearray(plan.filler_bytes))
        else:
            self._block = self._context.staging.acquire(plan.filler_bytes, self._context.deadline)
            filler = self._block.view
        parts: list[tuple[int, list[memoryview]]] = []
        for fetch, cuts in zip(plan.fetches, plan.cuts or (), strict=True):
            views: list[memoryview] = []
            for span, run in cuts:
                if run is None:
                    views.append(filler[: len(span)])
                    filler = filler[len(span) :]
                else:
                    views.append(_slot_view(self._context.buffers, run, segment.slot, segment.slot_token))
            parts.append((fetch.start, views))
        return parts


class ChunkSource:
    """Writes one whole object: gathers or packs its payload and seals it."""

    __slots__ = ("_block", "_context", "_key", "_placement", "_plan")

    def __init__(self, context: TransferContext, plan: PiecePlan, key: str, placement: Placement) -> None:
        self._context = context
        self._plan = plan
        self._key = key
        self._placement = placement
        self._block: Block | None = None

    def buffers(self) -> Sequence[memoryview]:
        """The payload and its trailer."""
        plan, shape, context = self._plan, self._plan.format, self._context
        name = NameSeed.of(self._key)
        if plan.is_direct(self._placement):
            segment = self._placement[0]
            views = [
                _slot_view(context.buffers, run, segment.slot, segment.slot_token)
                for cuts in plan.cuts or ()
                for _, run in cuts
                if run is not None
            ]
            return [*views, memoryview(shape.seal(name, views))]
        self._block = context.staging.acquire(shape.object_bytes, context.deadline)
        view = self._block.view
        payload, start = view[: shape.payload_bytes], 0
        for segment in self._placement:
            pack(plan.copy_plan(start, segment.tokens), segment, context.buffers, payload)
            start += segment.tokens
        view[shape.payload_bytes :] = shape.seal(name, [payload])
        return [view]

    def release(self) -> None:
        """Give the staging block back."""
        if self._block is not None:
            self._context.staging.release(self._block)
            self._block = None


def _slot_view(buffers: list[memoryview], run: Run, slot: int, slot_token: int) -> memoryview:
    start = run.pool_offset + slot * run.slot_stride + slot_token * run.token_stride
    return buffers[run.buffer][start : start + run.length]


def check_buffers(pool: Pool, layout: Layout, buffers: Sequence[memoryview], box: Box) -> None:
    """Raise :class:`ConfigurationError` unless the buffers can hold the layout of ``box``."""
    if layout.box != box:
        raise ConfigurationError(
            f"pool {pool.name}: the layout holds {_words(layout.box)}, the rank holds {_words(box)}"
        )
    needed = layout.buffer_bytes(pool.unit_bytes)
    if len(buffers) != len(needed):
        raise ConfigurationError(
            f"pool {pool.name}: layout {layout.name} uses {len(needed)} buffers, {len(buffers)} are given"
        )
    for index, (size, buffer) in enumerate(zip(needed, buffers, strict=True)):
        if len(buffer) < size:
            raise ConfigurationError(
                f"pool {pool.name}: buffer {index} has {len(buffer)} bytes, layout {layout.name} with "
                f"{layout.slots} slots of {layout.slot_tokens} tokens needs {size}"
            )


def _words(box: Box) -> str:
    return (
        f"heads {box.heads.start}-{box.heads.stop} x layers {box.layers.start}-{box.layers.stop} "
        f"x tokens {box.tokens.start}-{box.tokens.stop}"
    )
