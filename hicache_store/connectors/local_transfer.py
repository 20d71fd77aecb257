"""Bytes between an open file and memory: through the page cache, or past it with O_DIRECT."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np

from hicache_store.connectors.local_io import PosixIO, as_bytes, transfer
from hicache_store.connectors.local_publish import Publisher
from hicache_store.limits import IO_PIECE_BYTES, SCRATCH_KEEP_BYTES

ALIGNMENT: Final = 4096
"""What O_DIRECT asks of address, offset and length: the largest logical block of disks in use."""

O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)

IsStopped: TypeAlias = Callable[[], bool]


class Mover(Protocol):
    """Moves whole ranges; fewer bytes moved than asked for mean the end of the file or a stop."""

    open_flags: int
    alignment_bytes: int

    def read(self, fd: int, offset: int, views: Sequence[memoryview], is_stopped: IsStopped) -> int:
        """Fill ``views`` from ``offset`` on; returns the bytes that landed."""
        ...

    def write(self, fd: int, views: Sequence[memoryview], is_stopped: IsStopped) -> int:
        """Write ``views`` from the start of the empty file; returns the bytes of them written."""
        ...


class BufferedMover:
    """``preadv`` and ``pwritev`` straight into and from the views."""

    open_flags = 0
    alignment_bytes = 1

    def __init__(self, io: PosixIO) -> None:
        self._io = io

    def read(self, fd: int, offset: int, views: Sequence[memoryview], is_stopped: IsStopped) -> int:
        """Fill ``views`` from ``offset`` on."""
        return transfer(self._io.preadv, fd, views, offset, is_stopped)

    def write(self, fd: int, views: Sequence[memoryview], is_stopped: IsStopped) -> int:
        """Write ``views`` from the start."""
        return transfer(self._io.pwritev, fd, views, 0, is_stopped)


class DirectMover:
    """O_DIRECT: in place where addresses and lengths allow it, else through an aligned piece."""

    open_flags = O_DIRECT
    alignment_bytes = ALIGNMENT

    def __init__(self, io: PosixIO) -> None:
        self._io = io
        self._scratch = Scratch()

    def read(self, fd: int, offset: int, views: Sequence[memoryview], is_stopped: IsStopped) -> int:
        """Fill ``views`` from ``offset`` on."""
        if offset % ALIGNMENT == 0 and are_aligned(views):
            return transfer(self._io.preadv, fd, views, offset, is_stopped)
        memory = self._scratch.take(IO_PIECE_BYTES)
        sink = _Cursor(views)
        stop = offset + sink.size_bytes
        position = offset
        while position < stop:
            base = position - position % ALIGNMENT
            wanted = min(stop - base, IO_PIECE_BYTES)
            landed = self._read_piece(fd, memory[: _round_up(wanted)], base, wanted, is_stopped)
            sink.put(memory[position - base : min(landed, wanted)])
            if landed < wanted:
                return max(0, base + landed - offset)
            position = base + wanted
        return sink.size_bytes

    def write(self, fd: int, views: Sequence[memoryview], is_stopped: IsStopped) -> int:
        """Write ``views`` from the start; a padded tail is cut off again."""
        if are_aligned(views):
            return transfer(self._io.pwritev, fd, views, 0, is_stopped)
        memory = self._scratch.take(IO_PIECE_BYTES)
        source = _Cursor(views)
        done = 0
        while done < source.size_bytes:
            count = source.get(memory)
            padded = memory[: _round_up(count)]
            padded[count:] = bytes(len(padded) - count)
            written = transfer(self._io.pwritev, fd, [padded], done, is_stopped)
            if written < len(padded):
                return done + min(written, count)
            done += count
        if done % ALIGNMENT:
            self._io.truncate(fd, done)
        return done

    def _read_piece(self, fd: int, memory: memoryview, base: int, wanted: int, is_stopped: IsStopped) -> int:
        landed = 0
        while landed < wanted and not is_stopped():
            count = self._io.preadv(fd, [memory[landed:]], base + landed)
            if count <= 0:
                break
            landed += count
        return landed


class Scratch:
    """Page-aligned memory of the calling thread, reused from item to item."""

    def __init__(self) -> None:
        self._local = threading.local()

    def take(self, size_bytes: int) -> memoryview:
        """At least ``size_bytes``, rounded up to ALIGNMENT; the thread's last one is void then."""
        wanted = max(ALIGNMENT, _round_up(size_bytes))
        kept: memoryview | None = getattr(self._local, "memory", None)
        if kept is not None and len(kept) >= wanted:
            return kept[:wanted]
        memory = memoryview(mmap.mmap(-1, wanted))
        if wanted <= SCRATCH_KEEP_BYTES:
            self._local.memory = memory
        return memory


def copy(target: memoryview, source: memoryview) -> None:
    """Copy equal numbers of bytes, without the GIL; ``ValueError`` when ``target`` is read-only."""
    if target.nbytes:
        np.copyto(np.frombuffer(as_bytes(target), np.uint8), np.frombuffer(source, np.uint8))


def scatter(memory: memoryview, views: Sequence[memoryview]) -> None:
    """Fill ``views``, one after the other, from ``memory``, which is at least as long."""
    start = 0
    for view in views:
        copy(view, memory[start : start + view.nbytes])
        start += view.nbytes


def gather(views: Sequence[memoryview], memory: memoryview) -> None:
    """Lay ``views`` one after the other into ``memory``, which is at least as long."""
    start = 0
    for view in views:
        if view.nbytes:
            copy(memory[start : start + view.nbytes], as_bytes(view))
        start += view.nbytes


def are_aligned(views: Sequence[memoryview]) -> bool:
    """Whether O_DIRECT takes all of ``views`` as they are."""
    for view in views:
        if view.nbytes % ALIGNMENT:
            return False
        if view.nbytes and np.frombuffer(view, np.uint8).__array_interface__["data"][0] % ALIGNMENT:
            return False
    return True


def takes_direct_io(io: PosixIO, publisher: Publisher, directory_fd: int) -> bool:
    """Whether the file system of a directory writes and reads with O_DIRECT; leaves nothing there.

    Raises ``OSError`` for failures that have other causes.
    """
    if not O_DIRECT:
        return False
    memory = Scratch().take(ALIGNMENT)
    try:
        draft = publisher.draft(directory_fd, O_DIRECT)
        try:
            written = io.pwritev(draft.fd, [memory], 0)
            return written == io.preadv(draft.fd, [memory], 0) == ALIGNMENT
        finally:
            publisher.discard(draft)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


class _Cursor:
    """A place in a list of views, moved on by what is put there or taken from there."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [as_bytes(view) for view in views if view.nbytes]
        self.size_bytes = sum(view.nbytes for view in self._views)
        self._index = 0
        self._start = 0

    def put(self, data: memoryview) -> None:
        """Copy ``data`` here."""
        done = 0
        while done < len(data):
            view = self._next(len(data) - done)
            copy(view, data[done : done + len(view)])
            done += len(view)

    def get(self, memory: memoryview) -> int:
        """Copy what comes next into ``memory``, as much as fits; returns its bytes."""
        done = 0
        while done < len(memory) and self._index < len(self._views):
            view = self._next(len(memory) - done)
            copy(memory[done : done + len(view)], view)
            done += len(view)
        return done

    def _next(self, most: int) -> memoryview:
        view = self._views[self._index]
        piece = view[self._start : self._start + most]
        self._start += len(piece)
        if self._start == len(view):
            self._index, self._start = self._index + 1, 0
        return piece
