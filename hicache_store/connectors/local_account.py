"""Quota, free-space floor and expiry of a file store, across all processes of one root.

A writer reserves the bytes of a batch before it writes, so what is stored plus what is being
written stays within the quota. When there is no room, the one process that holds the sweep lock
evicts, oldest first, while the others wait for the room to appear. Attaching never walks the store;
a counter that is missing or damaged is rebuilt by the first write or sweep.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hicache_store.clock import SYSTEM_CLOCK, Clock, Deadline
from hicache_store.config import size_text
from hicache_store.connectors.local_io import PosixIO
from hicache_store.connectors.local_ledger import Ledger
from hicache_store.connectors.local_room import Bounds, Room, Sweeper
from hicache_store.connectors.local_sweep import SweepReport, holds_no_object
from hicache_store.errors import HandleError
from hicache_store.limits import ACCOUNT_LOCK_WAIT_S, EVICTION_ROUNDS
from hicache_store.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for the first ``granted`` items of a batch, to be settled once; ``reason`` says why it
    is not all of them."""

    granted: int
    reserved_bytes: int = 0
    reason: str = ""
    number: int = 0


def open_account(
    root_fd: int,
    objects_fd: int,
    *,
    quota_bytes: int | None,
    min_free_bytes: int | None,
    ttl_s: float | None,
    clock_offset_s: Callable[[], float],
    io: PosixIO,
    metrics: Metrics,
    clock: Clock = SYSTEM_CLOCK,
) -> Account:
    """Join the accounting of the store below ``root_fd``, whose objects lie below ``objects_fd``.

    Both descriptors are duplicated. ``clock_offset_s`` is the storage's clock minus ``clock``.
    ``quota_bytes=None`` takes QUOTA_SHARE of free plus stored bytes, ``min_free_bytes=None`` takes
    FREE_FLOOR_SHARE of the file system, at most FREE_FLOOR_MAX_BYTES: no store is unlimited.
    Raises ``OSError`` when the account can be neither read nor created.
    """

    def storage_time_s() -> float:
        return clock.time() + clock_offset_s()

    with contextlib.ExitStack() as undo:
        own_root_fd, own_objects_fd = os.dup(root_fd), os.dup(objects_fd)
        undo.callback(os.close, own_root_fd)
        undo.callback(os.close, own_objects_fd)
        bounds = Bounds(io, own_objects_fd, quota_bytes, min_free_bytes)
        ledger = Ledger(own_root_fd, io, lambda: holds_no_object(io, own_objects_fd), storage_time_s)
        undo.callback(ledger.close)
        # Whatever hinders it now, the first reservation will tell.
        with (
            contextlib.suppress(OSError),
            ledger.locked(Deadline.after(ACCOUNT_LOCK_WAIT_S, clock)) as counter,
        ):
            bounds.settle_quota(counter)
        sweeper = Sweeper(ledger, io, own_objects_fd, bounds, ttl_s, storage_time_s, metrics, clock)
        return Account(ledger, bounds, sweeper, metrics, undo.pop_all())


