"""The oracle judges everything else, so it is checked against literal shapes and by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_store.layout.box import Box
from hicache_store.layout.dtypes import DType
from hicache_store.layout.model import Attention, KVPart, ModelKV, Pool
from hicache_store.layout.plan import Placement, Segment, placement_of_slot
from hicache_store.testing.engine_forms import ENGINE_FORMS, FORMS_BY_LABEL
from hicache_store.testing.oracle import (
    Dense,
    EnginePool,
    cell_layers,
    dense_page,
    object_bytes,
    object_payload,
    unit_dtype,
)
from hicache_store.testing.probes import POISON
from hicache_store.testing.strategies import engine_pools, placements, pools, sub_boxes

BF16 = DType.of("bfloat16")
L, H, D, P, PS = 3, 4, 5, 2, 6
S = P * PS
MHA = Pool("kv", L, H, (KVPart("k", D), KVPart("v", D)), BF16, PS)
MLA = Pool("kv", L, 1, (KVPart("latent", D),), BF16, PS)
WIDE = Pool("kv", L, H, (KVPart("k", D), KVPart("v", 3)), BF16, PS)

Index = Callable[[list[np.ndarray], int, int, int, int, int], np.ndarray]

# form: shapes of the arrays, and where (part, head, layer, slot, token) lies in them
MHA_SHAPES: dict[str, tuple[list[tuple[int, ...]], Index]] = {
    "layer_first": ([(2, L, S, H, D)], lambda a, k, h, y, p, t: a[0][k, y, p * PS + t, h]),
    "layer_first_kv_apart": ([(L, S, H, D)] * 2, lambda a, k, h, y, p, t: a[k][y, p * PS + t, h]),
    "tensor_per_layer": ([(2, S, H, D)] * L, lambda a, k, h, y, p, t: a[y][k, p * PS + t, h]),
    "k_and_v_per_layer": ([(S, H, D)] * 2 * L, lambda a, k, h, y, p, t: a[k * L + y][p * PS + t, h]),
    "page_first": ([(2, S, L, H, D)], lambda a, k, h, y, p, t: a[0][k, p * PS + t, y, h]),
    "page_first_kv_apart": ([(S, L, H, D)] * 2, lambda a, k, h, y, p, t: a[k][p * PS + t, y, h]),
    "page_first_direct": ([(2, P, L, PS, H, D)], lambda a, k, h, y, p, t: a[0][k, p, y, t, h]),
    "page_first_direct_kv_apart": ([(P, L, PS, H, D)] * 2, lambda a, k, h, y, p, t: a[k][p, y, t, h]),
    "page_head": ([(2, P, H, PS, L, D)], lambda a, k, h, y, p, t: a[0][k, p, h, t, y]),
    "page_unified": ([(P, 2, L, 2, PS, H // 2, D)], lambda a, k, h, y, p, t: a[0][p, h // 2, y, k, t, h % 2]),
    "canonical": ([(P, H, L, 2, PS, D)], lambda a, k, h, y, p, t: a[0][p, h, y, k, t]),
    "head_token_kv": ([(L, P, H, PS, 2 * D)], lambda a, k, h, y, p, t: a[0][y, p, h, t, k * D : k * D + D]),
    "head_token_kv_per_layer": (
        [(P, H, PS, 2 * D)] * L,
        lambda a, k, h, y, p, t: a[y][p, h, t, k * D : k * D + D],
    ),
    "token_head_kv": ([(L, P, PS, H, 2 * D)], lambda a, k, h, y, p, t: a[0][y, p, t, h, k * D : k * D + D]),
    "token_head_kv_per_layer": (
        [(P, PS, H, 2 * D)] * L,
        lambda a, k, h, y, p, t: a[y][p, t, h, k * D : k * D + D],
    ),
    "block_kv_per_layer": ([(P, 2, PS, H, D)] * L, lambda a, k, h, y, p, t: a[y][p, k, t, h]),
    "kv_block_head_per_layer": ([(2, P, H, PS, D)] * L, lambda a, k, h, y, p, t: a[y][k, p, h, t]),
}


def test_no_form_is_left_out() -> None:
    assert set(MHA_SHAPES) == set(FORMS_BY_LABEL)
    assert len(FORMS_BY_LABEL) == len(ENGINE_FORMS)


@pytest.mark.parametrize("label", MHA_SHAPES)
def test_the_arrays_have_the_engines_shapes_and_hold_each_element_where_indexing_says(label: str) -> None:
    shapes, index = MHA_SHAPES[label]
    group = 2 if label == "page_unified" else None
    pool = EnginePool(MHA, MHA.page_box, label, slots=P, head_group=group)
    assert [array.shape for array in pool.arrays] == shapes
    pages = [dense_page(MHA, page=slot) for slot in range(P)]
    for slot, page in enumerate(pages):
        pool.write_page(placement_of_slot(slot, PS), page)
    for part in range(2):
        for head, layer, slot, token in np.ndindex(H, L, P, PS):
            row = index(pool.arrays, part, head, layer, slot, token)
            assert np.array_equal(row, pages[slot].parts[part][head, layer, token])


@pytest.mark.parametrize(
    ("label", "shape"),
    [
        ("layer_first", (L, S, 1, D)),
        ("page_first", (S, L, 1, D)),
        ("page_first_direct", (P, L, PS, 1, D)),
        ("page_unified", (P, 1, L, PS, 1, D)),
    ],
)
def test_mla_arrays_have_no_kv_axis(label: str, shape: tuple[int, ...]) -> None:
    pool = EnginePool(MLA, MLA.page_box, label, slots=P)
    assert [array.shape for array in pool.arrays] == [shape]


def test_unequal_widths_lie_one_array_after_the_other() -> None:
    pool = EnginePool(WIDE, WIDE.page_box, "layer_first", slots=P)
    page = dense_page(WIDE)
    pool.write_page(placement_of_slot(1, PS), page)
    flat = pool.arrays[0]
    k, v = flat[: L * S * H * D].reshape(L, S, H, D), flat[L * S * H * D :].reshape(L, S, H, 3)
    assert np.array_equal(k[:, PS:].transpose(2, 0, 1, 3), page.parts[0])
    assert np.array_equal(v[:, PS:].transpose(2, 0, 1, 3), page.parts[1])
    apart = EnginePool(WIDE, WIDE.page_box, "page_first_kv_apart", slots=P)
    assert [array.shape for array in apart.arrays] == [(S, L, H, D), (S, L, H, 3)]


@given(st.data())
def test_what_is_written_is_read_back_and_the_rest_stays_poison(data: st.DataObject) -> None:
    pool = data.draw(pools(max_layers=3, max_heads=4, page_sizes=(1, 5, 12)))
    box = data.draw(sub_boxes(pool.page_box))
    engine = data.draw(engine_pools(pool, box))
    place = data.draw(placements(pool.page_size, engine.slots, engine.slot_tokens))
    inner = data.draw(sub_boxes(box))
    page = dense_page(pool, seed=3)
    assert engine.is_poison_outside([])
    engine.write_page(place, page, inner)
    assert engine.read_page(place, inner).equals(page.part_of(inner))
    assert engine.is_poison_outside([place], inner)


def test_a_stray_byte_outside_is_seen() -> None:
    engine = EnginePool(MHA, MHA.page_box, slots=P)
    place: Placement = (Segment(1, 0, PS),)
    engine.write_page(place, dense_page(MHA))
    assert engine.is_poison_outside([place])
    before = engine.snapshot()
    engine.buffers()[0][0] = 1
    assert not engine.is_poison_outside([place])
    assert engine.snapshot() != before


def test_values_tell_part_head_layer_token_dim_page_and_seed_apart() -> None:
    pool = Pool("kv", 5, 6, (KVPart("k", 7), KVPart("v", 7)), DType.of("float32"), 8)
    pages = [dense_page(pool, page, seed) for page in range(3) for seed in range(3)]
    values = np.concatenate([part.ravel() for page in pages for part in page.parts])
    assert len(np.unique(values)) > len(values) - 10
    wider = dense_page(Pool("kv", 9, 8, pool.parts, pool.dtype, 8), 1, 2)
    assert wider.part_of(pool.page_box).equals(dense_page(pool, 1, 2))


def test_no_value_is_poison_for_long() -> None:
    page = dense_page(Pool("kv", 4, 4, (KVPart("k", 64),), DType.of("int8"), 16))
    share = np.mean(page.parts[0] == POISON)
    assert 0 < share < 0.01


def test_a_payload_written_out_by_hand() -> None:
    pool = Pool("kv", 2, 2, (KVPart("k", 2), KVPart("v", 1)), DType.of("float16"), 2)
    k = np.arange(16, dtype="<u2").reshape(2, 2, 2, 2)
    v = np.arange(100, 108, dtype="<u2").reshape(2, 2, 2, 1)
    dense = Dense(pool.page_box, (k, v))
    wanted = [
        *[0, 1, 2, 3, 100, 101],
        *[4, 5, 6, 7, 102, 103],
        *[8, 9, 10, 11, 104, 105],
        *[12, 13, 14, 15, 106, 107],
    ]
    assert object_payload(dense, pool.page_box) == np.array(wanted, "<u2").tobytes()
    half = Box.of((1, 2), (1, 2), (0, 2))
    assert object_payload(dense, half) == np.array(wanted[18:], "<u2").tobytes()
    assert len(object_bytes(dense, half, "key")) == 12 + 8 + 64


def test_the_cell_rule_by_hand() -> None:
    kib = 1024
    assert cell_layers(30, 32 * kib) == 5
    assert cell_layers(60, 64 * 1152) == 2
    assert cell_layers(61, 64 * 1152) == 2
    assert cell_layers(4, 8) == 4
    assert cell_layers(4, 1024 * kib) == 1


def test_a_box_outside_is_refused() -> None:
    page = dense_page(MHA)
    with pytest.raises(ValueError, match="does not lie in"):
        page.part_of(Box.of((0, H + 1), (0, L), (0, PS)))


def test_units_are_bytes_below_one() -> None:
    model = ModelKV(1, 1, (KVPart("k", 6),), DType.of("float4_e2m1"), Attention.MHA)
    assert (unit_dtype(model.pool(2)), dense_page(model.pool(2)).parts[0].shape) == (np.uint8, (1, 1, 2, 3))
