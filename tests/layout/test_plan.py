from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moving import backup, bound, poisoned, restore

from hicache_store.kernels.strided import pack, unpack
from hicache_store.layout.box import Box, Span
from hicache_store.layout.dtypes import ALL_DTYPES, DType
from hicache_store.layout.layouts import Field, Layout, check_layout, engine_layout
from hicache_store.layout.model import KVPart, ModelKV, Pool
from hicache_store.layout.plan import (
    Placement,
    Segment,
    placement_of_blocks,
    placement_of_slot,
    plan_copy,
)
from hicache_store.testing.engine_forms import ENGINE_FORMS, EngineForm
from hicache_store.testing.oracle import Dense, EnginePool, dense_page, object_payload
from hicache_store.testing.strategies import cuts, engine_pools, placements, pools, sub_boxes

BF16 = DType.of("bfloat16")
SMALL = Pool("kv", 3, 4, (KVPart("k", 4), KVPart("v", 4)), BF16, 64)
FORMS = pytest.mark.parametrize("form", ENGINE_FORMS, ids=lambda form: form.label)


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


def test_heads_evenly_apart_in_a_buffer_but_not_in_the_object_are_no_single_axis() -> None:
    """Heads 0, 1 and 3 side by side, head 2 elsewhere."""
    pool = Pool("kv", 1, 4, (KVPart("k", 2),), BF16, 3)
    row = 2 * 2
    fields = tuple(
        Field(buffer, 0, Span(head, head + 1), Span(0, 1), Span(0, 2), place * 3 * row, row, row, 999, row, 2)
        for head, buffer, place in ((0, 0, 0), (1, 0, 1), (3, 0, 2), (2, 1, 0))
    )
    layout = Layout("gap", pool.page_box, 1, 3, fields)
    check_layout(pool, layout)
    dense = dense_page(pool)
    payload = object_payload(dense, pool.page_box)
    buffers = [bytearray(9 * row), bytearray(3 * row)]
    plan = plan_copy(pool, layout, pool.page_box, pool.page_box, Span(0, 3))
    unpack(plan, Segment(0, 0, 3), [memoryview(raw) for raw in buffers], memoryview(payload))
    heads = [dense.parts[0][head].tobytes() for head in range(4)]
    assert buffers == [heads[0] + heads[1] + heads[3], heads[2]]


@st.composite
def scattered_layouts(draw: st.DrawFn, pool: Pool) -> Layout:
    """The page cut into fields at any heads, layers and dims, put into two buffers in any order, each
    with axes in an order of its own, so that slots have strides of their own too."""
    heads, layers = draw(cuts(pool.num_heads)), draw(cuts(pool.num_layers))
    blocks = [
        (part, Span(*h), Span(*y), Span(*d))
        for part, units in enumerate(pool.part_units)
        for h, y, d in product(pairwise(heads), pairwise(layers), pairwise(draw(cuts(units))))
    ]
    slots, tokens = 3, pool.page_size
    ends = [draw(st.integers(0, 3)), draw(st.integers(0, 3))]
    fields = []
    for part, h, y, d in draw(st.permutations(blocks)):
        buffer = draw(st.integers(0, 1))
        sizes = {"head": len(h), "layer": len(y), "slot": slots, "token": tokens, "dim": len(d)}
        step, strides = pool.unit_bytes, {}
        for axis in draw(st.permutations(sorted(sizes))):
            strides[f"{axis}_stride"] = step
            step *= sizes[axis]
        fields.append(Field(buffer, part, h, y, d, ends[buffer], **strides))
        ends[buffer] += step + draw(st.integers(0, 2))
    return Layout("scattered", pool.page_box, slots, tokens, tuple(fields))


@given(st.data())
def test_fields_cut_and_scattered_anyhow_are_moved_element_by_element(data: st.DataObject) -> None:
    """A latent whose rope part is kept elsewhere, heads out of order, slots of unlike sizes."""
    pool = data.draw(pools(max_layers=4, max_heads=4, page_sizes=(1, 3)))
    layout = data.draw(scattered_layouts(pool))
    check_layout(pool, layout)
    box = data.draw(sub_boxes(pool.page_box))
    dense = dense_page(pool, page=8).part_of(box)
    payload = object_payload(dense, box)
    sizes = (*layout.buffer_bytes(pool.unit_bytes), 0)
    got, wanted = [[poisoned(size) for size in sizes] for _ in range(2)]
    plan = plan_copy(pool, layout, box, box, box.tokens)
    unpack(plan, Segment(1, 0, pool.page_size), [memoryview(raw) for raw in got], memoryview(payload))
    for field in layout.fields:
        for head, layer, token, dim in product(
            range(max(field.heads.start, box.heads.start), min(field.heads.stop, box.heads.stop)),
            range(max(field.layers.start, box.layers.start), min(field.layers.stop, box.layers.stop)),
            range(pool.page_size),
            range(field.dims.start, field.dims.stop),
        ):
            at = field.offset + field.slot_stride + token * field.token_stride
            at += (head - field.heads.start) * field.head_stride
            at += (layer - field.layers.start) * field.layer_stride
            at += (dim - field.dims.start) * field.dim_stride
            value = dense.parts[field.part][head - box.heads.start, layer - box.layers.start, token, dim]
            wanted[field.buffer][at : at + pool.unit_bytes] = value.tobytes()
    assert got == wanted
    packed = poisoned(len(payload))
    pack(plan, Segment(1, 0, pool.page_size), [memoryview(raw) for raw in got], memoryview(packed))
    assert packed == payload


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
