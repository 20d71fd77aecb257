"""Reading values: requests sent ahead on each connection, replies received straight into place.

A whole object is one GET. Parts of one are GETRANGE, after the length and the version and before, or
together with, the version again: if it is the same at both ends, all bytes are of one object, however
the server interleaves other clients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from hicache_store.clock import Deadline
from hicache_store.connectors.base import ABSENT, TIMED_OUT, Outcome, Part, Read, Status
from hicache_store.connectors.batch import Claim, failure
from hicache_store.connectors.local_io import as_bytes
from hicache_store.connectors.local_transfer import Scratch, scatter
from hicache_store.connectors.redis_rounds import ASKING, OTHER_TYPE, Lane, Redo, damaged, outcome_of
from hicache_store.connectors.redis_wire import (
    VERSION_BYTES,
    ErrorReply,
    Head,
    ProtocolError,
    Wire,
    command,
    lengths_differ,
)
from hicache_store.limits import REDIS_AHEAD_BYTES, REDIS_AHEAD_ITEMS

_PlainPart: TypeAlias = "tuple[int, int, list[memoryview]]"
"""Start and stop in the object, and the views as plain writable bytes."""

_CHANGED: Final = Outcome(Status.FAILED, "the object changed while it was read", is_transient=True)


class ReadWork:
    """The work of the lanes of one ``read_into``."""

    def __init__(
        self, reads: Sequence[Read], keys: Sequence[bytes], scratch: Scratch, deadline: Deadline
    ) -> None:
        self._reads = reads
        self._keys = keys
        self._scratch = scratch
        self._deadline = deadline

    def __call__(self, lane: Lane[Outcome], wire: Wire, claim: Claim) -> None:
        """Read items until the queue is empty or time is up."""
        flight: deque[int] = deque()
        lead = _Lead(wire.ahead_bytes(REDIS_AHEAD_BYTES))
        while True:
            if not claim.is_cancelled():
                self._send_ahead(lane, wire, flight, lead)
            if not flight:
                return
            if claim.is_cancelled():
                raise TimeoutError("the deadline has passed")  # replies are on their way: never reuse
            index = flight.popleft()
            read = self._reads[index]
            lead.n_bytes -= read.size_bytes
            _Arrival(read, lane, index, wire, self._scratch, self._deadline).run()

    def _send_ahead(self, lane: Lane[Outcome], wire: Wire, flight: deque[int], lead: _Lead) -> None:
        """Ask for more, several at a time: not before half of what was asked for has come."""
        wanted = min(lane.queue.share, REDIS_AHEAD_ITEMS)
        if flight and (2 * len(flight) > wanted or 2 * lead.n_bytes > lead.wanted_bytes):
            return
        commands: list[bytes] = []
        while len(flight) < wanted and (not flight or lead.n_bytes < lead.wanted_bytes):
            taken = lane.take(1)
            if not taken:
                break
            index = taken[0]
            flight.append(index)
            lead.n_bytes += self._reads[index].size_bytes
            commands += _commands(self._reads[index], self._keys[index])
        if commands:
            replies = len(commands)
            if lane.is_asking:
                commands = [each for sent in commands for each in (ASKING, sent)]
                replies *= 2
            wire.send([b"".join(commands)], replies, self._deadline)


class _Lead:
    """How far the requests of a connection are ahead of its replies, by the sizes of the objects."""

    def __init__(self, wanted_bytes: int) -> None:
        self.wanted_bytes = wanted_bytes
        self.n_bytes = 0


class _Arrival:
    """The replies of one read, in order."""

    def __init__(
        self,
        read: Read,
        lane: Lane[Outcome],
        index: int,
        wire: Wire,
        scratch: Scratch,
        deadline: Deadline,
    ) -> None:
        self._read = read
        self._lane = lane
        self._index = index
        self._wire = wire
        self._scratch = scratch
        self._deadline = deadline
        self._left = _reply_count(read)
        self._has_asked_target = False

    def run(self) -> None:
        """Settle the item, or leave it to another round when its connection broke before it began."""
        try:
            outcome = self._whole() if _is_whole(self._read) else self._ranges()
            self._drop_rest()
        except TimeoutError:
            self._lane.finish(self._index, TIMED_OUT)
            raise
        except OSError as error:
            if self._has_asked_target:
                detail = failure(error).detail
                self._lane.finish(self._index, Outcome(Status.FAILED, detail, is_transient=True))
            raise
        self._lane.finish(self._index, outcome)

    # -- replies ---------------------------------------------------------------------------

    def _head(self) -> Head:
        if self._lane.is_asking:
            self._wire.head(self._deadline)  # the reply to ASKING itself
        self._left -= 1
        return self._wire.head(self._deadline)

    def _drop_rest(self) -> None:
        self._wire.skip_rest(self._deadline)
        while self._left:
            self._head()
            self._wire.skip_rest(self._deadline)

    def _error(self, head: Head) -> Outcome | Redo:
        if head.kind != "-":
            raise ProtocolError(f"a reply begins with {head.kind!r}")
        error = ErrorReply(head.text)
        if error.kind == OTHER_TYPE:
            return damaged(error)
        redo = None if self._has_asked_target else self._lane.redo_of(error)
        return outcome_of(error) if redo is None else redo

    def _whole(self) -> Outcome | Redo:
        head = self._head()
        if head.kind != "$":
            return self._error(head)
        if head.number < 0:
            return ABSENT
        size = self._read.size_bytes
        if head.number != size + VERSION_BYTES:
            return _wrong_size(head.number, size, self._wire.skip_to_version(self._deadline))
        return self._land([(0, size)], None)

    def _ranges(self) -> Outcome | Redo:
        size = self._read.size_bytes
        length = self._head()
        if length.kind != ":":
            return self._error(length)
        head = self._head()
        if head.kind != "$":
            return self._error(head)
        version = self._wire.skip_to_version(self._deadline)
        if length.number == 0:
            return ABSENT
        if length.number != size + VERSION_BYTES:
            return _wrong_size(length.number, size, version)
        return self._land(self._read.fetched, version)

    # -- landing ---------------------------------------------------------------------------

    def _land(self, fetched: Sequence[tuple[int, int]], version: str | None) -> Outcome:
        """Ask the target, fill it, have it checked, release it; its exceptions are this item's."""
        self._has_asked_target = True
        try:
            try:
                parts, views, is_in_place = self._prepare(fetched)
                found = self._receive(fetched, views, version)
                if isinstance(found, Outcome):
                    return found
                version = found
                complaint = self._finish(parts, fetched, None if is_in_place else views)
            finally:
                _guarded(self._read.target.release)
        except _TargetError as error:
            return Outcome(Status.FAILED, str(error), version)
        if complaint is not None:
            return Outcome(Status.REJECTED, complaint, version)
        return Outcome(Status.OK, version=version)

    def _prepare(
        self, fetched: Sequence[tuple[int, int]]
    ) -> tuple[list[_PlainPart], list[list[memoryview]], bool]:
        """The target's parts, where each range lands, and whether that is in the parts themselves."""
        try:
            parts = _checked(self._read.target.parts(), self._read.size_bytes)
            views = _in_place(parts, fetched)
            if views is not None:
                return parts, views, True
            _require_within(parts, fetched)
            return parts, self._borrow(fetched), False
        except Exception as error:
            raise _TargetError(failure(error).detail) from error

    def _finish(
        self,
        parts: Sequence[_PlainPart],
        fetched: Sequence[tuple[int, int]],
        borrowed: Sequence[list[memoryview]] | None,
    ) -> str | None:
        """Copy what landed elsewhere into its parts; the word of the target's check."""
        try:
            if borrowed is not None:
                _distribute(parts, fetched, borrowed)
            return self._read.target.check()
        except Exception as error:
            raise _TargetError(failure(error).detail) from error

    def _receive(
        self, fetched: Sequence[tuple[int, int]], views: Sequence[list[memoryview]], version: str | None
    ) -> str | Outcome:
        """Fill ``views``, range by range; the object's version, or what became of it if it changed."""
        wire, deadline = self._wire, self._deadline
        if version is None:
            return wire.fill_and_version(views[0], deadline)
        last: str | None = None
        for (start, stop), into in zip(fetched, views, strict=True):
            head = self._head()
            tail_bytes = VERSION_BYTES if stop == self._read.size_bytes else 0
            if head.kind != "$" or head.number != stop - start + tail_bytes:
                return _CHANGED
            if tail_bytes:
                last = wire.fill_and_version(into, deadline)
            else:
                wire.fill_to_end(into, deadline)
        if last is None:
            head = self._head()
            if head.kind != "$":
                return _CHANGED
            last = wire.skip_to_version(deadline)
        return version if last == version else _CHANGED

    def _borrow(self, fetched: Sequence[tuple[int, int]]) -> list[list[memoryview]]:
        """Memory of this thread for every range."""
        memory = self._scratch.take(_length(fetched))
        views: list[list[memoryview]] = []
        for start, stop in fetched:
            views.append([memory[: stop - start]])
            memory = memory[stop - start :]
        return views


