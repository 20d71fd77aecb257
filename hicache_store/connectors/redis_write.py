"""Writing values: sent ahead on each connection straight from the caller's memory, replies read behind.

Creating is SET NX, followed by STRLEN in the same request, which tells an equal object from another one.
A source is given back as soon as its bytes were handed to the kernel, so a write that the server then
sends elsewhere, or whose connection breaks, has failed and is not tried again.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from hicache_store.clock import Deadline
from hicache_store.connectors.base import META_PREFIX, Outcome, Status, Write
from hicache_store.connectors.batch import Claim, failure
from hicache_store.connectors.local_io import as_bytes
from hicache_store.connectors.redis_compare import EXEC, MULTI, UNWATCH, compare, took_place
from hicache_store.connectors.redis_rounds import ASKING, Lane, Redo, outcome_of
from hicache_store.connectors.redis_wire import (
    VERSION_BYTES,
    ErrorReply,
    Head,
    ProtocolError,
    Wire,
    command,
    lengths_differ,
)
from hicache_store.limits import REDIS_AHEAD_ITEMS, REDIS_REPLY_GRACE_S, REDIS_WRITE_AHEAD_BYTES

_TOO_LATE: Final = "the deadline has passed"


def lifetime_ms(key: str, depth: int, ttl_s: float | None) -> int | None:
    """How long an object stays after its last use, shorter by a millisecond a page of depth.

    So a chain's tail expires before its head, and ``volatile-ttl`` evicts it first. Metadata stays.
    """
    if ttl_s is None or key.startswith(META_PREFIX):
        return None
    whole = int(ttl_s * 1000)
    return whole - min(depth, whole // 2)


class _Sent(NamedTuple):
    """A write that the server has, and whose replies are due."""

    item: int
    version: str


class WriteWork:
    """The work of the lanes of one ``write_from``, on writes that need their bytes sent."""

    def __init__(
        self,
        writes: Sequence[Write],
        keys: Sequence[bytes],
        ttl_s: float | None,
        watches: bool,
        deadline: Deadline,
    ) -> None:
        self._writes = writes
        self._keys = keys
        self._ttl_s = ttl_s
        self._watches = watches
        self._deadline = deadline

    def __call__(self, lane: Lane[Outcome], wire: Wire, claim: Claim) -> None:
        """Write items until the queue is empty or time is up."""
        sent: deque[_Sent] = deque()
        ahead_bytes = wire.ahead_bytes(REDIS_WRITE_AHEAD_BYTES)
        try:
            while taken := lane.take(1):
                self._write(lane, wire, claim, taken[0], sent)
                while sent and (len(sent) >= REDIS_AHEAD_ITEMS or self._size(sent) > ahead_bytes):
                    self._answer(lane, wire, sent)
            while sent:
                self._answer(lane, wire, sent)
        except TimeoutError:
            with contextlib.suppress(OSError):  # what the server has in full it answers at once
                while sent:
                    self._answer(lane, wire, sent)
            raise
        except OSError as error:
            for lost in sent:
                lane.finish(lost.item, _lost(error))
            raise

    def _write(self, lane: Lane[Outcome], wire: Wire, claim: Claim, index: int, sent: deque[_Sent]) -> None:
        if claim.is_cancelled():
            raise TimeoutError(_TOO_LATE)
        write = self._writes[index]
        try:
            if write.replace is None:
                self._create(wire, claim, write, index, lane.is_asking, sent)
                return
            while sent:
                self._answer(lane, wire, sent)
            lane.finish(index, self._replace(lane, wire, claim, write, index))
        except _SourceError as error:
            if not sent or sent[-1].item != index:
                lane.finish(index, Outcome(Status.FAILED, str(error)))
        except TimeoutError:
            raise
        except OSError as error:
            lane.finish(index, _lost(error))
            raise

    def _size(self, sent: Sequence[_Sent]) -> int:
        return sum(self._writes[each.item].size_bytes for each in sent)

    # -- creating --------------------------------------------------------------------------

    def _create(
        self, wire: Wire, claim: Claim, write: Write, index: int, is_asking: bool, sent: deque[_Sent]
    ) -> None:
        version = os.urandom(VERSION_BYTES)
        key = self._keys[index]
        before = [ASKING] if is_asking else []
        with _lent(write) as views:
            if claim.is_cancelled():
                raise TimeoutError(_TOO_LATE)
            request = [
                *before,
                *self._set(write, key, views, version, b"NX"),
                *before,
                command(b"STRLEN", key),
            ]
            wire.send(request, 4 if is_asking else 2, self._deadline)
            sent.append(_Sent(index, version.hex()))

    def _set(
        self, write: Write, key: bytes, views: Sequence[memoryview], version: bytes, condition: bytes
    ) -> list[bytes | memoryview]:
        """SET as the pieces that make it up; the value is the caller's views and the version."""
        options = [condition]
        lifetime = lifetime_ms(write.key, write.depth, self._ttl_s)
        if lifetime is not None:
            options += [b"PX", b"%d" % lifetime]
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
            3 + len(options),
            len(key),
            key,
            write.size_bytes + VERSION_BYTES,
        )
        tail = b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in options])
        return [head, *views, version + b"\r\n" + tail]

    def _answer(self, lane: Lane[Outcome], wire: Wire, sent: deque[_Sent]) -> None:
        deadline = _settling(self._deadline)
        heads = [wire.head(deadline) for _ in range(4 if lane.is_asking else 2)]
        index, version = sent.popleft()
        stored, length = heads[1::2] if lane.is_asking else heads
        lane.finish(index, self._judged(lane, self._writes[index], stored, length, version))

    def _judged(
        self, lane: Lane[Outcome], write: Write, stored: Head, length: Head, version: str
    ) -> Outcome | Redo:
        if stored.kind == "+":
            return Outcome(Status.OK, version=version)
        if stored.kind == "-":
            return _final(lane, ErrorReply(stored.text))
        if stored.kind != "$" or length.kind not in (":", "-"):
            raise ProtocolError(f"SET is answered by {stored.kind!r} and {length.kind!r}")
        if length.kind == "-":
            return outcome_of(ErrorReply(length.text))
        there = length.number - VERSION_BYTES
        if there == write.size_bytes or length.number == 0:  # gone since: like one evicted a moment later
            return Outcome(Status.EXISTS)
        return Outcome(Status.CONFLICT, lengths_differ(length.number, write.size_bytes))

    # -- replacing -------------------------------------------------------------------------

    def _replace(
        self, lane: Lane[Outcome], wire: Wire, claim: Claim, write: Write, index: int
    ) -> Outcome | Redo:
        """SET if the key still holds the version that the write names."""
        assert write.replace is not None
        key, version = self._keys[index], os.urandom(VERSION_BYTES)
        other = compare(lane, wire, key, write.replace, self._watches, self._deadline)
        if other is not None:
            return other
        is_sent = False
        try:
            with _lent(write) as views:
                if claim.is_cancelled():
                    raise TimeoutError(_TOO_LATE)
                request = self._set(write, key, views, version, b"XX")
                if self._watches:
                    wire.send([MULTI, *request, EXEC], 3, self._deadline)
                else:
                    wire.send(request, 1, self._deadline)
                is_sent = True
        except _SourceError:
            if not is_sent:
                if self._watches:
                    wire.ask(UNWATCH, 1, self._deadline)
                raise
        return took_place(wire, self._watches, version.hex(), _settling(self._deadline))


