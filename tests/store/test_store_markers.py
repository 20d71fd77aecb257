"""Grids in use are told by markers that may be late, lost, damaged, raced for or too many."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Callable, Iterator

import pytest
from store_rig import Place, attach_rank, chain, namespace_of, read_pages, tiny, write_pages

from hicache_store.connectors.base import Connector
from hicache_store.layout.box import Span
from hicache_store.layout.grid import Grid, fixed_grid
from hicache_store.layout.names import marker_key
from hicache_store.layout.parallel import Rank
from hicache_store.layout.records import encode_grid, first_slot, frame
from hicache_store.limits import MARKER_RECHECK_S, MARKER_REFRESH_MAX_S, MARKER_REFRESH_S, MARKER_SLOTS
from hicache_store.store import EndReason, FixedGrid, PageState
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.faults import (
    Attempt,
    CountingConnector,
    Fail,
    Fault,
    FaultyConnector,
    OverwritingConnector,
    TimeOut,
    on_keys,
)

POOL = tiny(4, 4).pool(2)
NAMESPACE = namespace_of(POOL).digest
TP1_PP4 = "tp1pp4"
"""A reader whose cut equals none of the writers'."""


def is_marker(key: str) -> bool:
    return "/grid-" in key


def markers(place: Place) -> dict[str, bytes]:
    return {key: data for key, data in place.meta().items() if is_marker(key)}


def put_marker(place: Place, slot: int, grid: Grid) -> None:
    key = marker_key(NAMESPACE, slot)
    place.put(key, frame(key, encode_grid(grid)))


def test_every_rank_of_a_stage_announces_the_same_bytes() -> None:
    place = Place()
    write_pages(place, POOL, "tp4pp2", chain(8, 2))
    assert len(markers(place)) == 2
    by_slot = [
        marker_key(NAMESPACE, first_slot(Grid("kv", (0, 1, 2, 3, 4), cuts))) for cuts in ((0, 2), (2, 4))
    ]
    assert sorted(markers(place)) == sorted(by_slot)


def test_a_grid_announced_after_the_reader_attached_is_found() -> None:
    place, hashes, clock = Place(), chain(3, 2), FakeClock()
    with attach_rank(place, POOL, TP1_PP4, Rank(pp=2), pages=3, clock=clock) as reader:
        assert reader.restore(hashes).pages == 0
        write_pages(place, POOL, "tp2pp1", hashes)
        clock.advance(MARKER_REFRESH_S)
        assert reader.restore(hashes).pages == 3
        reader.assert_holds(range(3))
        write_pages(place, POOL, "tp4pp2", chain(5, 2))
        clock.advance(2 * MARKER_REFRESH_S)
        assert reader.store.contains(chain(5, 2)).pages == 5


def test_markers_are_read_again_ever_less_often_while_nothing_new_shows() -> None:
    clock, watched = FakeClock(), []

    def watch(connector: Connector) -> Connector:
        watched.append(CountingConnector(connector))
        return watched[-1]

    place = Place(wrap=watch)
    with attach_rank(place, POOL, "tp1pp1", Rank(), clock=clock) as reader:
        asked = []
        for second in range(1, 400):
            clock.advance(1.0)
            watched[0].reset()
            reader.store.contains(chain(1, 2))
            reader.restore(chain(1, 2))
            if watched[0].items["read"] >= MARKER_SLOTS:
                asked.append(second)
    gaps = [b - a for a, b in itertools.pairwise([0, *asked])]
    assert gaps[0] == MARKER_REFRESH_S
    assert gaps == sorted(gaps)
    assert gaps[-1] == MARKER_REFRESH_MAX_S


def test_markers_lost_behind_the_back_come_back() -> None:
    place, hashes, clock = Place(), chain(8, 2), FakeClock()
    with attach_rank(place, POOL, "tp2pp2", Rank(), pages=8, clock=clock, writer="caller") as writer:
        writer.fill(range(8))
        assert set(writer.backup(hashes[:2]).states) == {PageState.STORED}
        before = markers(place)
        assert len(before) == 1
        place.remove(*before)
        clock.advance(MARKER_RECHECK_S - 1)
        assert set(writer.backup(hashes[:4]).states) == {PageState.PRESENT, PageState.STORED}
        assert markers(place) == {}, "looked at again only now and then"
        clock.advance(1)
        assert writer.backup(hashes[:4]).objects == 0
        assert markers(place) == before, "announced again although nothing is left to store"


