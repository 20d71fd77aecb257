from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from fewer import FEWER
from hypothesis import given
from hypothesis import strategies as st

from hicache_store.errors import ConfigurationError
from hicache_store.layout.box import Box, Span, cover
from hicache_store.layout.dtypes import DType
from hicache_store.layout.grid import Grid, fixed_grid, own_grid
from hicache_store.layout.model import KVPart, ModelKV, Pool
from hicache_store.layout.parallel import ParallelSpec, Rank, shard
from hicache_store.limits import OBJECT_PAYLOAD_CAP_BYTES
from hicache_store.testing.strategies import grids, pools, sub_boxes, topologies


def big(heads: int = 8, layers: int = 60) -> Pool:
    return ModelKV.dense(num_layers=layers, num_kv_heads=heads, head_dim=128, dtype="bfloat16").pool(64)


def box_of(pool: Pool, spec: ParallelSpec, rank: Rank) -> Box:
    held = shard(pool, spec, rank)
    assert held is not None
    return held.box


def tiles(box: Box, chunks: tuple[Box, ...]) -> bool:
    """Whether the chunks are exactly the places of the box, each once."""
    count = np.zeros((box.heads.stop, box.layers.stop), dtype=int)
    for chunk in chunks:
        if not box.covers(chunk) or chunk.tokens != box.tokens:
            return False
        count[chunk.heads.start : chunk.heads.stop, chunk.layers.start : chunk.layers.stop] += 1
    inside = np.zeros_like(count)
    inside[box.heads.start :, box.layers.start :] = 1
    return bool(np.array_equal(count, inside))


@FEWER
@given(st.data())
def test_a_writers_own_grid_tiles_its_box_whatever_the_cap(data: st.DataObject) -> None:
    pool = data.draw(pools())
    spec = data.draw(topologies(pool))
    cap = data.draw(st.integers(1, 2 * pool.payload_bytes(pool.page_box)))
    for rank in spec.ranks():
        box = box_of(pool, spec, rank)
        chunks = own_grid(pool, spec, box, cap).chunks_within(box)
        assert tiles(box, chunks)
        assert all(pool.payload_bytes(c) <= cap or len(c.layers) == 1 for c in chunks)


@FEWER
@given(st.data())
def test_all_ranks_of_a_stage_announce_one_grid(data: st.DataObject) -> None:
    pool = data.draw(pools())
    spec = data.draw(topologies(pool))
    cap = data.draw(st.integers(1, pool.payload_bytes(pool.page_box)))
    by_stage: dict[int, set[Grid]] = {}
    for rank in spec.ranks():
        by_stage.setdefault(rank.pp, set()).add(own_grid(pool, spec, box_of(pool, spec, rank), cap))
    assert all(len(found) == 1 for found in by_stage.values())


@FEWER
@given(st.data())
def test_any_grid_over_a_stage_tiles_the_box_of_each_of_its_ranks(data: st.DataObject) -> None:
    pool = data.draw(pools())
    spec = data.draw(topologies(pool))
    for rank in spec.ranks():
        if rank.tp or rank.cp:
            continue
        box = box_of(pool, spec, rank)
        grid = data.draw(grids(pool, spec, box.layers))
        for tp in range(spec.tp_size):
            mine = box_of(pool, spec, Rank(tp, rank.pp))
            assert tiles(mine, grid.chunks_within(mine))


@FEWER
@given(st.data())
def test_chunks_within_tiles_or_refuses_and_does_not_guess(data: st.DataObject) -> None:
    pool = data.draw(pools())
    spec = data.draw(topologies(pool, max_pp=1))
    grid = data.draw(grids(pool, spec, Span(0, pool.num_layers)))
    box = data.draw(sub_boxes(pool.page_box))
    is_union = {box.heads.start, box.heads.stop} <= set(grid.head_cuts) and {
        box.layers.start,
        box.layers.stop,
    } <= set(grid.layer_cuts)
    if is_union:
        assert tiles(box, grid.chunks_within(box))
    else:
        with pytest.raises(ConfigurationError):
            grid.chunks_within(box)


def test_a_refusal_names_the_box_and_the_cuts() -> None:
    grid = Grid("kv", (0, 2, 4), (0, 4))
    with pytest.raises(ConfigurationError, match=r"heads 1-2 x layers 0-4 .*\[0, 2, 4\].*\[0, 4\]"):
        grid.chunks_within(Box.of((1, 2), (0, 4), (0, 16)))
    with pytest.raises(ConfigurationError, match=r"do not reach over heads 2-6"):
        grid.chunks_within(Box.of((2, 6), (0, 4), (0, 16)))
    with pytest.raises(ConfigurationError, match="not a union"):
        grid.chunks_within(Box.of((4, 6), (0, 4), (0, 16)))


def test_the_known_example_is_eight_objects_a_page() -> None:
    pool = big()
    spec = ParallelSpec(tp_size=4, pp_size=2)
    chunks = {
        chunk
        for rank in spec.ranks()
        for chunk in own_grid(pool, spec, box_of(pool, spec, rank)).chunks_within(box_of(pool, spec, rank))
    }
    assert len(chunks) == 8
    assert {pool.payload_bytes(chunk) for chunk in chunks} == {1_966_080}
    assert Box.of((4, 6), (30, 60), (0, 64)) in chunks


