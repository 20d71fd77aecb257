"""One handle, many threads, a place that changes under it: whatever is reported is right."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
from store_rig import PATIENCE_S, Place, RankRig, attach_rank, chain, page_values, tiny, write_pages

from hicache_store.layout.parallel import Rank
from hicache_store.limits import MARKER_REFRESH_S
from hicache_store.store import PageState
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.faults import Fail, FaultyConnector, FlipBit, TimeOut, Vanish, seeded

POOL = tiny(2, 4).pool(2)
PAGES = 6
THREADS = 4
ROUNDS = 12


@pytest.mark.parametrize("seed", range(3))
def test_threads_share_one_handle_over_faults_and_new_grids(seed: int, tally: Counter[str]) -> None:
    """Every thread looks up, restores and backs up its own slots; other topologies write meanwhile,
    objects go bad, vanish, fail and time out."""
    clock, place, hashes = FakeClock(), Place(), chain(PAGES * THREADS, 2)
    kinds = (FlipBit(50), Vanish(), Fail(), TimeOut(), TimeOut(lands=True))
    rates = [(operation, 0.02, kind) for kind in kinds for operation in ("read", "write", "delete", "sizes")]
    plan = seeded(seed, rates)
    place.wrap = lambda connector: FaultyConnector(connector, plan)
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=PAGES * THREADS, clock=clock) as rank:
        place.wrap = lambda connector: connector
        errors: list[BaseException] = []

        def run(number: int) -> None:
            try:
                _work(rank, number, random.Random(10 * seed + number), hashes, tally)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for writer in ("tp2pp1", "tp1pp4", "tp2pp2"):
            write_pages(place, POOL, writer, hashes[:: 1 + seed], pages=range(0, len(hashes), 1 + seed))
            clock.advance(MARKER_REFRESH_S)
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)
        if errors:
            raise errors[0]


def _work(rank: RankRig, number: int, draw: random.Random, hashes: list[str], tally: Counter[str]) -> None:
    mine = range(PAGES * number, PAGES * (number + 1))
    where = [rank.placements[page] for page in mine]
    for _ in range(ROUNDS):
        start = draw.randrange(PAGES)
        pages, slots = list(mine)[start:], where[start:]
        asked = [hashes[page] for page in pages]
        looked = rank.store.contains(asked)
        assert 0 <= looked.pages <= len(asked)
        report = rank.store.restore(asked, slots)
        for page, placement in zip(pages[: report.pages], slots, strict=False):
            held = rank.arrays.read_page(placement)
            assert held.equals(page_values(POOL, page)), "a page was reported that is not right"
            tally["pages checked under threads and faults"] += 1
        for page, placement in zip(pages, slots, strict=True):
            rank.arrays.write_page(placement, page_values(POOL, page))
        stored = rank.store.backup(asked, slots, first_page=start)
        assert set(stored.states) <= set(PageState) - {PageState.NOT_ELECTED}
