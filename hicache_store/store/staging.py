"""Bounded staging memory, handed out to workers one block at a time.

A worker takes a block just before its own transfer and gives it back right after, and holds at
most one, so that waiting for a block can never become a circle. Blocks are reused newest first: a
block that has just been verified and copied out is still in the processor's cache.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass

from hicache_store.clock import Deadline
from hicache_store.errors import ConfigurationError, DeadlineExceededError
from hicache_store.limits import KIB

_ROUND_BYTES = 64 * KIB


@dataclass(frozen=True, slots=True)
class Block:
    """Page-aligned staging memory. ``view`` has the length that was asked for."""

    view: memoryview
    memory: memoryview


class StagingPool:
    """At most ``capacity_bytes`` of staging memory, allocated as it is first needed."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._allocated = 0
        self._free: dict[int, list[memoryview]] = {}
        self._changed = threading.Condition()

    @property
    def allocated_bytes(self) -> int:
        """Memory held, in use or free."""
        with self._changed:
            return self._allocated

    def acquire(self, size_bytes: int, deadline: Deadline) -> Block:
        """A block of ``size_bytes``.

        Raises :class:`ConfigurationError` when it can never fit and
        :class:`DeadlineExceededError` when none came free in time.
        """
        if size_bytes > self.capacity_bytes:
            raise ConfigurationError(
                f"an object needs {size_bytes} bytes of staging, the store has {self.capacity_bytes}; "
                "raise staging_bytes"
            )
        rounded = max(_ROUND_BYTES, -(-size_bytes // _ROUND_BYTES) * _ROUND_BYTES)
        rounded = min(rounded, self.capacity_bytes)
        with self._changed:
            while True:
                memory = self._take(rounded)
                if memory is not None:
                    return Block(memory[:size_bytes], memory)
                if not self._changed.wait(deadline.require("staging memory")) and deadline.is_past:
                    raise DeadlineExceededError("staging memory: the deadline has passed")

    def release(self, block: Block) -> None:
        """Give a block back."""
        with self._changed:
            self._free.setdefault(len(block.memory), []).append(block.memory)
            self._changed.notify_all()  # one alone may want more than this block makes room for

    def _take(self, rounded: int) -> memoryview | None:
        free = self._free.get(rounded)
        if free:
            return free.pop()
        while self._allocated + rounded > self.capacity_bytes:
            other = next((size for size, blocks in self._free.items() if blocks), None)
            if other is None:
                return None
            self._free[other].pop()
            self._allocated -= other
        self._allocated += rounded
        return memoryview(mmap.mmap(-1, rounded))
