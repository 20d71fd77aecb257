"""What a call reports: exactly the pages that are right, and why the first other one is not."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from store_rig import FilePlace, Place, attach_rank, chain, namespace_of, tiny, write_pages

from hicache_store.connectors.base import Connector, Outcome, Read, Status, Write
from hicache_store.connectors.memory import MemoryTable
from hicache_store.layout.names import ObjectName, page_prefix
from hicache_store.layout.parallel import Rank
from hicache_store.store import EndReason, PageState
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.faults import (
    Attempt,
    CountingConnector,
    Fail,
    Fault,
    FaultyConnector,
    FlipBit,
    ServeOther,
    TimeOut,
    Truncate,
    Vanish,
    on_keys,
    seeded,
)

POOL = tiny(2, 4).pool(2)
PAGES = 8


class Refuser:
    """Refuses reads and writes of some keys, as storage does that has enough hung work."""

    def __init__(self, inner: Connector, matches: Callable[[str], bool]) -> None:
        self._inner, self._matches = inner, matches

    def read_into(self, reads: list[Read], deadline: object) -> list[Outcome]:
        return self._without(reads, self._inner.read_into, deadline)

    def write_from(self, writes: list[Write], deadline: object) -> list[Outcome]:
        return self._without(writes, self._inner.write_from, deadline)

    def _without(self, items, forward, deadline) -> list[Outcome]:
        passed = iter(forward([item for item in items if not self._matches(item.key)], deadline))
        refused = Outcome(Status.REFUSED, "too much hung work")
        return [refused if self._matches(item.key) else next(passed) for item in items]

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def is_page(page_hash: str) -> Callable[[str], bool]:
    return lambda key: key.startswith("v1/") and page_hash in key


FAULTS: dict[EndReason, Fault] = {
    EndReason.ABSENT: Vanish(),
    EndReason.CORRUPT: FlipBit(77),
    EndReason.TIMED_OUT: TimeOut(),
    EndReason.FAILED: Fail("the cable is out"),
}


@pytest.mark.parametrize("reason", [*FAULTS, EndReason.FOREIGN, EndReason.REFUSED])
@pytest.mark.parametrize("bad", [0, 3, PAGES - 1])
@pytest.mark.parametrize("writer", ["tp1pp1", "tp2pp4"])
def test_the_prefix_ends_at_the_bad_page_for_its_reason(reason: EndReason, bad: int, writer: str) -> None:
    place, hashes = Place(), chain(PAGES, 2)
    write_pages(place, POOL, writer, hashes)
    victim = sorted(key for key in place.objects() if hashes[bad] in key)[-1]
    other = sorted(key for key in place.objects() if hashes[(bad + 1) % PAGES] in key)[-1]

    def spoil(connector: Connector) -> Connector:
        if reason is EndReason.REFUSED:
            return Refuser(connector, lambda key: key == victim)
        fault = ServeOther(other) if reason is EndReason.FOREIGN else FAULTS[reason]
        return FaultyConnector(connector, on_keys(lambda key: key == victim, fault))

    place.wrap = spoil
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=PAGES) as reader:
        report = reader.restore(hashes)
        assert (report.pages, report.end.page, report.end.reason) == (bad, bad, reason)
        assert report.end.key == victim
        assert reader.store.metrics.get(f"miss.{reason.value}") == 1
        assert reader.store.metrics.get("restore.hits") == bad
        reader.assert_holds(range(bad))
        assert reader.arrays.is_poison_outside(reader.placements), "no slot but those given is touched"


def test_a_truncated_object_is_corrupt() -> None:
    place, hashes = Place(), chain(PAGES, 2)
    write_pages(place, POOL, "tp1pp1", hashes)
    place.wrap = lambda connector: FaultyConnector(
        connector, on_keys(is_page(hashes[2]), Truncate(9), ("read", "sizes"))
    )
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=PAGES) as reader:
        for report in (reader.store.contains(hashes), reader.restore(hashes)):
            assert (report.pages, report.end.reason) == (2, EndReason.CORRUPT)


@pytest.mark.parametrize("pages", [0, 1, 5])
def test_a_deadline_that_is_past_is_a_timeout(pages: int) -> None:
    place, hashes = Place(), chain(PAGES, 2)
    write_pages(place, POOL, "tp2pp1", hashes[:pages])
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=PAGES) as reader:
        for report in (
            reader.store.contains(hashes, timeout_s=0.0),
            reader.restore(hashes, timeout_s=0.0),
        ):
            assert (report.pages, report.end.page, report.end.reason) == (0, 0, EndReason.TIMED_OUT)
        assert reader.arrays.is_poison_outside([])
        states = reader.backup(hashes, timeout_s=0.0).states
        assert states == (PageState.TIMED_OUT,) * PAGES


@pytest.mark.parametrize("writer", ["tp2pp1", "tp1pp2"])
def test_an_absence_that_there_was_no_time_to_look_into_is_a_timeout(writer: str) -> None:
    """The page lies under another grid; the deadline passes after the own cut was tried in vain."""
    place, hashes, clock = Place(), chain(PAGES, 2), FakeClock()
    write_pages(place, POOL, writer, hashes)

    def late(attempt: Attempt) -> Fault | None:
        if attempt.operation == "sizes" and attempt.key.startswith("v1/"):
            clock.advance(1.0)
        return None

    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=PAGES, clock=clock) as reader:
        assert reader.restore(hashes).pages == PAGES
    place.wrap = lambda connector: FaultyConnector(connector, late)
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=PAGES, clock=clock) as reader:
        report = reader.restore(hashes, timeout_s=1.0)
        assert (report.pages, report.end.page, report.end.reason) == (0, 0, EndReason.TIMED_OUT)
        report = reader.store.contains(hashes, timeout_s=1.0)
        assert report.end.reason is EndReason.TIMED_OUT


def test_the_reason_of_an_empty_request_is_none() -> None:
    with attach_rank(Place(), POOL, "tp1pp1", Rank()) as rank:
        for report in (rank.store.contains([]), rank.store.restore([], [])):
            assert (report.pages, report.end) == (0, None)
        assert rank.store.backup([], []).states == ()


def test_a15_fewer_places_than_pages_end_at_the_last_place() -> None:
    """Ten pages are asked for and six slots are free: six are restored, nothing stale is called a page,
    and no other slot is written."""
    place, hashes = Place(), chain(10, 2)
    write_pages(place, POOL, "tp1pp1", hashes)
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=10) as reader:
        for array in reader.arrays.arrays:
            array.view(np.uint8)[...] = 0xAB
        free = reader.placements[:6]
        report = reader.store.restore(hashes, free)
        assert (report.pages, report.end.page, report.end.reason) == (6, 6, EndReason.NO_SLOT)
        reader.assert_holds(range(6))
        for placement in reader.placements[6:]:
            held = reader.arrays.read_page(placement)
            assert all(bool(np.all(part.view(np.uint8) == 0xAB)) for part in held.parts)
        place.remove(*(key for key in place.objects() if hashes[4] in key))
        report = reader.restore(hashes)
        assert (report.pages, report.end.reason) == (4, EndReason.ABSENT)
        report = reader.store.restore(hashes, free)
        assert (report.pages, report.end.page, report.end.reason) == (4, 4, EndReason.ABSENT)


def test_a53_the_host_knows_more_than_storage_and_only_the_rest_is_stored() -> None:
    """Storage holds 6 of 12 pages: the put of all 12 writes pages 6 to 11 and succeeds."""
    watched: list[CountingConnector] = []

    def watch(connector: Connector) -> Connector:
        watched.append(CountingConnector(connector))
        return watched[-1]

    place, hashes = Place(), chain(12, 2)
    write_pages(place, POOL, "tp1pp1", hashes[:6])
    place.wrap = watch
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=12) as rank:
        rank.fill(range(12))
        watched[0].reset()
        report = rank.backup(hashes)
        assert report.states == (PageState.PRESENT,) * 6 + (PageState.STORED,) * 6
        assert (report.pages, report.objects) == (12, 6)
        assert watched[0].items["write"] == 6
        written = {ObjectName.parse(key).page_hash for key in watched[0].digests if key.startswith("v1/")}
        assert written == set(hashes[6:])
        assert rank.restore(hashes).pages == 12
        rank.assert_holds(range(12))


def test_a45_every_range_of_a_chain_reads_exactly_its_pages() -> None:
    """All [a, b) of 12 pages: right bytes, right objects, nothing else asked for."""
    watched: list[CountingConnector] = []

    def watch(connector: Connector) -> Connector:
        watched.append(CountingConnector(connector))
        return watched[-1]

    place, hashes = Place(), chain(12, 2)
    write_pages(place, POOL, "tp2pp2", hashes)
    place.wrap = watch
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=12) as reader:
        reader.restore(hashes)
        for start, stop in itertools.combinations(range(13), 2):
            watched[0].reset()
            report = reader.restore(hashes[start:stop])
            assert (report.pages, report.end) == (stop - start, None)
            reader.assert_holds(range(start, stop))
            read = Counter(ObjectName.parse(record.key).page_hash for record in watched[0].reads)
            assert read == dict.fromkeys(hashes[start:stop], 4)
            assert watched[0].bytes_read == report.read_bytes
            assert watched[0].bytes_read == sum(
                len(data) for key, data in place.objects().items() if ObjectName.parse(key).page_hash in read
            )


def test_a_backup_of_one_page_leaves_its_neighbours_alone() -> None:
    place, hashes = Place(), chain(12, 2)
    write_pages(place, POOL, "tp1pp1", hashes)
    before = place.objects()
    place.remove(*(key for key in before if hashes[5] in key))
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=12) as rank:
        rank.fill([5])
        assert rank.store.backup(hashes[5:6], rank.placements[:1], first_page=5).objects == 1
    assert place.objects() == before


def test_a_full_quota_is_refused_and_said() -> None:
    place, hashes = Place(MemoryTable(quota_bytes=100)), chain(2, 2)
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2) as rank:
        report = rank.backup(hashes)
        assert report.states == (PageState.REFUSED, PageState.REFUSED)
        assert "exceed the whole quota of 100" in report.detail
        assert rank.store.metrics.get("backup.refused") == 2


def test_a_read_only_store_is_read_and_nothing_else(tmp_path) -> None:
    hashes = chain(3, 2)
    write_pages(FilePlace(tmp_path), POOL, "tp1pp1", hashes)
    with attach_rank(FilePlace(tmp_path, "&readonly=1"), POOL, "tp1pp1", Rank(), pages=4) as rank:
        assert rank.store.contains(hashes).pages == 3
        assert rank.restore(hashes).pages == 3
        rank.assert_holds(range(3))
        report = rank.backup(chain(4, 2))
        assert report.states[3] is PageState.REFUSED
        assert PageState.FAILED not in report.states


@pytest.mark.parametrize("is_file", [False, True])
def test_a01_failed_writes_are_reported_invisible_and_no_others(is_file: bool, tmp_path) -> None:
    """Writes fail after 60 % of their bytes for about 1 page in 20, over 400 pages and 4 threads."""
    place, hashes = (FilePlace(tmp_path) if is_file else Place()), chain(400, 2)
    plan = seeded(11, [("write", 0.05, Fail("the disk is gone", 0.6))])

    def injured(attempt: Attempt) -> Fault | None:
        return plan(attempt) if attempt.key.startswith("v1/") else None

    plain = place.open
    faulty = FaultyConnector(plain(), injured)

    class Injured:
        open = staticmethod(lambda: faulty)

    with attach_rank(Injured(), POOL, "tp1pp1", Rank(), pages=400) as writer:
        writer.fill(range(400))
        states: dict[int, PageState] = {}

        def work(number: int) -> None:
            for start in range(number * 100, number * 100 + 100, 25):
                part = slice(start, start + 25)
                report = writer.store.backup(hashes[part], writer.placements[part], first_page=start)
                states.update(zip(range(start, start + 25), report.states, strict=True))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    failed = sorted(page for page, state in states.items() if state is PageState.FAILED)
    assert 10 < len(failed) < 40
    assert faulty.injected["Fail"] == len(failed)
    assert {state for page, state in states.items() if page not in failed} == {PageState.STORED}
    assert len(states) == 400
    if is_file:
        left = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
        assert len(left) == 400 - len(failed), "neither objects nor drafts of failed writes"
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=400) as reader:
        for page in range(400):
            assert reader.store.contains(hashes[page : page + 1]).pages == (page not in failed)
        report = reader.restore(hashes)
        assert (report.pages, report.end.page, report.end.reason) == (failed[0], failed[0], EndReason.ABSENT)
        reader.assert_holds(range(failed[0]))
        reader.fill(range(400))
        assert reader.backup(hashes).objects == len(failed)
        assert reader.restore(hashes).pages == 400
        reader.assert_holds(range(400))


@pytest.mark.parametrize("size", [1, 40, -1])
def test_a04_a_short_object_is_never_one(size: int) -> None:
    """Storage that keeps fewer bytes than it was given and calls that done: a miss, and put right."""
    place, hashes = Place(), chain(3, 2)
    whole = Place()
    write_pages(whole, POOL, "tp1pp1", hashes)
    length = len(next(iter(whole.objects().values())))
    place.wrap = lambda connector: FaultyConnector(
        connector, on_keys(is_page(hashes[1]), Truncate(size % length), ("write",), times=1)
    )
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=3) as rank:
        rank.fill(range(3))
        rank.backup(hashes)
        assert len(place.objects()[page_key(hashes[1])]) == size % length
        assert rank.store.contains(hashes).pages == 1
        assert rank.restore(hashes).end.reason is EndReason.CORRUPT
        rank.fill(range(3))
        assert rank.backup(hashes).states == (PageState.PRESENT, PageState.STORED, PageState.PRESENT)
        assert place.objects() == whole.objects()
        assert rank.restore(hashes).pages == 3
        rank.assert_holds(range(3))


def page_key(page_hash: str) -> str:
    return page_prefix(namespace_of(POOL).digest, page_hash) + "kv.H000-002.L000-004"


def test_one_failed_page_does_not_fail_its_batch() -> None:
    place, hashes = Place(), chain(PAGES, 2)
    place.wrap = lambda connector: FaultyConnector(
        connector, on_keys(is_page(hashes[3]), TimeOut(), ("write",))
    )
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=PAGES) as rank:
        rank.fill(range(PAGES))
        report = rank.backup(hashes)
        expected = [PageState.STORED] * PAGES
        expected[3] = PageState.TIMED_OUT
        assert report.states == tuple(expected)
        assert (report.pages, report.objects) == (3, PAGES - 1)


def test_a_write_that_timed_out_and_landed_is_found_and_right() -> None:
    place, hashes = Place(), chain(PAGES, 2)
    place.wrap = lambda connector: FaultyConnector(
        connector, on_keys(is_page(hashes[3]), TimeOut(lands=True), ("write",), times=1)
    )
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=PAGES) as rank:
        rank.fill(range(PAGES))
        assert rank.backup(hashes).states[3] is PageState.TIMED_OUT
        assert rank.store.contains(hashes).pages == PAGES
        assert rank.backup(hashes).states == (PageState.PRESENT,) * PAGES
        assert rank.restore(hashes).pages == PAGES
        rank.assert_holds(range(PAGES))
