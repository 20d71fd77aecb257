"""The items of one S3 call: what became of each, and who may touch the caller's memory.

A landing thread touches it only between :meth:`Batch.enter` and :meth:`Batch.leave`. Once
:meth:`Batch.finish` was called nobody enters any more, and when :meth:`Batch.wait_until_left` returned
nobody is inside: the call may return, whatever requests are still on their way.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from hicache_store.clock import Deadline
from hicache_store.connectors.base import TIMED_OUT, Outcome, Read, Status, Write
from hicache_store.connectors.batch import failure
from hicache_store.connectors.local_transfer import gather, scatter
from hicache_store.connectors.s3_plane import Body


class Batch:
    """The outcomes of one call, first all TIMED_OUT."""

    def __init__(self, count: int, deadline: Deadline) -> None:
        self.deadline = deadline
        self.outcomes: list[Outcome] = [TIMED_OUT] * count
        self._entered = 0
        self._is_over = False
        self._is_done = False
        self._changed = threading.Condition()

    @property
    def is_late(self) -> bool:
        """Whether nothing more should be started."""
        return self._is_over or self.deadline.is_past

    def enter(self) -> bool:
        """Before touching the caller's memory; ``False`` means the item is lost: touch nothing."""
        with self._changed:
            if self.is_late:
                return False
            self._entered += 1
            return True

    def leave(self) -> None:
        """After the last touch of the caller's memory."""
        with self._changed:
            self._entered -= 1
            if self._entered == 0:
                self._changed.notify_all()

    def record(self, index: int, outcome: Outcome) -> None:
        """Take an outcome, unless the call is over and nobody waits inside for it."""
        with self._changed:
            if not self._is_over or self._entered:
                self.outcomes[index] = outcome

    def done(self) -> None:
        """Nothing more will be recorded: wake the caller."""
        with self._changed:
            self._is_done = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Until everything is done or the deadline has passed."""
        with self._changed:
            while not self._is_done:
                left_s = self.deadline.remaining_s()
                if left_s <= 0.0:
                    return
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))

    def finish(self) -> None:
        """Let nobody enter any more."""
        with self._changed:
            self._is_over = True

    def wait_until_left(self) -> None:
        """Until nobody is in the caller's memory, whatever interrupts the wait."""
        interruption: BaseException | None = None
        while True:
            try:
                with self._changed:
                    while self._entered:
                        self._changed.wait()
                break
            except BaseException as error:
                interruption = error
        if interruption is not None:
            raise interruption

    @property
    def is_inside(self) -> bool:
        """Whether a landing thread is in the caller's memory."""
        with self._changed:
            return self._entered > 0


class Buffers:
    """Memory for bodies of PUTs, given out again warm. At most ``keep_bytes`` lie idle.

    Only memory that no request can still read may be given back.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._idle: dict[int, list[memoryview]] = {}
        self._idle_bytes = 0
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> memoryview:
        """Memory of exactly ``size_bytes``, with any content."""
        with self._lock:
            idle = self._idle.get(size_bytes)
            if idle:
                self._idle_bytes -= size_bytes
                return idle.pop()
        return np.empty(size_bytes, np.uint8).data

    def give_back(self, memory: memoryview) -> None:
        """Keep ``memory`` for the next body of its size."""
        with self._lock:
            if self._idle_bytes + len(memory) > self._keep_bytes:
                self._idle.clear()  # sizes that are no longer written must not fill it for ever
                self._idle_bytes = 0
            if len(memory) <= self._keep_bytes:
                self._idle.setdefault(len(memory), []).append(memory)
                self._idle_bytes += len(memory)


def deliver(read: Read, bodies: Sequence[Body], batch: Batch, index: int) -> None:
    """Copy what was fetched, range by range of ``read.fetched``, into the target, and record it."""
    if not batch.enter():
        return
    try:
        batch.record(index, _delivered(read, bodies))
    finally:
        batch.leave()


def collect(write: Write, batch: Batch, buffers: Buffers) -> memoryview | Outcome:
    """The bytes of a source in memory of our own, or why there are none."""
    if not batch.enter():
        return TIMED_OUT
    try:
        return _collected(write, buffers)
    except Exception as error:
        return failure(error)
    finally:
        batch.leave()


def _delivered(read: Read, bodies: Sequence[Body]) -> Outcome:
    version = bodies[0].version if bodies else None
    try:
        target = read.target
        try:
            for offset, views in target.parts():
                stop = offset + sum(view.nbytes for view in views)
                scatter(_within(read, bodies, offset, stop), views)
            complaint = target.check()
        finally:
            target.release()
    except Exception as error:
        return Outcome(Status.FAILED, failure(error).detail, version)
    if complaint is not None:
        return Outcome(Status.REJECTED, complaint, version)
    return Outcome(Status.OK, version=version)


def _within(read: Read, bodies: Sequence[Body], start: int, stop: int) -> memoryview:
    """Bytes ``start .. stop`` of the object."""
    if start < 0 or stop > read.size_bytes:
        raise ValueError(f"bytes {start} to {stop} do not lie in an object of {read.size_bytes}")
    if start == stop:
        return memoryview(b"")
    for (first, last), body in zip(read.fetched, bodies, strict=True):
        if first <= start and stop <= last:
            return body.data[start - first : stop - first]
    raise ValueError(f"bytes {start} to {stop} were not among the ranges of the read")


def _collected(write: Write, buffers: Buffers) -> memoryview:
    try:
        views = write.source.buffers()
        given = sum(view.nbytes for view in views)
        if given != write.size_bytes:
            raise ValueError(f"the source gave {given} bytes, not {write.size_bytes}")
        memory = buffers.take(given)
        gather(views, memory)
        return memory
    finally:
        write.source.release()
