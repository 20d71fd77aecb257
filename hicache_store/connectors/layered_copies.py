"""Own copies of objects: taken as they pass by, and delivered to targets."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_store.connectors.base import Outcome, Part, Read, Source, Status, Target
from hicache_store.connectors.batch import failure
from hicache_store.connectors.local_transfer import gather, scatter


def deliver(read: Read, data: bytearray, version: str | None = None) -> Outcome:
    """Take a target through its protocol with the bytes of the whole object."""
    if len(data) != read.size_bytes:
        return Outcome(Status.WRONG_SIZE, f"there are {len(data)} bytes, not {read.size_bytes}", version)
    memory = memoryview(data)
    try:
        try:
            for offset, views in read.target.parts():
                stop = offset + sum(view.nbytes for view in views)
                if offset < 0 or stop > len(memory):
                    raise ValueError(f"bytes {offset} to {stop} do not lie in an object of {len(memory)}")
                scatter(memory[offset:stop], views)
            complaint = read.target.check()
        finally:
            read.target.release()
    except Exception as error:
        return failure(error)
    if complaint is not None:
        return Outcome(Status.REJECTED, complaint, version)
    return Outcome(Status.OK, version=version)


def joined(views: Sequence[memoryview], size_bytes: int) -> bytearray | None:
    """A copy of ``views``, one after the other; ``None`` when they are not ``size_bytes`` long."""
    if sum(view.nbytes for view in views) != size_bytes:
        return None
    memory = bytearray(size_bytes)
    gather(views, memoryview(memory))
    return memory


class CapturingTarget:
    """A target whose bytes are copied when they are the whole object and were found good."""

    def __init__(self, inner: Target, size_bytes: int) -> None:
        self.data: bytearray | None = None
        self._inner = inner
        self._size_bytes = size_bytes
        self._parts: Sequence[Part] = ()

    def parts(self) -> Sequence[Part]:
        """The inner target's; what an earlier try captured is forgotten."""
        self.data = None
        self._parts = self._inner.parts()
        return self._parts

    def check(self) -> str | None:
        """The inner target's word."""
        complaint = self._inner.check()
        if complaint is None:
            ordered = sorted(self._parts, key=lambda part: part[0])
            views: list[memoryview] = []
            position = 0
            for offset, some in ordered:
                if offset != position:
                    return None
                views += some
                position += sum(view.nbytes for view in some)
            self.data = joined(views, self._size_bytes)
        return complaint

    def release(self) -> None:
        """Give the parts back."""
        self._parts = ()
        self._inner.release()


class CapturingSource:
    """A source whose bytes are copied when they are asked for."""

    def __init__(self, inner: Source, size_bytes: int) -> None:
        self.data: bytearray | None = None
        self._inner = inner
        self._size_bytes = size_bytes

    def buffers(self) -> Sequence[memoryview]:
        """The inner source's; what an earlier try captured is forgotten."""
        self.data = None
        views = self._inner.buffers()
        self.data = joined(views, self._size_bytes)
        return views

    def release(self) -> None:
        """Give the buffers back."""
        self._inner.release()