def _final(lane: Lane[Outcome], error: ErrorReply) -> Outcome | Redo:
    """A write whose bytes are spent: what the server says is taken in, but it is not tried again."""
    outcome = outcome_of(error)
    redo = lane.redo_of(error)
    if redo is not None:
        return Redo(outcome, moved=redo.moved, ask=redo.ask, may_repeat=False)
    if error.kind == "READONLY":  # perhaps another server has become the master
        return Redo(outcome, is_broken=True, may_repeat=False)
    return outcome


def _lost(error: OSError) -> Outcome:
    return Outcome(Status.FAILED, f"the connection broke: {error}", is_transient=True)


def _settling(deadline: Deadline) -> Deadline:
    """Time for a reply that can only be moments away, so that a write that happened is not denied."""
    grace = Deadline.after(REDIS_REPLY_GRACE_S)
    return grace if deadline.remaining_s() < REDIS_REPLY_GRACE_S else deadline


class _SourceError(Exception):
    """What the caller's source raised, in words."""


@contextlib.contextmanager
def _lent(write: Write) -> Iterator[list[memoryview]]:
    """The views of the source, which hold exactly the object, as plain bytes; given back at the end."""
    try:
        try:
            views = [as_bytes(view) for view in write.source.buffers() if view.nbytes]
            given = sum(map(len, views))
            if given != write.size_bytes:
                raise ValueError(f"the source gave {given} bytes, not {write.size_bytes}")
        except Exception as error:
            raise _SourceError(failure(error).detail) from error
        yield views
    finally:
        try:
            write.source.release()
        except Exception as error:
            raise _SourceError(failure(error).detail) from error
