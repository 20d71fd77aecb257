"""One process's hold on the byte counter that all processes of a file store share.

``root/account/counter`` is one record, changed under its ``flock``; ``root/account/writers/`` has a
small file per live writer with the bytes it has reserved and not settled, locked for as long as the
process lives. A writer reserves before it writes and releases after it unlinked, and every update
is one small ``pwrite``, so a process killed at any instant leaves the counter too high, never too
low. A recount brings it back down while others write (see
:class:`~hicache_store.connectors.local_counter.Recount`).

Without locks on the file system (ENOLCK, ENOTSUP) updates of two processes can be lost. The next
recount repairs that, and until then the quota is only approximate; the log says so once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from hicache_store.clock import Deadline
from hicache_store.connectors.local_counter import (
    OUTSTANDING_BYTES,
    RECORD_BYTES,
    Counter,
    Recount,
    decode_counter,
    decode_outstanding,
    encode_counter,
    encode_outstanding,
    new_epoch,
)
from hicache_store.connectors.local_io import PosixIO
from hicache_store.connectors.local_tree import make_directory
from hicache_store.errors import DeadlineExceededError, HandleError
from hicache_store.limits import ACCOUNT_LOCK_WAIT_S, TEMPORARY_GRACE_S

ACCOUNT_DIR: Final = "account"

_COUNTER = "counter"
_COUNTER_PATH = f"{ACCOUNT_DIR}/{_COUNTER}"
_WRITERS = "writers"
_WRITER = "writer"
_SWEEP = "sweep.lock"
_LOG = logging.getLogger(__name__)
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_PEEKS = 3
_REOPENS = 3  # some file systems tell another inode at every look


def is_dead(io: PosixIO, fd: int, dead_before_s: float) -> bool:
    """Whether no process holds the lock of the open file; if so it is ours now.

    Where the file system has no locks, a file last written before ``dead_before_s`` is dead.
    """
    try:
        io.flock(fd)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return io.fstat(fd).st_mtime < dead_before_s
    return True


def _unlock(fd: int) -> None:
    # Not left to close: a child forked meanwhile would keep the lock by its copy.
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


def _read_record(io: PosixIO, fd: int, size: int) -> bytes:
    data = bytearray(size + 1)
    return bytes(data[: io.preadv(fd, [memoryview(data)], 0)])


class Ledger:
    """The counter of the store below ``root_fd``. Thread-safe; unusable after close or a fork.

    ``is_empty`` tells whether the store holds no object at all: then a missing counter starts at
    zero, else its total is unknown until a recount. ``storage_time_s`` is the storage's clock.
    """

    def __init__(
        self, root_fd: int, io: PosixIO, is_empty: Callable[[], bool], storage_time_s: Callable[[], float]
    ) -> None:
        self._io = io
        self._root_fd = root_fd
        self._is_empty = is_empty
        self._storage_time_s = storage_time_s
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._fds: dict[str, int] = {}
        self._directory_id = self._counter_id = (0, 0)
        self._writer_name = ""
        # Reserved by this process: now, as the counter holds it, and as the writer's file says.
        self._outstanding = 0
        self._recorded = 0
        self._written: int | None = 0
        # What settle and release could not yet store; guarded by its own lock, which never waits.
        self._debt_lock = threading.Lock()
        self._settled = self._refund = 0
        self._released = (0, 0)
        self._has_warned = False
        self.is_read_only = False
        try:
            self._open()
        except OSError as error:
            self.close_fds()
            self.is_read_only = error.errno in _READ_ONLY
            if not self.is_read_only and error.errno not in _FULL:
                raise
        _ledgers.add(self)

    def peek(self) -> Counter | None:
        """The counter as it is now, without its lock; ``None`` when it cannot be read."""
        self.require_usable()
        for _ in range(_PEEKS):
            try:
                directory = self._io.open(ACCOUNT_DIR, _DIRECTORY, dir_fd=self._root_fd)
                try:
                    fd = self._io.open(_COUNTER, os.O_RDONLY, dir_fd=directory)
                finally:
                    self._io.close(directory)
                try:
                    counter = decode_counter(_read_record(self._io, fd, RECORD_BYTES))
                finally:
                    self._io.close(fd)
            except OSError:
                return None
            if counter is not None:
                return counter
        return None

    def epoch(self) -> int:
        """To be read before an unlink and handed to :meth:`release`; 0 when it cannot be."""
        counter = self.peek()
        return 0 if counter is None else counter.epoch

    @contextlib.contextmanager
    def locked(self, deadline: Deadline) -> Iterator[Counter]:
        """The counter under its lock; what the body changed is stored at the end.

        Raises :class:`DeadlineExceededError` when others hold it for too long, and ``OSError`` when
        it cannot be read or stored; what the body reserved is then not reserved.
        """
        self.require_usable()
        if self.is_read_only:
            raise OSError(errno.EROFS, "the store is read-only for this process")
        if not self._mutex.acquire(timeout=deadline.remaining_s()):
            raise DeadlineExceededError("the byte counter is held by another thread")
        try:
            self._take_file_lock(deadline)
            try:
                yield from self._transaction()
            finally:
                _unlock(self._fds[_COUNTER])
        finally:
            self._mutex.release()

    def _transaction(self) -> Iterator[Counter]:
        counter = decode_counter(_read_record(self._io, self._fds[_COUNTER], RECORD_BYTES))
        before = None if counter is None else replace(counter)
        counter = self._fresh() if counter is None else counter
        with self._debt_lock:
            settled, refund, (released, epoch) = self._settled, self._refund, self._released
        outstanding = self._outstanding
        try:
            self._outstanding -= settled
            counter.add(-refund)
            if epoch == counter.epoch:
                counter.release(released)
            yield counter
            self._store(counter, before)
        except BaseException:
            self._outstanding = outstanding
            raise
        with self._debt_lock:
            self._settled -= settled
            self._refund -= refund
            if self._released[1] == epoch:
                self._released = (self._released[0] - released, epoch)

    def reserve(self, counter: Counter, n_bytes: int) -> None:
        """Within :meth:`locked`: count ``n_bytes`` that this process is about to write."""
        counter.add(n_bytes)
        counter.gross_reserved_bytes += n_bytes
        self._outstanding += n_bytes

    def settle(self, reserved_bytes: int, stored_bytes: int) -> None:
        """End a reservation of which ``stored_bytes`` became objects; never raises."""
        with self._debt_lock:
            self._settled += reserved_bytes
            self._refund += reserved_bytes - stored_bytes
        self._flush()

    def release(self, n_bytes: int, epoch: int) -> None:
        """Take off ``n_bytes`` that were unlinked after ``epoch`` was read; never raises.

        If a recount came between, its walk may have missed these bytes already: then nothing is
        taken off, and the next recount corrects what is too high.
        """
        with self._debt_lock:
            pending, pending_epoch = self._released
            self._released = (n_bytes + (pending if pending_epoch == epoch else 0), epoch)
        self._flush()

    def _flush(self) -> None:
        with contextlib.suppress(OSError, HandleError), self.locked(Deadline.after(ACCOUNT_LOCK_WAIT_S)):
            pass

    def begin_recount(self, counter: Counter) -> Recount:
        """Within :meth:`locked`: drop dead writers and note where the counter stands."""
        self.drop_dead_writers(counter)
        reserved = counter.reserved_bytes + self._outstanding - self._recorded
        return Recount(counter.epoch, reserved, counter.gross_reserved_bytes, counter.gross_released_bytes)

    def drop_dead_writers(self, counter: Counter) -> None:
        """Within :meth:`locked`: remove the files of dead writers and add up those of the living."""
        others = [name for name in self._io.listdir(self._fds[_WRITERS]) if name != self._writer_name]
        counter.reserved_bytes = sum(map(self._living_bytes, others)) + self._recorded

    def _living_bytes(self, name: str) -> int:
        io, writers = self._io, self._fds[_WRITERS]
        try:
            fd = io.open(name, os.O_RDWR, dir_fd=writers)
        except OSError:
            return 0
        try:
            if not is_dead(io, fd, self._storage_time_s() - TEMPORARY_GRACE_S):
                return decode_outstanding(_read_record(io, fd, OUTSTANDING_BYTES))
            with contextlib.suppress(FileNotFoundError):
                io.unlink(name, dir_fd=writers)
            return 0
        finally:
            io.close(fd)

    def try_sweep_lock(self) -> bool:
        """Become the one process of this root that sweeps or evicts. The caller sees to it that
        one thread at a time asks."""
        self.require_usable()
        with self._mutex:
            if _COUNTER not in self._fds or self._id_of(_COUNTER_PATH) != self._counter_id:
                self._open()
            fd = self._io.open(_SWEEP, os.O_RDWR | os.O_CREAT, dir_fd=self._fds[ACCOUNT_DIR])
            self._fds[_SWEEP] = fd
        try:
            self._io.flock(fd)
        except BlockingIOError:
            self._drop(_SWEEP)
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self._drop(_SWEEP)
                raise
        return True

    def last_sweep_s(self) -> float:
        """When a sweep of this root last ended, by the storage's clock. Needs the sweep lock."""
        return self._io.fstat(self._fds[_SWEEP]).st_mtime

    def note_sweep(self) -> None:
        """Remember that a sweep ends now. Needs the sweep lock."""
        with contextlib.suppress(OSError):
            self._io.utime_fd(self._fds[_SWEEP], None)

    def release_sweep_lock(self) -> None:
        """Let others sweep."""
        _unlock(self._fds[_SWEEP])
        self._drop(_SWEEP)

    def close(self) -> None:
        """Give back the descriptors. A reservation that is still out keeps its file locked."""
        if not self.is_ours:
            return
        self._flush()
        with self._mutex:
            self._pid = 0
            if self._outstanding > 0:
                self._fds.pop(_WRITER, None)
            elif _WRITER in self._fds:
                with contextlib.suppress(OSError):
                    self._io.unlink(self._writer_name, dir_fd=self._fds[_WRITERS])
            self.close_fds()

    @property
    def is_ours(self) -> bool:
        """Whether this process opened the ledger and has not closed it."""
        return self._pid == os.getpid()

    def require_usable(self) -> None:
        """Raise :class:`HandleError` after close, or in a child of the process that opened."""
        if not self.is_ours:
            why = "closed" if self._pid == 0 else "opened before a fork; connect again in the child"
            raise HandleError(f"the store's byte counter was {why}")

    def _take_file_lock(self, deadline: Deadline) -> None:
        pause, tries = 0.0001, _REOPENS
        while True:
            if _COUNTER not in self._fds:
                self._open()
            try:
                self._io.flock(self._fds[_COUNTER])
            except BlockingIOError:
                if deadline.is_past:
                    raise DeadlineExceededError("the byte counter is held by another process") from None
                time.sleep(min(pause, deadline.remaining_s()))
                pause = min(2 * pause, 0.005)
                continue
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                self._warn_no_locks(error)
            if tries == 0 or self._id_of(_COUNTER_PATH) == self._counter_id:
                return
            tries -= 1
            self._open()

    def _warn_no_locks(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning("no file locks here (%s): the quota is approximate between processes", error)

    def _id_of(self, path: str) -> tuple[int, int] | None:
        try:
            stat = self._io.stat(path, dir_fd=self._root_fd)
        except FileNotFoundError:
            return None
        return stat.st_dev, stat.st_ino

    def _open(self) -> None:
        """Open the files of the account, again if somebody removed them under us."""
        directory = make_directory(self._io, self._root_fd, ACCOUNT_DIR)
        self._replace(ACCOUNT_DIR, directory)
        stat = self._io.fstat(directory)
        if (stat.st_dev, stat.st_ino) != self._directory_id:
            self._drop(_WRITER)
            self._written = 0
        self._directory_id = (stat.st_dev, stat.st_ino)
        self._replace(_WRITERS, make_directory(self._io, directory, _WRITERS))
        self._replace(_COUNTER, self._io.open(_COUNTER, os.O_RDWR | os.O_CREAT, dir_fd=directory))
        stat = self._io.fstat(self._fds[_COUNTER])
        self._counter_id = (stat.st_dev, stat.st_ino)
        self._recorded = self._written or 0

    def _replace(self, name: str, fd: int) -> None:
        self._drop(name)
        self._fds[name] = fd

    def _drop(self, name: str) -> None:
        fd = self._fds.pop(name, None)
        if fd is not None:
            with contextlib.suppress(OSError):
                self._io.close(fd)

    def close_fds(self) -> None:
        """Close every descriptor: in a forked child, where they would keep the parent's locks alive."""
        for name in list(self._fds):
            self._drop(name)

    def _fresh(self) -> Counter:
        counter = Counter(new_epoch(), None)
        self.drop_dead_writers(counter)
        if self._is_empty():
            counter.total_bytes = counter.reserved_bytes
        self._io.truncate(self._fds[_COUNTER], 0)
        return counter

    def _store(self, counter: Counter, before: Counter | None) -> None:
        if self._outstanding != self._written:
            self._written = None
            self._write(self._writer_fd(counter), encode_outstanding(self._outstanding))
            self._written = self._outstanding
        counter.reserved_bytes = max(0, counter.reserved_bytes + self._outstanding - self._recorded)
        if counter.total_bytes is not None:
            counter.total_bytes = max(counter.total_bytes, counter.reserved_bytes)
        if counter != before:
            self._write(self._fds[_COUNTER], encode_counter(counter))
        self._recorded = self._outstanding

    def _writer_fd(self, counter: Counter) -> int:
        """The descriptor of this process's own file, which the counter's lock keeps from being
        taken for a dead one until it is locked itself."""
        if _WRITER not in self._fds:
            self.drop_dead_writers(counter)
            self._writer_name = f"{os.getpid():x}.{os.urandom(8).hex()}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            self._fds[_WRITER] = self._io.open(self._writer_name, flags, dir_fd=self._fds[_WRITERS])
            with contextlib.suppress(OSError):
                self._io.flock(self._fds[_WRITER])
        return self._fds[_WRITER]

    def _write(self, fd: int, data: bytes) -> None:
        if self._io.pwritev(fd, [memoryview(data)], 0) != len(data):
            raise OSError(errno.EIO, "short write to the byte counter")


_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for ledger in list(_ledgers):
        ledger.close_fds()


os.register_at_fork(after_in_child=_after_fork_in_child)
