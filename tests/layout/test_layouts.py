from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_store.errors import ConfigurationError
from hicache_store.layout.box import Box, Span
from hicache_store.layout.dtypes import DType
from hicache_store.layout.layouts import (
    ENGINE_AXES,
    Field,
    Layout,
    axes_layout,
    check_layout,
    engine_layout,
    object_layout,
)
from hicache_store.layout.model import KVPart, Pool
from hicache_store.layout.plan import Segment
from hicache_store.testing.engine_forms import ENGINE_FORMS, EngineForm
from hicache_store.testing.oracle import EnginePool, dense_page, layout_of_views, object_payload
from hicache_store.testing.strategies import engine_pools, pools, sub_boxes

BF16 = DType.of("bfloat16")
EQUAL = Pool("kv", 5, 6, (KVPart("k", 4), KVPart("v", 4)), BF16, 3)
UNEQUAL = Pool("kv", 5, 6, (KVPart("k", 6), KVPart("v", 4)), BF16, 3)
LATENT = Pool("kv", 5, 1, (KVPart("latent", 5),), BF16, 3)
NIBBLES = Pool("kv", 5, 6, (KVPart("k", 6), KVPart("v", 4)), DType.of("float4_e2m1"), 3)
THREE = Pool("kv", 5, 6, (KVPart("k", 4), KVPart("v", 2), KVPart("scale", 1)), BF16, 3)
POOLS = {"equal": EQUAL, "unequal": UNEQUAL, "mla": LATENT, "4 bits": NIBBLES, "three": THREE}


def addresses(layout: Layout, part: int, head: int, layer: int, slot: int, token: int) -> dict[int, tuple]:
    """Every dim's (buffer, byte), by the formula of the layout's description."""
    found: dict[int, tuple[int, int]] = {}
    for f in layout.fields:
        if f.part != part or head not in f.heads or layer not in f.layers:
            continue
        for dim in range(f.dims.start, f.dims.stop):
            assert dim not in found
            found[dim] = (
                f.buffer,
                f.offset
                + slot * f.slot_stride
                + token * f.token_stride
                + (head - f.heads.start) * f.head_stride
                + (layer - f.layers.start) * f.layer_stride
                + (dim - f.dims.start) * f.dim_stride,
            )
    return found


def assert_layout_is_the_arrays(engine: EnginePool) -> None:
    layout, pool, box = engine.layout(), engine.pool, engine.box
    bases = [array.__array_interface__["data"][0] for array in engine.arrays]
    for part in range(len(pool.parts)):
        for head, layer, slot in product(
            range(box.heads.start, box.heads.stop),
            range(box.layers.start, box.layers.stop),
            range(engine.slots),
        ):
            ((_, rows),) = engine.rows(part, head, layer, (Segment(slot, 0, engine.slot_tokens),))
            for token in range(engine.slot_tokens):
                row = rows[token]
                owner = next(i for i, array in enumerate(engine.arrays) if np.may_share_memory(row, array))
                at = row.__array_interface__["data"][0] - bases[owner]
                wanted = {dim: (owner, at + dim * row.strides[0]) for dim in range(len(row))}
                assert addresses(layout, part, head, layer, slot, token) == wanted


@pytest.mark.parametrize("slot_tokens", [3, 2])
@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("form", ENGINE_FORMS, ids=lambda form: form.label)
def test_every_element_lies_where_the_engines_array_has_it(
    form: EngineForm, kind: str, slot_tokens: int
) -> None:
    pool = POOLS[kind]
    heads = (0, 1) if pool.num_heads == 1 else (2, 6)
    box = Box.of(heads, (1, 4), (0, 3))
    groups: list[int | None] = [None]
    if form.label == "page_unified":
        groups = [None, *(size for size in (1, 2) if len(box.heads) % size == 0)]
    for group in groups:
        engine = EnginePool(pool, box, form, slots=3, slot_tokens=slot_tokens, head_group=group)
        assert_layout_is_the_arrays(engine)


