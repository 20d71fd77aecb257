"""Counts of calls, items, bytes, time and outcomes, by verb, in the connector's own metrics."""

from __future__ import annotations

from typing import Any, Final

from hicache_store.clock import SYSTEM_CLOCK, Clock, Deadline
from hicache_store.connectors.base import Connector
from hicache_store.connectors.wrapping import Forward, Items, Verb, WrappedConnector, metrics_of
from hicache_store.metrics import Metrics

_BOUNDS_MS: Final = (1, 4, 16, 64, 256, 1024, 4096)
"""Upper bounds of the classes that calls are counted in by their time."""


def metered(
    inner: Connector, *, metrics: Metrics | None = None, clock: Clock = SYSTEM_CLOCK
) -> WrappedConnector:
    """``inner``, counted in ``metrics``, by default in its own.

    For each verb ``io.VERB.calls``, ``.items``, ``.bytes`` (of items that went well), ``.microseconds``,
    ``.STATUS`` (items by outcome; for sizes ``present`` and ``unknown``) and ``.within_Nms`` or
    ``.beyond_4096ms`` (calls by time).
    """
    counters = metrics_of(inner) if metrics is None else metrics
    return WrappedConnector(inner, _Metered(counters, clock), counters)


class _Metered:
    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock

    def call(self, verb: Verb, items: Items, deadline: Deadline, forward: Forward) -> list[Any]:
        """The results, counted."""
        start = self._clock.monotonic()
        results = forward(items, deadline)
        took_s = self._clock.monotonic() - start
        fitting = next((bound for bound in _BOUNDS_MS if took_s * 1e3 <= bound), None)
        within = f"beyond_{_BOUNDS_MS[-1]}ms" if fitting is None else f"within_{fitting}ms"
        counts = {"calls": 1, "items": len(items), "microseconds": round(took_s * 1e6), within: 1}
        for item, result in zip(items, results, strict=True):
            if verb == "sizes":
                word = "unknown" if result is None else "present"
            else:
                word = str(result.status)
                if verb in ("read", "write") and result.is_ok:
                    counts["bytes"] = counts.get("bytes", 0) + _moved_bytes(verb, item)
            counts[word] = counts.get(word, 0) + 1
        self._metrics.add_many({f"io.{verb}.{name}": number for name, number in counts.items()})
        return results

    def close(self) -> None:
        """Nobody waits here."""


def _moved_bytes(verb: Verb, item: Any) -> int:
    if verb == "read":
        return sum(stop - start for start, stop in item.fetched)
    return int(item.size_bytes)
