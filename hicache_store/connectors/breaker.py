"""A circuit breaker: a storage that does not answer is left alone for a while.

Faults are items that timed out or that failed for the moment (``is_transient``); absence, rejection,
a conflict and a refusal by policy are answers. The breaker opens after BREAKER_CALLS calls in a row
with faults and without any answer, or when in the last seconds as many calls had faults and the share of
faults among all items is too high: one call, however large and however short of time, opens nothing. While
it is open an item is refused at once and a size is unknown. After the cool-down one caller probes the
storage with the read of one absent key, at most BREAKER_PROBE_S long: an answer closes the breaker,
anything else opens it for twice the time, up to a bound. All others are refused meanwhile.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from hicache_store.clock import SYSTEM_CLOCK, Clock, Deadline
from hicache_store.connectors.base import TIMED_OUT, BufferTarget, Connector, Outcome, Read, Status
from hicache_store.connectors.wrapping import Forward, Items, Verb, WrappedConnector, metrics_of
from hicache_store.limits import (
    BREAKER_CALLS,
    BREAKER_COOL_MAX_S,
    BREAKER_COOL_S,
    BREAKER_FAULT_SHARE,
    BREAKER_PROBE_S,
    BREAKER_WINDOW_ITEMS,
    BREAKER_WINDOW_S,
)
from hicache_store.metrics import Metrics

PROBE_KEY: Final = f"meta/v1/{'0' * 64}/probe"
"""The absent key that a probe asks for."""


def breaking(inner: Connector, *, clock: Clock = SYSTEM_CLOCK) -> WrappedConnector:
    """``inner`` behind a breaker."""
    metrics = metrics_of(inner)
    return WrappedConnector(inner, _Breaker(inner, clock, metrics), metrics)


def is_fault(outcome: Outcome) -> bool:
    """Whether the storage failed, rather than answered."""
    return outcome.status is Status.TIMED_OUT or (outcome.is_transient and not outcome.is_ok)


class _Breaker:
    def __init__(self, inner: Connector, clock: Clock, metrics: Metrics) -> None:
        self._inner = inner
        self._clock = clock
        self._metrics = metrics
        self._lock = threading.Lock()
        self._cool_s = BREAKER_COOL_S
        self._open_until: float | None = None
        self._is_probing = False
        self._calls_in_a_row = 0
        self._window_start = clock.monotonic()
        self._window = [0, 0, 0]  # faults, answers and calls with faults since then

    def call(self, verb: Verb, items: Items, deadline: Deadline, forward: Forward) -> list[Any]:
        """The results of the storage, or refusals while it is left alone."""
        if deadline.is_past or not items or self._is_passable(deadline):
            had_time = not deadline.is_past
            results = forward(items, deadline)
            if had_time and items:
                self._learn(verb, results, deadline)
            return results
        self._metrics.add("breaker.refused", len(items))
        return [None if verb == "sizes" else self._refusal()] * len(items)

    def _refusal(self) -> Outcome:
        with self._lock:
            wait_s = max(0.0, (self._open_until or 0.0) - self._clock.monotonic())
        detail = f"the storage does not answer and is left alone; it is tried again in {wait_s:.1f} s"
        return Outcome(Status.REFUSED, detail, retry_after_s=wait_s)

    def _is_passable(self, deadline: Deadline) -> bool:
        with self._lock:
            if self._open_until is None:
                return True
            if self._is_probing or self._clock.monotonic() < self._open_until:
                return False
            self._is_probing = True
        outcome = TIMED_OUT
        try:
            outcome = self._probe(deadline)
        finally:
            with self._lock:
                self._is_probing = False
                if is_fault(outcome):
                    self._cool_s = min(BREAKER_COOL_MAX_S, 2 * self._cool_s)
                    self._open_until = self._clock.monotonic() + self._cool_s
                else:
                    self._cool_s, self._open_until = BREAKER_COOL_S, None
                    self._calls_in_a_row = 0
                    self._window = [0, 0, 0]
        self._metrics.add("breaker.stayed_open" if is_fault(outcome) else "breaker.closed")
        return not is_fault(outcome)

    def _probe(self, deadline: Deadline) -> Outcome:
        clock = deadline.clock
        until = Deadline(min(deadline.at, clock.monotonic() + BREAKER_PROBE_S), clock)
        return self._inner.read_into([Read(PROBE_KEY, 1, BufferTarget.whole(bytearray(1)))], until)[0]

    def _learn(self, verb: Verb, results: list[Any], deadline: Deadline) -> None:
        if verb == "sizes":  # ``None`` may be absence or a fault; only running out of time is certain
            answers = sum(result is not None for result in results)
            faults = len(results) - answers if deadline.is_past else 0
        else:
            faults = sum(map(is_fault, results))
            answers = len(results) - faults
        with self._lock:
            if self._open_until is None and self._is_too_much(faults, answers):
                self._open_until = self._clock.monotonic() + self._cool_s
            else:
                return
        self._metrics.add("breaker.opened")

    def _is_too_much(self, faults: int, answers: int) -> bool:
        now = self._clock.monotonic()
        if now - self._window_start > BREAKER_WINDOW_S:
            self._window_start, self._window = now, [0, 0, 0]
        seen = (faults, answers, int(faults > 0))
        self._window = [sum(pair) for pair in zip(self._window, seen, strict=True)]
        if answers:
            self._calls_in_a_row = 0
        elif faults:
            self._calls_in_a_row += 1
        if self._calls_in_a_row >= BREAKER_CALLS:
            return True
        all_faults, all_answers, faulty_calls = self._window
        is_telling = faulty_calls >= BREAKER_CALLS and all_faults + all_answers >= BREAKER_WINDOW_ITEMS
        return is_telling and all_faults >= BREAKER_FAULT_SHARE * (all_faults + all_answers)

    def close(self) -> None:
        """Nobody waits here."""
