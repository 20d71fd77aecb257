"""The walls of a file store, and the making of room within them."""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator

from hicache_store.clock import Clock, Deadline
from hicache_store.config import size_text
from hicache_store.connectors.local_counter import Counter
from hicache_store.connectors.local_io import PosixIO
from hicache_store.connectors.local_ledger import Ledger
from hicache_store.connectors.local_sweep import Eviction, SweepReport, Victims, Walk, evict
from hicache_store.limits import (
    ACCOUNT_LOCK_WAIT_S,
    EVICTION_LOW_WATERMARK,
    EVICTION_RETRY_S,
    EVICTION_VICTIMS_MAX,
    EVICTION_WAIT_S,
    FREE_FLOOR_MAX_BYTES,
    FREE_FLOOR_SHARE,
    QUOTA_FALLBACK_BYTES,
    QUOTA_SHARE,
    TEMPORARY_GRACE_S,
)
from hicache_store.metrics import Metrics

_LOG = logging.getLogger(__name__)
_NANO = 1_000_000_000


class Bounds:
    """Quota and floor of free space, in bytes.

    Without a quota, QUOTA_SHARE of the free and the stored bytes becomes it as soon as the stored
    ones are known; without a floor, FREE_FLOOR_SHARE of the file system, at most
    FREE_FLOOR_MAX_BYTES. A file system that reports no size has no floor.
    """

    def __init__(self, io: PosixIO, fd: int, quota_bytes: int | None, min_free_bytes: int | None) -> None:
        self._io = io
        self._fd = fd
        self.quota_bytes = quota_bytes
        if min_free_bytes is None:
            size_bytes = self._free_and_size()[1]
            min_free_bytes = min(int(size_bytes * FREE_FLOOR_SHARE), FREE_FLOOR_MAX_BYTES)
        self.min_free_bytes = min_free_bytes

    def _free_and_size(self) -> tuple[int, int]:
        found = self._io.statvfs(self._fd)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def settle_quota(self, counter: Counter) -> None:
        """Turn the default quota into a number, once the stored bytes are known."""
        if self.quota_bytes is not None or counter.total_bytes is None:
            return
        free_bytes, size_bytes = self._free_and_size()
        share = int((free_bytes + counter.total_bytes) * QUOTA_SHARE)
        self.quota_bytes = share if size_bytes else QUOTA_FALLBACK_BYTES
        _LOG.warning(
            "no quota was given: using %s, half of the %s free and %s stored; "
            "give each process of the store, tools too, the same quota=",
            size_text(self.quota_bytes),
            size_text(free_bytes),
            size_text(counter.total_bytes),
        )

    def room(self, counter: Counter) -> tuple[int, str]:
        """Bytes that may be reserved now, and what limits them."""
        if counter.total_bytes is None or self.quota_bytes is None:
            return 0, "the stored bytes have not been counted yet"
        by_quota = self.quota_bytes - counter.total_bytes
        by_floor = self._above_floor(counter)
        if by_floor is not None and by_floor < by_quota:
            return max(0, by_floor), f"the floor of {size_text(self.min_free_bytes)} free is reached"
        return max(0, by_quota), f"the quota of {size_text(self.quota_bytes)} is used up"

    def deficit(self, counter: Counter, need_bytes: int) -> int | None:
        """Bytes to evict before ``need_bytes`` fit, down to the low watermark where the quota is the
        limit; ``None`` until the stored bytes are known."""
        if counter.total_bytes is None or self.quota_bytes is None:
            return None
        excess = 0
        if counter.total_bytes + need_bytes > self.quota_bytes:
            low = min(int(self.quota_bytes * EVICTION_LOW_WATERMARK), self.quota_bytes - need_bytes)
            excess = counter.total_bytes - max(0, low)
        by_floor = self._above_floor(counter)
        return excess if by_floor is None else max(excess, need_bytes - by_floor)

    def is_at_floor(self, counter: Counter, need_bytes: int) -> bool:
        """Whether the floor of free space leaves no room for ``need_bytes``."""
        by_floor = self._above_floor(counter)
        return by_floor is not None and by_floor < need_bytes

    def _above_floor(self, counter: Counter) -> int | None:
        if self.min_free_bytes == 0:
            return None
        free_bytes, size_bytes = self._free_and_size()
        # Reserved bytes may not be on the disk yet: they count as taken, whoever reserved them.
        return free_bytes - counter.reserved_bytes - self.min_free_bytes if size_bytes else None


