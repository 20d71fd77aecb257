"""Retries: which items, how often, how long, and on whose time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from hicache_store.clock import Deadline
from hicache_store.connectors.base import OK, Outcome, Read, Status, Touch
from hicache_store.connectors.memory import MemoryConnector
from hicache_store.connectors.retrying import retrying
from hicache_store.limits import RETRY_BUDGET, RETRY_FIRST_WAIT_S
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.contract_base import PATIENCE_S, page_key, run_together, soon, store
from hicache_store.testing.probes import ProbeTarget, content, read_of

BUSY = Outcome(Status.FAILED, "busy", is_transient=True)
BROKEN = Outcome(Status.FAILED, "broken")


class Scripted(MemoryConnector):
    """Reads and touches give the outcomes of a script, call by call; then they go through."""

    def __init__(self, *script: Sequence[Outcome | None]) -> None:
        super().__init__()
        self.script = list(script)
        self.asked: list[int] = []

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        self.asked.append(len(reads))
        answers = self.script.pop(0) if self.script else [None] * len(reads)
        real = [super(Scripted, self).read_into([read], deadline)[0] for read in reads]
        return [fake or true for fake, true in zip(answers, real, strict=True)]

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        self.asked.append(len(touches))
        return [self.script.pop(0)[0] or OK if self.script else OK for _ in touches]


class Waits:
    """A pause that moves a clock."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.taken: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        self.clock.advance(seconds)


def rig(inner: Scripted, retries: int = 2):
    clock = FakeClock()
    waits = Waits(clock)
    return retrying(inner, retries, pause=waits, draw=lambda low, high: high), waits, clock


def reads_of(number: int) -> tuple[list[Read], list[ProbeTarget]]:
    pairs = [read_of(page_key(f"retry {index}"), 100) for index in range(number)]
    return [read for read, _ in pairs], [target for _, target in pairs]


def test_only_items_that_failed_for_the_moment_are_tried_again() -> None:
    inner = Scripted([BUSY, BROKEN, None, BUSY], [None, BUSY], [None])
    store(inner, {page_key(f"retry {i}"): content(page_key(f"retry {i}"), 100) for i in range(3)})
    connector, waits, clock = rig(inner)
    reads, targets = reads_of(4)
    outcomes = connector.read_into(reads, Deadline.after(10.0, clock))
    statuses = [outcome.status for outcome in outcomes]
    assert statuses == [Status.OK, Status.FAILED, Status.OK, Status.ABSENT]
    assert inner.asked == [4, 2, 1]
    assert waits.taken == [RETRY_FIRST_WAIT_S, 2 * RETRY_FIRST_WAIT_S], "the bound doubles"
    assert targets[2].events == ["parts", "check", "release"]
    assert targets[0].events == ["parts", "check", "release"] * 2, "whole attempts, one after the other"
    assert connector.metrics.get("retry.read") == 3


def test_retries_end() -> None:
    inner = Scripted(*[[BUSY]] * 9)
    connector, _, clock = rig(inner, retries=3)
    assert connector.read_into(reads_of(1)[0], Deadline.after(60.0, clock)) == [BUSY]
    assert inner.asked == [1] * 4


@pytest.mark.parametrize(("asked_s", "calls"), [(5.0, 2), (120.0, 1)])
def test_d11_what_the_storage_asks_for_is_waited_or_the_item_ends_at_once(asked_s: float, calls: int) -> None:
    """A throttled server names a time: within the deadline it is kept to, beyond it nobody sleeps."""
    inner = Scripted([Outcome(Status.REFUSED, "slow down", is_transient=True, retry_after_s=asked_s)])
    connector, waits, clock = rig(inner)
    outcome = connector.touch([Touch(page_key("x"))], Deadline.after(10.0, clock))[0]
    assert inner.asked == [1] * calls
    assert waits.taken == ([asked_s] if calls == 2 else [])
    assert outcome.is_ok == (calls == 2)


def test_one_patient_item_does_not_hold_up_the_others() -> None:
    """An item asked to wait beyond the deadline ends; the others are tried again without its wait."""
    patient = Outcome(Status.FAILED, is_transient=True, retry_after_s=120.0)
    inner = Scripted([patient, BUSY])
    store(inner, {page_key("retry 1"): content(page_key("retry 1"), 100)})
    connector, waits, clock = rig(inner)
    outcomes = connector.read_into(reads_of(2)[0], Deadline.after(10.0, clock))
    assert outcomes[0] == patient
    assert outcomes[1].status is Status.OK
    assert waits.taken == [RETRY_FIRST_WAIT_S]


def test_a_storage_that_fails_for_long_is_not_asked_more_and_more() -> None:
    """Retries cost tokens that only successes bring back."""
    inner = Scripted()
    inner.script = [[BUSY]] * 10_000
    connector, _, clock = rig(inner, retries=1)
    for _ in range(RETRY_BUDGET + 100):
        connector.touch([Touch("k")], Deadline.after(10.0, clock))
    assert len(inner.asked) == 2 * RETRY_BUDGET + 100
    assert connector.metrics.get("retry.out_of_budget") == 100
    inner.script = []
    for _ in range(10):
        connector.touch([Touch("k")], Deadline.after(10.0, clock))
    inner.script = [[BUSY]]
    assert connector.touch([Touch("k")], Deadline.after(10.0, clock))[0].is_ok


def test_closing_ends_the_waits() -> None:
    """A call that waits for its next try returns what it has."""
    inner = Scripted([Outcome(Status.FAILED, is_transient=True, retry_after_s=50.0)])
    connector = retrying(inner, 1)
    outcomes: list[Outcome] = []
    asked = threading.Event()
    inner_touch = inner.touch

    def touch(touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        asked.set()
        return inner_touch(touches, deadline)

    def close() -> None:
        assert asked.wait(PATIENCE_S)
        connector.close()

    inner.touch = touch  # type: ignore[method-assign]
    run_together(lambda: outcomes.extend(connector.touch([Touch("k")], soon())), close)
    assert [outcome.status for outcome in outcomes] == [Status.FAILED]
    assert inner.asked == [1]
