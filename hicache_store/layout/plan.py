"""Copy plans: moving one box between a rank's buffers and one object.

A plan is a handful of strided regions, made once at attach and independent of the page. Binding it
to a slot only adds an offset. Regions are never enumerated into byte runs unless the runs are few
and long enough to be read straight into place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

from hicache_store.errors import ConfigurationError
from hicache_store.layout.box import Box, Span
from hicache_store.layout.layouts import Field, Layout, object_layout
from hicache_store.layout.model import Pool


class Axis(NamedTuple):
    """One axis of a region: how many, and the distance in bytes on either side."""

    size: int
    pool_stride: int
    object_stride: int


@dataclass(frozen=True, slots=True)
class Region:
    """Rows of ``row_bytes`` on ``axes``, in one buffer of the pool and in the object's payload.

    ``pool_offset`` is for slot 0; a slot adds ``slot * slot_stride``. Axes are ordered by the
    object's strides, outermost first, so that the object side is walked forwards.
    """

    buffer: int
    pool_offset: int
    object_offset: int
    slot_stride: int
    token_stride: int
    axes: tuple[Axis, ...]
    row_bytes: int

    @property
    def run_count(self) -> int:
        """Number of contiguous runs."""
        count = 1
        for axis in self.axes:
            count *= axis.size
        return count

    @property
    def total_bytes(self) -> int:
        """Bytes the region moves."""
        return self.run_count * self.row_bytes


class Run(NamedTuple):
    """Contiguous bytes on both sides. ``pool_offset`` is for slot 0, as in :class:`Region`."""

    object_offset: int
    length: int
    buffer: int
    pool_offset: int
    slot_stride: int
    token_stride: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """All regions between one object and the part of a rank's slot that holds tokens of a page."""

    regions: tuple[Region, ...]

    @property
    def run_count(self) -> int:
        """Number of contiguous runs of all regions."""
        return sum(region.run_count for region in self.regions)

    @property
    def shortest_run_bytes(self) -> int:
        """Length of the shortest run."""
        return min(region.row_bytes for region in self.regions)

    @property
    def total_bytes(self) -> int:
        """Bytes the plan moves."""
        return sum(region.total_bytes for region in self.regions)

    def runs(self) -> tuple[Run, ...]:
        """Every contiguous run, in the object's order. For plans of few runs only."""
        return tuple(sorted(run for region in self.regions for run in _region_runs(region)))


class Segment(NamedTuple):
    """Consecutive tokens of a page in one slot: ``tokens`` of them from ``slot_token`` on."""

    slot: int
    slot_token: int
    tokens: int


Placement = tuple[Segment, ...]
"""Where a page lives: segments whose tokens, one after the other, are the page's."""


def placement_of_slot(slot: int, page_size: int) -> Placement:
    """A page that fills one slot of the same size."""
    return (Segment(slot, 0, page_size),)


def placement_of_blocks(blocks: Sequence[int], page_index: int, page_size: int, block_size: int) -> Placement:
    """Where page ``page_index`` of a sequence lies whose tokens fill ``blocks`` in order.

    Blocks may be smaller or larger than the page, and need not divide it.
    """
    segments: list[Segment] = []
    token, stop = page_index * page_size, (page_index + 1) * page_size
    while token < stop:
        index, inside = divmod(token, block_size)
        if index >= len(blocks):
            raise ConfigurationError(
                f"page {page_index} of {page_size} tokens needs block {index}, only {len(blocks)} are given"
            )
        count = min(block_size - inside, stop - token)
        segments.append(Segment(blocks[index], inside, count))
        token += count
    return tuple(segments)


def checked_placement(placement: Placement, layout: Layout, page_size: int) -> Placement:
    """``placement`` in integers of Python: those of numpy wrap around in the arithmetic of addresses.

    Raises :class:`ConfigurationError` unless it is one page inside the layout.
    """
    total = 0
    is_plain = True
    for segment in placement:
        try:
            slot, slot_token, tokens = segment
            if not (type(slot) is type(slot_token) is type(tokens) is int and type(segment) is Segment):
                slot, slot_token, tokens = map(operator.index, segment)
                is_plain = False
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"{segment!r} is no segment; give a slot, its first token and a number of tokens, as integers"
            ) from None
        inside = 0 <= slot < layout.slots and slot_token >= 0 and tokens > 0
        if not inside or slot_token + tokens > layout.slot_tokens:
            raise ConfigurationError(
                f"tokens {slot_token}..{slot_token + tokens} of slot {slot} are outside "
                f"{layout.slots} slots of {layout.slot_tokens} tokens"
            )
        total += tokens
    if total != page_size:
        raise ConfigurationError(f"a placement of {total} tokens does not hold a page of {page_size}")
    if not is_plain:
        placement = tuple(Segment(*map(operator.index, segment)) for segment in placement)
    if len(placement) > 1:
        require_apart([placement])
    return placement


def require_apart(placements: Sequence[Placement]) -> None:
    """Raise :class:`ConfigurationError` when a token of a slot is named twice: two pages would land there."""
    segments = sorted(segment for placement in placements for segment in placement)
    for (slot, first, tokens), after in pairwise(segments):
        if slot == after.slot and first + tokens > after.slot_token:
            raise ConfigurationError(
                f"token {after.slot_token} of slot {slot} is named twice; give every page a place of its own"
            )