def test_layers_are_halved_until_a_chunk_is_at_most_the_cap() -> None:
    pool = big()
    one_rank = ParallelSpec()
    grid = own_grid(pool, one_rank, pool.page_box)
    # 8 heads x 64 tokens x 512 B are 256 KiB a layer: 60 layers are 15 MiB, halves 7.5 MiB.
    assert (grid.head_cuts, grid.layer_cuts) == ((0, 8), (0, 30, 60))
    assert own_grid(big(layers=61), one_rank, big(layers=61).page_box).layer_cuts == (0, 30, 61)
    assert own_grid(pool, one_rank, pool.page_box, 3 * 256 * 1024).layer_cuts[:5] == (0, 1, 3, 5, 7)
    whole = own_grid(pool, one_rank, pool.page_box, 1).layer_cuts
    assert whole == tuple(range(61))
    assert OBJECT_PAYLOAD_CAP_BYTES == 8 * 1024 * 1024


def test_uneven_head_maps_cut_layers_by_the_widest_shard() -> None:
    pool = big(heads=8, layers=8)
    spec = ParallelSpec(tp_size=2, head_map=((0, 1), (1, 8)))
    grids_ = {own_grid(pool, spec, box_of(pool, spec, Rank(tp)), 7 * 32768 * 4) for tp in range(2)}
    assert grids_ == {Grid("kv", (0, 1, 8), (0, 4, 8))}


def test_a_fixed_grid_cuts_at_multiples_of_its_sizes_from_any_stage() -> None:
    pool = big(heads=8, layers=20)
    whole = fixed_grid(pool, heads_per_object=4, layers_per_object=8, stage=Span(0, 20))
    assert (whole.head_cuts, whole.layer_cuts) == ((0, 4, 8), (0, 8, 16, 20))
    cuts = [
        fixed_grid(pool, heads_per_object=3, layers_per_object=8, stage=Span(*stage)).layer_cuts
        for stage in ((0, 8), (8, 16), (3, 8), (7, 9), (16, 20), (9, 10))
    ]
    assert cuts == [(0, 8), (8, 16), (3, 8), (7, 8, 9), (16, 20), (9, 10)]
    odd = fixed_grid(pool, heads_per_object=3, layers_per_object=1, stage=Span(0, 1))
    assert odd.head_cuts == (0, 3, 6, 8)


@pytest.mark.parametrize(("heads", "layers"), [(0, 1), (1, 0), (-1, 4)])
def test_a_fixed_grid_of_nothing_is_refused(heads: int, layers: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{heads} heads and {layers} layers"):
        fixed_grid(big(), heads_per_object=heads, layers_per_object=layers, stage=Span(0, 60))


@pytest.mark.parametrize("cuts", [(), (0,), (0, 0), (2, 1), (-1, 2), (0, 3, 2)])
def test_cuts_that_do_not_ascend_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="head cuts"):
        Grid("kv", cuts, (0, 1))
    with pytest.raises(ConfigurationError, match="layer cuts"):
        Grid("kv", (0, 1), cuts)


def test_a_grid_of_a_side_pool_carries_the_name_its_objects_carry() -> None:
    """A reader tells by this name whether a marker concerns one of its pools."""
    pool = Pool("draft", 2, 2, (KVPart("k", 2),), DType.of("int8"), 16)
    assert own_grid(pool, ParallelSpec(), pool.page_box).pool == pool.key_name
    stage = Span(0, 2)
    assert fixed_grid(pool, heads_per_object=1, layers_per_object=1, stage=stage).pool == pool.key_name


@FEWER
@given(st.data())
def test_chunks_of_two_grids_cover_a_box_together_where_each_place_is_in_one_of_them(
    data: st.DataObject,
) -> None:
    """Half a page under one grid and half under another is the whole page."""
    pool = data.draw(pools(max_layers=5))
    spec = data.draw(topologies(pool, max_pp=1))
    stage = Span(0, pool.num_layers)
    chunks = [
        *data.draw(grids(pool, spec, stage)).chunks(pool.page_size),
        *data.draw(grids(pool, spec, stage)).chunks(pool.page_size),
    ]
    held = [chunk for chunk in chunks if data.draw(st.booleans())]
    count = np.zeros((pool.num_heads, pool.num_layers), dtype=int)
    for chunk in held:
        count[chunk.heads.start : chunk.heads.stop, chunk.layers.start : chunk.layers.stop] += 1
    assert cover(pool.page_box, enumerate(held)).is_complete == bool(np.all(count))


def test_layer_cuts_of_stages_meet() -> None:
    pool = big(layers=61)
    spec = ParallelSpec(tp_size=2, pp_size=2)
    cuts = [own_grid(pool, spec, box_of(pool, spec, Rank(0, pp))).layer_cuts for pp in range(2)]
    assert all(a[-1] == b[0] for a, b in pairwise(cuts))
    assert (cuts[0][0], cuts[-1][-1]) == (0, 61)
