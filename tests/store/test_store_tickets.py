"""Submitted work: a bounded queue, a drain at close, and handles that refuse what they cannot do."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_rig import PATIENCE_S, FilePlace, Place, RankRig, attach_rank, chain, tiny, write_pages

from hicache_store.errors import DeadlineExceededError, HandleError
from hicache_store.layout.parallel import Rank
from hicache_store.limits import SUBMIT_QUEUE_MAX, SUBMIT_THREADS
from hicache_store.store import EndReason, PageState, TicketState
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.faults import FaultyConnector, Hold, on_keys

POOL = tiny(2, 2).pool(1)
PAGES = 4


@contextmanager
def held(operation: str, **options: object) -> Iterator[tuple[RankRig, Hold]]:
    """A rank whose reads or writes of objects wait until they are let go."""
    place, hold = Place(), Hold(threading.Event())
    write_pages(place, POOL, "tp1pp1", chain(PAGES))
    place.wrap = lambda connector: FaultyConnector(
        connector, on_keys(lambda key: key.startswith("v1/"), hold, (operation,))
    )
    try:
        with attach_rank(place, POOL, "tp1pp1", Rank(), pages=PAGES, **options) as rank:
            try:
                yield rank, hold
            finally:
                hold.until.set()
    finally:
        hold.until.set()


def test_tickets_do_what_calls_do() -> None:
    place, hashes = Place(), chain(PAGES)
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=PAGES) as rank:
        rank.fill(range(PAGES))
        stored = rank.store.submit_backup(hashes, rank.placements[:PAGES]).wait(PATIENCE_S)
        assert stored.states == (PageState.STORED,) * PAGES
        rank.arrays.poison()
        ticket = rank.store.submit_restore(hashes, rank.placements[:PAGES], prefix=())
        assert ticket.wait(PATIENCE_S).pages == PAGES
        assert ticket.poll() is TicketState.DONE
        assert ticket.wait(0.0).pages == PAGES, "asking again gives the same"
        rank.assert_holds(range(PAGES))


def test_a_ticket_keeps_what_it_was_given() -> None:
    """The caller's lists may change after submitting."""
    with held("read") as (rank, hold):
        hashes, placements = chain(PAGES), rank.placements[:PAGES]
        ticket = rank.store.submit_restore(hashes, placements)
        assert hold.entered.wait(PATIENCE_S)
        hashes.clear()
        placements.clear()
        hold.until.set()
        assert ticket.wait(PATIENCE_S).pages == PAGES


def test_the_queue_is_bounded_and_says_so() -> None:
    with held("read") as (rank, hold):
        hashes, where = chain(1), rank.placements[:1]
        tickets = [rank.store.submit_restore(hashes, where) for _ in range(SUBMIT_QUEUE_MAX)]
        for submit in (rank.store.submit_restore, rank.store.submit_backup):
            with pytest.raises(HandleError, match=f"{SUBMIT_QUEUE_MAX} tickets wait already"):
                submit(hashes, where)
        assert {ticket.poll() for ticket in tickets} == {TicketState.PENDING}
        workers = [one for one in threading.enumerate() if one.name.startswith("hicache-submit")]
        assert len(workers) == SUBMIT_THREADS
        hold.until.set()
        assert all(ticket.wait(PATIENCE_S).pages == 1 for ticket in tickets)
        assert rank.store.submit_restore(hashes, where).wait(PATIENCE_S).pages == 1


def test_waiting_for_a_ticket_has_an_end_of_its_own() -> None:
    with held("read") as (rank, hold):
        ticket = rank.store.submit_restore(chain(1), rank.placements[:1])
        with pytest.raises(DeadlineExceededError, match=r"the ticket is pending after waiting 0\.01 s"):
            ticket.wait(0.01)
        hold.until.set()
        assert ticket.wait(PATIENCE_S).pages == 1


