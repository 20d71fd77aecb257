"""The product of everything: random models, topologies, grids, layouts and placements."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from store_rig import Place, chain, distinct_ranks, namespace_of, page_values

from hicache_store.layout.box import Box
from hicache_store.layout.model import Pool
from hicache_store.layout.namespace import Namespace
from hicache_store.layout.parallel import ParallelSpec, Rank, shard
from hicache_store.layout.plan import Placement
from hicache_store.store import EndReason, FixedGrid, PageState, PoolBuffers, Store
from hicache_store.testing.oracle import EnginePool
from hicache_store.testing.strategies import engine_pools, placements, pools, topologies


@st.composite
def fixed_grids(draw: st.DrawFn, pool: Pool, spec: ParallelSpec) -> FixedGrid | None:
    """No fixed grid, or one that every rank of the topology accepts."""
    if draw(st.booleans()):
        return None
    grid = FixedGrid(draw(st.integers(1, pool.num_heads)), draw(st.integers(1, pool.num_layers)))
    heads = {head for rank in spec.ranks() for head in _bounds(shard(pool, spec, rank).box)}
    return grid if all(head % grid.heads_per_object == 0 for head in heads - {pool.num_heads}) else None


def _bounds(box: Box) -> tuple[int, int]:
    return box.heads.start, box.heads.stop


@given(data=st.data())
def test_what_some_ranks_wrote_any_rank_reads(data: st.DataObject, tally: Counter[str]) -> None:
    """Up to three topologies write some of their ranks' parts of a page; a rank of any other hits
    exactly when those parts cover its box, and then holds every bit."""
    pool = data.draw(pools())
    ns, place, hashes = namespace_of(pool), Place(), chain(1)
    held: list[Box] = []
    for _ in range(data.draw(st.integers(1, 3), label="writers")):
        spec = data.draw(topologies(pool), label="writer")
        grid = data.draw(fixed_grids(pool, spec), label="grid")
        is_whole = data.draw(st.booleans(), label="all boxes of the topology")
        ranks = distinct_ranks(pool, spec) if is_whole else data.draw(_some_ranks(spec), label="ranks")
        for rank in ranks:
            arrays, placement = data.draw(_arrays(pool, shard(pool, spec, rank).box))
            arrays.write_page(placement, page_values(pool, 0))
            before = arrays.snapshot()
            writer = "caller" if is_whole else "elected"
            with _attach(place, pool, ns, spec, rank, arrays, grid=grid, writer=writer) as store:
                report = store.backup(hashes, [placement])
            assert arrays.snapshot() == before
            assert report.states[0] in (PageState.STORED, PageState.PRESENT, PageState.NOT_ELECTED)
            if report.states[0] is not PageState.NOT_ELECTED:
                held.append(arrays.box)
            tally["backups of the random product"] += 1
    for _ in range(2):
        spec = data.draw(topologies(pool), label="reader")
        rank = data.draw(st.sampled_from(list(spec.ranks())), label="reader rank")
        arrays, placement = data.draw(_arrays(pool, shard(pool, spec, rank).box))
        with _attach(place, pool, ns, spec, rank, arrays) as store:
            report = store.restore(hashes, [placement])
        expected = int(_is_covered(arrays.box, held))
        assert report.pages == expected, (report, held)
        if expected:
            assert arrays.read_page(placement).equals(page_values(pool, 0).part_of(arrays.box))
            assert arrays.is_poison_outside([placement])
        else:
            assert report.end is not None
            assert report.end.reason is EndReason.ABSENT
        tally[f"restores of the random product that {'hit' if expected else 'missed'}"] += 1


@st.composite
def _arrays(draw: st.DrawFn, pool: Pool, box: Box) -> tuple[EnginePool, Placement]:
    arrays = draw(engine_pools(pool, box))
    return arrays, draw(placements(pool.page_size, arrays.slots, arrays.slot_tokens))


@st.composite
def _some_ranks(draw: st.DrawFn, spec: ParallelSpec) -> list[Rank]:
    ranks = list(spec.ranks())
    return draw(st.lists(st.sampled_from(ranks), max_size=4, unique=True))


def _attach(
    place: Place,
    pool: Pool,
    ns: Namespace,
    spec: ParallelSpec,
    rank: Rank,
    arrays: EnginePool,
    **options: object,
) -> Store:
    buffers = [PoolBuffers(pool, arrays.layout(), arrays.buffers())]
    return Store.attach(place.open(), ns, buffers, spec, rank, **options)


def _is_covered(box: Box, held: list[Box]) -> bool:
    return all(
        any(head in one.heads and layer in one.layers for one in held)
        for head in range(box.heads.start, box.heads.stop)
        for layer in range(box.layers.start, box.layers.stop)
    )