class Account:
    """One process's part in the accounting of a store. Thread-safe; made by :func:`open_account`.

    After :meth:`close`, and in a forked child, every method raises :class:`HandleError`, except
    :meth:`settle` and :meth:`released`, which then do nothing.
    """

    def __init__(
        self, ledger: Ledger, bounds: Bounds, sweeper: Sweeper, metrics: Metrics, owned: contextlib.ExitStack
    ) -> None:
        self._ledger = ledger
        self._bounds = bounds
        self._sweeper = sweeper
        self._metrics = metrics
        self._owned = owned
        self._state = threading.Lock()
        self._users = 0
        self._is_closed = False
        self._numbers = itertools.count(1)
        self._open_reservations: dict[int, int] = {}

    @property
    def quota_bytes(self) -> int | None:
        """The quota in force; ``None`` while the default one waits for the first count."""
        return self._bounds.quota_bytes

    @property
    def min_free_bytes(self) -> int:
        """The floor of free space in force."""
        return self._bounds.min_free_bytes

    @property
    def is_read_only(self) -> bool:
        """Whether the root cannot be written by this process: nothing is granted or removed."""
        return self._ledger.is_read_only

    def used_bytes(self) -> int | None:
        """Bytes stored and reserved, never too low; ``None`` until they have been counted."""
        with self._use():
            counter = self._ledger.peek()
            return None if counter is None else counter.total_bytes

    def reserve(self, sizes: Sequence[int], deadline: Deadline) -> Reservation:
        """Reserve room for the leading items of a batch, evicting where needed.

        What the storage does never raises: what cannot be reserved by ``deadline`` is not granted,
        and ``reason`` says why. A batch larger than the quota is granted what the quota holds.
        """
        with self._use():
            try:
                reservation = self._reserve(list(itertools.accumulate(sizes)), deadline)
            except OSError as error:
                reservation = Reservation(0, reason=f"no room could be reserved: {error}")
        if reservation.granted < len(sizes):
            self._metrics.add("file.quota_refused", len(sizes) - reservation.granted)
        return reservation

    def _reserve(self, sums: list[int], deadline: Deadline) -> Reservation:
        evictions = 0
        while evictions < EVICTION_ROUNDS and not deadline.is_past:
            attempt = self._attempt(sums, deadline, is_last=False)
            if isinstance(attempt, Reservation):
                return attempt
            room = self._sweeper.make_room(attempt, deadline)
            if room is Room.NONE:
                break
            evictions += room is Room.MADE
        attempt = self._attempt(sums, deadline, is_last=True)
        assert isinstance(attempt, Reservation)
        return attempt

    def _attempt(self, sums: list[int], deadline: Deadline, *, is_last: bool) -> Reservation | int:
        """Reserve what the quota can ever hold of the batch, or if ``is_last``, what fits now; else
        return the bytes that need room. ``sums`` are the running sums of the batch."""
        with self._ledger.locked(deadline) as counter:
            self._bounds.settle_quota(counter)
            room_bytes, limit = self._bounds.room(counter)
            quota_bytes = self._bounds.quota_bytes or 0
            goal = bisect_right(sums, quota_bytes)
            fits = min(goal, bisect_right(sums, room_bytes))
            is_known = counter.total_bytes is not None
            if not is_last and (fits < goal or not is_known):
                return sums[goal - 1] if is_known and goal else 0
            n_bytes = sums[fits - 1] if fits else 0
            self._ledger.reserve(counter, n_bytes)
        if fits == len(sums):
            limit = ""
        elif fits == goal and is_known:
            limit = (
                f"the quota of {size_text(quota_bytes)} cannot hold the {size_text(sums[-1])} of the batch"
            )
        number = next(self._numbers)
        with self._state:
            self._open_reservations[number] = n_bytes
        return Reservation(fits, n_bytes, limit, number)

    def settle(self, reservation: Reservation, stored_bytes: int) -> None:
        """End a reservation of which ``stored_bytes`` became objects. A second time does nothing."""
        with contextlib.suppress(HandleError), self._use():
            with self._state:
                reserved_bytes = self._open_reservations.pop(reservation.number, None)
            if reserved_bytes:
                self._ledger.settle(reserved_bytes, stored_bytes)

    def mark(self) -> int:
        """To be taken before unlinking and handed to :meth:`released`: a recount that runs between
        the two has left these bytes out already, and taking them off again would be too much."""
        with self._use():
            return self._ledger.epoch()

    def released(self, n_bytes: int, mark: int | None = None) -> None:
        """Take off ``n_bytes`` of objects unlinked since :meth:`mark` gave ``mark``; without it,
        since just now."""
        with contextlib.suppress(HandleError), self._use():
            self._ledger.release(n_bytes, self._ledger.epoch() if mark is None else mark)

    def sweep(self, deadline: Deadline, is_stopped: Callable[[], bool] | None = None) -> SweepReport:
        """Walk the store: expire, remove what dead writers left, recount, and evict what is over the
        quota or under the floor. Waits for another sweep until ``deadline``; ``is_stopped`` is asked
        after every directory. Raises ``OSError`` when the account itself cannot be used."""
        with self._use():
            return self._sweeper.sweep(deadline, is_stopped)

    def maintain(
        self, interval_s: float, deadline: Deadline, is_stopped: Callable[[], bool]
    ) -> SweepReport | None:
        """Sweep, unless a process of this root does so now or did within ``interval_s``."""
        with self._use():
            return self._sweeper.maintain(interval_s, deadline, is_stopped)

    def close(self) -> None:
        """Leave the accounting; idempotent. What other threads are doing here ends first, without
        being waited for."""
        if not self._ledger.is_ours:
            return
        with self._state:
            self._is_closed = True
            is_last = self._users == 0
        if is_last:
            self._owned.close()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        self._ledger.require_usable()
        with self._state:
            if self._is_closed:
                raise HandleError("the store's account is closed")
            self._users += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._state:
            self._users -= 1
            is_last = self._is_closed and self._users == 0
        if is_last:
            self._owned.close()
