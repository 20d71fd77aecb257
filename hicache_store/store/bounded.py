"""A dictionary that forgets its oldest entries, for everything the store remembers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(Generic[K, V]):
    """Thread-safe mapping of at most ``capacity`` entries; setting an entry makes it the newest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value of ``key`` or ``None``."""
        with self._lock:
            return self._entries.get(key)

    def set(self, key: K, value: V) -> None:
        """Remember ``value``, forgetting the oldest entry when full."""
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            if len(self._entries) > self._capacity:
                self._entries.popitem(last=False)

    def get_many(self, keys: Iterable[K]) -> list[V | None]:
        """The values of several keys, in order, under one lock."""
        with self._lock:
            return [self._entries.get(key) for key in keys]

    def set_many(self, entries: Sequence[tuple[K, V]]) -> None:
        """Remember several values under one lock."""
        with self._lock:
            for key, value in entries:
                self._entries[key] = value
                self._entries.move_to_end(key)
            while len(self._entries) > self._capacity:
                self._entries.popitem(last=False)

    def discard(self, key: K) -> None:
        """Forget ``key`` if it is known."""
        with self._lock:
            self._entries.pop(key, None)