@given(st.data())
def test_any_pool_of_any_form_is_described_exactly_and_to_its_last_byte(data: st.DataObject) -> None:
    pool = data.draw(pools(max_layers=3, max_heads=4, page_sizes=(1, 3, 4)))
    engine = data.draw(engine_pools(pool, data.draw(sub_boxes(pool.page_box))))
    assert_layout_is_the_arrays(engine)
    layout = engine.layout()
    assert layout.buffer_count == len(engine.arrays)
    assert layout.buffer_bytes(pool.unit_bytes) == tuple(array.nbytes for array in engine.arrays)


@given(pools(), st.data())
def test_the_object_is_one_more_layout(pool: Pool, data: st.DataObject) -> None:
    box = data.draw(sub_boxes(pool.page_box))
    layout = object_layout(pool, box)
    assert layout.buffer_bytes(pool.unit_bytes) == (pool.payload_bytes(box),)
    dense = dense_page(pool).part_of(box)
    payload = np.frombuffer(object_payload(dense, box), dtype=dense.parts[0].dtype)
    for part, field in enumerate(layout.fields):
        view = np.ndarray(
            dense.parts[part].shape,
            payload.dtype,
            payload.data.cast("B"),
            field.offset,
            (field.head_stride, field.layer_stride, field.token_stride, field.dim_stride),
        )
        assert np.array_equal(view, dense.parts[part])


def test_every_named_layout_is_met_by_a_form_of_the_oracle() -> None:
    assert set(ENGINE_AXES) == {form.layout for form in ENGINE_FORMS if isinstance(form.layout, str)}


def test_an_unknown_layout_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'page_last'.*layer_first, page_first"):
        engine_layout("page_last", EQUAL, EQUAL.page_box, slots=1)


@pytest.mark.parametrize(
    ("axes", "split"),
    [
        (("kv", "layer", "slot", "token", "head"), ()),
        (("kv", "layer", "slot", "token", "head", "dim", "dim"), ()),
        (("kv", "layer", "slot", "token", "head", "dim"), ("kv",)),
        (("kv", "layer", "slot", "token", "dim"), ("head",)),
        (("kv", "layer", "slot", "page", "head", "dim"), ()),
    ],
)
def test_axes_that_are_not_each_there_once_are_refused(axes: tuple[str, ...], split: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="once each"):
        axes_layout(EQUAL, EQUAL.page_box, axes, slots=1, split=split)


def test_dims_outside_the_kv_axis_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="dim axis"):
        axes_layout(EQUAL, EQUAL.page_box, ("slot", "head", "layer", "token", "dim", "kv"), slots=1)


@pytest.mark.parametrize("group", [0, -1, 4, 5])
def test_a_head_group_that_does_not_divide_the_heads_is_refused(group: int) -> None:
    with pytest.raises(ConfigurationError, match=f"6 local heads .* head group {group}"):
        engine_layout("page_unified", EQUAL, EQUAL.page_box, slots=1, head_group=group)


