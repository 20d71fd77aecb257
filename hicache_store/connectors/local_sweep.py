"""Walks over the objects of a file store: counting, expiry, leftovers, victims; and when to walk.

An object is a regular file whose name is a key of the very directory it lies in. Everything else
below ``objects/`` (directories, links, foreign files) is a stray: never followed, counted or
removed. Nothing outside ``objects/`` is looked at.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from hicache_store.clock import Deadline
from hicache_store.connectors.local_io import PosixIO, is_absent
from hicache_store.connectors.local_ledger import is_dead
from hicache_store.connectors.local_names import OBJECTS_DIR, directory_of, is_temporary, key_of
from hicache_store.errors import HandleError
from hicache_store.limits import (
    CLOSE_JOIN_S,
    EVICTION_BATCH,
    EVICTION_VICTIMS_MAX,
    MAINTENANCE_FIRST_S,
    MAINTENANCE_PAUSE_S,
    MAINTENANCE_SWEEP_S,
)
from hicache_store.metrics import Metrics

_LOG = logging.getLogger(__name__)
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one sweep found and did. ``objects`` and ``bytes`` are what it left in the store.

    ``is_complete``: every directory was read, so ``used_bytes`` has been recounted. ``failures``
    are system calls that failed on an object, a directory or a leftover. ``reason`` says why the
    sweep did not run or did not finish.
    """

    objects: int = 0
    bytes: int = 0
    strays: int = 0
    evicted_objects: int = 0
    evicted_bytes: int = 0
    expired_objects: int = 0
    expired_bytes: int = 0
    temp_files_removed: int = 0
    failures: int = 0
    used_bytes: int | None = None
    is_complete: bool = False
    reason: str = ""


class Victim(NamedTuple):
    """An object in the order of eviction: last used first, the deepest page of a chain first."""

    mtime_ns: int
    name: str
    leaf: str
    size_bytes: int


class Victims:
    """The oldest objects of one walk, at most ``limit`` of them, oldest first out."""

    def __init__(self, limit: int = EVICTION_VICTIMS_MAX) -> None:
        self._limit = limit
        self._found: list[Victim] = []
        self._newest_ns: int | None = None

    def __len__(self) -> int:
        return len(self._found)

    def add(self, victim: Victim) -> None:
        """Take note of an object, unless enough older ones are known."""
        if self._newest_ns is not None and victim.mtime_ns > self._newest_ns:
            return
        self._found.append(victim)
        if len(self._found) >= 2 * self._limit:
            self._cut()

    def seal(self) -> None:
        """End the walk: from here on only :meth:`pop`."""
        self._cut()
        self._found.reverse()

    def pop(self) -> Victim | None:
        """The oldest that was not popped yet."""
        return self._found.pop() if self._found else None

    def _cut(self) -> None:
        self._found.sort()
        if len(self._found) > self._limit:
            del self._found[self._limit :]
            self._newest_ns = self._found[-1].mtime_ns


