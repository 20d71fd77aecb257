"""``memory://name``: objects in the memory of this process.

``memory://name?quota=1GiB&ttl=1h``. Handles of one name share one place, which lives as long as
any of them is open; ``memory:`` without a name is private to its handle. Everything the contract
leaves open is exact here: versions, create-only writes, and the order of eviction.

Calls run in the caller's thread and move bytes by one copy, so ``concurrency`` is 1 and no deadline
is overrun by more than the copy of one object.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

from hicache_store.clock import SYSTEM_CLOCK, Clock, Deadline
from hicache_store.config import StoreUrl, duration_option, size_option
from hicache_store.connectors.base import (
    ABSENT,
    META_PREFIX,
    OK,
    TIMED_OUT,
    Capabilities,
    Entry,
    Outcome,
    Part,
    Read,
    Status,
    Touch,
    Write,
)
from hicache_store.errors import ConfigurationError, HandleError
from hicache_store.limits import KIB, MEMORY_META_BYTES, MEMORY_QUOTA_BYTES

OPTIONS: Final = (size_option("quota", minimum=1), duration_option("ttl", minimum=1.0))

_CAPABILITIES: Final = Capabilities(
    scheme="memory",
    stop="bounded",
    create_only=True,
    conditional_versions=True,
    request_cost_bytes=4 * KIB,
    concurrency=1,
    orders_eviction=True,
)


@dataclass(slots=True)
class _Object:
    data: bytes
    version: str
    used_at: float
    used_wall_s: float
    ticket: int
    """Its newest entry in the eviction order; older entries of the same key are void."""


class MemoryTable:
    """The objects of one place, behind one lock.

    Keys below ``meta/`` neither expire nor count. All others are bounded by ``quota_bytes`` of
    content and leave ``ttl_s`` seconds after their last use: a write, a write that found them, or
    a touch. The victim is the object whose last use lies in the earliest second and, within that
    second, the deepest in its chain. A new object that would itself be the next victim is refused
    instead of pushing out one that is worth more.
    """

    def __init__(
        self,
        quota_bytes: int = MEMORY_QUOTA_BYTES,
        ttl_s: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.quota_bytes = quota_bytes
        self.ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._order: list[tuple[int, int, int, str]] = []
        self._bytes = {True: 0, False: 0}  # by whether the key is metadata
        self._last = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the objects that count against the quota."""
        with self._lock:
            return self._bytes[False]

    def find(self, key: str) -> tuple[bytes, str] | None:
        """Content and version of a live object."""
        with self._lock:
            found = self._live(key)
            return None if found is None else (found.data, found.version)

    def judge(self, write: Write) -> Outcome | None:
        """The outcome of a write that needs no bytes to be decided, else ``None``."""
        with self._lock:
            return self._judge(write)

    def put(self, write: Write, data: bytes) -> Outcome:
        """Publish ``data``, unless someone else decided the write meanwhile."""
        with self._lock:
            decided = self._judge(write)
            if decided is not None:
                return decided
            is_meta = write.key.startswith(META_PREFIX)
            old = self._objects.get(write.key)
            if not is_meta and not self._make_room(write, 0 if old is None else len(old.data)):
                detail = f"the quota of {self.quota_bytes} bytes is full of objects used as recently"
                return Outcome(Status.REFUSED, detail)
            self._drop(write.key)
            version = f"m{self._next()}"
            self._objects[write.key] = new = _Object(data, version, 0.0, 0.0, 0)
            self._bytes[is_meta] += len(data)
            self._mark(write.key, new, write.depth)
            return Outcome(Status.OK, version=version)

    def remove(self, key: str, version: str | None) -> Outcome:
        """Drop an object; with a version, only that one."""
        with self._lock:
            found = self._live(key)
            if found is None:
                return ABSENT
            if version is not None and version != found.version:
                return Outcome(Status.CONFLICT, "the object is of another version", found.version)
            self._drop(key)
            return OK

    def touch(self, touch: Touch) -> Outcome:
        """Mark an object as used now."""
        with self._lock:
            found = self._live(touch.key)
            if found is None:
                return ABSENT
            self._mark(touch.key, found, touch.depth)
            return OK

    def entries(self, prefix: str) -> list[Entry]:
        """The live objects below ``prefix``, sorted by key."""
        with self._lock:
            keys = sorted(key for key in self._objects if key.startswith(prefix))
            live = [(key, found) for key in keys if (found := self._live(key)) is not None]
            return [Entry(key, len(found.data), found.used_wall_s, found.version) for key, found in live]

    # All below run under the lock.

    def _next(self) -> int:
        self._last += 1
        return self._last

    def _live(self, key: str) -> _Object | None:
        found = self._objects.get(key)
        if found is not None and self._is_expired(key, found):
            self._drop(key)
            return None
        return found

    def _is_expired(self, key: str, found: _Object) -> bool:
        if self.ttl_s is None or key.startswith(META_PREFIX):
            return False
        return self._clock.monotonic() - found.used_at >= self.ttl_s

    def _drop(self, key: str) -> None:
        found = self._objects.pop(key, None)
        if found is not None:
            self._bytes[key.startswith(META_PREFIX)] -= len(found.data)

    def _judge(self, write: Write) -> Outcome | None:
        found = self._live(write.key)
        if write.replace is not None:
            if found is None or found.version != write.replace:
                version = None if found is None else found.version
                return Outcome(Status.CONFLICT, "the version to replace is gone", version)
        elif found is not None:
            if len(found.data) != write.size_bytes:
                detail = f"there are {len(found.data)} bytes, not {write.size_bytes}"
                return Outcome(Status.CONFLICT, detail, found.version)
            self._mark(write.key, found, write.depth)
            return Outcome(Status.EXISTS, version=found.version)
        return self._judge_size(write, 0 if found is None else len(found.data))

    def _judge_size(self, write: Write, freed_bytes: int) -> Outcome | None:
        if write.size_bytes <= 0:
            return Outcome(Status.REFUSED, "an object has at least one byte")
        if write.key.startswith(META_PREFIX):
            if self._bytes[True] - freed_bytes + write.size_bytes > MEMORY_META_BYTES:
                return Outcome(Status.REFUSED, f"metadata is bounded by {MEMORY_META_BYTES} bytes")
        elif write.size_bytes > self.quota_bytes:
            detail = f"{write.size_bytes} bytes exceed the whole quota of {self.quota_bytes}"
            return Outcome(Status.REFUSED, detail)
        return None

    def _mark(self, key: str, found: _Object, depth: int) -> None:
        found.used_at, found.used_wall_s = self._clock.monotonic(), self._clock.time()
        if key.startswith(META_PREFIX):
            return
        found.ticket = self._next()
        heapq.heappush(self._order, (int(found.used_at), -depth, found.ticket, key))
        if len(self._order) > 2 * len(self._objects) + 64:  # touches alone must not grow it
            self._order = [entry for entry in self._order if self._is_current(entry)]
            heapq.heapify(self._order)

    def _is_current(self, entry: tuple[int, int, int, str]) -> bool:
        found = self._objects.get(entry[3])
        return found is not None and found.ticket == entry[2]

    def _make_room(self, write: Write, freed_bytes: int) -> bool:
        """Evict until ``write`` fits; ``False``, with nothing evicted, when it would go first."""
        rank = (int(self._clock.monotonic()), -write.depth)
        excess = self._bytes[False] - freed_bytes + write.size_bytes - self.quota_bytes
        popped: list[tuple[int, int, int, str]] = []
        victims: list[str] = []
        fits = True
        while self._order:
            entry = self._order[0]
            key = entry[3]
            if key != write.key and self._is_current(entry):
                victim = self._objects[key]
                if not self._is_expired(key, victim):
                    if excess <= 0:
                        break
                    if entry[:2] > rank:
                        fits = False
                        break
                victims.append(key)
                excess -= len(victim.data)
            popped.append(heapq.heappop(self._order))
        if not fits:
            for entry in popped:
                heapq.heappush(self._order, entry)
            return False
        for key in victims:
            self._drop(key)
        return True


