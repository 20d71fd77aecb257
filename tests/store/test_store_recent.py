"""Asking again and again while a request waits: few questions, and no answer that outlives its reason."""

from __future__ import annotations

import dataclasses

import pytest
from store_rig import Place, RankRig, attach_rank, chain, tiny

from hicache_store.connectors.base import Connector
from hicache_store.layout.parallel import Rank
from hicache_store.limits import HINTS_MAX, RECENT_GAPS_MAX
from hicache_store.store import EndReason
from hicache_store.store.recent import RecentLookups
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.faults import CountingConnector, FaultyConnector, TimeOut, on_keys

POOL = tiny(2, 2, 1, "int8").pool(1)
PAGES = 60


@dataclasses.dataclass
class Waiting:
    place: Place
    rig: RankRig
    seen: CountingConnector
    clock: FakeClock
    hashes: list[str]

    def look(self, pages: int = PAGES, max_age_s: float = 1.0) -> int:
        report = self.rig.store.contains(self.hashes[:pages], max_age_s=max_age_s)
        if report.pages < pages:
            assert report.end is not None
            assert (report.end.page, report.end.reason) == (report.pages, EndReason.ABSENT)
        else:
            assert report.end is None
        return report.pages

    @property
    def questions(self) -> int:
        return self.seen.calls["sizes"]


@pytest.fixture
def waiting():
    place, clock, made = Place(), FakeClock(), []

    def watch(connector: Connector) -> Connector:
        made.append(CountingConnector(connector))
        return made[-1]

    place.wrap = watch
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=PAGES, clock=clock) as rig:
        rig.fill(range(PAGES))
        rig.backup(chain(PAGES)[:50])
        made[0].reset()
        yield Waiting(place, rig, made[0], clock, chain(PAGES))


def test_c17_a_request_that_waits_asks_once(waiting: Waiting) -> None:
    """A hundred turns of a scheduler over one prefix, present, ended or growing, are one question."""
    for _ in range(100):
        assert waiting.look() == 50
    assert waiting.questions == 1
    assert waiting.look(30) == 30
    assert waiting.questions == 1, "a shorter prefix is known as well"
    assert waiting.look(max_age_s=0.0) == 50
    assert waiting.questions == 2, "who asks for the truth gets it"
    waiting.clock.advance(1.5)
    assert waiting.look() == 50
    assert waiting.questions == 3
    pages = (waiting.rig.store.metrics.get("contains.pages"), waiting.rig.store.metrics.get("contains.hits"))
    assert pages == (102 * PAGES + 30, 102 * 50 + 30)


def test_c17_a_longer_prefix_asks_for_the_rest_only(waiting: Waiting) -> None:
    assert waiting.look(40) == 40
    waiting.seen.reset()
    assert waiting.look(60) == 50
    assert waiting.seen.items["sizes"] == 20


def test_c17_what_this_handle_stores_is_seen_at_once(waiting: Waiting) -> None:
    """And what others store when the answer has grown old."""
    assert waiting.look() == 50
    waiting.rig.fill(range(PAGES))
    assert waiting.rig.backup(waiting.hashes[:55]).objects == 5
    assert waiting.look() == 55
    waiting.place.wrap = lambda connector: connector
    with attach_rank(waiting.place, POOL, "tp1pp1", Rank(), pages=PAGES) as other:
        other.fill(range(PAGES))
        other.backup(waiting.hashes)
    assert waiting.look() == 55
    waiting.clock.advance(1.5)
    assert waiting.look() == 60


def test_d12_a_page_that_a_restore_missed_is_forgotten(waiting: Waiting) -> None:
    """Removed behind the back, a page looks present until it is wanted; then it is a miss for everybody."""
    assert waiting.look() == 50
    gone = [key for key in waiting.place.objects() if f"/{waiting.hashes[20]}/" in key]
    assert gone
    waiting.place.remove(*gone)
    assert waiting.look() == 50
    report = waiting.rig.restore(waiting.hashes[:50])
    assert (report.pages, report.end.reason) == (20, EndReason.ABSENT)
    waiting.rig.assert_holds(range(20))
    assert waiting.look() == 20
    assert waiting.look() == 20
    waiting.rig.fill(range(PAGES))
    assert waiting.rig.backup(waiting.hashes[:50]).objects == 1
    assert waiting.look() == 50


def test_what_could_not_be_told_is_not_remembered() -> None:
    """A look-up that ran out of time says nothing about the next one."""
    place, made = Place(), []

    def faulty(connector: Connector) -> Connector:
        made.append(FaultyConnector(connector))
        return made[-1]

    place.wrap = faulty
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=4) as rig:
        rig.fill(range(4))
        rig.backup(chain(4))
        assert rig.store.contains(chain(4), max_age_s=60.0, timeout_s=-1.0).end.reason is EndReason.TIMED_OUT
        assert rig.store.contains(chain(4), max_age_s=60.0).pages == 4
        made[0].plan = on_keys(lambda key: True, TimeOut(), ("sizes",))
        assert rig.store.contains(chain(4), max_age_s=60.0).pages == 4


def test_c16_what_is_remembered_is_bounded() -> None:
    """Five times as many pages as are kept leave no more than are kept, and the newest of them."""
    recent = RecentLookups()
    for batch in range(5):
        hashes = [f"{batch} {index}" for index in range(HINTS_MAX + 1)]
        recent.remember("kv", hashes, HINTS_MAX, 0.0)
        for gap in range(1_000):
            recent.remember("kv", [f"gap {batch} {gap}"], 0, 0.0)
    assert len(recent._found) == HINTS_MAX
    assert len(recent._gaps) == RECENT_GAPS_MAX
    assert recent.known("kv", hashes[:3], 0.0) == (3, False)
    assert recent.known("kv", ["0 0"], 0.0) == (0, False)
    assert recent.known("other", hashes[:3], 0.0) == (0, False)
