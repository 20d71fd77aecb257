"""Counters: named, thread-safe, cheap, and readable as one dictionary."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class Metrics:
    """A bag of monotonically growing counters shared by the parts of one store."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Add ``amount`` to the counter ``name``."""
        with self._lock:
            self._counts[name] += amount

    def add_many(self, amounts: Mapping[str, int]) -> None:
        """Add several counters under one lock."""
        with self._lock:
            self._counts.update(amounts)

    def get(self, name: str) -> int:
        """The value of one counter, zero when it was never touched."""
        with self._lock:
            return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        """All counters, sorted by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))