class MemoryConnector:
    """A handle on a :class:`MemoryTable`; without one given, on a private one."""

    def __init__(self, table: MemoryTable | None = None) -> None:
        self._table: MemoryTable | None = MemoryTable() if table is None else table
        self._pid = os.getpid()

    @property
    def capabilities(self) -> Capabilities:
        """Exact versions, first writer wins, ordered eviction."""
        return _CAPABILITIES

    def _open(self) -> MemoryTable:
        table = self._table
        if table is None:
            raise HandleError("the memory connector is closed")
        if self._pid != os.getpid():
            raise HandleError("a memory connector does not outlive a fork; open one in the child")
        return table

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        """Length of each object, ``None`` where absent, expired or past the deadline."""
        table = self._open()
        found = (None if deadline.is_past else table.find(key) for key in keys)
        return [None if one is None else len(one[0]) for one in found]

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        """Copy each object's parts into its target."""
        table = self._open()
        return [TIMED_OUT if deadline.is_past else _read_one(table, read) for read in reads]

    def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        """Copy each source into an object of its own."""
        table = self._open()
        return [TIMED_OUT if deadline.is_past else _write_one(table, write) for write in writes]

    def delete(
        self, keys: Sequence[str], deadline: Deadline, versions: Sequence[str | None] | None = None
    ) -> list[Outcome]:
        """Remove objects, with a version only that one."""
        table = self._open()
        wanted = [None] * len(keys) if versions is None else versions
        pairs = zip(keys, wanted, strict=True)
        return [TIMED_OUT if deadline.is_past else table.remove(key, version) for key, version in pairs]

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        """Mark objects as used now."""
        table = self._open()
        return [TIMED_OUT if deadline.is_past else table.touch(touch) for touch in touches]

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """The objects below ``prefix`` as they are now, sorted by key."""
        return iter(self._open().entries(prefix))

    def close(self) -> None:
        """Let go of the place; the last handle of a name frees its objects."""
        self._table = None


