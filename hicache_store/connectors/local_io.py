"""The system calls of the file connector, replaceable, and transfers made of them.

Everything below a store's root goes through one :class:`PosixIO`, so that tests can make any call
fail, fall short or hang.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np

from hicache_store.limits import IO_PIECE_BYTES, IO_TAIL_BYTES

IOV_MAX: Final = int(os.sysconf("SC_IOV_MAX"))
"""Most buffers one ``preadv`` or ``pwritev`` takes."""

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700

_STATFS_BYTES = 256
"""More than any ``struct statfs``."""


class PosixIO:
    """One method per system call. Names are relative to ``dir_fd``; no call follows a symlink."""

    def open(self, name: str, flags: int, mode: int = FILE_MODE, *, dir_fd: int | None = None) -> int:
        """``openat`` with O_CLOEXEC and O_NOFOLLOW."""
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        """``close``."""
        os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """``fstat``."""
        return os.fstat(fd)

    def stat(self, name: str, *, dir_fd: int) -> os.stat_result:
        """``fstatat`` of the name itself."""
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """``preadv``: bytes read, fewer than asked for at the end of the file or by bad luck."""
        return os.preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """``pwritev``: bytes written, possibly fewer than given."""
        return os.pwritev(fd, views, offset)

    def truncate(self, fd: int, size_bytes: int) -> None:
        """``ftruncate``."""
        os.ftruncate(fd, size_bytes)

    def fsync(self, fd: int) -> None:
        """``fsync``, of a file or of a directory."""
        os.fsync(fd)

    def chmod(self, fd: int, mode: int) -> None:
        """``fchmod``."""
        os.fchmod(fd, mode)

    def mkdir(self, name: str, *, dir_fd: int) -> None:
        """``mkdirat`` for the owner only."""
        os.mkdir(name, DIRECTORY_MODE, dir_fd=dir_fd)

    def link(self, name: str, new_name: str, *, dir_fd: int) -> None:
        """``linkat`` within one directory; an existing ``new_name`` is an error."""
        os.link(name, new_name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)

    def link_fd(self, fd: int, name: str, *, dir_fd: int) -> None:
        """Give the open file ``fd`` a name, as O_TMPFILE files need; an existing one is an error."""
        os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=dir_fd, follow_symlinks=True)

    def rename(self, name: str, new_name: str, *, dir_fd: int) -> None:
        """``renameat`` within one directory, over whatever is there."""
        os.rename(name, new_name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        """``unlinkat``."""
        os.unlink(name, dir_fd=dir_fd)

    def utime(self, name: str, mtime_ns: int, *, dir_fd: int) -> None:
        """``utimensat`` of the name itself: both times to ``mtime_ns``."""
        os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=dir_fd, follow_symlinks=False)

    def utime_fd(self, fd: int, mtime_ns: int | None) -> None:
        """``futimens``: both times to ``mtime_ns``, or to the storage's own now."""
        if mtime_ns is None:
            os.utime(fd)
        else:
            os.utime(fd, ns=(mtime_ns, mtime_ns))

    def flock(self, fd: int) -> None:
        """Take the exclusive lock of the open file without waiting; ``BlockingIOError`` if taken."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def listdir(self, fd: int) -> list[str]:
        """The names in a directory, unordered, without the two dots."""
        return os.listdir(fd)

    def statvfs(self, fd: int) -> os.statvfs_result:
        """``fstatvfs``: the free space of the file system."""
        return os.statvfs(fd)

    def filesystem_type(self, fd: int) -> int:
        """The ``f_type`` of ``fstatfs``."""
        libc = ctypes.CDLL(None, use_errno=True)
        buffer = ctypes.create_string_buffer(_STATFS_BYTES)
        if libc.fstatfs(fd, buffer) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return ctypes.c_long.from_buffer(buffer).value


def flush_directory(io: PosixIO, fd: int) -> None:
    """Put the names of a directory on the disk; raises an ``OSError`` that names the option at fault."""
    try:
        io.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        words = "this file system cannot flush a directory, as fsync=1 asks; leave the option out"
        raise OSError(error.errno, words) from None


def as_bytes(view: memoryview) -> memoryview:
    """``view``, of any format and shape but not empty, as plain bytes; it must be contiguous.

    Raises ``ValueError`` when it is not: a copy would take what belongs in place.
    """
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    return np.frombuffer(view, np.uint8).data


class _VectorCall(Protocol):
    def __call__(self, fd: int, views: Sequence[memoryview], offset: int, /) -> int: ...


def pieces(views: Sequence[memoryview]) -> Iterator[tuple[list[memoryview], int]]:
    """``views`` cut into vectors of at most IO_PIECE_BYTES and IOV_MAX buffers, with their bytes.

    All of them are one vector when they exceed the piece by at most IO_TAIL_BYTES.
    """
    total = sum(view.nbytes for view in views)
    if 0 < total <= IO_PIECE_BYTES + IO_TAIL_BYTES and len(views) <= IOV_MAX:
        yield [as_bytes(view) for view in views if view.nbytes], total
        return
    vector: list[memoryview] = []
    room = IO_PIECE_BYTES
    for view in views:
        size = view.nbytes
        if size == 0:
            continue
        flat = as_bytes(view)
        start = 0
        while start < size:
            take = min(room, size - start)
            vector.append(flat if take == size else flat[start : start + take])
            start += take
            room -= take
            if room == 0 or len(vector) == IOV_MAX:
                yield vector, IO_PIECE_BYTES - room
                vector, room = [], IO_PIECE_BYTES
    if vector:
        yield vector, IO_PIECE_BYTES - room


def transfer(
    call: _VectorCall,
    fd: int,
    views: Sequence[memoryview],
    offset: int,
    is_stopped: Callable[[], bool],
) -> int:
    """Move all of ``views`` at ``offset`` by ``call``; returns the bytes moved.

    Fewer than the views hold means the end of the file, no progress, or ``is_stopped``, which is
    asked before every system call. Short transfers go on where they ended.
    """
    moved = 0
    for piece, size in pieces(views):
        vector, left = piece, size
        while left:
            if is_stopped():
                return moved
            try:
                count = call(fd, vector, offset + moved)
            except InterruptedError:
                continue
            if count <= 0:
                return moved
            moved += count
            left -= count
            if left:
                vector = _after(vector, count)
    return moved


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """``views`` without their first ``count`` bytes, of which they hold more."""
    index = 0
    while count >= views[index].nbytes:
        count -= views[index].nbytes
        index += 1
    return [views[index][count:], *views[index + 1 :]]


def is_absent(error: OSError) -> bool:
    """Whether the error says that the name, or a directory on the way to it, is not there."""
    return error.errno in (errno.ENOENT, errno.ESTALE)
