from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_store.kernels.strided import pack, unpack
from hicache_store.layout.box import Box, Span
from hicache_store.layout.dtypes import DType
from hicache_store.layout.layouts import engine_layout
from hicache_store.layout.model import KVPart, Pool
from hicache_store.layout.plan import Axis, CopyPlan, Region, Segment, plan_copy
from hicache_store.testing.engine_forms import ENGINE_FORMS
from hicache_store.testing.oracle import EnginePool, dense_page, object_payload
from hicache_store.testing.probes import POISON

POOL = Pool("kv", 3, 4, (KVPart("k", 6), KVPart("v", 2)), DType.of("bfloat16"), 8)
WHOLE = Span(0, 8)
HERE = Segment(1, 0, 8)


@st.composite
def regions(draw: st.DrawFn) -> Region:
    """Rows apart on both sides, in any order of axes on the pool's side."""
    row = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))

    def strides(order: list[int]) -> list[int]:
        found = [0] * len(sizes)
        step = row + draw(st.integers(0, 3))
        for axis in reversed(order):
            found[axis] = step
            step *= sizes[axis]
            step += draw(st.integers(0, 3))
        return found

    in_pool = strides(draw(st.permutations(range(len(sizes)))))
    in_object = strides(list(range(len(sizes))))
    return Region(
        buffer=0,
        pool_offset=draw(st.integers(0, 20)),
        object_offset=draw(st.integers(0, 20)),
        slot_stride=1000,
        token_stride=7,
        axes=tuple(Axis(*axis) for axis in zip(sizes, in_pool, in_object, strict=True)),
        row_bytes=row,
    )


@given(regions(), st.integers(0, 2), st.integers(0, 3), st.integers(0, 20))
def test_a_region_is_copied_row_by_row_both_ways(region: Region, slot: int, token: int, base: int) -> None:
    base = min(base, region.object_offset)
    source = np.random.default_rng(1).integers(0, 200, 6000, dtype=np.uint8)
    plan, segment = CopyPlan((region,)), Segment(slot, token, 1)
    packed, unpacked = np.full(3000, POISON, np.uint8), np.full(6000, POISON, np.uint8)
    wanted_packed, wanted_unpacked = packed.copy(), unpacked.copy()
    for index in np.ndindex(*(axis.size for axis in region.axes)):
        shifts = list(zip(index, region.axes, strict=True))
        at_pool = region.pool_offset + slot * 1000 + token * 7
        at_pool += sum(i * axis.pool_stride for i, axis in shifts)
        at_object = region.object_offset - base + sum(i * axis.object_stride for i, axis in shifts)
        row = region.row_bytes
        wanted_packed[at_object : at_object + row] = source[at_pool : at_pool + row]
        wanted_unpacked[at_pool : at_pool + row] = source[at_object : at_object + row]
    pack(plan, segment, [source.data], packed.data, base)
    unpack(plan, segment, [unpacked.data], source.data, base)
    assert np.array_equal(packed, wanted_packed)
    assert np.array_equal(unpacked, wanted_unpacked)


@pytest.mark.parametrize("form", ENGINE_FORMS, ids=lambda form: form.label)
def test_unpack_undoes_pack(form) -> None:
    source, target = (EnginePool(POOL, POOL.page_box, form, slots=3) for _ in range(2))
    dense = dense_page(POOL)
    source.write_page((HERE,), dense)
    plan = plan_copy(POOL, source.layout(), POOL.page_box, POOL.page_box, WHOLE)
    payload = bytearray(POOL.payload_bytes(POOL.page_box))
    pack(plan, HERE, source.buffers(), memoryview(payload))
    unpack(plan, Segment(0, 0, 8), target.buffers(), memoryview(payload))
    assert target.read_page((Segment(0, 0, 8),)).equals(dense)
    assert target.is_poison_outside([(Segment(0, 0, 8),)])


def test_a_fetched_range_stands_for_the_object_from_its_base_on() -> None:
    """Of an object whose second half of heads was fetched, only that half is in memory."""
    engine = EnginePool(POOL, POOL.page_box)
    dense = dense_page(POOL)
    payload = object_payload(dense, POOL.page_box)
    piece = Box.of((2, 4), (0, 3), (0, 8))
    plan = plan_copy(POOL, engine.layout(), POOL.page_box, piece, WHOLE)
    half = len(payload) // 2
    unpack(plan, HERE, engine.buffers(), memoryview(payload)[half:], half)
    assert engine.read_page((HERE,), piece).equals(dense.part_of(piece))
    assert engine.is_poison_outside([(HERE,)], piece)


def test_memory_that_is_too_small_is_refused_and_nothing_is_written() -> None:
    engine = EnginePool(POOL, POOL.page_box, slots=2)
    layout = engine_layout("layer_first", POOL, POOL.page_box, slots=2)
    plan = plan_copy(POOL, layout, POOL.page_box, POOL.page_box, WHOLE)
    payload = bytearray(object_payload(dense_page(POOL), POOL.page_box))
    with pytest.raises((ValueError, TypeError)):
        unpack(plan, HERE, engine.buffers(), memoryview(payload)[:-1])
    with pytest.raises((ValueError, TypeError)):
        pack(plan, Segment(2, 0, 8), engine.buffers(), memoryview(payload))
    with pytest.raises((ValueError, TypeError)):
        unpack(plan, Segment(-1, 0, 8), engine.buffers(), memoryview(payload))


def test_a_buffer_of_the_engines_own_element_type_is_taken_as_bytes() -> None:
    engine = EnginePool(POOL, POOL.page_box, "page_first_direct_kv_apart")
    dense = dense_page(POOL)
    plan = plan_copy(POOL, engine.layout(), POOL.page_box, POOL.page_box, WHOLE)
    payload = object_payload(dense, POOL.page_box)
    unpack(plan, HERE, [array.data for array in engine.arrays], memoryview(payload))
    assert engine.read_page((HERE,)).equals(dense)
