"""Reading one object of the file connector, into the caller's memory or by way of private memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from hicache_store.connectors.base import ABSENT, TIMED_OUT, Outcome, Part, Read, Status
from hicache_store.connectors.batch import Claim
from hicache_store.connectors.local_io import is_absent
from hicache_store.connectors.local_root import Place, Root, place_of, require_file, version_of
from hicache_store.connectors.local_transfer import Scratch, scatter

_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK  # a FIFO in place of an object must not block the open


class Reader:
    """The step of a batch of reads.

    ``bounces``: the ranges of the read are fetched into memory of the worker, and only a claimed
    item's parts are asked for and filled. Otherwise the parts are read straight into place.
    """

    def __init__(self, root: Root, bounces: bool) -> None:
        self._root = root
        self._land = self._land_from_scratch if bounces else self._land_in_place
        self._scratch = Scratch()

    def __call__(self, read: Read, claim: Claim) -> Outcome:
        """Read one object; nothing is raised."""
        return self._root.guarded("read", lambda: self._read(read, place_of(read.key), claim))

    def _read(self, read: Read, place: Place, claim: Claim) -> Outcome:
        root = self._root
        fd = self._open(place)
        if fd is None:
            return ABSENT
        try:
            found = root.io.fstat(fd)
            require_file(found, place[1])
            if root.is_expired(read.key, found):
                return ABSENT
            if found.st_size != read.size_bytes:
                detail = f"there are {found.st_size} bytes, not {read.size_bytes}"
                return Outcome(Status.WRONG_SIZE, detail, version_of(found))
            if claim.is_cancelled():
                return TIMED_OUT
            return self._land(read, fd, version_of(found), claim)
        finally:
            root.io.close(fd)

    def _open(self, place: Place) -> int | None:
        root = self._root
        path, name = place
        flags = _FLAGS | root.mover.open_flags
        try:
            return root.within(path, lambda directory: root.io.open(name, flags, dir_fd=directory))
        except OSError as error:
            if is_absent(error):
                return None
            raise

    def _land_in_place(self, read: Read, fd: int, version: str, claim: Claim) -> Outcome:
        target = read.target
        try:
            for offset, views in target.parts():
                wanted = _checked_bytes(offset, views, read.size_bytes)
                landed = self._root.mover.read(fd, offset, views, claim.is_cancelled)
                if landed != wanted:
                    return self._fell_short(offset + landed, version, claim)
            return _judged(target.check(), version)
        finally:
            target.release()

    def _land_from_scratch(self, read: Read, fd: int, version: str, claim: Claim) -> Outcome:
        fetched = read.fetched
        memory = self._scratch.take(sum(stop - start for start, stop in fetched))
        at = 0
        for start, stop in fetched:
            piece = memory[at : at + stop - start]
            landed = self._root.mover.read(fd, start, [piece], claim.is_cancelled)
            if landed != len(piece):
                return self._fell_short(start + landed, version, claim)
            at += len(piece)
        if not claim.enter():
            return TIMED_OUT
        try:
            return _deliver(read, memory, version)
        finally:
            claim.leave()

    def _fell_short(self, position: int, version: str, claim: Claim) -> Outcome:
        if claim.is_cancelled():
            return TIMED_OUT
        self._root.metrics.add("file.read_short")
        return Outcome(Status.FAILED, f"the file ended at byte {position} while it was read", version)


def _deliver(read: Read, memory: memoryview, version: str) -> Outcome:
    target = read.target
    try:
        parts: Sequence[Part] = target.parts()
        for offset, views in parts:
            wanted = _checked_bytes(offset, views, read.size_bytes)
            scatter(_within(read.fetched, memory, offset, offset + wanted), views)
        return _judged(target.check(), version)
    finally:
        target.release()


def _within(fetched: Sequence[tuple[int, int]], memory: memoryview, start: int, stop: int) -> memoryview:
    """Bytes ``start .. stop`` of the object out of its fetched ranges, which lie packed in ``memory``."""
    at = 0
    for first, last in fetched:
        if first <= start and stop <= last:
            return memory[at + start - first : at + stop - first]
        at += last - first
    raise ValueError(f"bytes {start} to {stop} were not among the ranges of the read")


def _checked_bytes(offset: int, views: Sequence[memoryview], size_bytes: int) -> int:
    wanted = sum(view.nbytes for view in views)
    if offset < 0 or offset + wanted > size_bytes:
        raise ValueError(f"bytes {offset} to {offset + wanted} do not lie in an object of {size_bytes}")
    return wanted


def _judged(complaint: str | None, version: str) -> Outcome:
    if complaint is not None:
        return Outcome(Status.REJECTED, complaint, version)
    return Outcome(Status.OK, version=version)
