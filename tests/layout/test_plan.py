from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_store.errors import ConfigurationError
from hicache_store.kernels.strided import pack, unpack
from hicache_store.layout.box import Box, Span
from hicache_store.layout.dtypes import ALL_DTYPES, DType
from hicache_store.layout.layouts import Layout, check_layout, engine_layout
from hicache_store.layout.model import KVPart, ModelKV, Pool
from hicache_store.layout.plan import (
    CopyPlan,
    Placement,
    Segment,
    check_placement,
    placement_of_blocks,
    placement_of_slot,
    plan_copy,
)
from hicache_store.testing.engine_forms import ENGINE_FORMS, EngineForm
from hicache_store.testing.oracle import Dense, EnginePool, dense_page, layout_of_views, object_payload
from hicache_store.testing.probes import POISON
from hicache_store.testing.strategies import engine_pools, placements, pools, sub_boxes

BF16 = DType.of("bfloat16")
SMALL = Pool("kv", 3, 4, (KVPart("k", 4), KVPart("v", 4)), BF16, 64)
FORMS = pytest.mark.parametrize("form", ENGINE_FORMS, ids=lambda form: form.label)


def bound(
    pool: Pool, layout: Layout, object_box: Box, piece: Box, placement: Placement
) -> Iterator[tuple[CopyPlan, Segment]]:
    first = object_box.tokens.start
    for segment in placement:
        yield (
            plan_copy(pool, layout, object_box, piece, Span(first, first + segment.tokens)),
            segment,
        )
        first += segment.tokens


def poisoned(size: int) -> bytearray:
    return bytearray([POISON]) * size


def restore(engine: EnginePool, payload: bytes, object_box: Box, piece: Box, placement: Placement) -> None:
    for plan, segment in bound(engine.pool, engine.layout(), object_box, piece, placement):
        unpack(plan, segment, engine.buffers(), memoryview(payload))


def backup(engine: EnginePool, object_box: Box, placement: Placement) -> bytes:
    payload = poisoned(engine.pool.payload_bytes(object_box))
    for plan, segment in bound(engine.pool, engine.layout(), object_box, object_box, placement):
        pack(plan, segment, engine.buffers(), memoryview(payload))
    return bytes(payload)


def expected(engine: EnginePool, dense: Dense, piece: Box, placement: Placement) -> list[bytes]:
    """Every byte of a poisoned pool after the oracle wrote ``piece`` alone."""
    twin = EnginePool(
        engine.pool,
        engine.box,
        engine.form,
        slots=engine.slots,
        slot_tokens=engine.slot_tokens,
        head_group=engine.head_group,
    )
    twin.write_page(placement, dense, piece)
    return twin.snapshot()


@given(st.data())
def test_packing_any_form_gives_the_objects_the_oracle_writes(data: st.DataObject) -> None:
    pool = data.draw(pools(max_layers=4, max_heads=4))
    box = data.draw(sub_boxes(pool.page_box))
    engine = data.draw(engine_pools(pool, box))
    placement = data.draw(placements(pool.page_size, engine.slots, engine.slot_tokens))
    object_box = data.draw(sub_boxes(box))
    dense = dense_page(pool, page=5)
    engine.write_page(placement, dense)
    before = engine.snapshot()
    assert backup(engine, object_box, placement) == object_payload(dense, object_box)
    assert engine.snapshot() == before


@given(st.data())
def test_unpacking_a_piece_writes_its_elements_and_no_other_byte(data: st.DataObject) -> None:
    pool = data.draw(pools(max_layers=4, max_heads=4))
    box = data.draw(sub_boxes(pool.page_box))
    engine = data.draw(engine_pools(pool, box))
    placement = data.draw(placements(pool.page_size, engine.slots, engine.slot_tokens))
    object_box = data.draw(sub_boxes(pool.page_box))
    common = object_box.intersect(box)
    piece = data.draw(sub_boxes(common)) if common else None
    dense = dense_page(pool, page=6)
    payload = object_payload(dense, object_box)
    if piece is None:
        plans = [plan for plan, _ in bound(pool, engine.layout(), object_box, object_box, placement)]
        assert all(plan.regions == () for plan in plans)
        return
    restore(engine, payload, object_box, piece, placement)
    assert engine.snapshot() == expected(engine, dense, piece, placement)