class Room(enum.Enum):
    """What came of the wish for room."""

    MADE = enum.auto()
    AWAITED = enum.auto()
    NONE = enum.auto()


class Sweeper:
    """Walks and evictions of one process, of which one at a time runs on a root."""

    def __init__(
        self,
        ledger: Ledger,
        io: PosixIO,
        objects_fd: int,
        bounds: Bounds,
        ttl_s: float | None,
        storage_time_s: Callable[[], float],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._ledger = ledger
        self._io = io
        self._objects_fd = objects_fd
        self._bounds = bounds
        self._ttl_s = ttl_s
        self._storage_time_s = storage_time_s
        self._metrics = metrics
        self._clock = clock
        self._mutex = threading.Lock()
        # The rest belongs to the thread that sweeps.
        self._victims = Victims()
        self._stuck: set[str] = set()
        self._stuck_until = self._futile_until = float("-inf")
        self._has_reported = False

    def make_room(self, need_bytes: int, deadline: Deadline) -> Room:
        """Evict until ``need_bytes`` fit, or give whoever evicts now a moment to do so. ``NONE`` when
        trying again would gain nothing."""
        if self._clock.monotonic() < self._futile_until:
            return Room.NONE
        with self._try_lock() as is_ours:
            if is_ours:
                return self._make_room(need_bytes, deadline)
        time.sleep(min(EVICTION_WAIT_S, deadline.remaining_s()))
        return Room.AWAITED

    def sweep(self, deadline: Deadline, is_stopped: Callable[[], bool] | None) -> SweepReport:
        """A whole sweep, after that of another process or thread if one is running."""
        while True:
            with self._try_lock() as is_ours:
                if is_ours:
                    return self._sweep(deadline, is_stopped)
            if deadline.is_past:
                return SweepReport(reason="another sweep is running")
            time.sleep(min(EVICTION_WAIT_S, deadline.remaining_s()))

    def maintain(
        self, interval_s: float, deadline: Deadline, is_stopped: Callable[[], bool]
    ) -> SweepReport | None:
        """A sweep, unless another one runs or ended within ``interval_s``."""
        with self._try_lock() as is_ours:
            if not is_ours or self._ledger.is_read_only:
                return None
            counter = self._ledger.peek()
            is_counted = counter is not None and counter.total_bytes is not None
            since_s = abs(self._storage_time_s() - self._ledger.last_sweep_s())
            if is_counted and since_s < interval_s:
                return None
            return self._sweep(deadline, is_stopped)

    @contextlib.contextmanager
    def _try_lock(self) -> Iterator[bool]:
        if not self._mutex.acquire(blocking=False):
            yield False
            return
        try:
            is_ours = self._ledger.is_read_only or self._ledger.try_sweep_lock()
            try:
                yield is_ours
            finally:
                if is_ours and not self._ledger.is_read_only:
                    self._ledger.release_sweep_lock()
        finally:
            self._mutex.release()

    def _make_room(self, need_bytes: int, deadline: Deadline) -> Room:
        with self._ledger.locked(deadline) as counter:
            self._ledger.drop_dead_writers(counter)
            deficit = self._bounds.deficit(counter, need_bytes)
        if deficit is not None and deficit <= 0:
            return Room.MADE
        if deficit is None or self._evict(deficit, deadline).bytes < deficit:
            self._walk(Deadline.after(deadline.remaining_s() / 2, deadline.clock), None)
            with self._ledger.locked(deadline) as counter:
                deficit = self._bounds.deficit(counter, need_bytes)
            if deficit is None:
                return Room.NONE
            evicted = self._evict(deficit, deadline)
            if evicted.bytes < deficit:
                self._give_up_for_now(is_worth_it=bool(self._stuck))
                return Room.MADE if evicted.bytes else Room.NONE
        counter_now = self._ledger.peek()
        # Some file systems free the space of a removed file much later: removing more does not help.
        self._give_up_for_now(
            is_worth_it=counter_now is not None and self._bounds.is_at_floor(counter_now, need_bytes)
        )
        return Room.MADE

    def _give_up_for_now(self, *, is_worth_it: bool) -> None:
        if is_worth_it:
            self._futile_until = self._clock.monotonic() + EVICTION_RETRY_S

    def _evict(self, goal_bytes: int, deadline: Deadline) -> Eviction:
        mark = self._ledger.epoch()
        done = evict(
            self._io,
            self._objects_fd,
            self._victims,
            goal_bytes,
            deadline,
            lambda n_bytes: self._ledger.release(n_bytes, mark),
        )
        self._metrics.add_many(
            {
                "file.evicted_objects": done.objects,
                "file.evicted_bytes": done.bytes,
                "file.eviction_spared": done.spared,
                "file.eviction_failures": done.failures,
            }
        )
        if done.stuck:
            self._note_stuck(done)
        return done

    def _note_stuck(self, done: Eviction) -> None:
        if not self._has_reported:
            self._has_reported = True
            _LOG.warning(
                "%d objects cannot be removed and are passed over: %s", done.failures, done.first_error
            )
        if len(self._stuck) < EVICTION_VICTIMS_MAX:
            self._stuck |= done.stuck
        self._stuck_until = self._clock.monotonic() + EVICTION_RETRY_S

    def _walk(self, deadline: Deadline, is_stopped: Callable[[], bool] | None) -> Walk:
        if self._clock.monotonic() >= self._stuck_until:
            self._stuck = set()
        now_s = self._storage_time_s()
        walk = Walk(
            self._io,
            self._objects_fd,
            dead_before_s=now_s - TEMPORARY_GRACE_S,
            expire_before_ns=0 if self._ttl_s is None else int((now_s - self._ttl_s) * _NANO),
            is_read_only=self._ledger.is_read_only,
            skip=self._stuck,
        )
        if self._ledger.is_read_only:
            walk.run(deadline, is_stopped)
            return walk
        with self._ledger.locked(deadline) as counter:
            recount = self._ledger.begin_recount(counter)
        walk.run(deadline, is_stopped)
        # The walk may have used up the deadline; its result is worth a moment more.
        with self._ledger.locked(Deadline.after(ACCOUNT_LOCK_WAIT_S, self._clock)) as counter:
            if counter.epoch == recount.epoch:
                counter.release(walk.expired_bytes)
            if walk.is_complete:
                recount.apply(counter, walk.stored_bytes)
            self._bounds.settle_quota(counter)
        if walk.is_complete:
            self._ledger.note_sweep()
        self._victims = walk.victims
        self._metrics.add_many(
            {
                "file.walks": 1,
                "file.expired_objects": walk.expired_objects,
                "file.expired_bytes": walk.expired_bytes,
                "file.temp_files_removed": walk.temp_files_removed,
                "file.walk_failures": walk.failures,
            }
        )
        return walk

    def _sweep(self, deadline: Deadline, is_stopped: Callable[[], bool] | None) -> SweepReport:
        walk = self._walk(deadline, is_stopped)
        counter = self._ledger.peek()
        deficit = None if counter is None else self._bounds.deficit(counter, 0)
        done = Eviction()
        if deficit is not None and deficit > 0 and not self._ledger.is_read_only:
            done = self._evict(deficit, deadline)
            counter = self._ledger.peek()
        return SweepReport(
            objects=walk.objects - done.objects,
            bytes=walk.stored_bytes - done.bytes,
            strays=walk.strays,
            evicted_objects=done.objects,
            evicted_bytes=done.bytes,
            expired_objects=walk.expired_objects,
            expired_bytes=walk.expired_bytes,
            temp_files_removed=walk.temp_files_removed,
            failures=walk.failures + done.failures,
            used_bytes=None if counter is None else counter.total_bytes,
            is_complete=walk.is_complete,
            reason=walk.reason,
        )