def test_the_announcement_precedes_the_first_object_and_may_stay_alone() -> None:
    """A crash between marker and object leaves a marker that harms nobody; none leaves the reverse."""
    seen: list[str] = []

    def dying(attempt: Attempt) -> Fault | None:
        if attempt.operation == "write":
            seen.append(attempt.key)
        is_object = attempt.operation == "write" and attempt.key.startswith("v1/")
        return Fail("the process is gone", 0.5) if is_object else None

    place, hashes = Place(), chain(2, 2)
    place.wrap = lambda connector: FaultyConnector(connector, dying)
    with attach_rank(place, POOL, "tp2pp1", Rank(), pages=2) as writer:
        writer.fill(range(2))
        report = writer.backup(hashes)
        assert set(report.states) <= {PageState.FAILED, PageState.NOT_ELECTED}
    order = [is_marker(key) for key in seen if not key.endswith("manifest")]
    assert order == sorted(order, reverse=True)
    assert len(markers(place)) == 1
    assert place.objects() == {}
    place.wrap = lambda connector: connector
    with attach_rank(place, POOL, TP1_PP4, Rank(), pages=2) as reader:
        assert reader.restore(hashes).end.reason is EndReason.ABSENT
    write_pages(place, POOL, "tp2pp1", hashes)
    assert read_pages(place, POOL, TP1_PP4, hashes) == 4


@pytest.mark.parametrize(
    ("operation", "fault", "state"),
    [
        ("write", Fail(), PageState.FAILED),
        ("read", Fail(), PageState.FAILED),
        ("write", TimeOut(), PageState.FAILED),
        ("read", TimeOut(), PageState.FAILED),
    ],
)
@pytest.mark.parametrize("others_grids", [0, 1])
def test_no_object_without_a_marker_and_no_full_house_by_a_failure(
    operation: str, fault: Fault, state: PageState, others_grids: int
) -> None:
    """Slots that cannot be told are not taken: nothing is written, and the next backup works."""
    place, hashes = Place(), chain(2, 2)
    put_marker(place, 5, Grid("kv", (0, 4), tuple(range(4 + 1)))) if others_grids else None
    connectors: list[FaultyConnector] = []

    def faulty(connector: Connector) -> Connector:
        connectors.append(FaultyConnector(connector))
        return connectors[-1]

    place.wrap = faulty
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2) as writer:
        writer.fill(range(2))
        connectors[0].plan = on_keys(is_marker, fault, (operation,))
        report = writer.backup(hashes)
        assert report.states == (state, state)
        assert "marker" in report.detail
        assert place.objects() == {}
        assert len(markers(place)) <= others_grids + 1, "one slot at most was taken"
        connectors[0].plan = lambda attempt: None
        assert writer.backup(hashes).states == (PageState.STORED, PageState.STORED)
        assert {key.rsplit(".", 1)[1] for key in place.objects()} == {"L000-004"}


@pytest.mark.parametrize("fault", [Fail(), TimeOut()])
def test_a_marker_that_cannot_be_looked_at_again_is_not_announced_twice(fault: Fault) -> None:
    place, hashes, clock = Place(), chain(2, 2), FakeClock()
    connectors: list[FaultyConnector] = []

    def faulty(connector: Connector) -> Connector:
        connectors.append(FaultyConnector(connector))
        return connectors[-1]

    place.wrap = faulty
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2, clock=clock) as writer:
        writer.fill(range(2))
        writer.backup(hashes[:1])
        before = markers(place)
        clock.advance(MARKER_RECHECK_S)
        connectors[0].plan = on_keys(is_marker, fault, ("read",))
        assert writer.backup(hashes).states == (PageState.PRESENT, PageState.STORED)
        assert markers(place) == before
        connectors[0].plan = lambda attempt: None
        place.remove(*before)
        assert writer.backup(hashes).objects == 0
        assert markers(place) == before, "looked at again as soon as that is possible"


def test_a_deadline_before_the_markers_are_read_is_a_timeout() -> None:
    place, hashes = Place(), chain(2, 2)
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2) as writer:
        report = writer.backup(hashes, timeout_s=0.0)
        assert report.states == (PageState.TIMED_OUT, PageState.TIMED_OUT)
        assert writer.store.metrics.get("markers.no_slot") == 0


def colliding_grids() -> tuple[FixedGrid, FixedGrid]:
    """Two fixed grids of one stage whose probes start at one slot."""
    pool = tiny(16, 31).pool(2)
    slots: dict[int, FixedGrid] = {}
    for heads, layers in itertools.product((1, 2, 4, 8, 16), range(1, 31)):
        grid = fixed_grid(pool, heads_per_object=heads, layers_per_object=layers, stage=Span(0, 31))
        other = slots.setdefault(first_slot(grid), FixedGrid(heads, layers))
        if other != FixedGrid(heads, layers):
            return other, FixedGrid(heads, layers)
    raise AssertionError("150 grids have different first slots of 64")


