"""Counters of the vLLM adapter, in vLLM's log line and in its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from hicache_store.metrics import Metrics

COUNTERS: Final[Mapping[str, str]] = {
    "hit_tokens": "Tokens whose KV was ordered from the store.",
    "short_hits": "Requests whose hit was too short to be loaded.",
    "shared_loads": "Requests that waited for another one's load of the same pages.",
    "lookup_failed": "Look-ups that failed and counted as a miss.",
    "lookup_late": "Look-ups given up because no thread came to them in time.",
    "lookup_dropped": "Look-ups left out because too many waited.",
    "loaded_pages": "Pages placed in KV blocks, by every rank.",
    "loaded_bytes": "Bytes of pages placed in KV blocks, by every rank.",
    "load_us": "Microseconds that loads took, queues left out, by every rank.",
    "load_failed": "Loads that failed or were late, whose requests were computed instead, by every rank.",
    "load_raised": "Loads that failed for a fault of the adapter or the engine, by every rank.",
    "saved_pages": "Pages that were stored, or found stored, by every rank.",
    "saved_bytes": "Bytes written to the store, by every rank.",
    "save_failed_pages": "Pages that could not be stored, by every rank.",
    "save_dropped_pages": "Pages not stored because the staging memory was full, by every rank.",
    "hook_raised": "Calls of the adapter that failed and did nothing.",
}
"""Counter to what it counts. Of a tensor-parallel engine each rank counts its part of a page as a page."""


class StoreStats(KVConnectorStats):  # type: ignore[misc]
    """What was counted since the last question."""

    def reset(self) -> None:
        """Begin anew."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both together."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the log line says."""
        numbers: dict[str, int | float] = {name: n for name, n in self.data.items() if name != "load_us"}
        seconds = self.data.get("load_us", 0) / 1e6
        if seconds:
            numbers["load_GB_per_s"] = round(self.data.get("loaded_bytes", 0) / 1e9 / seconds, 3)
        return numbers

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class StatsSource:
    """The growth of one half's counters between two questions."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._told: dict[str, int] = {}

    def take(self) -> StoreStats | None:
        """What was counted since the last call, ``None`` for nothing."""
        grown: dict[str, int] = {}
        for name in COUNTERS:
            now = self._metrics.get(f"engine.{name}")
            if now != self._told.get(name, 0):
                grown[name] = now - self._told.get(name, 0)
                self._told[name] = now
        return StoreStats(data=grown) if grown else None


class StorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One Prometheus counter a name, ``vllm:hicache_`` before it."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: metric_types[Counter](
                name=f"vllm:hicache_{name}", documentation=text, labelnames=labelnames
            )
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted in one step."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(amount)
