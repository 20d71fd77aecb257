"""The batch engine: order, failures, both ways of stopping, recovery, fork and close."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from hicache_store.clock import Deadline
from hicache_store.connectors.base import TIMED_OUT, Outcome, Status
from hicache_store.connectors.batch import Claim
from hicache_store.connectors.workers import Mode, Workers
from hicache_store.errors import HandleError
from hicache_store.limits import ABANDONED_MAX

SOON_S = 0.05
LONG_S = 60.0
MODES: tuple[Mode, ...] = ("bounded", "abandons")


def later() -> Deadline:
    return Deadline.after(LONG_S)


class Gate:
    """A point at which steps hang until it is opened."""

    def __init__(self) -> None:
        self.arrivals = threading.Semaphore(0)
        self.opened = threading.Event()

    def hang(self) -> None:
        self.arrivals.release()
        assert self.opened.wait(LONG_S)

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self.arrivals.acquire(timeout=LONG_S)


def eventually(condition: object) -> None:
    assert callable(condition)
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("never happened")


@pytest.fixture(params=MODES)
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    pool = Workers(3, "test", request.param)
    yield pool
    pool.close()


@pytest.fixture
def abandoning() -> Iterator[Workers]:
    pool = Workers(2, "test", "abandons")
    yield pool
    pool.close()


@pytest.fixture
def bounded() -> Iterator[Workers]:
    pool = Workers(2, "test", "bounded")
    yield pool
    pool.close()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 128, 1000])
def test_results_keep_the_order_of_the_items(workers: Workers, count: int) -> None:
    assert workers.run(range(count), lambda item, _: item * 7, later()) == [i * 7 for i in range(count)]


def test_every_item_is_run_once_by_at_most_as_many_threads_as_asked_for(workers: Workers) -> None:
    lock = threading.Lock()
    seen: list[int] = []
    threads: set[int] = set()

    def step(item: int, _: Claim) -> None:
        with lock:
            seen.append(item)
            threads.add(threading.get_ident())

    workers.run(range(500), step, later())
    assert sorted(seen) == list(range(500))
    assert 1 <= len(threads) <= 3


def test_a_batch_is_worked_on_by_all_threads_at_once(workers: Workers) -> None:
    meeting = threading.Barrier(3)
    assert workers.run(range(3), lambda item, _: meeting.wait(LONG_S) >= 0, later()) == [True] * 3


def test_a_failed_item_never_fails_its_batch(workers: Workers) -> None:
    def step(item: int, _: Claim) -> int:
        if item % 3 == 0:
            raise OSError(5, "broken")
        return item

    results = workers.run(range(10), step, later())
    for item, result in enumerate(results):
        if item % 3 == 0:
            assert isinstance(result, Outcome)
            assert result.status is Status.FAILED
            assert "broken" in result.detail
        else:
            assert result == item
    assert workers.run(range(3), lambda item, _: item, later()) == [0, 1, 2]


def test_a_step_that_tries_to_end_its_thread_is_a_failed_item(abandoning: Workers) -> None:
    def step(item: int, _: Claim) -> int:
        raise SystemExit

    results = abandoning.run(range(4), step, later())
    assert [result.status for result in results if isinstance(result, Outcome)] == [Status.FAILED] * 4
    assert abandoning.alive == 2


def test_nothing_is_started_past_the_deadline(workers: Workers) -> None:
    def step(item: int, _: Claim) -> int:
        raise AssertionError("started")

    assert workers.run(range(5), step, Deadline.after(0.0)) == [TIMED_OUT] * 5


def test_making_a_pool_starts_no_thread() -> None:
    before = threading.active_count()
    pools = [Workers(8, "idle", mode) for mode in MODES]
    assert threading.active_count() == before
    assert [pool.alive for pool in pools] == [0, 0]


def test_a_single_item_of_a_bounded_pool_runs_in_the_caller(bounded: Workers) -> None:
    assert bounded.run([0], lambda item, _: threading.get_ident(), later()) == [threading.get_ident()]
    assert bounded.alive == 0


def test_bounded_returns_only_when_no_step_runs(bounded: Workers) -> None:
    gate = Gate()
    left: list[bool] = []
    returned = threading.Event()

    def step(item: int, claim: Claim) -> int:
        gate.hang()
        left.append(claim.is_cancelled())
        return item

    def call() -> None:
        results.extend(bounded.run(range(8), step, Deadline.after(SOON_S)))
        returned.set()

    results: list[object] = []
    caller = threading.Thread(target=call)
    caller.start()
    gate.wait_for(2)
    assert not returned.wait(4 * SOON_S)
    gate.opened.set()
    caller.join(LONG_S)
    assert left == [True, True]
    assert results.count(TIMED_OUT) == 6
    assert not gate.arrivals.acquire(blocking=False)


def test_a_hung_bounded_batch_does_not_hold_up_another_one(bounded: Workers) -> None:
    gate = Gate()
    caller = threading.Thread(target=bounded.run, args=(range(8), lambda item, _: gate.hang(), later()))
    caller.start()
    gate.wait_for(2)
    assert bounded.run(range(20), lambda item, _: item, later()) == list(range(20))
    gate.opened.set()
    caller.join(LONG_S)


def test_an_interrupted_caller_still_waits_for_its_helpers(bounded: Workers) -> None:
    gate = Gate()
    in_helper = threading.Event()
    helper_left = threading.Event()
    main = threading.get_ident()

    def step(item: int, claim: Claim) -> None:
        if threading.get_ident() == main:
            assert in_helper.wait(LONG_S)
            threading.Timer(2 * SOON_S, gate.opened.set).start()
            raise KeyboardInterrupt
        in_helper.set()
        gate.hang()
        helper_left.set()

    with pytest.raises(KeyboardInterrupt):
        bounded.run(range(64), step, later())
    assert helper_left.is_set()
    assert bounded.run(range(3), lambda item, _: item, later()) == [0, 1, 2]


def test_a_signal_during_the_wait_for_helpers_does_not_end_the_wait(bounded: Workers) -> None:
    helper_left = threading.Event()
    opened = threading.Event()
    main = threading.get_ident()

    def on_alarm(number: int, frame: object) -> None:
        threading.Timer(2 * SOON_S, opened.set).start()
        raise KeyboardInterrupt

    def step(item: int, claim: Claim) -> None:
        if threading.get_ident() != main:
            assert opened.wait(LONG_S)
            helper_left.set()
        elif not claim.is_cancelled():
            opened.wait(0.001)

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 4 * SOON_S)
        with pytest.raises(KeyboardInterrupt):
            bounded.run(range(8), step, later())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert helper_left.is_set()


def test_abandons_returns_on_time_and_drops_what_comes_late(abandoning: Workers) -> None:
    gate = Gate()
    entered: list[bool] = []

    def step(item: int, claim: Claim) -> int:
        if item >= 2:
            gate.hang()
        entered.append(claim.enter())
        claim.leave()
        return item

    results = abandoning.run(range(8), step, Deadline.after(SOON_S))
    assert results == [0, 1, *[TIMED_OUT] * 6]
    assert abandoning.stuck == 2
    gate.opened.set()
    eventually(lambda: abandoning.stuck == 0)
    assert entered == [True, True, False, False]
    assert results == [0, 1, *[TIMED_OUT] * 6]


def test_abandons_waits_for_an_entered_item(abandoning: Workers) -> None:
    gate = Gate()
    copied = threading.Event()

    def step(item: int, claim: Claim) -> str:
        assert claim.enter()
        gate.hang()
        copied.set()
        claim.leave()
        return "copied"

    opener = threading.Timer(4 * SOON_S, gate.opened.set)
    opener.start()
    assert abandoning.run([0], step, Deadline.after(SOON_S))[0] in ("copied", TIMED_OUT)
    assert copied.is_set()


def test_a_step_that_fails_while_entered_does_not_hold_the_call(abandoning: Workers) -> None:
    def step(item: int, claim: Claim) -> int:
        assert claim.enter()
        raise ValueError("in the caller's memory")

    (result,) = abandoning.run([0], step, later())
    assert isinstance(result, Outcome)
    assert result.status is Status.FAILED


def test_stuck_workers_are_replaced_up_to_the_bound_then_calls_are_refused_then_all_recovers() -> None:
    pool = Workers(3, "test", "abandons")
    gate = Gate()
    calls = 0
    while pool.stuck < ABANDONED_MAX:
        results = pool.run(range(3), lambda item, _: gate.hang(), Deadline.after(SOON_S))
        assert results == [TIMED_OUT] * 3
        calls += 1
        assert calls <= ABANDONED_MAX
    assert pool.alive <= ABANDONED_MAX + 3
    refused = pool.run(range(4), lambda item, _: item, later())
    assert [result.status for result in refused if isinstance(result, Outcome)] == [Status.REFUSED] * 4
    assert str(ABANDONED_MAX) in refused[0].detail  # type: ignore[union-attr]
    gate.opened.set()
    eventually(lambda: pool.stuck == 0)
    assert pool.run(range(9), lambda item, _: item, later()) == list(range(9))
    eventually(lambda: pool.alive == 3)
    pool.close()
    assert pool.alive == 0


def test_a_hang_in_one_batch_leaves_the_others_served(abandoning: Workers) -> None:
    gate = Gate()
    abandoning.run(range(2), lambda item, _: gate.hang(), Deadline.after(SOON_S))
    assert abandoning.stuck == 2
    assert abandoning.run(range(50), lambda item, _: item, later()) == list(range(50))
    gate.opened.set()


def test_workers_are_shared_between_batches(abandoning: Workers) -> None:
    """A long batch holds one worker of two once a second batch is there."""
    gate = Gate()
    long_items = threading.Semaphore(0)

    def slow(item: int, claim: Claim) -> None:
        long_items.release()
        gate.opened.wait(0.005)

    caller = threading.Thread(target=abandoning.run, args=(range(100_000), slow, Deadline.after(LONG_S)))
    caller.start()
    assert long_items.acquire(timeout=LONG_S)
    assert abandoning.run(range(10), lambda item, _: item, later()) == list(range(10))
    assert caller.is_alive()
    gate.opened.set()
    abandoning.close()
    caller.join(LONG_S)
    assert not caller.is_alive()


@pytest.mark.parametrize("fails", [False, True])
def test_after_runs_once_when_every_item_is_done(workers: Workers, fails: bool) -> None:
    done: list[int] = []
    ends: list[int] = []

    def after() -> None:
        ends.append(len(done))
        if fails:
            raise OSError("at the end")

    workers.run(range(40), lambda item, _: done.append(item), later(), after)
    assert ends == [40]
    workers.run([], lambda item, _: item, later(), after)
    assert ends == [40, 40]


def test_after_of_an_abandoned_batch_runs_when_its_last_worker_comes_back(abandoning: Workers) -> None:
    gates = [Gate(), Gate()]
    left: list[int] = []
    ends: list[list[int]] = []

    def step(item: int, _: Claim) -> None:
        gates[item].hang()
        left.append(item)

    # Long enough for both steps to have begun on any machine: one that had not would never leave.
    until = Deadline.after(LONG_S / 20)
    results = abandoning.run(range(2), step, until, lambda: ends.append(list(left)))
    assert results == [TIMED_OUT] * 2
    gates[1].opened.set()
    eventually(lambda: left == [1])
    assert ends == []
    gates[0].opened.set()
    eventually(lambda: ends == [[1, 0]])
    assert abandoning.run(range(5), lambda item, _: item, later()) == list(range(5))


def test_after_runs_even_for_a_batch_that_was_never_started(abandoning: Workers) -> None:
    gate, ended = Gate(), threading.Event()
    abandoning.run([0, 1], lambda item, _: gate.hang(), Deadline.after(SOON_S))
    assert abandoning.run([0], lambda item, _: item, Deadline.after(0.0), ended.set) == [TIMED_OUT]
    assert ended.wait(LONG_S)
    gate.opened.set()


def test_close_is_idempotent_and_a_closed_pool_says_so(workers: Workers) -> None:
    workers.run(range(10), lambda item, _: item, later())
    ends: list[int] = []
    workers.close(lambda: ends.append(1))
    workers.close(lambda: ends.append(2))
    assert ends == [1]
    assert workers.alive == 0
    with pytest.raises(HandleError, match="closed"):
        workers.run(range(10), lambda item, _: item, later())


def test_close_leaves_stuck_workers_behind_and_they_end_when_they_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hicache_store.connectors.workers.CLOSE_JOIN_S", SOON_S)
    pool = Workers(2, "test", "abandons")
    gate = Gate()
    pool.run(range(2), lambda item, _: gate.hang(), Deadline.after(SOON_S))
    ended = threading.Event()
    pool.close(ended.set)
    assert pool.alive == 2
    assert not ended.is_set()
    gate.opened.set()
    assert ended.wait(LONG_S)
    assert pool.alive == 0


def test_a_call_under_way_returns_when_the_pool_is_closed(abandoning: Workers) -> None:
    gate = Gate()
    caller = threading.Thread(target=abandoning.run, args=(range(9), lambda item, _: gate.hang(), later()))
    caller.start()
    gate.wait_for(2)
    closer = threading.Thread(target=abandoning.close)
    closer.start()
    caller.join(LONG_S)
    assert not caller.is_alive()
    gate.opened.set()
    closer.join(LONG_S)


@pytest.mark.parametrize("mode", MODES)
def test_a_forked_child_is_told_the_way_out(mode: Mode) -> None:
    pool = Workers(2, "test", mode)
    pool.run(range(10), lambda item, _: item, later())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pool.run(range(10), lambda item, _: item, later())
        except HandleError as error:
            code = 0 if "open the store again in the child" in str(error) else 2
        pool.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.run(range(3), lambda item, _: item, later()) == [0, 1, 2]
    pool.close()


def test_fifty_pools_leave_no_thread(workers: Workers) -> None:
    before = threading.active_count()
    for _ in range(50):
        pool = Workers(3, "test", workers.mode)
        pool.run(range(10), lambda item, _: item, later())
        pool.close()
    assert threading.active_count() == before
