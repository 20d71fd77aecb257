"""A clock that moves only when a test moves it."""

from __future__ import annotations

import threading


class FakeClock:
    """Satisfies :class:`hicache_store.clock.Clock`; both times start where the test says."""

    def __init__(self, monotonic_s: float = 1_000.0, time_s: float = 1_700_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._time_s = time_s
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        with self._lock:
            return self._monotonic_s

    def time(self) -> float:
        """Seconds since the epoch."""
        with self._lock:
            return self._time_s

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass on both times; ``ValueError`` when negative."""
        if seconds < 0:
            raise ValueError(f"monotonic time does not go back by {-seconds} s")
        with self._lock:
            self._monotonic_s += seconds
            self._time_s += seconds

    def step_time(self, seconds: float) -> None:
        """Set the wall time forward or back, as an administrator or NTP does."""
        with self._lock:
            self._time_s += seconds