@FORMS
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_blocks_smaller_and_larger_than_a_page_of_64(form: EngineForm, block: int) -> None:
    blocks = [5, 2, 7, 0, 6, 1, 3, 4] if block < 128 else [2, 0, 1]
    engine = EnginePool(SMALL, Box.of((1, 3), (0, 2), (0, 64)), form, slots=len(blocks), slot_tokens=block)
    where = {page: placement_of_blocks(blocks, page, 64, block) for page in (0, 1)}
    pages = {page: dense_page(SMALL, page=page) for page in where}
    object_box = Box.of((0, 3), (1, 3), (0, 64))
    piece = Box.of((1, 3), (1, 2), (0, 64))
    for page, placement in where.items():
        restore(engine, object_payload(pages[page], object_box), object_box, piece, placement)
    for page, placement in where.items():
        assert engine.read_page(placement, piece).equals(pages[page].part_of(piece))
        assert backup(engine, piece, placement) == object_payload(pages[page], piece)
    assert engine.is_poison_outside(list(where.values()), piece)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda dtype: dtype.name)
@FORMS
def test_every_dtype_and_unequal_widths_survive_a_round_trip(form: EngineForm, dtype: DType) -> None:
    pool = Pool("kv", 2, 3, (KVPart("k", 6), KVPart("v", 2)), dtype, 4)
    writer = EnginePool(pool, pool.page_box, form)
    reader = EnginePool(pool, pool.page_box, form, slots=3)
    dense = dense_page(pool)
    writer.write_page(placement_of_slot(1, 4), dense)
    payload = backup(writer, pool.page_box, placement_of_slot(1, 4))
    assert payload == object_payload(dense, pool.page_box)
    restore(reader, payload, pool.page_box, pool.page_box, placement_of_slot(2, 4))
    assert reader.read_page(placement_of_slot(2, 4)).equals(dense)
    assert reader.is_poison_outside([placement_of_slot(2, 4)])


@given(st.data())
def test_runs_are_the_regions_one_by_one_in_the_objects_order(data: st.DataObject) -> None:
    pool = data.draw(pools(max_layers=3, max_heads=3, page_sizes=(1, 3, 5)))
    box = data.draw(sub_boxes(pool.page_box))
    engine = data.draw(engine_pools(pool, box))
    placement = data.draw(placements(pool.page_size, engine.slots, engine.slot_tokens))
    object_box = data.draw(sub_boxes(pool.page_box))
    piece = object_box.intersect(box)
    if piece is None:
        return
    dense = dense_page(pool, page=7)
    payload = object_payload(dense, object_box)
    buffers = engine.buffers()
    for plan, segment in bound(pool, engine.layout(), object_box, piece, placement):
        runs = plan.runs()
        assert len(runs) == plan.run_count
        assert sum(run.length for run in runs) == plan.total_bytes
        assert plan.total_bytes == pool.payload_bytes(piece) * segment.tokens // pool.page_size
        assert min(run.length for run in runs) == plan.shortest_run_bytes
        at = 0
        for run in runs:
            assert run.object_offset >= at
            at = run.object_offset + run.length
            start = run.pool_offset + segment.slot * run.slot_stride + segment.slot_token * run.token_stride
            buffers[run.buffer][start : start + run.length] = payload[run.object_offset : at]
    assert engine.snapshot() == expected(engine, dense, piece, placement)


def known_model(page: int) -> tuple[Pool, Box, Box]:
    pool = ModelKV.dense(num_layers=60, num_kv_heads=8, head_dim=128, dtype="bfloat16").pool(page)
    return pool, Box.of((4, 6), (30, 60), (0, page)), Box.of((4, 8), (30, 60), (0, page))


