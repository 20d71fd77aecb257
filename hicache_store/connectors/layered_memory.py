"""What the slow layer was lately seen to hold and to lack, so that look-ups need not ask it every time."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Final

from hicache_store.clock import SYSTEM_CLOCK, Clock
from hicache_store.connectors.base import META_PREFIX, Outcome, Read, Status, Write
from hicache_store.limits import LAYER_CONFIRMED_MAX, LAYER_CONFIRMED_S

_UNLIKE: Final = (Status.ABSENT, Status.WRONG_SIZE, Status.CONFLICT)


class SlowMemory:
    """Lengths by key for LAYER_CONFIRMED_S each, and since when which keys were seen to be missing."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, tuple[int, float]] = {}
        self._lost: dict[str, float] = {}

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """The length of each object that was confirmed lately."""
        since_s = self._clock.monotonic() - LAYER_CONFIRMED_S
        with self._lock:
            found = [self._held.get(key) for key in keys]
        return [None if one is None or one[1] < since_s else one[0] for one in found]

    def confirm(self, pairs: Iterable[tuple[str, int]]) -> None:
        """The slow layer holds these keys, at these lengths."""
        now = self._clock.monotonic()
        with self._lock:
            for key, size_bytes in pairs:
                if key.startswith(META_PREFIX):  # never in the fast layer
                    continue
                self._lost.pop(key, None)
                self._held.pop(key, None)  # the order is that of the last confirmation
                self._held[key] = (size_bytes, now)
            while len(self._held) > LAYER_CONFIRMED_MAX:
                del self._held[next(iter(self._held))]

    def learn(self, items: Sequence[Read | Write], outcomes: Sequence[Outcome]) -> None:
        """What the slow layer said of these reads or writes."""
        pairs = list(zip(items, outcomes, strict=True))
        self.forget(one.key for one, outcome in pairs if outcome.status in _UNLIKE)
        self.confirm((one.key, one.size_bytes) for one, outcome in pairs if outcome.is_ok)

    def forget(self, keys: Iterable[str]) -> None:
        """What the slow layer holds under these keys is not known any more."""
        with self._lock:
            for key in keys:
                self._held.pop(key, None)

    def lost_s(self, keys: Sequence[str]) -> list[float]:
        """The slow layer lacks these keys now: seconds since that was first seen of each."""
        now = self._clock.monotonic()
        with self._lock:
            for key in keys:
                self._held.pop(key, None)
            ages = [now - self._lost.setdefault(key, now) for key in keys]
            while len(self._lost) > LAYER_CONFIRMED_MAX:
                del self._lost[next(iter(self._lost))]
        return ages

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic()
