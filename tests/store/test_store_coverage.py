"""Coverage is a property of a box: whatever grids its objects belong to, and whatever is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from store_rig import Place, attach_rank, chain, distinct_ranks, read_pages, tiny, write_pages

from hicache_store.connectors.base import Connector
from hicache_store.layout.names import ObjectName
from hicache_store.layout.parallel import ParallelSpec, Rank, shard
from hicache_store.store import EndReason, FixedGrid, PageState
from hicache_store.testing.faults import CountingConnector

POOL = tiny(4, 4).pool(2)


def half_and_half(place: Place, hashes: list[str]) -> None:
    """Heads 0-2 of every page under the grid of TP2, heads 2-4 under that of TP4 with two stages."""
    write_pages(place, POOL, "tp2pp1", hashes, ranks=[Rank(tp=0)])
    others = [Rank(tp, pp) for tp in (2, 3) for pp in (0, 1)]
    write_pages(place, POOL, "tp4pp2", hashes, ranks=others)


@pytest.mark.parametrize("reader", ["tp1pp1", "tp1pp4", "tp2pp2", "tp4pp3"])
def test_half_a_page_under_one_grid_and_half_under_another_is_a_hit(reader: str) -> None:
    place, hashes = Place(), chain(3, 2)
    half_and_half(place, hashes)
    assert len(place.objects()) == 3 * (1 + 4)
    assert read_pages(place, POOL, reader, hashes) == len(list(ParallelSpec.parse(reader).ranks()))


@pytest.mark.parametrize("filler", ["tp1pp1", "tp4pp2", "tp2pp4", "tp8pp1"])
def test_remove_any_one_object_back_up_and_hit_again(filler: str, tally: Counter[str]) -> None:
    """A backup by any topology stores what the union lacks, cut its own way, and nothing else."""
    hashes = chain(2, 2)
    whole = Place()
    half_and_half(whole, hashes)
    for lost in whole.objects():
        place = Place()
        half_and_half(place, hashes)
        place.remove(lost)
        page = hashes.index(ObjectName.parse(lost).page_hash)
        with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2) as rig:
            assert rig.store.contains(hashes).pages == page
            report = rig.restore(hashes)
            assert report.pages == page
            assert report.end is not None
            assert (report.end.page, report.end.reason) == (page, EndReason.ABSENT)
            rig.assert_holds(range(page))
            reports = write_pages(place, POOL, filler, hashes)
            name = ObjectName.parse(lost)
            spec = ParallelSpec.parse(filler)
            boxes = {shard(POOL, spec, rank).box for rank in spec.ranks()}
            meeting = [b for b in boxes if b.heads.intersect(name.heads) and b.layers.intersect(name.layers)]
            assert sum(report.objects for report in reports) == len(meeting)
            for report in reports:
                assert report.states[1 - page] in (PageState.PRESENT, PageState.NOT_ELECTED)
        with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2) as rig:
            assert rig.store.contains(hashes).pages == 2
            assert rig.restore(hashes).pages == 2
            rig.assert_holds(range(2))
        tally["objects removed one at a time and filled again"] += 1


def test_a_writer_stores_nothing_of_what_the_union_holds() -> None:
    place, hashes = Place(), chain(3, 2)
    half_and_half(place, hashes)
    before = place.objects()
    for writer in ("tp1pp1", "tp2pp2", "tp4pp1", "tp1pp3"):
        for report in write_pages(place, POOL, writer, hashes):
            assert report.objects == report.written_bytes == 0
            assert set(report.states) <= {PageState.PRESENT, PageState.NOT_ELECTED}
    assert place.objects() == before


def test_a_writer_stores_only_those_of_its_chunks_that_the_union_lacks() -> None:
    place, hashes = Place(), chain(2, 2)
    half_and_half(place, hashes)
    lost = [key for key in place.objects() if key.endswith(".H002-003.L002-004")]
    place.remove(*lost)
    before = place.objects()
    grid = FixedGrid(heads_per_object=1, layers_per_object=1)
    (report,) = write_pages(place, POOL, "tp1pp1", hashes, grid=grid)
    added = place.objects().keys() - before.keys()
    assert {key.rsplit("/", 1)[1] for key in added} == {"kv.H002-003.L002-003", "kv.H002-003.L003-004"}
    assert report.objects == len(added) == 4
    assert report.states == (PageState.STORED, PageState.STORED)


@pytest.mark.parametrize("writer", ["tp1pp1", "tp4pp2"])
def test_an_object_of_a_wrong_size_is_not_there_and_is_replaced(writer: str) -> None:
    place, hashes = Place(), chain(2, 2)
    write_pages(place, POOL, writer, hashes)
    sound = place.objects()
    victim = sorted(sound)[-1]
    page = hashes.index(ObjectName.parse(victim).page_hash)
    for size in (1, len(sound[victim]) - 1, len(sound[victim]) + 1):
        place.put(victim, (sound[victim] + b"\0")[:size])
        with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2) as rig:
            ends = [rig.store.contains(hashes).end, rig.restore(hashes).end]
            assert [(end.page, end.reason, end.key) for end in ends] == [
                (page, EndReason.CORRUPT, victim)
            ] * 2
        assert sum(report.objects for report in write_pages(place, POOL, writer, hashes)) == 1
        assert place.objects() == sound


def test_the_own_cut_is_found_without_any_marker() -> None:
    place, hashes = Place(), chain(2, 2)
    write_pages(place, POOL, "tp2pp2", hashes)
    place.remove(*place.meta())
    assert read_pages(place, POOL, "tp2pp2", hashes) == 4
    for rank in distinct_ranks(POOL, "tp1pp1"):
        with attach_rank(place, POOL, "tp1pp1", rank, pages=2) as rig:
            assert rig.restore(hashes).pages == 0


def test_pages_of_one_chain_may_lie_under_different_cuts_without_a_read_in_vain() -> None:
    """Pages alternate between two cuts. Once it is known which page is cut how, each is read as it lies:
    as many objects are asked for as there are, and no look-up is made."""
    place, hashes, pages = Place(), chain(6, POOL.page_size), range(6)
    for spec, numbers in (("tp2pp1", pages[::2]), ("tp1pp2", pages[1::2])):
        write_pages(place, POOL, spec, [hashes[i] for i in numbers], pages=numbers)
    watched: list[CountingConnector] = []

    def watch(connector: Connector) -> Connector:
        watched.append(CountingConnector(connector))
        return watched[-1]

    place.wrap = watch
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=6) as rig:
        assert rig.restore(hashes).pages == 6
        watched[-1].reset()
        report = rig.restore(hashes)
        rig.assert_holds(pages)
        assert (report.pages, report.objects) == (6, 12)
        assert watched[-1].items["read"] == 12
        assert watched[-1].calls["sizes"] == 0