REGIONS_AND_RUNS = {
    # form: (regions, runs of a 64-token page)
    "layer_first": (1, 2 * 30 * 2 * 64),
    "layer_first_kv_apart": (2, 2 * 30 * 2 * 64),
    "tensor_per_layer": (30, 2 * 30 * 2 * 64),
    "k_and_v_per_layer": (60, 2 * 30 * 2 * 64),
    "page_first": (1, 2 * 30 * 2 * 64),
    "page_first_kv_apart": (2, 2 * 30 * 2 * 64),
    "page_first_direct": (1, 2 * 30 * 2 * 64),
    "page_first_direct_kv_apart": (2, 2 * 30 * 2 * 64),
    "page_head": (1, 2 * 30 * 2 * 64),
    "page_unified": (1, 2 * 30 * 2 * 64),
    "canonical": (1, 1),
    "head_token_kv": (1, 2 * 30 * 2 * 64),
    "head_token_kv_per_layer": (30, 2 * 30 * 2 * 64),
    "token_head_kv": (1, 2 * 30 * 2 * 64),
    "token_head_kv_per_layer": (30, 2 * 30 * 2 * 64),
    "block_kv_per_layer": (30, 2 * 30 * 2 * 64),
    "kv_block_head_per_layer": (30, 2 * 30 * 2),
}


@FORMS
def test_a_plan_is_a_handful_of_regions_whatever_the_page(form: EngineForm) -> None:
    """Two heads of four, thirty layers: one region a buffer, not one copy a row."""
    found = []
    for page in (16, 64, 256):
        pool, object_box, box = known_model(page)
        engine = EnginePool(pool, box, form, slots=1)
        plan = plan_copy(pool, engine.layout(), object_box, object_box, Span(0, page))
        found.append((len(plan.regions), plan.run_count))
    assert len({regions for regions, _ in found}) == 1
    assert found[1] == REGIONS_AND_RUNS[form.label]


def test_where_both_sides_are_contiguous_there_is_one_run() -> None:
    pool, object_box, box = known_model(64)
    whole = Span(0, 64)
    for name, group in (("canonical", None), ("page_unified", 1)):
        layout = engine_layout(name, pool, box, slots=3, head_group=group)
        plan = plan_copy(pool, layout, object_box, object_box, whole)
        (run,) = plan.runs()
        assert (run.object_offset, run.length, run.buffer) == (0, 1_966_080, 0)
        assert run.pool_offset == 0
        assert run.slot_stride == 2 * 1_966_080
        second = Box.of((6, 8), (30, 60), (0, 64))
        (other,) = plan_copy(pool, layout, second, second, whole).runs()
        assert other.pool_offset == 1_966_080
    # Half of an object's layers: one run a head. Half of its heads: one run.
    layout = engine_layout("canonical", pool, box, slots=1)
    layers = Box.of((4, 6), (40, 50), (0, 64))
    assert plan_copy(pool, layout, object_box, layers, whole).run_count == 2
    heads = Box.of((5, 6), (30, 60), (0, 64))
    assert plan_copy(pool, layout, object_box, heads, whole).run_count == 1


