"""Time as a part that tests can replace, and deadlines built on it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from hicache_store.errors import DeadlineExceededError


class Clock(Protocol):
    """Monotonic time for waits and wall time for ages."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...

    def time(self) -> float:
        """Seconds since the epoch."""
        ...


class SystemClock:
    """The clock of the machine; asked several times an object, so without a call in between."""

    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)


SYSTEM_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in monotonic time that a whole operation must not pass."""

    at: float
    clock: Clock = SYSTEM_CLOCK

    @classmethod
    def after(cls, seconds: float, clock: Clock = SYSTEM_CLOCK) -> Deadline:
        """The deadline ``seconds`` from now."""
        return cls(clock.monotonic() + seconds, clock)

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.at - self.clock.monotonic())

    @property
    def is_past(self) -> bool:
        """Whether no time is left."""
        return self.clock.monotonic() >= self.at

    def require(self, what: str) -> float:
        """Seconds left, or :class:`DeadlineExceededError` naming what was waited for."""
        left = self.remaining_s()
        if left <= 0.0:
            raise DeadlineExceededError(f"{what}: the deadline has passed")
        return left