def open_directory(io: PosixIO, objects_fd: int, path: str) -> int:
    """A descriptor of the directory ``path`` ("a" or "a/b"), no part of which may be a symlink."""
    fd = objects_fd
    for part in path.split("/"):
        try:
            inner = io.open(part, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        finally:
            if fd != objects_fd:
                io.close(fd)
        fd = inner
    return fd


@dataclass(slots=True)
class Walk:
    """One pass over the objects. ``stored_bytes`` includes leftovers that could not be removed.

    Objects last used before ``expire_before_ns`` are removed, and so are unpublished files of dead
    writers: those whose lock is free, or where there are no locks, those last written before
    ``dead_before_s``. With ``is_read_only`` nothing is removed. Names in ``skip`` are counted but
    are no victims. ``reason`` says why the walk is not complete: a directory that could not be
    read, or the end of the time.
    """

    io: PosixIO
    objects_fd: int
    dead_before_s: float
    expire_before_ns: int = 0
    is_read_only: bool = False
    skip: Collection[str] = ()
    objects: int = 0
    stored_bytes: int = 0
    strays: int = 0
    expired_objects: int = 0
    expired_bytes: int = 0
    temp_files_removed: int = 0
    failures: int = 0
    reason: str = ""
    victims: Victims = field(default_factory=Victims)

    @property
    def is_complete(self) -> bool:
        """Whether every directory was read."""
        return not self.reason

    def run(self, deadline: Deadline, is_stopped: Callable[[], bool] | None = None) -> None:
        """Walk all directories, until ``deadline`` or until ``is_stopped``, asked after each.

        Begins at a random one, so that walks which never end in time still reach all in the end.
        """
        leaves = self.leaves()
        turn = int.from_bytes(os.urandom(2), "little") % max(1, len(leaves))
        for leaf in leaves[turn:] + leaves[:turn]:
            self._walk_leaf(leaf)
            if deadline.is_past or (is_stopped is not None and is_stopped()):
                self.reason = "the deadline has passed" if deadline.is_past else "stopped"
                break
        self.victims.seal()

    def leaves(self) -> list[str]:
        """The directories that may hold objects, as "a/b"."""
        found = []
        for top in self._directories(self.names(".")):
            found += [f"{top}/{second}" for second in self._directories(self.names(top))]
        return found

    def _directories(self, names: list[str]) -> list[str]:
        directories = [name for name in names if name in _HEX]
        self.strays += len(names) - len(directories)
        return directories

    def names(self, path: str) -> list[str]:
        """The names in the directory ``path``, none where it is no directory or cannot be read."""
        fd = self._open(path)
        if fd is None:
            return []
        try:
            return self.io.listdir(fd)
        except OSError as error:
            self._fail(path, error)
            return []
        finally:
            self.io.close(fd)

    def _open(self, path: str) -> int | None:
        try:
            return open_directory(self.io, self.objects_fd, path)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                self.strays += 1
            elif not is_absent(error):
                self._fail(path, error)
            return None

    def _fail(self, path: str, error: OSError) -> None:
        self.failures += 1
        self.reason = f"{OBJECTS_DIR}/{path} cannot be read: {error.strerror}"

    def _walk_leaf(self, leaf: str) -> None:
        fd = self._open(leaf)
        if fd is None:
            return
        try:
            here = (OBJECTS_DIR, *leaf.split("/"))
            for name in self.io.listdir(fd):
                try:
                    self._visit(fd, leaf, here, name)
                except OSError as error:
                    self.failures += not is_absent(error)
        except OSError as error:
            self._fail(leaf, error)
        finally:
            self.io.close(fd)

    def _visit(self, fd: int, leaf: str, here: tuple[str, ...], name: str) -> None:
        found = self.io.stat(name, dir_fd=fd)
        is_file = stat.S_ISREG(found.st_mode)
        if is_file and is_temporary(name):
            self._visit_temporary(fd, name, found.st_size)
            return
        key = key_of(name)
        if not is_file or key is None or directory_of(key) != here:
            self.strays += 1
            return
        if found.st_mtime_ns < self.expire_before_ns and not self.is_read_only and self._remove(fd, name):
            self.expired_objects += 1
            self.expired_bytes += found.st_size
            return
        self.objects += 1
        self.stored_bytes += found.st_size
        if name not in self.skip:
            self.victims.add(Victim(found.st_mtime_ns, name, leaf, found.st_size))

    def _visit_temporary(self, fd: int, name: str, size_bytes: int) -> None:
        if self.is_read_only:
            return
        # For writing, because network file systems emulate the lock by one that needs it.
        temporary = self.io.open(name, os.O_RDWR, dir_fd=fd)
        try:
            if not is_dead(self.io, temporary, self.dead_before_s):
                return
            if self._remove(fd, name):
                self.temp_files_removed += 1
            else:
                self.stored_bytes += size_bytes
        finally:
            self.io.close(temporary)

    def _remove(self, fd: int, name: str) -> bool:
        try:
            self.io.unlink(name, dir_fd=fd)
        except OSError as error:
            if is_absent(error):
                raise
            self.failures += 1
            return False
        return True


@dataclass(slots=True)
class Eviction:
    """What an eviction removed, what it spared because it was used since, and what it could not
    remove."""

    objects: int = 0
    bytes: int = 0
    spared: int = 0
    failures: int = 0
    stuck: set[str] = field(default_factory=set)
    first_error: str = ""


def evict(
    io: PosixIO,
    objects_fd: int,
    victims: Victims,
    goal_bytes: int,
    deadline: Deadline,
    release: Callable[[int], None],
) -> Eviction:
    """Remove the oldest ``victims`` until ``goal_bytes`` are gone, they are, or the time is.

    ``release`` is told the bytes after every EVICTION_BATCH objects and at the end. A victim whose
    time changed since the walk was used and stays; one that cannot be removed is passed over.
    """
    done = Eviction()
    unreleased = pending = 0
    while done.bytes < goal_bytes and not deadline.is_past:
        victim = victims.pop()
        if victim is None:
            break
        n_bytes = _evict_one(io, objects_fd, victim, done)
        unreleased += n_bytes
        pending += 1
        if pending == EVICTION_BATCH:
            release(unreleased)
            unreleased = pending = 0
    if unreleased:
        release(unreleased)
    return done


def _evict_one(io: PosixIO, objects_fd: int, victim: Victim, done: Eviction) -> int:
    try:
        fd = open_directory(io, objects_fd, victim.leaf)
        try:
            found = io.stat(victim.name, dir_fd=fd)
            if found.st_mtime_ns != victim.mtime_ns or not stat.S_ISREG(found.st_mode):
                done.spared += 1
                return 0
            io.unlink(victim.name, dir_fd=fd)
        finally:
            io.close(fd)
    except OSError as error:
        if not is_absent(error):
            done.failures += 1
            done.stuck.add(victim.name)
            done.first_error = (
                done.first_error or f"{OBJECTS_DIR}/{victim.leaf}/{victim.name}: {error.strerror}"
            )
        return 0
    done.objects += 1
    done.bytes += found.st_size
    return found.st_size


def holds_no_object(io: PosixIO, objects_fd: int) -> bool:
    """Whether no directory of the store has an entry that may be an object; stops at the first."""
    walk = Walk(io, objects_fd, 0.0, is_read_only=True)
    is_found = any(not is_temporary(name) for leaf in walk.leaves() for name in walk.names(leaf))
    return not is_found and walk.is_complete


class Maintained(Protocol):
    """What :class:`Maintenance` looks after."""

    def maintain(
        self, interval_s: float, deadline: Deadline, is_stopped: Callable[[], bool]
    ) -> SweepReport | None:
        """Sweep if no process of this root did within ``interval_s``; ``None`` when one did."""
        ...


class Maintenance:
    """A daemon thread that sweeps every ``interval_s`` until it is closed.

    It pauses after every directory, for the engine's threads, and stops there when closed.
    """

    def __init__(
        self,
        account: Maintained,
        interval_s: float,
        metrics: Metrics,
        first_after_s: float | None = None,
    ) -> None:
        self._account = account
        self._interval_s = interval_s
        self._first_after_s = min(interval_s, MAINTENANCE_FIRST_S) if first_after_s is None else first_after_s
        self._metrics = metrics
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hicache-maintenance", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = CLOSE_JOIN_S) -> bool:
        """Stop the thread; ``False`` if it hangs in a system call past ``timeout_s``. Idempotent."""
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        delay = self._first_after_s
        while not self._stop.wait(delay):
            delay = self._interval_s
            try:
                self._account.maintain(
                    self._interval_s, Deadline.after(MAINTENANCE_SWEEP_S), self._pause_and_ask
                )
            except HandleError:
                return
            except OSError as error:
                self._metrics.add("file.sweep_failures")
                _LOG.warning("a sweep failed and will be tried again in %g s: %s", delay, error)

    def _pause_and_ask(self) -> bool:
        return self._stop.wait(MAINTENANCE_PAUSE_S)