@pytest.mark.parametrize("overwrites", [False, True])
def test_racing_announcers_lose_nothing(overwrites: bool) -> None:
    """B reads the slots, A announces and writes, then B announces into the same slot."""
    first, second = colliding_grids()
    pool = tiny(16, 31).pool(2)
    place, hashes, clock = Place(), chain(2, 2), FakeClock()

    def plain(connector: Connector) -> Connector:
        return OverwritingConnector(connector) if overwrites else connector

    place.wrap = plain
    with attach_rank(place, pool, "tp1pp1", Rank(), pages=2, grid=first, clock=clock) as a:
        a.fill(range(2))

        def race() -> Iterator[None]:
            assert a.backup(hashes[:1]).states == (PageState.STORED,)
            yield
            while True:
                yield

        racing = race()

        def before_marker(attempt: Attempt) -> Fault | None:
            if attempt.operation == "write" and is_marker(attempt.key):
                next(racing)
            return None

        place.wrap = lambda connector: FaultyConnector(plain(connector), before_marker)
        with attach_rank(place, pool, "tp1pp1", Rank(), pages=2, grid=second, clock=clock) as b:
            b.fill(range(2))
            b.store.backup(hashes[1:], b.placements[1:], first_page=1)
        place.wrap = plain
        assert len(markers(place)) == (1 if overwrites else 2)
        clock.advance(MARKER_RECHECK_S)
        a.backup(hashes[:1])
        assert len(markers(place)) == 2, "the loser finds its marker gone and announces it again"
    assert read_pages(place, pool, TP1_PP4, hashes) == 4


def fill_slots(place: Place, grid_of: Callable[[int], Grid]) -> None:
    for slot in range(MARKER_SLOTS):
        put_marker(place, slot, grid_of(slot))


def test_when_all_slots_are_taken_writers_use_announced_grids(caplog: pytest.LogCaptureFixture) -> None:
    place, hashes = Place(), chain(2, 2)
    fill_slots(place, lambda slot: Grid("kv", (0, 1, 2, 3, 4), (0, 2, 4)) if slot == 9 else foreign(slot))
    before = markers(place)
    with (
        caplog.at_level(logging.WARNING, "hicache_store"),
        attach_rank(place, POOL, "tp2pp1", Rank(), pages=2, writer="caller") as writer,
    ):
        writer.fill(range(2))
        assert writer.backup(hashes).states == (PageState.STORED, PageState.STORED)
        assert writer.store.metrics.get("markers.no_slot") == 1
        assert "every grid marker slot is taken" in caplog.text
        assert writer.backup(hashes).objects == 0
    assert {key.rsplit("/", 1)[1] for key in place.objects()} == {
        f"kv.H00{head}-00{head + 1}.L00{layer}-00{layer + 2}" for head in (0, 1) for layer in (0, 2)
    }
    assert markers(place) == before
    assert read_pages(place, POOL, "tp4pp4", hashes, ranks=[Rank(1, 3)]) == 1


def foreign(slot: int) -> Grid:
    """The grid of another pool; 64 different ones."""
    return Grid("drafts_0a1b2c3d", (0, 1), (slot, slot + 1))


def test_when_no_announced_grid_fits_nothing_is_written() -> None:
    place = Place()
    fill_slots(place, lambda slot: foreign(slot) if slot else Grid("kv", (0, 3, 4), (0, 4)))
    with attach_rank(place, POOL, "tp2pp1", Rank(), pages=2, writer="caller") as writer:
        report = writer.backup(chain(2, 2))
        assert report.states == (PageState.REFUSED, PageState.REFUSED)
        assert "every grid marker slot is taken" in report.detail
        assert "hicache grids --retire" in report.detail
        place.remove(marker_key(NAMESPACE, 40))
        assert writer.backup(chain(2, 2)).states == (PageState.STORED, PageState.STORED)
    assert place.objects()


def damages(sound: bytes, other: bytes) -> Iterator[bytes]:
    """A marker cut, emptied, prolonged, blanked, with any one bit of its content flipped, or moved
    here from another slot."""
    yield from (b"\0", sound[:-1], sound[:100], sound + b"\0", bytes(len(sound)), b"\xff" * len(sound), other)
    generator = random.Random(4)
    body = len(json.dumps({"head_cuts": [0, 4], "layer_cuts": [0, 4], "pool": "kv"}))
    tail = 8 * (len(sound) - 32)
    for bit in {*generator.sample(range(8 * body), 40), *range(tail, tail + 256, 5)}:
        flipped = bytearray(sound)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def test_damaged_markers_are_survived_counted_and_replaced() -> None:
    place, hashes = Place(), chain(2, 2)
    write_pages(place, POOL, "tp1pp1", hashes)
    ((key, sound),) = markers(place).items()
    slot = int(key.rsplit("-", 1)[1])
    elsewhere = marker_key(NAMESPACE, (slot + 1) % MARKER_SLOTS)
    moved = frame(elsewhere, encode_grid(Grid("kv", (0, 4), (0, 4))))
    tried = 0
    for damaged in damages(sound, moved):
        place.put(key, damaged)
        with attach_rank(place, POOL, TP1_PP4, Rank(), pages=2) as reader:
            assert reader.store.metrics.get("markers.damaged") == 1
            assert reader.restore(hashes).pages == 0
        (report,) = write_pages(place, POOL, "tp1pp1", hashes)
        assert report.objects == 0
        assert markers(place) == {key: sound}
        assert read_pages(place, POOL, TP1_PP4, hashes, ranks=[Rank(pp=3)]) == 1
        tried += 1
    assert tried > 90