class _TargetError(Exception):
    """What the caller's target raised, in words: kept apart from the connection's own ``OSError``."""


def _guarded(release: Callable[[], None]) -> None:
    try:
        release()
    except Exception as error:
        raise _TargetError(failure(error).detail) from error


def _commands(read: Read, key: bytes) -> list[bytes]:
    if _is_whole(read):
        return [command(b"GET", key)]
    size = read.size_bytes
    version = command(b"GETRANGE", key, b"-%d" % VERSION_BYTES, b"-1")
    words = [command(b"STRLEN", key), version]
    for start, stop in read.fetched:
        last = stop + VERSION_BYTES if stop == size else stop
        words.append(command(b"GETRANGE", key, b"%d" % start, b"%d" % (last - 1)))
    if not _reaches_end(read):
        words.append(version)
    return words


def _reply_count(read: Read) -> int:
    """The replies to :func:`_commands`."""
    if _is_whole(read):
        return 1
    return 2 + len(read.fetched) + (not _reaches_end(read))


def _is_whole(read: Read) -> bool:
    fetched = read.fetched
    return len(fetched) == 1 and tuple(fetched[0]) == (0, read.size_bytes)


def _reaches_end(read: Read) -> bool:
    return bool(read.fetched) and read.fetched[-1][1] == read.size_bytes


