"""An attached root: from keys to files, and what is known of the file system below it."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar

from hicache_store.clock import Clock
from hicache_store.connectors.base import META_PREFIX, Outcome, Status
from hicache_store.connectors.batch import failure
from hicache_store.connectors.local_io import PosixIO, is_absent
from hicache_store.connectors.local_names import directory_of, file_name
from hicache_store.connectors.local_publish import Publisher, Syncs, is_full, probe_method
from hicache_store.connectors.local_transfer import BufferedMover, Mover
from hicache_store.connectors.local_tree import DirectoryTree
from hicache_store.errors import HandleError, NameFormatError
from hicache_store.metrics import Metrics

T = TypeVar("T")
Place: TypeAlias = tuple[tuple[str, ...], str]
"""(directories from the root, file name)."""

NANO: Final = 1_000_000_000
PROBE_DIRECTORY: Final = ("objects", "0", "0")
"""Where the file system is tried out: a directory that a sweep looks through."""


class NotAFileError(OSError):
    """Something else than a regular file has the name of an object."""


class StorageClock:
    """The wall time of the storage, by which all ages are judged."""

    def __init__(self, clock: Clock, offset_s: float = 0.0) -> None:
        self._clock = clock
        self.offset_s = offset_s

    def now_s(self) -> float:
        """Seconds since the epoch as the storage counts them."""
        return self._clock.time() + self.offset_s

    def second(self) -> int:
        """The whole second. One call takes it once, or a chain could be torn apart at a boundary."""
        return int(self.now_s())


def used_at_ns(second: int, depth: int) -> int:
    """The time of an object last used in ``second``: within it, the deepest page is the oldest."""
    return second * NANO + NANO - 1 - min(max(depth, 0), NANO - 1)


def version_of(found: os.stat_result) -> str:
    """The version of an object: its inode, time of use and time of change, in hexadecimal.

    The time of use has whole seconds and a depth, and inodes are reused: only the time of change
    tells a removed object from the one written in its place within the same second.
    """
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_ctime_ns:x}"


class Root:
    """What every operation needs: system calls, directories, clock, counters and the way to publish."""

    def __init__(
        self, io: PosixIO, tree: DirectoryTree, clock: StorageClock, ttl_s: float | None, metrics: Metrics
    ) -> None:
        self.io = io
        self.tree = tree
        self.clock = clock
        self.metrics = metrics
        self.mover: Mover = BufferedMover(io)
        self.is_local = True
        self.is_read_only = False
        self.keeps_order = False
        self.syncs: Syncs = "nothing"
        self._ttl_s = ttl_s
        self._publisher: Publisher | None = None
        self._probing = threading.Lock()

    def publisher(self) -> Publisher:
        """The best way to publish here, found out once; raises the ``OSError`` of a full disk."""
        if self._publisher is None:
            with self._probing:
                if self._publisher is None:
                    method = self.within(PROBE_DIRECTORY, lambda fd: probe_method(self.io, fd), creates=True)
                    self._publisher = Publisher(self.io, method, self.syncs)
        return self._publisher

    @property
    def creates_only(self) -> bool:
        """Whether the first complete object of a name stays, as far as that was found out."""
        return self._publisher is not None and self._publisher.creates_only

    def within(self, path: tuple[str, ...], action: Callable[[int], T], creates: bool = False) -> T:
        """Run ``action`` on the descriptor of a directory; again if it had been removed behind us."""
        for is_last in (False, True):
            directory = self.tree.borrow(path, creates)
            try:
                return action(directory.fd)
            except OSError as error:
                if is_last or not is_absent(error) or not self.tree.is_gone(directory):
                    raise
            finally:
                self.tree.give_back(directory)
        raise AssertionError("the second turn returns or raises")

    def look(self, place: Place) -> os.stat_result | None:
        """The file of an object, ``None`` when there is none; raises ``OSError`` otherwise."""
        path, name = place
        try:
            found = self.within(path, lambda fd: self.io.stat(name, dir_fd=fd))
        except OSError as error:
            if is_absent(error):
                return None
            raise
        require_file(found, name)
        return found

    def is_expired(self, key: str, found: os.stat_result) -> bool:
        """Whether the object was not used for its time to live and counts as absent."""
        if self._ttl_s is None or key.startswith(META_PREFIX):
            return False
        return found.st_mtime_ns < (self.clock.now_s() - self._ttl_s) * NANO

    def guarded(self, what: str, action: Callable[[], T]) -> T | Outcome:
        """Run ``action`` for one item; whatever it raises fails this item and is counted."""
        try:
            return action()
        except NameFormatError as error:
            return Outcome(Status.FAILED, str(error))
        except HandleError:
            return Outcome(Status.FAILED, "the store was closed meanwhile")
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.tree.shed()
                self.metrics.add("file.no_descriptors")
            self.metrics.add("file.no_space" if is_full(error) else f"file.{what}_failed")
            return Outcome(Status.FAILED, f"{what}: {error}")
        except Exception as error:
            self.metrics.add(f"file.{what}_failed")
            return failure(error)


def place_of(key: str) -> Place:
    """Where the file of ``key`` lies; raises :class:`NameFormatError`."""
    name = file_name(key)
    return directory_of(key), name


def require_file(found: os.stat_result, name: str) -> None:
    """Raise :class:`NotAFileError` unless ``found`` is a regular file."""
    if not stat.S_ISREG(found.st_mode):
        raise NotAFileError(f"{name} is not a regular file but of mode {found.st_mode:o}")
