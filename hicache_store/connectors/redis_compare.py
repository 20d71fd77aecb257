"""Acting on a named version only: WATCH, a look at the version, and MULTI ... EXEC, which does nothing
if anybody touched the key in between. No script: servers may forbid those.

Where a server forbids WATCH, the look and the action are two steps and a race may be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hicache_store.clock import Deadline
from hicache_store.connectors.base import ABSENT, OK, Outcome, Status
from hicache_store.connectors.batch import Claim
from hicache_store.connectors.redis_rounds import Lane, Redo, outcome_of
from hicache_store.connectors.redis_wire import (
    VERSION_BYTES,
    ErrorReply,
    Head,
    ProtocolError,
    Reply,
    Wire,
    command,
)

MULTI: Final = command(b"MULTI")
EXEC: Final = command(b"EXEC")
UNWATCH: Final = command(b"UNWATCH")

_GONE: Final = Outcome(Status.CONFLICT, "the object is gone")
_CHANGED: Final = Outcome(Status.CONFLICT, "the object changed meanwhile")
_MOVING: Final = Outcome(Status.FAILED, "the key is on its way to another server", is_transient=True)


def version_request(key: bytes) -> bytes:
    """The command whose reply is the version of a value, empty if there is none."""
    return command(b"GETRANGE", key, b"-%d" % VERSION_BYTES, b"-1")


def compare(
    lane: Lane[Outcome], wire: Wire, key: bytes, wanted: str, watches: bool, deadline: Deadline
) -> Outcome | Redo | None:
    """``None`` when ``key`` holds version ``wanted``, and is watched from now on; else why not."""
    if lane.is_asking:
        return _MOVING
    if not watches:
        replies = wire.ask(version_request(key), 1, deadline)
    else:
        replies = wire.ask(command(b"WATCH", key) + version_request(key), 2, deadline)
    result = _compared(lane, replies, wanted)
    if result is not None and watches:
        wire.ask(UNWATCH, 1, deadline)
    return result


def _compared(lane: Lane[Outcome], replies: Sequence[Reply], wanted: str) -> Outcome | Redo | None:
    for reply in replies:
        if isinstance(reply, ErrorReply):
            return lane.redo_of(reply) or outcome_of(reply)
    found = replies[-1]
    if not isinstance(found, bytes):
        raise ProtocolError("GETRANGE is answered by something that is no value")
    if not found:
        return _GONE
    if found.hex() != wanted:
        return Outcome(Status.CONFLICT, "the object is of another version", found.hex())
    return None


def took_place(wire: Wire, watched: bool, version: str, deadline: Deadline) -> Outcome:
    """What became of a SET, the second of three commands if ``watched``, else alone."""
    if not watched:
        return _outcome_of_set(wire.head(deadline), version)
    begun, queued, executed = (wire.head(deadline) for _ in range(3))
    for head in (queued, begun, executed):
        if head.kind == "-":
            return outcome_of(ErrorReply(head.text))
    if executed.kind != "*":
        raise ProtocolError(f"EXEC is answered by {executed.kind!r}")
    if executed.number < 0:
        return _CHANGED
    return _outcome_of_set(wire.head(deadline), version)


def _outcome_of_set(head: Head, version: str) -> Outcome:
    if head.kind == "+":
        return Outcome(Status.OK, version=version)
    if head.kind == "-":
        return outcome_of(ErrorReply(head.text))
    return _CHANGED


class DeleteWork:
    """The work of the lanes of one ``delete`` of named versions."""

    def __init__(
        self, keys: Sequence[bytes], versions: Sequence[str | None], watches: bool, deadline: Deadline
    ) -> None:
        self._keys = keys
        self._versions = versions
        self._watches = watches
        self._deadline = deadline

    def __call__(self, lane: Lane[Outcome], wire: Wire, claim: Claim) -> None:
        """Delete items until the queue is empty or time is up."""
        while not claim.is_cancelled() and (taken := lane.take(1)):
            index = taken[0]
            key, version = self._keys[index], self._versions[index]
            assert version is not None
            other = compare(lane, wire, key, version, self._watches, self._deadline)
            if other is None:
                other = self._unlink(wire, key)
            lane.finish(index, ABSENT if other == _GONE else other)

    def _unlink(self, wire: Wire, key: bytes) -> Outcome:
        unlink = command(b"UNLINK", key)
        if not self._watches:
            (reply,) = wire.ask(unlink, 1, self._deadline)
            return unlinked(reply)
        *_, reply = wire.ask(MULTI + unlink + EXEC, 3, self._deadline)
        if isinstance(reply, list):
            (reply,) = reply
            return unlinked(reply)
        return _CHANGED if reply is None else unlinked(reply)


def unlinked(reply: Reply) -> Outcome:
    """What the reply to UNLINK says."""
    if isinstance(reply, ErrorReply):
        return outcome_of(reply)
    return OK if reply else ABSENT