def _length(fetched: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in fetched)


def _wrong_size(stored: int, size: int, version: str) -> Outcome:
    return Outcome(Status.WRONG_SIZE, lengths_differ(stored, size), version or None)


def _checked(parts: Sequence[Part], size: int) -> list[_PlainPart]:
    """(start, stop, views as plain writable bytes) of every part; ``ValueError`` for others."""
    found: list[_PlainPart] = []
    for offset, views in parts:
        flat = [as_bytes(view) for view in views if view.nbytes]
        stop = offset + sum(map(len, flat))
        if offset < 0 or stop > size:
            raise ValueError(f"bytes {offset} to {stop} do not lie in an object of {size}")
        if any(view.readonly for view in flat):
            raise ValueError("a view of the target is read-only")
        found.append((offset, stop, flat))
    return found


def _in_place(
    parts: Sequence[_PlainPart], fetched: Sequence[tuple[int, int]]
) -> list[list[memoryview]] | None:
    """The views of each range, where the parts are exactly the ranges."""
    if [(start, stop) for start, stop, _ in parts] != [(start, stop) for start, stop in fetched]:
        return None
    return [views for _, _, views in parts]


def _require_within(parts: Sequence[_PlainPart], fetched: Sequence[tuple[int, int]]) -> None:
    for start, stop, _ in parts:
        if start != stop and not any(first <= start and stop <= last for first, last in fetched):
            raise ValueError(f"bytes {start} to {stop} were not among the ranges of the read")


def _distribute(
    parts: Sequence[_PlainPart],
    fetched: Sequence[tuple[int, int]],
    memory: Sequence[list[memoryview]],
) -> None:
    """Copy what landed in ``memory``, range by range, to where the parts want it."""
    for start, stop, views in parts:
        for (first, last), (piece,) in zip(fetched, memory, strict=True):
            if first <= start and stop <= last:
                scatter(piece[start - first : stop - first], views)
                break
