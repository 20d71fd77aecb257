"""Every legal writer and reader topology against each other, judged by the dense oracle."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from store_rig import (
    Place,
    attach_rank,
    chain,
    distinct_ranks,
    read_pages,
    tiny,
    write_pages,
)

from hicache_store.errors import TopologyError
from hicache_store.layout.box import Box
from hicache_store.layout.model import Pool
from hicache_store.layout.ownership import locate, owned_positions, owner, pages_needed, widen
from hicache_store.layout.parallel import ParallelSpec, Rank, head_spans, shard

TP_SIZES = (1, 2, 3, 4, 8, 16)
STAGES = {1: None, 2: None, 3: (1, 2), 4: None}
"""Pipeline sizes; three stages of 4 layers are 1, 1 and 2."""
HEADS = (1, 2, 3, 4, 8)
CP_SIZES = (1, 2, 4)
LAYERS = 4
PAGE_SIZE = 2


def legal_topologies(heads: int, cp_size: int = 1) -> list[ParallelSpec]:
    """Every topology that may hold ``heads`` heads."""
    return [
        ParallelSpec(tp, pp, cp_size, starts)
        for tp in TP_SIZES
        if heads % tp == 0 or tp % heads == 0
        for pp, starts in STAGES.items()
    ]


def distinct_readers(pool: Pool, topologies: list[ParallelSpec]) -> list[tuple[ParallelSpec, Rank]]:
    """For each box that any rank of any topology holds, one rank that holds it."""
    boxes: dict[Box, tuple[ParallelSpec, Rank]] = {}
    for spec in topologies:
        for rank in spec.ranks():
            boxes.setdefault(shard(pool, spec, rank).box, (spec, rank))
    return list(boxes.values())


@pytest.mark.parametrize("heads", HEADS)
def test_every_legal_pair_of_topologies_restores_every_bit(heads: int, tally: Counter[str]) -> None:
    pool = tiny(heads, LAYERS).pool(PAGE_SIZE)
    topologies = legal_topologies(heads)
    readers = distinct_readers(pool, topologies)
    hashes = chain(1, PAGE_SIZE)
    for writer in topologies:
        place = Place()
        write_pages(place, pool, writer, hashes)
        for spec, rank in readers:
            read_pages(place, pool, spec, hashes, ranks=[rank])
            tally["restores of a distinct reader box, over all legal writer topologies"] += 1
        tally["legal writer and reader pairs of TP x PP x KV heads"] += len(topologies)


def test_the_pairs_are_all_there_are() -> None:
    legal = {heads: len(legal_topologies(heads)) // len(STAGES) for heads in HEADS}
    assert legal == {1: 6, 2: 5, 3: 2, 4: 5, 8: 5}
    for heads, tp in itertools.product(HEADS, TP_SIZES):
        is_legal = any(spec.tp_size == tp for spec in legal_topologies(heads))
        if not is_legal:
            with pytest.raises(TopologyError, match=rf"{heads} KV heads .* size {tp};"):
                head_spans(heads, ParallelSpec(tp))


def test_context_parallel_sizes_change_who_moves_a_page_and_nothing_else(tally: Counter[str]) -> None:
    """Any pair of CP sizes, any rotation, any length: each page has one writer and one reader, whose
    boxes do not depend on the rank's CP coordinate."""
    for cp_size, count in itertools.product(CP_SIZES, range(0, 26)):
        for base in range(cp_size):
            owned = [list(owned_positions(count, base, cp_size, rank)) for rank in range(cp_size)]
            assert sorted(itertools.chain(*owned)) == list(range(count))
            assert tuple(map(len, owned)) == pages_needed(count, base, cp_size)
            for rank, positions in enumerate(owned):
                assert all(owner(position, base, cp_size) == rank for position in positions)
            for x in range(count * PAGE_SIZE):
                held = locate(x, cp_size, PAGE_SIZE)
                assert widen(held.rank, held.row, cp_size, PAGE_SIZE) == x
                assert held.page in owned[(held.rank + base) % cp_size]
                tally["rows located under context parallelism"] += 1
    for heads in HEADS:
        pool = tiny(heads, LAYERS).pool(PAGE_SIZE)
        for plain in legal_topologies(heads):
            wanted = [shard(pool, plain, rank) for rank in plain.ranks()]
            for cp_size in CP_SIZES:
                spec = ParallelSpec(plain.tp_size, plain.pp_size, cp_size, plain.stage_starts)
                by_cp = [
                    [shard(pool, spec, rank) for rank in spec.ranks() if rank.cp == cp]
                    for cp in range(cp_size)
                ]
                assert by_cp == [wanted] * cp_size
                tally["shards compared over context-parallel sizes"] += len(wanted) * cp_size


@pytest.mark.soak
@pytest.mark.parametrize("heads", HEADS)
def test_the_full_product_with_context_parallelism(heads: int, tally: Counter[str]) -> None:
    """Every writer of any CP size, every reader of any CP size, with data."""
    pool = tiny(heads, LAYERS).pool(PAGE_SIZE)
    count = 6
    hashes = chain(count, PAGE_SIZE)
    for writer_cp in CP_SIZES:
        for writer in legal_topologies(heads, writer_cp):
            place = Place()
            _each_owner(place, pool, writer, hashes, base=count % writer_cp, is_writer=True)
            for reader_cp in CP_SIZES:
                for reader in legal_topologies(heads, reader_cp):
                    _each_owner(place, pool, reader, hashes, base=0, is_writer=False)
                    tally["writer and reader pairs of TP x PP x CP with data"] += 1


def _each_owner(
    place: Place, pool: Pool, spec: ParallelSpec, hashes: list[str], *, base: int, is_writer: bool
) -> None:
    """Every rank moves the pages it owns; of readers one rank for each box and CP coordinate."""
    if is_writer:
        ranks = list(spec.ranks())
    else:
        ranks = [
            Rank(rank.tp, rank.pp, cp) for rank in distinct_ranks(pool, spec) for cp in range(spec.cp_size)
        ]
    for rank in ranks:
        pages = list(owned_positions(len(hashes), base, spec.cp_size, rank.cp))
        mine = [hashes[page] for page in pages]
        with attach_rank(place, pool, spec, rank, pages=len(pages)) as rig:
            if is_writer:
                rig.fill(pages)
                rig.backup(mine)
                continue
            report = rig.restore(mine)
            assert report.pages == len(mine), report
            rig.assert_holds(pages)
            rig.assert_untouched_beside(len(pages))
