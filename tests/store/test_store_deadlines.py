"""I/O that hangs past its deadline, on storage that waits for it and on storage that leaves it behind.

In both, once a call has returned or its ticket is done, the caller's memory is the caller's: what is
written there afterwards stays, no matter when the hang ends. Nothing half-written appears.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from store_rig import PATIENCE_S, RankRig, attach_rank, chain, tiny, write_pages

from hicache_store.config import parse_url
from hicache_store.connectors.base import Connector
from hicache_store.connectors.local import open_local
from hicache_store.connectors.local_attach import read_settings
from hicache_store.connectors.local_io import PosixIO
from hicache_store.errors import DeadlineExceededError
from hicache_store.layout.parallel import Rank
from hicache_store.store import BackupReport, EndReason, PageState, RestoreReport, TicketState
from hicache_store.testing.clocks import FakeClock

POOL = tiny(2, 4, 32).pool(64)
FORMS = ("canonical", "layer_first")
"""One goes straight between file and slot, the other through staging."""
OURS = 0x3C


class GatedIO(PosixIO):
    """Transfers of more than metadata hang while the gate is shut."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def shut(self) -> None:
        self.entered.clear()
        self.gate.clear()

    def _pass(self, views: Sequence[memoryview]) -> None:
        if sum(view.nbytes for view in views) > 3 * 4096 and not self.gate.is_set():
            self.entered.set()
            assert self.gate.wait(PATIENCE_S), "the gate was never opened"

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self._pass(views)
        return super().preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self._pass(views)
        return super().pwritev(fd, views, offset)


@dataclass(slots=True)
class GatedPlace:
    """A file store in one mode whose transfers may hang."""

    root: Path
    mode: str
    io: GatedIO = field(default_factory=GatedIO)

    def open(self) -> Connector:
        url = f"file://{self.root}?sweep=0&quota=1GiB&threads=2&io={self.mode}"
        return open_local(read_settings(parse_url(url)), self.io)

    def files(self) -> list[Path]:
        return [path for path in (self.root / "objects").rglob("*") if path.is_file()]


def refill(rank: RankRig) -> list[bytes]:
    """The caller takes its memory back and puts something else there."""
    for array in rank.arrays.arrays:
        array.view("u1")[...] = OURS
    return rank.arrays.snapshot()


def until(condition: Callable[[], bool]) -> None:
    patience = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < patience
        time.sleep(0.001)


def prepared(place: GatedPlace, operation: str) -> list[str]:
    hashes = chain(2, 64)
    if operation == "restore":
        write_pages(place, POOL, "tp1pp1", hashes)
    return hashes


def assert_timed_out(report: RestoreReport | BackupReport) -> None:
    if isinstance(report, RestoreReport):
        assert (report.pages, report.end.reason) == (0, EndReason.TIMED_OUT)
    else:
        assert set(report.states) == {PageState.TIMED_OUT}


def assert_honest(rank: RankRig, report: RestoreReport | BackupReport) -> None:
    """A read whose last call ended late may still have brought all of its page; a write never may."""
    if isinstance(report, RestoreReport):
        rank.assert_holds(range(report.pages))
        assert report.pages == 2 or report.end.reason is EndReason.TIMED_OUT
    else:
        assert_timed_out(report)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("operation", ["restore", "backup"])
def test_bounded_a_ticket_drains_until_the_hang_ends(operation: str, form: str, tmp_path: Path) -> None:
    place, clock = GatedPlace(tmp_path, "direct"), FakeClock()
    hashes = prepared(place, operation)
    before = place.files()
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2, form=form, clock=clock) as rank:
        rank.fill(range(2))
        place.io.shut()
        submit = getattr(rank.store, f"submit_{operation}")
        ticket = submit(hashes, rank.placements[:2], timeout_s=5.0)
        assert place.io.entered.wait(PATIENCE_S)
        assert ticket.poll() is TicketState.PENDING
        clock.advance(5.0)
        assert ticket.poll() is TicketState.DRAINING
        with pytest.raises(DeadlineExceededError, match="the ticket is draining after waiting"):
            ticket.wait(0.01)
        place.io.gate.set()
        assert_honest(rank, ticket.wait(PATIENCE_S))
        assert ticket.poll() is TicketState.DONE
        ours = refill(rank)
    assert rank.arrays.snapshot() == ours
    assert place.files() == before, "no object, no draft"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("operation", ["restore", "backup"])