def plan_copy(pool: Pool, layout: Layout, object_box: Box, piece: Box, tokens: Span) -> CopyPlan:
    """The regions of ``piece`` between the object of ``object_box`` and the rank's buffers.

    ``tokens`` are the page's tokens that one segment holds; the segment's first token lands at the
    slot token that binding adds. ``piece`` lies in both the object and the rank's box.
    """
    stored = object_layout(pool, object_box).fields
    regions: list[Region] = []
    for target in layout.fields:
        source = stored[target.part]
        heads, layers = target.heads.intersect(piece.heads), target.layers.intersect(piece.layers)
        if heads is None or layers is None or len(tokens) == 0:
            continue
        regions.append(_region(pool, target, source, object_box, heads, layers, tokens))
    # K and V of a head group join first, then the groups: every round may make room for another.
    merged = list(_merge_regions(regions))
    while len(merged) < len(regions):
        regions, merged = merged, list(_merge_regions(merged))
    return CopyPlan(tuple(merged))


def _region(
    pool: Pool,
    target: Field,
    source: Field,
    object_box: Box,
    heads: Span,
    layers: Span,
    tokens: Span,
) -> Region:
    unit = pool.unit_bytes
    axes = [
        Axis(len(heads), target.head_stride, source.head_stride),
        Axis(len(layers), target.layer_stride, source.layer_stride),
        Axis(len(tokens), target.token_stride, source.token_stride),
        Axis(len(target.dims), target.dim_stride, source.dim_stride),
    ]
    pool_offset = (
        target.offset
        + (heads.start - target.heads.start) * target.head_stride
        + (layers.start - target.layers.start) * target.layer_stride
    )
    object_offset = (
        source.offset
        + (heads.start - object_box.heads.start) * source.head_stride
        + (layers.start - object_box.layers.start) * source.layer_stride
        + (tokens.start - object_box.tokens.start) * source.token_stride
        + target.dims.start * source.dim_stride
    )
    region = Region(
        buffer=target.buffer,
        pool_offset=pool_offset,
        object_offset=object_offset,
        slot_stride=target.slot_stride,
        token_stride=target.token_stride,
        axes=tuple(axes),
        row_bytes=unit,
    )
    return _merge_axes(region)


def _merge_axes(region: Region) -> Region:
    """Fold axes that continue each other on both sides; contiguous ones become part of the row."""
    axes = [axis for axis in region.axes if axis.size > 1]
    axes.sort(key=lambda axis: (-axis.object_stride, -axis.pool_stride))
    row = region.row_bytes
    while axes and axes[-1].pool_stride == row == axes[-1].object_stride:
        row *= axes.pop().size
    folded: list[Axis] = []
    for axis in axes:
        outer = folded[-1] if folded else None
        if (
            outer is not None
            and outer.pool_stride == axis.pool_stride * axis.size
            and outer.object_stride == axis.object_stride * axis.size
        ):
            folded[-1] = Axis(outer.size * axis.size, axis.pool_stride, axis.object_stride)
        else:
            folded.append(axis)
    return replace(region, axes=tuple(folded), row_bytes=row)


def _merge_regions(regions: Sequence[Region]) -> Iterator[Region]:
    """Join regions of equal shape whose offsets advance by one constant step into one axis more."""
    groups: dict[tuple[object, ...], list[Region]] = {}
    for region in regions:
        key = (region.buffer, region.slot_stride, region.token_stride, region.axes, region.row_bytes)
        groups.setdefault(key, []).append(region)
    for group in groups.values():
        group.sort(key=lambda region: region.object_offset)
        start = 0
        while start < len(group):
            stop, step = _progression(group, start)
            first = group[start]
            if step is not None:
                axis = Axis(stop - start, *step)
                first = _merge_axes(replace(first, axes=(axis, *first.axes)))
            yield first
            start = stop


def _progression(group: Sequence[Region], start: int) -> tuple[int, tuple[int, int] | None]:
    """Where the run of constant steps from ``start`` ends, and the (pool, object) step."""
    if start + 1 == len(group):
        return start + 1, None

    def step_at(i: int) -> tuple[int, int]:
        a, b = group[i], group[i + 1]
        return b.pool_offset - a.pool_offset, b.object_offset - a.object_offset

    step = step_at(start)
    if step[0] <= 0:
        return start + 1, None
    stop = start + 1
    while stop < len(group) and step_at(stop - 1) == step:
        stop += 1
    return stop, step


def _region_runs(region: Region) -> Iterator[Run]:
    for index in product(*(range(axis.size) for axis in region.axes)):
        pool_shift = sum(i * axis.pool_stride for i, axis in zip(index, region.axes, strict=True))
        object_shift = sum(i * axis.object_stride for i, axis in zip(index, region.axes, strict=True))
        yield Run(
            region.object_offset + object_shift,
            region.row_bytes,
            region.buffer,
            region.pool_offset + pool_shift,
            region.slot_stride,
            region.token_stride,
        )
