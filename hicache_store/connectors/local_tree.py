"""Directories below the root, opened step by step and kept open.

A path is walked from the root's descriptor, one name at a time and never through a symlink, so that
nothing outside the root can be reached, whatever is put below it. Descriptors are lent: one that is
in use, even by a worker stuck in hung I/O, is closed only when it is given back, because its number
would otherwise come to mean another directory.
"""

from __future__ import annotations

import os
import threading
from typing import Final

from hicache_store.connectors.local_io import DIRECTORY_MODE, PosixIO, flush_directory, is_absent
from hicache_store.errors import HandleError
from hicache_store.limits import DIRECTORIES_MAX, DIRECTORIES_MIN

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY


class Directory:
    """An open directory, lent to some users."""

    __slots__ = ("fd", "is_retired", "path", "users")

    def __init__(self, path: tuple[str, ...], fd: int) -> None:
        self.path = path
        self.fd = fd
        self.users = 0
        self.is_retired = False


class DirectoryTree:
    """The directories of one root; owns ``root_fd``. Keeps one descriptor for each path borrowed,
    which with two levels of 16 are at most 258, and fewer once the process was short of them."""

    def __init__(self, root_fd: int, io: PosixIO, syncs: bool = False) -> None:
        self._io = io
        self._syncs = syncs
        self._lock = threading.Lock()
        self._open: dict[tuple[str, ...], Directory] = {(): Directory((), root_fd)}
        self._is_closed = False
        self._keep = len(self._open) + DIRECTORIES_MAX

    def borrow(self, path: tuple[str, ...], creates: bool = False) -> Directory:
        """The directory at ``path``; give it back. ``creates`` makes what is missing, 0700.

        Raises ``OSError``: ``FileNotFoundError`` when it is missing, ``NotADirectoryError`` for a
        symlink or a file in its place; :class:`HandleError` after :meth:`close`.
        """
        found = self._lend(path)
        if found is not None:
            return found
        root = self._lend(())
        if root is None:
            raise HandleError("the store's directories are closed; open the store again")
        try:
            fd = self._descend(root.fd, path, creates)
        finally:
            self.give_back(root)
        return self._adopt(path, fd)

    def give_back(self, directory: Directory) -> None:
        """The end of a loan."""
        with self._lock:
            directory.users -= 1
            is_over = directory.is_retired and directory.users == 0
        if is_over:
            self._io.close(directory.fd)

    def is_gone(self, directory: Directory) -> bool:
        """Whether a borrowed directory was removed; then the next borrower gets a new one."""
        try:
            if self._io.fstat(directory.fd).st_nlink > 0:
                return False
        except OSError as error:
            if not is_absent(error):
                return False
        with self._lock:
            if self._open.get(directory.path) is directory and directory.path:
                del self._open[directory.path]
                directory.is_retired = True
        return True

    def shed(self) -> None:
        """Give the idle descriptors back, because the process has none left, and keep half as many from
        now on."""
        with self._lock:
            self._keep = max(DIRECTORIES_MIN, min(self._keep, len(self._open)) // 2)
            idle = [self._retire(directory) for directory in self._idle()]
        for fd in idle:
            self._io.close(fd)

    def close(self) -> None:
        """Close what is not lent now, and the rest as it is given back; idempotent."""
        with self._lock:
            self._is_closed = True
            directories, self._open = list(self._open.values()), {}
            for directory in directories:
                directory.is_retired = True
            idle = [directory.fd for directory in directories if directory.users == 0]
        for fd in idle:
            self._io.close(fd)

    def _lend(self, path: tuple[str, ...]) -> Directory | None:
        with self._lock:
            found = self._open.get(path)
            if found is not None:
                found.users += 1
            return found

    def _idle(self) -> list[Directory]:
        return [one for path, one in self._open.items() if path and one.users == 0]

    def _retire(self, directory: Directory) -> int:
        del self._open[directory.path]
        directory.is_retired = True
        return directory.fd

    def _adopt(self, path: tuple[str, ...], fd: int) -> Directory:
        """Keep a newly opened descriptor, unless another thread was faster or all is closed."""
        spare: list[int] = []
        with self._lock:
            kept = self._open.get(path)
            if kept is None and len(self._open) >= self._keep:
                spare = [self._retire(directory) for directory in self._idle()[:1]]
            if kept is None:
                kept = Directory(path, fd)
                kept.is_retired = self._is_closed
                if not self._is_closed:
                    self._open[path] = kept
            kept.users += 1
        if kept.fd != fd:
            spare.append(fd)
        for unwanted in spare:
            self._io.close(unwanted)
        return kept

    def _descend(self, root_fd: int, path: tuple[str, ...], creates: bool) -> int:
        fd = root_fd
        try:
            for name in path:
                below = self._enter(fd, name, creates)
                if fd != root_fd:
                    self._io.close(fd)
                fd = below
        except BaseException:
            if fd != root_fd:
                self._io.close(fd)
            raise
        return fd

    def _enter(self, fd: int, name: str, creates: bool) -> int:
        try:
            return self._io.open(name, _FLAGS, dir_fd=fd)
        except FileNotFoundError:
            if not creates:
                raise
        return make_directory(self._io, fd, name, self._syncs)


def make_directory(io: PosixIO, parent_fd: int, name: str, syncs: bool = False) -> int:
    """Make a directory of mode 0700, whatever the umask, or take the one there is; returns it open."""
    try:
        io.mkdir(name, dir_fd=parent_fd)
    except FileExistsError:
        return io.open(name, _FLAGS, dir_fd=parent_fd)
    fd = io.open(name, _FLAGS, dir_fd=parent_fd)
    try:
        if io.fstat(fd).st_mode & 0o7777 != DIRECTORY_MODE:
            io.chmod(fd, DIRECTORY_MODE)
        if syncs:
            flush_directory(io, parent_fd)
    except BaseException:
        io.close(fd)
        raise
    return fd