def test_bounded_a_call_does_not_return_before_the_hang_ends(
    operation: str, form: str, tmp_path: Path
) -> None:
    place, clock = GatedPlace(tmp_path, "direct"), FakeClock()
    hashes = prepared(place, operation)
    before = place.files()
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2, form=form, clock=clock) as rank:
        rank.fill(range(2))
        place.io.shut()
        reports: list[object] = []
        returned = threading.Event()

        def call() -> None:
            operate = getattr(rank.store, operation)
            reports.append(operate(hashes, rank.placements[:2], timeout_s=5.0))
            returned.set()

        thread = threading.Thread(target=call)
        thread.start()
        assert place.io.entered.wait(PATIENCE_S)
        clock.advance(6.0)
        assert not returned.wait(0.1), "it returned while its memory was still in use"
        place.io.gate.set()
        assert returned.wait(PATIENCE_S)
        thread.join(PATIENCE_S)
        assert_honest(rank, reports[0])
        ours = refill(rank)
    assert rank.arrays.snapshot() == ours
    assert place.files() == before, "no object, no draft"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("operation", ["restore", "backup"])
@pytest.mark.parametrize("is_submitted", [False, True])
def test_abandons_a_call_returns_while_the_hang_lasts(
    operation: str, form: str, is_submitted: bool, tmp_path: Path
) -> None:
    place = GatedPlace(tmp_path, "bounce")
    hashes = prepared(place, operation)
    before, others = place.files(), set(threading.enumerate())
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2, form=form, staging_bytes=1 << 18) as rank:
        rank.fill(range(2))
        place.io.shut()
        for timeout_s in (0.2, 0.4, 0.8, 1.6, 3.2, 6.4):
            # On a busy machine a deadline may pass before the transfer begins: then once more.
            if is_submitted:
                submit = getattr(rank.store, f"submit_{operation}")
                report = submit(hashes, rank.placements[:2], timeout_s=timeout_s).wait(PATIENCE_S)
            else:
                operate = getattr(rank.store, operation)
                report = operate(hashes, rank.placements[:2], timeout_s=timeout_s)
            assert_timed_out(report)
            if place.io.entered.is_set():
                break
        assert place.io.entered.is_set()
        assert not place.io.gate.is_set(), "the hang still lasts"
        staging = rank.store._context.staging
        staging.release(staging.acquire(staging.capacity_bytes, rank.store._deadline(0.0)))
        ours = refill(rank)
        place.io.gate.set()
        until(lambda: rank.store.contains(hashes).pages == (2 if operation == "restore" else 0))
    until(lambda: not [one for one in threading.enumerate() if "file://" in one.name and one not in others])
    assert rank.arrays.snapshot() == ours
    assert place.files() == before, "no object, no draft"


@pytest.mark.parametrize("mode", ["direct", "bounce"])
def test_after_the_hang_everything_works_again(mode: str, tmp_path: Path) -> None:
    place = GatedPlace(tmp_path, mode)
    hashes = prepared(place, "restore")
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2) as rank:
        place.io.shut()
        ticket = rank.store.submit_restore(hashes, rank.placements[:2], timeout_s=0.05)
        until(lambda: ticket.poll() is not TicketState.PENDING)
        place.io.gate.set()
        ticket.wait(PATIENCE_S)
        assert rank.restore(hashes).pages == 2
        rank.assert_holds(range(2))


@pytest.mark.parametrize("mode", ["direct", "bounce"])
def test_a21_a_page_on_its_way_is_absent_and_then_whole(mode: str, tmp_path: Path) -> None:
    """Readers that ask while the object is being written get a miss, never a part of it."""
    place = GatedPlace(tmp_path, mode)
    hashes = chain(2, 64)
    with (
        attach_rank(place, POOL, "tp1pp1", Rank(), pages=2) as writer,
        attach_rank(GatedPlace(tmp_path, mode), POOL, "tp1pp1", Rank(), pages=2) as reader,
        attach_rank(GatedPlace(tmp_path, mode), POOL, "tp2pp1", Rank(tp=1), pages=2) as other,
    ):
        writer.fill(range(2))
        place.io.shut()
        ticket = writer.store.submit_backup(hashes, writer.placements[:2])
        assert place.io.entered.wait(PATIENCE_S)
        for _ in range(20):
            for rank in (reader, other):
                assert rank.store.contains(hashes).pages == 0
                assert rank.restore(hashes).end.reason is EndReason.ABSENT
        place.io.gate.set()
        assert ticket.wait(PATIENCE_S).pages == 2
        assert reader.restore(hashes).pages == 2
        reader.assert_holds(range(2))