@pytest.mark.parametrize(("slots", "tokens"), [(0, 3), (2, 0), (-1, 3)])
def test_a_layout_without_room_is_refused(slots: int, tokens: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{slots} slots of {tokens} tokens"):
        engine_layout("layer_first", EQUAL, EQUAL.page_box, slots=slots, slot_tokens=tokens)


@pytest.mark.parametrize(
    "axes",
    [
        ("layer", "slot", "kv", "head", "dim", "token"),
        ("slot", "kv", "dim", "layer", "head", "token"),
        ("layer", "kv", "slot", "token", "head", "dim"),
    ],
)
@pytest.mark.parametrize("kind", POOLS)
def test_axes_in_any_order_are_those_of_a_numpy_array(axes: tuple[str, ...], kind: str) -> None:
    """Tokens innermost is how one CPU backend keeps its transposed keys."""
    pool = POOLS[kind]
    sizes = {"slot": 2, "token": pool.page_size, "layer": pool.num_layers, "head": pool.num_heads}
    layout = axes_layout(pool, pool.page_box, axes, slots=2)
    at = axes.index("kv")
    outer, inner = axes[:at], axes[at + 1 :]
    unit = np.dtype(f"u{pool.unit_bytes}")
    blocks = [[units if axis == "dim" else sizes[axis] for axis in inner] for units in pool.part_units]
    lengths = [int(np.prod(block)) for block in blocks]
    outer_sizes = [sizes[axis] for axis in outer]
    base = np.zeros((*outer_sizes, sum(lengths)), unit)
    views = []
    for part, block in enumerate(blocks):
        first = sum(lengths[:part])
        view = base[..., first : first + lengths[part]].reshape(*outer_sizes, *block)
        assert np.shares_memory(view, base)
        order = [(*outer, *inner).index(axis) for axis in ("head", "layer", "slot", "token", "dim")]
        views.append((0, view.transpose(order)))
    assert replace(layout_of_views(pool.page_box, [base], views), name="axes") == layout


def strided(**changes: object) -> Layout:
    """Two slots of EQUAL's shape by explicit strides, K then V a token, with one thing changed."""
    width = 8
    fields = []
    for part in range(2):
        field = Field(
            buffer=0,
            part=part,
            heads=Span(0, 6),
            layers=Span(0, 5),
            dims=Span(0, 4),
            offset=part * width,
            head_stride=2 * width,
            layer_stride=6 * 2 * width,
            slot_stride=3 * 5 * 6 * 2 * width,
            token_stride=5 * 6 * 2 * width,
            dim_stride=2,
        )
        fields.append(replace(field, **changes) if part == 1 else field)  # type: ignore[arg-type]
    return Layout("strided", EQUAL.page_box, 5, 3, tuple(fields))


def test_the_unchanged_layout_is_accepted() -> None:
    check_layout(EQUAL, strided())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offset": 0}, "overlap"),
        ({"offset": 6}, "overlap"),
        ({"offset": -8}, "must not be negative"),
        ({"dim_stride": 1}, "overlap"),
        ({"dim_stride": 4}, "overlap"),
        ({"head_stride": 0}, "positive"),
        ({"head_stride": -16}, "positive"),
        ({"head_stride": 8}, "overlap"),
        ({"layer_stride": 16}, "overlap"),
        ({"token_stride": 96}, "overlap"),
        ({"slot_stride": 0}, "positive"),
        ({"slot_stride": 480}, "overlap"),
        ({"part": 0}, "exactly once"),
        ({"part": 2}, "outside the rank's box"),
        ({"part": -1}, "outside the rank's box"),
        ({"buffer": -1}, "outside the rank's box"),
        ({"heads": Span(0, 5)}, "exactly once"),
        ({"heads": Span(1, 7)}, "outside the rank's box"),
        ({"heads": Span(6, 6)}, "holds nothing"),
        ({"layers": Span(0, 4)}, "exactly once"),
        ({"layers": Span(0, 6)}, "outside the rank's box"),
        ({"dims": Span(0, 3)}, "exactly once"),
        ({"dims": Span(1, 5)}, "outside the rank's box"),
    ],
)
def test_strides_that_cannot_be_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_layout(EQUAL, strided(**changes))


def test_fields_that_hold_a_head_twice_and_another_never_are_refused() -> None:
    k, v = strided().fields
    twice = (replace(k, heads=Span(0, 3)), replace(k, heads=Span(2, 5), offset=10**6), v)
    with pytest.raises(ConfigurationError, match="exactly once"):
        check_layout(EQUAL, Layout("twice", EQUAL.page_box, 1, 3, twice))


def test_a_slot_that_reaches_into_the_next_layer_is_refused_however_far_the_slots_are_apart() -> None:
    """A layer-first buffer of 5 slots described with 6: slot 5 of one layer is slot 0 of the next."""
    right = engine_layout("layer_first", EQUAL, EQUAL.page_box, slots=5)
    check_layout(EQUAL, right)
    with pytest.raises(ConfigurationError, match="overlap"):
        check_layout(EQUAL, replace(right, slots=6))
    # Here neighbours are clear of one another, and so are the first slot and the last.
    sparse = [replace(field, layer_stride=2 * field.slot_stride, layers=Span(0, 2)) for field in right.fields]
    box = replace(EQUAL.page_box, layers=Span(0, 2))
    with pytest.raises(ConfigurationError, match="overlap"):
        check_layout(EQUAL, Layout("sparse", box, 5, 3, tuple(sparse)))


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("name", ENGINE_AXES)
def test_a_buffer_described_with_more_slots_than_it_has_is_refused_unless_slots_are_outermost(
    name: str, kind: str
) -> None:
    """Among them K slots that grow into the V block behind them, whose slots are of another size."""
    pool = POOLS[kind]
    for layers in (1, 5):
        box = replace(pool.page_box, layers=Span(0, layers))
        more = replace(engine_layout(name, pool, box, slots=5), slots=6)
        inner = {"kv": len(pool.parts), "layer": layers}
        outside = [axis for axis in ENGINE_AXES[name][: ENGINE_AXES[name].index("slot")] if inner[axis] > 1]
        if outside:
            with pytest.raises(ConfigurationError, match="overlap"):
                check_layout(pool, more)
        else:
            check_layout(pool, more)