def _read_one(table: MemoryTable, read: Read) -> Outcome:
    found = table.find(read.key)
    if found is None:
        return ABSENT
    data, version = found
    if len(data) != read.size_bytes:
        return Outcome(Status.WRONG_SIZE, f"there are {len(data)} bytes, not {read.size_bytes}", version)
    try:
        try:
            _fill(read.target.parts(), memoryview(data))
            complaint = read.target.check()
        finally:
            read.target.release()
    except Exception as error:
        return Outcome(Status.FAILED, f"{type(error).__name__}: {error}", version)
    if complaint is not None:
        return Outcome(Status.REJECTED, complaint, version)
    return Outcome(Status.OK, version=version)


def _write_one(table: MemoryTable, write: Write) -> Outcome:
    decided = table.judge(write)
    if decided is not None:
        return decided
    try:
        try:
            data = _gather(write.source.buffers(), write.size_bytes)
        finally:
            write.source.release()
    except Exception as error:
        return Outcome(Status.FAILED, f"{type(error).__name__}: {error}")
    return table.put(write, data)


def _fill(parts: Sequence[Part], data: memoryview) -> None:
    for offset, views in parts:
        start = offset
        stop = offset + sum(view.nbytes for view in views)
        if offset < 0 or stop > len(data):
            raise ValueError(f"bytes {offset} to {stop} do not lie in an object of {len(data)}")
        for view in views:
            if view.nbytes:  # an empty view of more than one dimension cannot be cast
                view.cast("B")[:] = data[start : start + view.nbytes]
                start += view.nbytes


def _gather(views: Sequence[memoryview], size_bytes: int) -> bytes:
    given = sum(view.nbytes for view in views)
    if given != size_bytes:
        raise ValueError(f"the source gave {given} bytes, not {size_bytes}")
    return b"".join([view.cast("B") for view in views if view.nbytes])


_places: WeakValueDictionary[str, MemoryTable] = WeakValueDictionary()
_places_lock = threading.Lock()


def _forget_places() -> None:
    """Give a forked child a world of its own: a copy that no longer agrees is not a shared place."""
    global _places, _places_lock
    _places, _places_lock = WeakValueDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_forget_places)


def connect(url: StoreUrl) -> MemoryConnector:
    """Open ``memory://name?quota=SIZE&ttl=TIME``.

    Raises :class:`ConfigurationError` for an option that is not right, or that differs from the one
    the named place was opened with.
    """
    options = url.options(OPTIONS)
    quota_bytes, ttl_s = options.optional("quota", int), options.optional("ttl", float)
    table = MemoryTable(MEMORY_QUOTA_BYTES if quota_bytes is None else quota_bytes, ttl_s)
    if not url.location:
        return MemoryConnector(table)
    with _places_lock:
        place = _places.setdefault(url.location, table)
    for name, wanted, has in (("quota", quota_bytes, place.quota_bytes), ("ttl", ttl_s, place.ttl_s)):
        if wanted is not None and wanted != has:
            raise ConfigurationError(
                f"memory://{url.location} is open with {name}={has}, not {wanted}; "
                "leave the option out or use another name"
            )
    return MemoryConnector(place)
