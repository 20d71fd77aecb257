"""The grids in use, told by markers beside the manifest.

A marker takes one of 64 slots: first the grid's digest mod 64, then linear probing, put-if-absent,
and read back, since not every storage can refuse to overwrite. A marker without objects is
harmless; objects without a marker are found by ranks of the same cut only, so a writer announces
before its first object and again whenever its marker is gone.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from hicache_store.clock import Clock, Deadline
from hicache_store.connectors.base import (
    BufferSource,
    BufferTarget,
    Connector,
    Lister,
    Outcome,
    Read,
    Status,
    Write,
)
from hicache_store.layout.grid import Grid
from hicache_store.layout.names import marker_key
from hicache_store.layout.records import decode_grid, encode_grid, first_slot, frame, unframe
from hicache_store.limits import (
    MARKER_BYTES,
    MARKER_RECHECK_S,
    MARKER_REFRESH_MAX_S,
    MARKER_REFRESH_S,
    MARKER_SLOTS,
)
from hicache_store.metrics import Metrics


class Announcement(enum.Enum):
    """Whether a grid's marker is in place."""

    CONFIRMED = "confirmed"
    FULL = "full"
    """Every slot holds another grid; only announced grids may be written."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Slot:
    """One marker slot: its grid, or free, or damaged (and replaceable where ``bad_version`` tells what),
    or none of these: then it cannot be told what it holds."""

    grid: Grid | None = None
    is_free: bool = False
    is_damaged: bool = False
    bad_version: str | None = None

    @property
    def is_usable(self) -> bool:
        """Whether a marker may be put here."""
        return self.is_free or self.bad_version is not None

    @property
    def is_unknown(self) -> bool:
        """Whether it may hold any grid."""
        return self.grid is None and not self.is_free and not self.is_damaged


class GridDirectory:
    """Reads, remembers and announces the grids of one namespace."""

    def __init__(self, connector: Connector, namespace: str, clock: Clock, metrics: Metrics) -> None:
        self._connector = connector
        self._namespace = namespace
        self._clock = clock
        self._metrics = metrics
        self._lock = threading.Lock()
        self._grids: tuple[Grid, ...] = ()
        self._next_refresh = 0.0
        self._refresh_interval_s = MARKER_REFRESH_S
        self._confirmed: dict[Grid, float] = {}

    @property
    def grids(self) -> tuple[Grid, ...]:
        """Every grid seen so far."""
        return self._grids

    def refresh(self, deadline: Deadline) -> bool:
        """Read the markers again unless that was done just now; whether a new grid showed up.

        Misses are the normal end of a prefix, so the interval doubles while nothing new is found.
        """
        with self._lock:
            now = self._clock.monotonic()
            if now < self._next_refresh:
                return False
            self._next_refresh = now + self._refresh_interval_s
            self._refresh_interval_s = min(2 * self._refresh_interval_s, MARKER_REFRESH_MAX_S)
        before = len(self._grids)
        self.read_slots(deadline)
        is_new = len(self._grids) > before
        if is_new:
            self._refresh_interval_s = MARKER_REFRESH_S
        return is_new

    def read_slots(self, deadline: Deadline) -> list[Slot]:
        """All slots, in one batch, without those that a list says are free.

        A list that is behind the times does no harm: what it hides is met when a marker is put there,
        and what it shows too long is read as absent.
        """
        keys = [marker_key(self._namespace, slot) for slot in range(MARKER_SLOTS)]
        slots = [Slot(is_free=True)] * MARKER_SLOTS
        listed = self._listed(deadline)
        taken = [slot for slot, key in enumerate(keys) if listed is None or key in listed]
        memory = [bytearray(MARKER_BYTES) for _ in taken]
        reads = [
            Read(keys[slot], MARKER_BYTES, BufferTarget.whole(raw))
            for slot, raw in zip(taken, memory, strict=True)
        ]
        outcomes = self._connector.read_into(reads, deadline) if reads else []
        for slot, raw, outcome in zip(taken, memory, outcomes, strict=True):
            slots[slot] = self._judge(keys[slot], raw, outcome)
        self._remember([slot.grid for slot in slots if slot.grid is not None])
        return slots

    def _listed(self, deadline: Deadline) -> frozenset[str] | None:
        """The markers there are, where one request tells."""
        if not isinstance(self._connector, Lister):
            return None
        prefix = marker_key(self._namespace, 0).removesuffix("00")
        found = self._connector.listing(prefix, deadline)
        return None if found is None else frozenset(found)

    def _judge(self, key: str, raw: bytearray, outcome: Outcome) -> Slot:
        if outcome.status is Status.ABSENT:
            return Slot(is_free=True)
        body = unframe(key, bytes(raw)) if outcome.is_ok else None
        grid = None if body is None else decode_grid(body)
        if grid is not None:
            return Slot(grid)
        is_damaged = outcome.is_ok or outcome.status is Status.WRONG_SIZE
        if is_damaged:
            self._metrics.add("markers.damaged")
        return Slot(is_damaged=is_damaged, bad_version=outcome.version if is_damaged else None)

    def ensure(self, grid: Grid, deadline: Deadline) -> Announcement:
        """Make sure the marker of ``grid`` is there; looked at again now and then."""
        now = self._clock.monotonic()
        with self._lock:
            confirmed = self._confirmed.get(grid)
        if confirmed is not None and now - confirmed < MARKER_RECHECK_S:
            return Announcement.CONFIRMED
        slots = self.read_slots(deadline)
        if not any(slot.grid == grid for slot in slots):
            if confirmed is not None and any(slot.is_unknown for slot in slots):
                return Announcement.CONFIRMED  # not seen to be gone; looked at again next time
            announcement = self._announce(grid, slots, deadline)
            if announcement is not Announcement.CONFIRMED:
                return announcement
        self._remember([grid])
        with self._lock:
            self._confirmed[grid] = now
        return Announcement.CONFIRMED

    def _announce(self, grid: Grid, slots: Sequence[Slot], deadline: Deadline) -> Announcement:
        body = encode_grid(grid)
        start = first_slot(grid)
        for step in range(MARKER_SLOTS):
            index = (start + step) % MARKER_SLOTS
            slot = slots[index]
            if slot.is_unknown:  # it may be this grid's own: a second marker would waste a slot
                self._metrics.add("markers.unknown")
                return Announcement.FAILED
            if not slot.is_usable:
                continue
            key = marker_key(self._namespace, index)
            record = frame(key, body)
            write = Write(key, len(record), BufferSource.of(record), replace=slot.bad_version)
            (outcome,) = self._connector.write_from([write], deadline)
            if outcome.status in (Status.TIMED_OUT, Status.FAILED, Status.REFUSED):
                self._metrics.add("markers.write_failed")
                return Announcement.FAILED
            # Another grid may have won this slot: only what is there now counts.
            raw = bytearray(MARKER_BYTES)
            back = Read(key, MARKER_BYTES, BufferTarget.whole(raw))
            if not self._connector.read_into([back], deadline)[0].is_ok:
                self._metrics.add("markers.unconfirmed")
                return Announcement.FAILED
            if unframe(key, bytes(raw)) == body:
                self._metrics.add("markers.announced")
                return Announcement.CONFIRMED
        self._metrics.add("markers.no_slot")
        return Announcement.FULL

    def _remember(self, grids: Sequence[Grid]) -> None:
        with self._lock:
            new = [grid for grid in dict.fromkeys(grids) if grid not in self._grids]
            self._grids = (*self._grids, *new)
