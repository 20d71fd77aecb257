"""A store's root for the tests of its accounting: objects put by hand, faults by system call."""

from __future__ import annotations

import errno
import os
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hicache_store.clock import Clock, Deadline
from hicache_store.connectors.local_account import Account, open_account
from hicache_store.connectors.local_io import PosixIO
from hicache_store.connectors.local_names import directory_of, file_name
from hicache_store.metrics import Metrics
from hicache_store.testing.clocks import FakeClock

NANO = 1_000_000_000
START_S = 1_700_000_000
SIZE = 1000


class FaultyIO(PosixIO):
    """Counts its calls; ``fail_unlink`` and ``fail_open`` say which names fail, and how."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.fail_unlink: Callable[[str], int | None] = lambda name: None
        self.fail_open: Callable[[str, int], int | None] = lambda name, flags: None
        self.flock_errno: int | None = None
        self.free_bytes: Callable[[], int] | None = None
        self.size_bytes = 1000 * SIZE
        self.before_unlink: Callable[[str], None] = lambda name: None

    def open(self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        _raise(self.fail_open(name, flags), name)
        return super().open(name, flags, mode, dir_fd=dir_fd)

    def mkdir(self, name: str, *, dir_fd: int) -> None:
        _raise(self.fail_open(name, os.O_CREAT), name)
        super().mkdir(name, dir_fd=dir_fd)

    def stat(self, name: str, *, dir_fd: int) -> os.stat_result:
        self.calls["stat"] += 1
        return super().stat(name, dir_fd=dir_fd)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        self.before_unlink(name)
        self.calls["unlink"] += 1
        _raise(self.fail_unlink(name), name)
        super().unlink(name, dir_fd=dir_fd)

    def flock(self, fd: int) -> None:
        _raise(self.flock_errno, "flock")
        super().flock(fd)

    def statvfs(self, fd: int) -> os.statvfs_result:
        if self.free_bytes is None:
            return super().statvfs(fd)
        free, size = self.free_bytes(), self.size_bytes
        return os.statvfs_result((1, 1, size, free, free, 0, 0, 0, 0, 255))


def _raise(code: int | None, what: str) -> None:
    if code == errno.EAGAIN:
        raise BlockingIOError(code, what)
    if code is not None:
        raise OSError(code, os.strerror(code), what)


class Place:
    """One root, and everything that was opened on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "objects").mkdir(parents=True)
        self.clock = FakeClock(time_s=START_S)
        self.io = FaultyIO()
        self.metrics = Metrics()
        self.offset_s = 0.0
        self._accounts: list[Account] = []

    def open(
        self,
        quota: int | None = 10 * SIZE,
        min_free: int | None = 0,
        ttl_s: float | None = None,
        clock: Clock | None = None,
    ) -> Account:
        root, objects = os.open(self.path, os.O_RDONLY), os.open(self.path / "objects", os.O_RDONLY)
        try:
            account = open_account(
                root,
                objects,
                quota_bytes=quota,
                min_free_bytes=min_free,
                ttl_s=ttl_s,
                clock_offset_s=lambda: self.offset_s,
                io=self.io,
                metrics=self.metrics,
                clock=clock or self.clock,
            )
        finally:
            os.close(root)
            os.close(objects)
        self._accounts.append(account)
        return account

    def close(self) -> None:
        for account in self._accounts:
            account.close()

    def file(self, key: str) -> Path:
        return self.path.joinpath(*directory_of(key), file_name(key))

    def put(self, key: str, age_s: int = 0, depth: int = 0, size: int = SIZE) -> Path:
        """An object last used ``age_s`` before START_S, past all accounting."""
        path = self.file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0" * size)
        used_ns = (START_S - age_s) * NANO + NANO - 1 - depth
        os.utime(path, ns=(used_ns, used_ns))
        return path

    def write(self, account: Account, keys: list[str], age_s: int = 0, size: int = SIZE) -> int:
        """One accounted batch; the number of objects stored."""
        reservation = account.reserve([size] * len(keys), later())
        for depth, key in enumerate(keys[: reservation.granted]):
            self.put(key, age_s, depth, size)
        account.settle(reservation, reservation.granted * size)
        return reservation.granted

    def stored(self) -> set[str]:
        """The file names of everything below ``objects``."""
        return {path.name for path in (self.path / "objects").rglob("*") if path.is_file()}

    def bytes_on_disk(self) -> int:
        """What an independent walk finds."""
        return sum(
            os.lstat(os.path.join(where, name)).st_size
            for where, _, names in os.walk(self.path / "objects")
            for name in names
        )


def later() -> Deadline:
    return Deadline.after(60.0)


def keys(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{index}" for index in range(count)]


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid


def wait_for(pid: int) -> int:
    """The exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def writer_files(place: Place) -> list[str]:
    return os.listdir(place.path / "account" / "writers")
