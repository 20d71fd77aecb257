"""Looking up long chains: exact, in a few batched questions, and no further than needed."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

from store_rig import (
    Place,
    RankRig,
    attach_rank,
    chain,
    distinct_ranks,
    namespace_of,
    tiny,
    write_pages,
)

from hicache_store.connectors.base import Connector
from hicache_store.layout.box import Box
from hicache_store.layout.grid import Grid
from hicache_store.layout.model import Pool
from hicache_store.layout.names import ObjectName, marker_key, page_prefix
from hicache_store.layout.parallel import ParallelSpec, Rank
from hicache_store.layout.records import encode_grid, frame
from hicache_store.store import EndReason
from hicache_store.testing.faults import CountingConnector

LONG = 10_000
SMALLEST = tiny(2, 2, 1, "int8").pool(1)


class Watched:
    """A rank whose connector counts."""

    def __init__(self, place: Place, spec: str, rank: Rank, pool: Pool = SMALLEST, pages: int = 1) -> None:
        self.seen: list[CountingConnector] = []
        place.wrap = self._watch
        self.rig: RankRig = attach_rank(place, pool, spec, rank, pages=pages)
        place.wrap = lambda connector: connector

    def _watch(self, connector: Connector) -> Connector:
        self.seen.append(CountingConnector(connector))
        return self.seen[-1]

    def look(self, hashes: list[str]) -> tuple[int, int, int]:
        """Pages found, calls and keys asked for."""
        self.seen[0].reset()
        report = self.rig.store.contains(hashes)
        assert set(self.seen[0].calls) <= {"sizes"}
        if report.pages < len(hashes):
            assert (report.end.page, report.end.reason) == (report.pages, EndReason.ABSENT)
        return report.pages, self.seen[0].calls["sizes"], self.seen[0].items["sizes"]

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *exc: object) -> None:
        self.rig.store.close()


def stored(count: int, writer: str) -> Place:
    """The first page as ``writer`` stores it, and objects of the same lengths for the pages behind it."""
    place, hashes = Place(), chain(count)
    write_pages(place, SMALLEST, writer, hashes[:1])
    for key, data in place.objects().items():
        name = ObjectName.parse(key)
        for page_hash in hashes[1:]:
            place.put(str(dataclasses.replace(name, page_hash=page_hash)), data)
    return place


def test_ten_thousand_pages_are_one_question_a_grid() -> None:
    place, hashes = stored(LONG, "tp1pp1"), chain(LONG)
    with Watched(place, "tp1pp1", Rank()) as own:
        assert own.look(hashes) == (LONG, 1, LONG)
    with Watched(place, "tp2pp1", Rank()) as other:
        # Its own cut, everything about the first page, and the one other grid for the rest.
        assert other.look(hashes) == (LONG, 3, LONG + 1 + LONG - 1)
        # A restore remembers which cut served: then it is one question again.
        assert other.rig.restore(hashes[:1]).pages == 1
        assert other.look(hashes) == (LONG, 1, LONG)


def test_what_is_not_there_costs_two_questions_whatever_grids_there_are() -> None:
    place = Place()
    specs = ["tp1pp1", "tp1pp2", "tp2pp2"]
    for number, spec in enumerate(specs):
        write_pages(place, SMALLEST, spec, [f"{number:064x}"])
    with Watched(place, "tp2pp1", Rank()) as rank:
        pages, calls, keys = rank.look(chain(LONG))
        assert (pages, calls) == (0, 2)
        assert LONG < keys <= LONG + 8


def test_grids_of_other_pools_cost_nothing() -> None:
    place, hashes = Place(), chain(LONG)
    digest = namespace_of(SMALLEST).digest
    for slot in range(40):
        key = marker_key(digest, slot)
        place.put(key, frame(key, encode_grid(Grid("draft_01234567", (0, 1, 2), (0, 1, 2 + slot)))))
    with Watched(place, "tp1pp1", Rank()) as rank:
        assert rank.look(hashes) == (0, 1, LONG)


def test_nothing_behind_the_first_gap_is_asked_for_again() -> None:
    place, hashes = stored(40, "tp1pp2"), chain(LONG)
    with Watched(place, "tp1pp1", Rank()) as rank:
        pages, calls, keys = rank.look(hashes)
        assert pages == 40
        assert calls <= 5
        assert keys <= 2 * LONG + 3 * LONG  # the own cut, and the two cells of each of two stages
    with Watched(place, "tp1pp2", Rank(pp=1)) as rank:
        assert rank.look(hashes) == (40, 1, LONG), "no grid but its own is known"


def brute_force(pool: Pool, box: Box, objects: set[str], hashes: list[str], prefix: str) -> int:
    """Leading pages whose every (head, layer) lies in some object."""
    for page, page_hash in enumerate(hashes):
        names = [ObjectName.parse(key) for key in objects if key.startswith(page_prefix(prefix, page_hash))]
        held = {
            (head, layer)
            for name in names
            for head in range(name.heads.start, name.heads.stop)
            for layer in range(name.layers.start, name.layers.stop)
        }
        wanted = {
            (head, layer)
            for head in range(box.heads.start, box.heads.stop)
            for layer in range(box.layers.start, box.layers.stop)
        }
        if not wanted <= held:
            return page
    return len(hashes)


def test_random_presence_against_brute_force(tally: Counter[str]) -> None:
    """Pages under one to three grids, many objects gone: every reader finds exactly the prefix there is."""
    pool = tiny(4, 4, 1, "int8").pool(1)
    hashes = chain(12)
    topologies = ["tp1pp1", "tp2pp1", "tp4pp2", "tp1pp4", "tp2pp3"]
    readers = ["tp1pp1", "tp4pp1", "tp2pp2"]
    generator = random.Random(5)
    for _ in range(15):
        place = Place()
        for writer in generator.sample(topologies, generator.randint(1, 3)):
            pages = generator.sample(range(12), generator.randint(4, 12))
            write_pages(place, pool, writer, [hashes[page] for page in pages], pages=pages)
        gone = generator.choice((0.0, 0.02, 0.1))
        place.remove(*(key for key in place.objects() if generator.random() < gone))
        objects = set(place.objects())
        prefix = next(iter(objects)).split("/")[1]
        for reader in readers:
            for rank in distinct_ranks(pool, ParallelSpec.parse(reader)):
                with Watched(place, reader, rank, pool, pages=12) as watched:
                    expected = brute_force(pool, watched.rig.box, objects, hashes, prefix)
                    first = watched.look(hashes)[0]
                    report = watched.rig.restore(hashes)
                    assert (first, report.pages) == (expected, expected)
                    watched.rig.assert_holds(range(expected))
                    assert watched.look(hashes)[0] == expected, "the same after what was learned"
                    tally["random presence patterns looked up and restored"] += 1
