"""The circuit breaker: opens on faults and on nothing else, costs nothing while open, closes by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from hicache_store.clock import Deadline
from hicache_store.connectors.base import ABSENT, OK, TIMED_OUT, Outcome, Read, Status, Touch
from hicache_store.connectors.breaker import PROBE_KEY, breaking
from hicache_store.connectors.memory import MemoryConnector
from hicache_store.errors import HandleError
from hicache_store.limits import (
    BREAKER_CALLS,
    BREAKER_COOL_MAX_S,
    BREAKER_COOL_S,
    BREAKER_LOG_S,
    BREAKER_PROBE_S,
)
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.contract_base import PATIENCE_S, run_together

DOWN = Outcome(Status.FAILED, "connection refused", is_transient=True)


class Flaky(MemoryConnector):
    """Answers everything with ``answer``; counts the calls and remembers the deadlines of probes."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = OK
        self.calls = 0
        self.probes: list[float] = []
        self.gate: threading.Event | None = None
        self.in_probe = threading.Event()

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        self.calls += 1
        return [self.answer] * len(touches)

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        if reads[0].key == PROBE_KEY:
            self.probes.append(deadline.remaining_s())
            self.in_probe.set()
            if self.gate is not None:
                assert self.gate.wait(PATIENCE_S)
        self.calls += 1
        return [self.answer] * len(reads)


class Rig:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.inner = Flaky()
        self.connector = breaking(self.inner, clock=self.clock)

    def touch(self, number: int = 1) -> list[Outcome]:
        return self.connector.touch([Touch(str(i)) for i in range(number)], Deadline.after(30.0, self.clock))

    def open(self) -> None:
        self.inner.answer = DOWN
        for _ in range(BREAKER_CALLS):
            assert self.touch() == [DOWN]
        self.inner.calls = 0


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_it_opens_costs_nothing_and_closes_again(rig: Rig) -> None:
    rig.open()
    for _ in range(100):
        (outcome,) = rig.touch()
        assert outcome.status is Status.REFUSED
        assert "tried again in 1.0 s" in outcome.detail
    assert rig.connector.sizes(["a", "b"], Deadline.after(1.0, rig.clock)) == [None, None]
    assert rig.inner.calls == 0
    assert rig.connector.metrics.get("breaker.refused") == 102
    rig.clock.advance(BREAKER_COOL_S)
    rig.inner.answer = ABSENT
    assert rig.touch() == [ABSENT], "the call that probed goes through"
    assert rig.inner.calls == 2
    assert rig.inner.probes == [BREAKER_PROBE_S]
    assert rig.connector.metrics.get("breaker.closed") == 1


def test_failed_probes_come_less_and_less_often(rig: Rig) -> None:
    """Twice the time after each, up to a bound; after a success it starts anew."""
    rig.open()
    cool_s = BREAKER_COOL_S
    for _ in range(8):
        rig.clock.advance(cool_s - 0.01)
        assert rig.touch()[0].status is Status.REFUSED
        probes = len(rig.inner.probes)
        rig.clock.advance(0.01)
        assert rig.touch()[0].status is Status.REFUSED
        assert len(rig.inner.probes) == probes + 1
        cool_s = min(BREAKER_COOL_MAX_S, 2 * cool_s)
    rig.inner.answer = OK
    rig.clock.advance(BREAKER_COOL_MAX_S)
    assert rig.touch() == [OK]
    rig.open()
    rig.clock.advance(BREAKER_COOL_S)
    rig.inner.answer = OK
    assert rig.touch() == [OK]


@pytest.mark.parametrize(
    "answer",
    [
        ABSENT,
        Outcome(Status.REJECTED, "a flipped bit"),
        Outcome(Status.WRONG_SIZE),
        Outcome(Status.CONFLICT),
        Outcome(Status.REFUSED, "over the quota"),
        Outcome(Status.FAILED, "the target broke"),
        OK,
    ],
    ids=lambda answer: str(answer.status),
)
def test_answers_are_no_faults(rig: Rig, answer: Outcome) -> None:
    rig.inner.answer = answer
    for _ in range(200):
        assert rig.touch(4) == [answer] * 4


def test_time_that_was_over_before_is_nobodys_fault(rig: Rig) -> None:
    rig.inner.answer = TIMED_OUT
    for _ in range(50):
        rig.connector.touch([Touch("k")], Deadline.after(-1.0, rig.clock))
    rig.inner.answer = OK
    assert rig.touch() == [OK]
    rig.inner.answer = TIMED_OUT
    for _ in range(BREAKER_CALLS):
        rig.touch()
    assert rig.touch()[0].status is Status.REFUSED


