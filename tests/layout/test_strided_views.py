"""A35: pages are read into and written from the caller's own memory, whatever its strides."""

from __future__ import annotations

import numpy as np
import pytest
from moving import bound, poisoned

from hicache_store.kernels.strided import pack, unpack
from hicache_store.layout.box import Span
from hicache_store.layout.dtypes import DType
from hicache_store.layout.layouts import check_layout
from hicache_store.layout.model import KVPart, Pool
from hicache_store.layout.plan import Segment, plan_copy
from hicache_store.testing.oracle import EnginePool, dense_page, layout_of_views, object_payload
from hicache_store.testing.probes import POISON

BF16 = DType.of("bfloat16")
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
    engine = EnginePool(VIEWED, VIEWED.page_box)
    plan = plan_copy(VIEWED, engine.layout(), VIEWED.page_box, VIEWED.page_box, Span(0, TOKENS))
    payload = object_payload(dense_page(VIEWED), VIEWED.page_box)
    with pytest.raises(ValueError, match="read-only"):
        unpack(plan, Segment(0, 0, TOKENS), [b.toreadonly() for b in engine.buffers()], memoryview(payload))
    assert engine.is_poison_outside([])
