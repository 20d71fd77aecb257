"""Hypothesis strategies for pools, topologies, grids, engine pools and placements.

Sizes are small, since a fault of arithmetic shows at 3 heads as at 128, and odd where a division
could hide one. Every strategy draws legal values only; what is refused has tests of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import strategies as st

from hicache_store.errors import TopologyError
from hicache_store.layout.box import Box, Span
from hicache_store.layout.dtypes import ALL_DTYPES, DType
from hicache_store.layout.grid import Grid
from hicache_store.layout.model import Attention, KVPart, ModelKV, Pool
from hicache_store.layout.parallel import ParallelSpec, head_spans
from hicache_store.layout.plan import Placement, Segment, placement_of_blocks
from hicache_store.testing.engine_forms import ENGINE_FORMS
from hicache_store.testing.oracle import EnginePool

PAGE_SIZES = (1, 16, 64, 3, 5, 12)


def dtypes() -> st.SearchStrategy[DType]:
    """Every logical dtype."""
    return st.sampled_from(ALL_DTYPES)


@st.composite
def models(draw: st.DrawFn, max_heads: int = 8, max_layers: int = 7) -> ModelKV:
    """MHA, GQA and MLA models; K and V of equal, unequal and odd widths (even ones for 4 bits)."""
    dtype = draw(dtypes())
    attention = draw(st.sampled_from(Attention))
    layers = draw(st.integers(1, max_layers))
    step = 2 if dtype.bits < 8 else 1
    width = st.integers(1, 9).map(lambda n: n * step)
    if attention is Attention.MLA:
        return ModelKV(layers, 1, (KVPart("latent", draw(width)),), dtype, attention)
    k = draw(width)
    v = draw(st.one_of(st.just(k), width))
    return ModelKV(
        layers, draw(st.integers(1, max_heads)), (KVPart("k", k), KVPart("v", v)), dtype, attention
    )


@st.composite
def pools(
    draw: st.DrawFn,
    max_heads: int = 8,
    max_layers: int = 7,
    page_sizes: Sequence[int] = PAGE_SIZES,
) -> Pool:
    """The main pool of a model, sometimes with packed draft layers."""
    model = draw(models(max_heads, max_layers))
    return model.pool(draw(st.sampled_from(page_sizes)), draft_layers=draw(st.sampled_from((0, 0, 0, 1))))


@st.composite
def cuts(draw: st.DrawFn, stop: int, must: Sequence[int] = ()) -> tuple[int, ...]:
    """Ascending numbers from 0 to ``stop``, ``must`` among them."""
    inner = draw(st.sets(st.integers(1, stop - 1))) if stop > 1 else set()
    return tuple(sorted({0, stop, *must, *inner}))


@st.composite
def topologies(draw: st.DrawFn, pool: Pool, max_tp: int = 16, max_pp: int = 4) -> ParallelSpec:
    """Legal ones: divisions, replications and explicit head maps; even and given stages; any CP."""
    heads, layers = pool.num_heads, pool.num_layers
    pp = draw(st.integers(1, min(max_pp, layers)))
    starts = None
    if pp > 1 and draw(st.booleans()):
        inner = st.lists(st.integers(1, layers - 1), min_size=pp - 1, max_size=pp - 1, unique=True)
        starts = tuple(sorted(draw(inner)))
    cp = draw(st.sampled_from((1, 1, 2, 4)))
    if draw(st.integers(0, 3)) == 0:
        rows = list(pairwise(draw(cuts(heads))))
        copies = draw(st.lists(st.sampled_from(rows), max_size=3))
        return ParallelSpec(len(rows) + len(copies), pp, cp, starts, tuple(rows + copies))
    legal = [tp for tp in range(1, max_tp + 1) if _can_split(heads, tp)]
    return ParallelSpec(draw(st.sampled_from(legal)), pp, cp, starts)


def _can_split(heads: int, tp: int) -> bool:
    try:
        head_spans(heads, ParallelSpec(tp))
    except TopologyError:
        return False
    return True


@st.composite
def grids(draw: st.DrawFn, pool: Pool, spec: ParallelSpec, stage: Span) -> Grid:
    """Any grid whose cuts contain those of the ranks of one stage of ``spec``."""
    bounds = [span.stop for span in head_spans(pool.num_heads, spec)]
    layers = draw(cuts(len(stage)))
    return Grid(
        pool.key_name,
        draw(cuts(pool.num_heads, bounds)),
        tuple(stage.start + cut for cut in layers),
    )


@st.composite
def sub_boxes(draw: st.DrawFn, box: Box, *, whole_tokens: bool = True) -> Box:
    """Boxes within ``box`` that are not empty; of all its tokens unless told otherwise."""
    tokens = box.tokens if whole_tokens else draw(_sub_spans(box.tokens))
    return Box(draw(_sub_spans(box.heads)), draw(_sub_spans(box.layers)), tokens)


@st.composite
def _sub_spans(draw: st.DrawFn, span: Span) -> Span:
    start = draw(st.integers(span.start, span.stop - 1))
    return Span(start, draw(st.integers(start + 1, span.stop)))


@st.composite
def placements(draw: st.DrawFn, page_size: int, slots: int, slot_tokens: int) -> Placement:
    """Where a page may lie in ``slots`` places of ``slot_tokens`` tokens: blocks of a sequence in any
    order, or segments of any lengths. There must be room for a page."""
    if slots * slot_tokens < page_size:
        raise ValueError(f"{slots} slots of {slot_tokens} tokens have no room for a page of {page_size}")
    order = draw(st.permutations(range(slots)))
    if draw(st.booleans()):
        page = draw(st.integers(0, slots * slot_tokens // page_size - 1))
        return placement_of_blocks(order, page, page_size, slot_tokens)
    segments: list[Segment] = []
    left, room = page_size, slots * slot_tokens
    for slot in order:
        room -= slot_tokens
        least = max(0, left - room)
        count = draw(st.integers(least, min(left, slot_tokens)))
        if count:
            segments.append(Segment(slot, draw(st.integers(0, slot_tokens - count)), count))
        left -= count
    return tuple(segments)


@st.composite
def engine_pools(draw: st.DrawFn, pool: Pool, box: Box) -> EnginePool:
    """A poisoned pool of any form with blocks smaller than, as large as or larger than a page."""
    page = pool.page_size
    slot_tokens = draw(st.sampled_from(sorted({page, max(1, page // 2), max(1, page // 3), 2 * page})))
    needed = -(-page // slot_tokens)
    slots = draw(st.integers(needed, needed + 2))
    groups = [size for size in range(1, len(box.heads) + 1) if len(box.heads) % size == 0]
    form = draw(st.sampled_from(ENGINE_FORMS))
    group = draw(st.sampled_from(groups)) if form.label == "page_unified" else None
    return EnginePool(pool, box, form, slots=slots, slot_tokens=slot_tokens, head_group=group)