def test_a_share_of_faults_opens_it_and_a_small_one_does_not(rig: Rig) -> None:
    """Calls that partly fail: three of four is too much, one of four is not."""

    def answers(pattern: list[Outcome]) -> None:
        rig.inner.touch = lambda touches, _: pattern  # type: ignore[method-assign]

    answers([DOWN, OK, OK, OK])
    for _ in range(100):
        assert rig.touch(4)[1] == OK
    rig.clock.advance(60.0)
    answers([DOWN, DOWN, DOWN, OK])
    seen = [rig.touch(4)[0].status for _ in range(20)]
    assert Status.REFUSED in seen
    assert seen.index(Status.REFUSED) == 8


def test_d19_a_full_server_is_read_from(rig: Rig) -> None:
    """Writes refused for want of memory say nothing against reads: no breaker stands in their way. Nor do
    they count as an answer, in a storage that fails otherwise."""
    full = Outcome(Status.REFUSED, "OOM command not allowed", is_transient=True)
    rig.inner.answer = full
    for _ in range(200):
        assert rig.touch(4) == [full] * 4
    rig.open()
    rig.inner.answer = full
    rig.clock.advance(BREAKER_COOL_S)
    assert rig.touch()[0].status is Status.REFUSED
    assert rig.connector.metrics.get("breaker.stayed_open") == 1


def test_d22_an_outage_is_one_line_and_says_why(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of failed puts are no thousand lines; the reason stands in each refusal, until it works."""
    rig.open()
    for _ in range(1_000):
        (outcome,) = rig.touch()
        assert "connection refused" in outcome.detail
    rig.clock.advance(BREAKER_COOL_S)
    rig.inner.answer = TIMED_OUT
    assert "no answer in time" in rig.touch()[0].detail
    rig.clock.advance(2 * BREAKER_COOL_S)
    rig.inner.answer = OK
    assert rig.touch() == [OK]
    assert len(caplog.records) == 1
    assert "memory storage fails" in caplog.text
    assert "connection refused" in caplog.text
    rig.open()
    assert len(caplog.records) == 1, "storage that comes and goes is told of now and then"
    assert rig.connector.metrics.get("breaker.opened") == 2
    rig.clock.advance(BREAKER_LOG_S)
    rig.inner.answer = OK
    assert rig.touch() == [OK]
    rig.open()
    assert len(caplog.records) == 2


def test_one_large_call_without_time_opens_nothing(rig: Rig) -> None:
    """Its caller gave it too little time, which says little of the storage; the calls behind it work."""
    rig.inner.answer = TIMED_OUT
    rig.touch(1_000)
    rig.inner.answer = OK
    for _ in range(20):
        assert rig.touch() == [OK]
    assert rig.connector.metrics.get("breaker.opened") == 0


def test_one_caller_probes_while_the_others_are_refused(rig: Rig) -> None:
    rig.open()
    rig.inner.gate = threading.Event()
    rig.inner.answer = OK
    rig.clock.advance(BREAKER_COOL_S)

    def others() -> None:
        assert rig.inner.in_probe.wait(PATIENCE_S)
        try:
            assert [rig.touch()[0].status for _ in range(20)] == [Status.REFUSED] * 20
        finally:
            rig.inner.gate.set()

    run_together(rig.touch, others)
    assert len(rig.inner.probes) == 1
    assert rig.touch() == [OK]


def test_a_probe_that_raises_leaves_it_open_for_the_next(rig: Rig) -> None:
    rig.open()
    rig.clock.advance(BREAKER_COOL_S)
    rig.inner.read_into = raising(HandleError("forked"))  # type: ignore[method-assign,assignment]
    with pytest.raises(HandleError, match="forked"):
        rig.touch()
    assert rig.touch()[0].status is Status.REFUSED
    del rig.inner.read_into
    rig.inner.answer = OK
    rig.clock.advance(2 * BREAKER_COOL_S)
    assert rig.touch() == [OK]


def test_calls_that_closing_ends_say_nothing_of_the_storage(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.inner.answer = TIMED_OUT
    for _ in range(BREAKER_CALLS - 1):
        rig.touch()

    def close_meanwhile(touches: Sequence[Touch], _: Deadline) -> list[Outcome]:
        rig.connector.close()
        return [TIMED_OUT] * len(touches)

    rig.inner.touch = close_meanwhile  # type: ignore[method-assign]
    assert rig.touch() == [TIMED_OUT]
    assert rig.connector.metrics.get("breaker.opened") == 0
    assert caplog.records == []


def test_a_closed_handle_says_so_even_while_the_breaker_is_open(rig: Rig) -> None:
    rig.open()
    rig.connector.close()
    with pytest.raises(HandleError, match="closed"):
        rig.touch()


def raising(error: Exception) -> Callable[..., list[Outcome]]:
    def call(*_: object) -> list[Outcome]:
        raise error

    return call