def test_slots_of_unlike_sizes_that_interleave_are_refused_for_they_cannot_be_compared() -> None:
    k, v = strided().fields
    check_layout(EQUAL, Layout("apart", EQUAL.page_box, 5, 3, (k, replace(v, offset=5 * k.slot_stride))))
    mixed = Layout("mixed", EQUAL.page_box, 5, 3, (k, replace(v, slot_stride=2 * v.slot_stride)))
    with pytest.raises(ConfigurationError, match="overlap"):
        check_layout(EQUAL, mixed)


def test_a_slot_longer_than_the_distance_to_the_next_is_refused() -> None:
    pool = Pool("kv", 1, 1, (KVPart("k", 8),), BF16, 4)
    right = engine_layout("layer_first", pool, pool.page_box, slots=2)
    short = replace(right.fields[0], slot_stride=48)
    with pytest.raises(ConfigurationError, match="overlap"):
        check_layout(pool, replace(right, fields=(short,)))


@given(st.data())
def test_overlaps_are_found_exactly_as_by_marking_every_byte(data: st.DataObject) -> None:
    """Against the marks of all elements of all slots, for strides from tight to colliding."""
    heads, layers, slots, tokens, dims = (data.draw(st.integers(1, 3), label=axis) for axis in "hlstd")
    pool = Pool("kv", layers, heads, (KVPart("k", dims), KVPart("v", dims)), BF16, tokens)
    slot_stride = data.draw(st.integers(1, 60))
    fields = [
        Field(
            buffer=0,
            part=part,
            heads=Span(0, heads),
            layers=Span(0, layers),
            dims=Span(0, dims),
            offset=data.draw(st.integers(0, 40)),
            head_stride=data.draw(st.integers(1, 40)),
            layer_stride=data.draw(st.integers(1, 80)),
            slot_stride=slot_stride,
            token_stride=data.draw(st.integers(1, 40)),
            dim_stride=data.draw(st.sampled_from((2, 2, 3, 5))),
        )
        for part in range(2)
    ]
    layout = Layout("drawn", pool.page_box, slots, tokens, tuple(fields))
    marks = np.zeros(layout.buffer_bytes(2)[0], dtype=int)
    for part, head, layer, slot, token in product(
        range(2), range(heads), range(layers), range(slots), range(tokens)
    ):
        for _, at in addresses(layout, part, head, layer, slot, token).values():
            marks[at : at + 2] += 1
    if marks.max() > 1:
        with pytest.raises(ConfigurationError, match="overlap"):
            check_layout(pool, layout)
    else:
        check_layout(pool, layout)


def test_parts_with_slot_strides_of_their_own_may_share_a_buffer_block_after_block() -> None:
    for kind in ("unequal", "4 bits"):
        for axes in (
            ("kv", "layer", "slot", "token", "head", "dim"),
            ("layer", "kv", "slot", "token", "head", "dim"),
        ):
            axes_layout(POOLS[kind], POOLS[kind].page_box, axes, slots=7)


def test_big_real_pools_are_checked_in_their_folded_form() -> None:
    """What is enumerated is runs, not rows: a pool of 100,000 slots costs what one slot costs."""
    pool = Pool("kv", 80, 8, (KVPart("k", 128), KVPart("v", 128)), BF16, 64)
    for name in ENGINE_AXES:
        layout = engine_layout(name, pool, pool.page_box, slots=100_000)
        assert min(layout.buffer_bytes(2)) > 10**11


def test_a_layout_too_intertwined_to_compare_is_refused_rather_than_run_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hicache_store.layout.overlap._COMPARED_MAX", 3)
    with pytest.raises(ConfigurationError, match="too intertwined"):
        engine_layout("layer_first", EQUAL, EQUAL.page_box, slots=2)
