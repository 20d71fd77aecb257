"""A circuit breaker: a storage that does not answer is left alone for a while.

Faults are items that timed out or that failed for the moment (``is_transient``); absence, rejection,
a conflict and a refusal by policy are answers. A refusal for the moment is neither: a full server takes
no writes and yet answers every read. The breaker opens after BREAKER_CALLS calls in a row
with faults and without any answer, or when in the last seconds as many calls had faults and the share of
faults among all items is too high: one call, however large and however short of time, opens nothing. While
it is open an item is refused at once and a size is unknown. After the cool-down one caller probes the
storage with the read of one absent key, at most BREAKER_PROBE_S long: an answer closes the breaker,
anything else opens it for twice the time, up to a bound. All others are refused meanwhile. Why it opened
stands in every refusal, and in one line of the log.
"""

from __future__ import annotations

import logging
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
    BREAKER_LOG_S,
    BREAKER_PROBE_S,
    BREAKER_WINDOW_ITEMS,
    BREAKER_WINDOW_S,
)
from hicache_store.metrics import Metrics

_LOG = logging.getLogger(__name__)

PROBE_KEY: Final = f"meta/v1/{'0' * 64}/probe"
"""The absent key that a probe asks for."""


def breaking(inner: Connector, *, clock: Clock = SYSTEM_CLOCK) -> WrappedConnector:
    """``inner`` behind a breaker."""
    metrics = metrics_of(inner)
    return WrappedConnector(inner, _Breaker(inner, clock, metrics), metrics)


def is_fault(outcome: Outcome) -> bool:
    """Whether the storage failed, rather than answered."""
    return outcome.status is Status.TIMED_OUT or (outcome.status is Status.FAILED and outcome.is_transient)


def is_answer(outcome: Outcome) -> bool:
    """Whether the storage did what it is there for, be it to say no."""
    is_refusal_for_now = outcome.status is Status.REFUSED and outcome.is_transient
    return not is_fault(outcome) and not is_refusal_for_now


class _Breaker:
    def __init__(self, inner: Connector, clock: Clock, metrics: Metrics) -> None:
        self._inner = inner
        self._clock = clock
        self._metrics = metrics
        self._lock = threading.Lock()
        self._cool_s = BREAKER_COOL_S
        self._open_until: float | None = None
        self._reason = ""
        self._is_closed = False
        self._next_log = clock.monotonic()
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
        detail = f"the storage fails and is left alone ({self._reason}); it is tried again in {wait_s:.1f} s"
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
                if not is_answer(outcome):
                    self._reason = _reason_of(outcome)
                    self._cool_s = min(BREAKER_COOL_MAX_S, 2 * self._cool_s)
                    self._open_until = self._clock.monotonic() + self._cool_s
                else:
                    self._cool_s, self._open_until = BREAKER_COOL_S, None
                    self._calls_in_a_row = 0
                    self._window = [0, 0, 0]
        self._metrics.add("breaker.closed" if is_answer(outcome) else "breaker.stayed_open")
        return is_answer(outcome)

    def _probe(self, deadline: Deadline) -> Outcome:
        clock = deadline.clock
        until = Deadline(min(deadline.at, clock.monotonic() + BREAKER_PROBE_S), clock)
        return self._inner.read_into([Read(PROBE_KEY, 1, BufferTarget.whole(bytearray(1)))], until)[0]

    def _learn(self, verb: Verb, results: list[Any], deadline: Deadline) -> None:
        if verb == "sizes":  # ``None`` may be absence or a fault; only running out of time is certain
            answers = sum(result is not None for result in results)
            faults = len(results) - answers if deadline.is_past else 0
            reason = TIMED_OUT
        else:
            faults = sum(map(is_fault, results))
            answers = sum(map(is_answer, results))
            reason = next(filter(is_fault, results), TIMED_OUT)
        with self._lock:
            if self._is_closed or self._open_until is not None or not self._is_too_much(faults, answers):
                return
            now = self._clock.monotonic()
            self._open_until = now + self._cool_s
            self._reason = _reason_of(reason)
            is_told = now >= self._next_log
            if is_told:
                self._next_log = now + BREAKER_LOG_S
        self._metrics.add("breaker.opened")
        if is_told:
            scheme = self._inner.capabilities.scheme
            _LOG.warning("the %s storage fails and is left alone for a while: %s", scheme, self._reason)

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
        """Judge nothing any more: what closing ends says nothing of the storage."""
        self._is_closed = True


def _reason_of(outcome: Outcome) -> str:
    return outcome.detail or "no answer in time"
