"""Bounded retries of single items, within the total deadline of their call.

Only items whose outcome says ``is_transient`` are tried again, after a wait drawn evenly between zero
and a bound that doubles each time ("full jitter": clients that failed together do not come back
together), or after the wait that the storage asked for, if that is longer. An item that would have to
wait beyond the deadline ends at once. A target goes through ``parts``, ``check`` and ``release`` once a
try, a source through ``buffers`` and ``release``; a connector releases it before it reports.

Retries cost tokens that successes earn back, so that a storage that fails for long is not asked
several times as often as one that works.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, Final

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Connector, Outcome
from hicache_store.connectors.wrapping import Forward, Items, Verb, WrappedConnector, metrics_of
from hicache_store.limits import RETRY_BUDGET, RETRY_FIRST_WAIT_S, RETRY_WAIT_MAX_S
from hicache_store.metrics import Metrics

_TENTHS: Final = 10
"""A success earns a tenth of a retry."""


def retrying(
    inner: Connector,
    retries: int,
    *,
    pause: Callable[[float], object] | None = None,
    draw: Callable[[float, float], float] = random.uniform,
) -> WrappedConnector:
    """``inner`` with up to ``retries`` more tries of each item that failed for the moment.

    ``pause`` waits for a number of seconds; ``draw`` gives a number between two others.
    """
    metrics = metrics_of(inner)
    return WrappedConnector(inner, _Retrying(retries, pause, draw, metrics), metrics)


class _Retrying:
    def __init__(
        self,
        retries: int,
        pause: Callable[[float], object] | None,
        draw: Callable[[float, float], float],
        metrics: Metrics,
    ) -> None:
        self._retries = retries
        self._closing = threading.Event()
        self._pause = self._closing.wait if pause is None else pause
        self._draw = draw
        self._metrics = metrics
        self._lock = threading.Lock()
        self._tenths = RETRY_BUDGET * _TENTHS

    def call(self, verb: Verb, items: Items, deadline: Deadline, forward: Forward) -> list[Any]:
        """The results, failed items being tried again. Sizes say nothing of faults and pass."""
        results = forward(items, deadline)
        if verb == "sizes":
            return results
        for attempt in range(self._retries):
            due = self._due(results, deadline)
            wait_s = self._wait_s(attempt, [results[index] for index in due])
            if not due or wait_s >= deadline.remaining_s() or not self._take(len(due)):
                break
            self._pause(wait_s)
            if self._closing.is_set():
                break
            self._metrics.add(f"retry.{verb}", len(due))
            again = forward([items[index] for index in due], deadline)
            for index, result in zip(due, again, strict=True):
                results[index] = result
        self._earn(sum(result.is_ok for result in results))
        return results

    @staticmethod
    def _due(results: list[Outcome], deadline: Deadline) -> list[int]:
        left_s = deadline.remaining_s()
        return [
            index
            for index, result in enumerate(results)
            if result.is_transient and not result.is_ok and (result.retry_after_s or 0.0) < left_s
        ]

    def _wait_s(self, attempt: int, failed: list[Outcome]) -> float:
        drawn_s = self._draw(0.0, min(RETRY_WAIT_MAX_S, RETRY_FIRST_WAIT_S * 2**attempt))
        return max([drawn_s, *(result.retry_after_s or 0.0 for result in failed)])

    def _take(self, number: int) -> bool:
        with self._lock:
            is_granted = self._tenths >= number * _TENTHS
            if is_granted:
                self._tenths -= number * _TENTHS
        if not is_granted:
            self._metrics.add("retry.out_of_budget", number)
        return is_granted

    def _earn(self, number: int) -> None:
        with self._lock:
            self._tenths = min(RETRY_BUDGET * _TENTHS, self._tenths + number)

    def close(self) -> None:
        """End all waits."""
        self._closing.set()