def test_a_latent_has_one_run_a_layer_or_one_in_all() -> None:
    pool = ModelKV.mla(num_layers=60, latent_dim=512, rope_dim=64, dtype="bfloat16").pool(64)
    box = pool.page_box
    runs = {}
    for name in ("layer_first", "page_first", "page_first_direct", "page_unified", "canonical"):
        plan = plan_copy(pool, engine_layout(name, pool, box, slots=2), box, box, Span(0, 64))
        assert len(plan.regions) == 1
        runs[name] = plan.run_count
    assert runs == {
        "layer_first": 60,
        "page_first": 60 * 64,
        "page_first_direct": 1,
        "page_unified": 1,
        "canonical": 1,
    }


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 5),
    st.lists(st.integers(0, 99), unique=True, max_size=40),
)
def test_a45_a_page_lies_where_its_tokens_are_whatever_the_blocks(
    page_size: int, block: int, page: int, blocks: list[int]
) -> None:
    """Counting blocks by rounding the length up forgets that the first one starts in its middle."""
    tokens = range(page * page_size, (page + 1) * page_size)
    if (tokens[-1] // block) >= len(blocks):
        with pytest.raises(ConfigurationError, match=f"page {page} of {page_size} tokens needs block"):
            placement_of_blocks(blocks, page, page_size, block)
        return
    placement = placement_of_blocks(blocks, page, page_size, block)
    spots = [(s.slot, s.slot_token + i) for s in placement for i in range(s.tokens)]
    assert spots == [(blocks[token // block], token % block) for token in tokens]
    assert len({segment.slot for segment in placement}) == len(placement)
    assert all(segment.tokens > 0 for segment in placement)


def test_a_page_that_fills_a_slot_is_one_segment() -> None:
    assert placement_of_slot(3, 64) == placement_of_blocks([3], 0, 64, 64) == (Segment(3, 0, 64),)


GOOD = (Segment(0, 8, 8), Segment(2, 0, 8))


def test_a_placement_inside_the_layout_is_accepted() -> None:
    layout = engine_layout("layer_first", SMALL, SMALL.page_box, slots=3, slot_tokens=16)
    check_placement(GOOD, layout, 16)
    check_placement((Segment(2, 0, 16),), layout, 16)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ((), "0 tokens does not hold a page of 16"),
        (GOOD[:1], "8 tokens does not hold a page of 16"),
        ((*GOOD, Segment(1, 0, 1)), "17 tokens"),
        ((Segment(3, 0, 16),), "slot 3 are outside 3 slots"),
        ((Segment(-1, 0, 16),), "slot -1"),
        ((Segment(0, 1, 16),), "1..17 of slot 0"),
        ((Segment(0, -1, 16),), "-1..15"),
        ((Segment(0, 0, 0), Segment(1, 0, 16)), "0..0"),
        ((Segment(0, 0, 24), Segment(0, 8, -8)), "0..24"),
        ((Segment(1, 0, 8), Segment(1, 0, 8)), "twice"),
        ((Segment(1, 0, 8), Segment(2, 0, 4), Segment(1, 7, 4)), "twice"),
    ],
)
def test_a_placement_that_is_no_page_of_the_layout_is_refused(placement: Placement, words: str) -> None:
    layout = engine_layout("layer_first", SMALL, SMALL.page_box, slots=3, slot_tokens=16)
    with pytest.raises(ConfigurationError, match=words):
        check_placement(placement, layout, 16)


# ---- destinations of any strides ----

HEADS, LAYERS, SLOTS, TOKENS, DIMS = 2, 3, 2, 4, 5
VIEWED = Pool("kv", LAYERS, HEADS, (KVPart("k", DIMS),), BF16, TOKENS)


def _contiguous() -> tuple[np.ndarray, np.ndarray]:
    base = np.zeros((HEADS, LAYERS, SLOTS, TOKENS, DIMS), "<u2")
    return base, base


def _layer_strided() -> tuple[np.ndarray, np.ndarray]:
    base = np.zeros((HEADS, 2 * LAYERS, SLOTS, TOKENS, DIMS), "<u2")
    return base, base[:, 1::2]


def _head_strided() -> tuple[np.ndarray, np.ndarray]:
    base = np.zeros((SLOTS, TOKENS, LAYERS, 3 * HEADS, DIMS), "<u2")
    return base, base[:, :, :, ::3].transpose(3, 2, 0, 1, 4)


def _transposed_rows() -> tuple[np.ndarray, np.ndarray]:
    base = np.zeros((SLOTS, LAYERS, HEADS, DIMS, TOKENS), "<u2")
    return base, base.transpose(2, 1, 0, 4, 3)


def _one_element_in() -> tuple[np.ndarray, np.ndarray]:
    base = np.zeros(1 + HEADS * LAYERS * SLOTS * TOKENS * DIMS, "<u2")
    return base, base[1:].reshape(LAYERS, SLOTS, TOKENS, HEADS, DIMS).transpose(3, 0, 1, 2, 4)


def _padded_rows() -> tuple[np.ndarray, np.ndarray]:
    base = np.zeros((SLOTS, TOKENS, LAYERS, HEADS, DIMS + 3), "<u2")
    return base, base[..., 2 : 2 + DIMS].transpose(3, 2, 0, 1, 4)


def _odd_byte() -> tuple[np.ndarray, np.ndarray]:
    base = np.zeros(1 + 2 * HEADS * LAYERS * SLOTS * TOKENS * DIMS, "u1")
    return base, base[1:].view("<u2").reshape(HEADS, LAYERS, SLOTS, TOKENS, DIMS)


def _every_other_slot() -> tuple[np.ndarray, np.ndarray]:
    base = np.zeros((2 * SLOTS, TOKENS, LAYERS, HEADS, DIMS), "<u2")
    return base, base[1::2].transpose(3, 2, 0, 1, 4)


VIEWS = [
    _contiguous,
    _layer_strided,
    _head_strided,
    _transposed_rows,
    _one_element_in,
    _padded_rows,
    _odd_byte,
    _every_other_slot,
]


@pytest.mark.parametrize("make", VIEWS, ids=lambda make: make.__name__.strip("_"))
def test_a35_the_callers_own_memory_is_filled_in_whatever_strides_it_has(make) -> None:
    """A destination made contiguous before the read is a copy: the bytes land there, not here."""
    base, view = make()
    base.view("u1").reshape(-1)[...] = POISON
    layout = layout_of_views(VIEWED.page_box, [base], [(0, view)])
    check_layout(VIEWED, layout)
    dense = dense_page(VIEWED)
    payload = object_payload(dense, VIEWED.page_box)
    wanted = base.copy()
    flat = memoryview(base.reshape(-1).view("u1"))
    placement = (Segment(1, 0, 1), Segment(0, 1, 2), Segment(1, 3, 1))
    for plan, segment in bound(VIEWED, layout, VIEWED.page_box, VIEWED.page_box, placement):
        unpack(plan, segment, [flat], memoryview(payload))
    got = np.concatenate([view[:, :, 1, 0:1], view[:, :, 0, 1:3], view[:, :, 1, 3:4]], axis=2)
    assert np.array_equal(got, dense.parts[0])
    packed = poisoned(len(payload))
    for plan, segment in bound(VIEWED, layout, VIEWED.page_box, VIEWED.page_box, placement):
        pack(plan, segment, [flat.toreadonly()], memoryview(packed))
    assert packed == payload
    # Put poison back into those rows: nothing else may have changed.
    for slot, first, last in ((1, 0, 1), (0, 1, 3), (1, 3, 4)):
        view[:, :, slot, first:last] = 0xCDCD
    assert np.array_equal(base, wanted)


def test_a35_read_only_memory_is_refused_and_stays_as_it_was() -> None:
    engine = EnginePool(SMALL, SMALL.page_box)
    plan = plan_copy(SMALL, engine.layout(), SMALL.page_box, SMALL.page_box, Span(0, 64))
    payload = object_payload(dense_page(SMALL), SMALL.page_box)
    with pytest.raises(ValueError, match="read-only"):
        unpack(plan, Segment(0, 0, 64), [b.toreadonly() for b in engine.buffers()], memoryview(payload))
    assert engine.is_poison_outside([])


def test_a_region_is_bound_by_adding_its_slot_and_token() -> None:
    layout = engine_layout("page_first", SMALL, SMALL.page_box, slots=4, slot_tokens=64)
    plan = plan_copy(SMALL, layout, SMALL.page_box, SMALL.page_box, Span(0, 16))
    token = 3 * 4 * 4 * 2
    assert {(region.slot_stride, region.token_stride) for region in plan.regions} == {(64 * token, token)}
    later = plan_copy(SMALL, layout, SMALL.page_box, SMALL.page_box, Span(16, 32))
    shift = 16 * 4 * 2
    assert later.regions == tuple(
        replace(region, object_offset=region.object_offset + shift) for region in plan.regions
    )
