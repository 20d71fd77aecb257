"""What a request used stays longest, and of one chain the head outlives the tail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from store_rig import PATIENCE_S, Place, RankRig, attach_rank, chain, tiny, write_pages

from hicache_store.clock import Deadline
from hicache_store.connectors.base import BufferSource, Connector, Outcome, Touch, Write
from hicache_store.connectors.memory import MemoryConnector, MemoryTable
from hicache_store.layout.names import ObjectName
from hicache_store.layout.parallel import Rank
from hicache_store.limits import MARKER_REFRESH_S, TOUCH_INTERVAL_S
from hicache_store.testing.clocks import FakeClock

POOL = tiny(2, 2).pool(1)
PAGES = 10


class Toucher:
    """Passes everything on and keeps the touches of each call."""

    def __init__(self, inner: Connector) -> None:
        self._inner = inner
        self.calls: list[list[Touch]] = []

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        self.calls.append(list(touches))
        return self._inner.touch(touches, deadline)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


class Bench:
    """A place with a clock of its own, and one rank whose touches are watched."""

    def __init__(self, quota_bytes: int = 1 << 30, spec: str = "tp1pp1") -> None:
        self.clock = FakeClock()
        self.place = Place(MemoryTable(quota_bytes, clock=self.clock))
        self.hashes = chain(PAGES)
        self.watched: list[Toucher] = []
        self.place.wrap = self._watch
        self.rank = attach_rank(self.place, POOL, spec, Rank(), pages=PAGES, clock=self.clock)
        self.rank.fill(range(PAGES))

    def _watch(self, connector: Connector) -> Connector:
        self.watched.append(Toucher(connector))
        return self.watched[-1]

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.rank.store.close()

    def touched(self, action: Callable[[RankRig], object]) -> list[tuple[int, int]]:
        """(page, depth) of every object touched by ``action``, in order; all in one call."""
        watcher = self.watched[0]
        watcher.calls.clear()
        action(self.rank)
        assert len(watcher.calls) <= 1
        return [
            (self.hashes.index(ObjectName.parse(touch.key).page_hash), touch.depth)
            for touch in itertools.chain(*watcher.calls)
        ]


def restoring(start: int, stop: int, prefix: int = 0) -> Callable[[RankRig], object]:
    """Restore pages ``start .. stop``, the ``prefix`` pages before them being known."""

    def action(rank: RankRig) -> None:
        hashes = chain(PAGES)
        report = rank.store.restore(
            hashes[start:stop], rank.placements[start:stop], prefix=hashes[start - prefix : start]
        )
        assert report.pages == stop - start

    return action


def backing_up(stop: int) -> Callable[[RankRig], object]:
    return lambda rank: rank.backup(chain(PAGES)[:stop])


def backing_up_rest(start: int) -> Callable[[RankRig], object]:
    """Back up the pages from ``start`` on, which the call is told."""
    return lambda rank: rank.store.backup(
        chain(PAGES)[start:], rank.placements[start:PAGES], first_page=start
    )


def whole(stop: int) -> list[tuple[int, int]]:
    return [(page, page) for page in range(stop)]


def test_a_restore_touches_the_whole_chain_once_head_first_with_its_depths() -> None:
    with Bench() as bench:
        backing_up(PAGES)(bench.rank)
        assert bench.touched(restoring(0, PAGES)) == whole(PAGES)
        bench.clock.advance(TOUCH_INTERVAL_S)
        assert bench.touched(restoring(4, PAGES, prefix=4)) == whole(PAGES)


def test_a_chain_is_not_touched_twice_within_a_minute() -> None:
    with Bench() as bench:
        backing_up(PAGES)(bench.rank)
        restoring(0, PAGES)(bench.rank)
        bench.clock.advance(TOUCH_INTERVAL_S - 1)
        assert bench.touched(restoring(0, PAGES)) == []
        assert bench.touched(restoring(0, 6)) == [], "nor because of a part of it"
        assert bench.touched(restoring(3, PAGES, prefix=3)) == []
        assert bench.touched(backing_up(PAGES)) == []
        bench.clock.advance(1)
        assert bench.touched(restoring(0, PAGES)) == whole(PAGES)


def test_a_longer_chain_touches_its_head_again() -> None:
    """Otherwise the tail would be the younger part, and outlive the head that gives it its worth."""
    with Bench() as bench:
        backing_up(PAGES)(bench.rank)
        restoring(0, 6)(bench.rank)
        bench.clock.advance(2)
        assert bench.touched(restoring(6, PAGES, prefix=6)) == whole(PAGES)


def test_a_tail_touched_without_its_head_does_not_keep_the_head_untouched() -> None:
    with Bench() as bench:
        backing_up(PAGES)(bench.rank)
        restoring(6, PAGES)(bench.rank)
        bench.clock.advance(2)
        assert bench.touched(restoring(0, PAGES)) == whole(PAGES)


def test_a_backup_that_grows_a_chain_touches_what_was_there() -> None:
    with Bench() as bench:
        assert bench.touched(backing_up(4)) == []
        bench.clock.advance(2)
        assert bench.touched(backing_up(6)) == whole(4)
        bench.clock.advance(2)
        assert bench.touched(backing_up(PAGES)) == whole(6)
        bench.clock.advance(2)
        assert bench.touched(backing_up(PAGES)) == whole(PAGES)


def test_depths_count_from_the_start_of_the_chain() -> None:
    with Bench() as bench:
        backing_up(PAGES)(bench.rank)
        bench.clock.advance(TOUCH_INTERVAL_S)
        hashes = bench.hashes[7:]
        found = bench.touched(lambda rank: rank.store.backup(hashes, rank.placements[7:PAGES], first_page=7))
        assert found == [(7, 7), (8, 8), (9, 9)]


def test_every_object_of_a_page_is_touched() -> None:
    with Bench() as bench:
        write_pages(bench.place, POOL, "tp2pp2", bench.hashes)
        bench.clock.advance(MARKER_REFRESH_S)
        found = bench.touched(restoring(0, PAGES))
        assert found == [(page, page) for page in range(PAGES) for _ in range(4)]


def test_a_look_touches_nothing() -> None:
    with Bench() as bench:
        backing_up(PAGES)(bench.rank)
        assert bench.touched(lambda rank: rank.store.contains(bench.hashes)) == []


def lengths_under_pressure(bench: Bench, newcomers: int) -> list[int]:
    """How long the chain's usable prefix is while other objects push it out, one by one."""
    handle = MemoryConnector(bench.place.table)
    size = len(next(iter(bench.place.objects().values())))
    lengths = []
    for number in range(newcomers):
        key = f"v1/{number:064x}/00/{0:064x}/kv.H000-001.L000-001"
        write = Write(key, size, BufferSource.of(bytes(size)))
        assert handle.write_from([write], Deadline.after(PATIENCE_S))[0].is_ok
        left = [
            ObjectName.parse(one).page_hash for one in bench.place.objects() if f"{number:064x}" not in one
        ]
        pages = [bench.hashes.index(one) for one in left if one in bench.hashes]
        lengths.append(len(pages))
        assert sorted(pages) == list(range(len(pages))), "what is left is always a prefix"
    return lengths


@pytest.mark.parametrize(
    "history",
    [
        [backing_up(PAGES)],
        [backing_up(4), backing_up(PAGES)],
        [backing_up(PAGES), restoring(0, PAGES)],
        [backing_up(PAGES), restoring(0, 5), restoring(5, PAGES, prefix=5)],
        [backing_up(PAGES), restoring(6, PAGES), restoring(0, PAGES)],
        [backing_up(3), restoring(0, 3), backing_up(7), backing_up(PAGES), restoring(0, 2)],
        [lambda rank: (backing_up(4)(rank), backing_up_rest(4)(rank))],
    ],
)
def test_eviction_takes_the_tail_of_a_chain_before_its_head(
    history: list[Callable[[RankRig], object]],
) -> None:
    with Bench() as sample:
        backing_up(1)(sample.rank)
        (one,) = sample.place.objects().values()
    with Bench(quota_bytes=PAGES * len(one)) as bench:
        for action in history:
            action(bench.rank)
            bench.clock.advance(7)
        assert len(bench.place.objects()) == PAGES
        assert lengths_under_pressure(bench, PAGES) == list(range(PAGES - 1, -1, -1))