def test_a_ticket_that_waits_in_line_past_its_deadline_moves_nothing() -> None:
    clock = FakeClock()
    with held("read", clock=clock) as (rank, hold):
        where = rank.placements[:1]
        running = [rank.store.submit_restore(chain(1), where) for _ in range(SUBMIT_THREADS)]
        assert hold.entered.wait(PATIENCE_S)
        waiting = rank.store.submit_restore(chain(2)[1:], rank.placements[1:2], timeout_s=1.0)
        clock.advance(2.0)
        assert waiting.poll() is TicketState.DRAINING
        assert running[0].poll() is TicketState.PENDING
        hold.until.set()
        report = waiting.wait(PATIENCE_S)
        assert (report.pages, report.end.reason) == (0, EndReason.TIMED_OUT)
        assert all(ticket.wait(PATIENCE_S).pages == 1 for ticket in running)
        assert rank.arrays.is_poison_outside([where[0]])


@pytest.mark.parametrize("operation", ["read", "write"])
def test_close_waits_for_what_was_accepted(operation: str) -> None:
    with held(operation) as (rank, hold):
        count = SUBMIT_THREADS + 3
        if operation == "read":
            tickets = [rank.store.submit_restore(chain(PAGES), rank.placements[:PAGES]) for _ in range(count)]
        else:
            hashes = chain(PAGES + count)[PAGES:]
            rank.fill([0])
            tickets = [rank.store.submit_backup([one], rank.placements[:1]) for one in hashes]
        assert hold.entered.wait(PATIENCE_S)
        closed = threading.Event()
        closer = threading.Thread(target=lambda: (rank.store.close(), closed.set()))
        closer.start()
        assert not closed.wait(0.05), "closed while work was running"
        with pytest.raises(HandleError, match="the store is closed"):
            rank.store.submit_restore(chain(1), rank.placements[:1])
        hold.until.set()
        assert closed.wait(PATIENCE_S)
        closer.join(PATIENCE_S)
        assert {ticket.poll() for ticket in tickets} == {TicketState.DONE}
        for ticket in tickets:
            report = ticket.wait(0.0)
            assert report.pages == (PAGES if operation == "read" else 1)


CALLS: dict[str, Callable[[RankRig], object]] = {
    "contains": lambda rank: rank.store.contains(chain(1)),
    "backup": lambda rank: rank.store.backup(chain(1), rank.placements[:1]),
    "restore": lambda rank: rank.store.restore(chain(1), rank.placements[:1]),
    "submit_backup": lambda rank: rank.store.submit_backup(chain(1), rank.placements[:1]),
    "submit_restore": lambda rank: rank.store.submit_restore(chain(1), rank.placements[:1]),
}


@pytest.mark.parametrize("is_file", [False, True])
def test_a_closed_handle_refuses_everything(is_file: bool, tmp_path: Path) -> None:
    place = FilePlace(tmp_path) if is_file else Place()
    rank = attach_rank(place, POOL, "tp1pp1", Rank(), pages=PAGES)
    rank.store.close()
    rank.store.close()
    for call in CALLS.values():
        with pytest.raises(HandleError, match="the store is closed"):
            call(rank)
    assert rank.store.metrics.snapshot() is not None


@pytest.mark.parametrize("is_file", [False, True])
def test_a_handle_taken_through_a_fork_refuses_everything_in_the_child(is_file: bool, tmp_path: Path) -> None:
    place = FilePlace(tmp_path) if is_file else Place()
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=PAGES) as rank:
        rank.fill(range(PAGES))
        rank.store.submit_backup(chain(PAGES), rank.placements[:PAGES]).wait(PATIENCE_S)
        child = os.fork()
        if child == 0:
            os._exit(_refusals(rank))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == len(CALLS)
        assert rank.restore(chain(PAGES)).pages == PAGES, "the parent goes on"


def _refusals(rank: RankRig) -> int:
    """In the child: how many calls raised what they should; closing must end too."""
    refused = 0
    for call in CALLS.values():
        try:
            call(rank)
        except HandleError as error:
            refused += "attached before a fork; attach again in the child" in str(error)
        except BaseException:
            return 100
    try:
        rank.store.close()
    except BaseException:
        return 101
    return refused
