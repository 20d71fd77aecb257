"""The Redis protocol (version 2) on one connection.

Replies that are short go through hiredis, many at a time (:meth:`Wire.ask`). A value goes straight into
the memory it belongs to: its length line is read first (:meth:`Wire.head`), then its bytes
(:meth:`Wire.fill_and_version`); hiredis would copy it twice.

A wire counts the replies it still owes. Only one that owes nothing, holds no unread byte and was cut off
nowhere may be used again, so that no reply ever reaches another command: :attr:`Wire.is_clean`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from hicache_store.clock import Deadline
from hicache_store.connectors.redis_channel import Channel
from hicache_store.limits import REDIS_AHEAD_BYTES_MAX, REDIS_AHEAD_RATE

VERSION_BYTES: Final = 16
"""Every value ends with as many random bytes, new for each write: its version."""

_HEAD_BYTES: Final = 4096
_SHORT_BYTES: Final = 64 * 1024
_SKIP_BYTES: Final = 64 * 1024
_CRLF: Final = b"\r\n"
_DIGITS_MAX: Final = 19
_CUT: Final = -1
"""In place of the bytes left of a value: nobody knows how many of them were read."""


class ProtocolError(OSError):
    """Bytes that are no reply, or not the one that was due: the connection is of no use any more."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as the server worded it."""

    text: str

    @property
    def kind(self) -> str:
        """The first word, such as ``OOM`` or ``MOVED``."""
        return self.text.partition(" ")[0]


Reply: TypeAlias = "int | bytes | ErrorReply | list[Reply] | None"


class Head(NamedTuple):
    """The first line of a reply: its type byte, and its number or text.

    ``$`` with a length is followed by the bytes, ``*`` by as many replies; -1 means none.
    """

    kind: str
    number: int
    text: str


def lengths_differ(stored: int, size_bytes: int) -> str:
    """In words that a value of ``stored`` bytes is not an object of ``size_bytes`` and its version."""
    if stored < VERSION_BYTES:
        return f"there is a value of {stored} bytes, too short for any object"
    return f"there are {stored - VERSION_BYTES} bytes, not {size_bytes}"


def command(*words: bytes) -> bytes:
    """One command as it is sent."""
    body = b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
    return b"*%d\r\n%b" % (len(words), body)


class Wire:
    """One connection. Methods raise ``OSError`` or ``TimeoutError``; it must be closed then."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.round_trip_s = 0.0
        self._owed = 0
        self._body_left = 0
        self._is_cut = False
        self._buffer = bytearray(_HEAD_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._stop = 0
        self._tail = bytearray(VERSION_BYTES + len(_CRLF))

    def measure(self, deadline: Deadline) -> None:
        """Learn the time of a round trip, proxies included; raises when the server wants a login."""
        began_s = time.perf_counter()
        (reply,) = self.ask(_PING, 1, deadline)
        self.round_trip_s = time.perf_counter() - began_s
        if isinstance(reply, ErrorReply) and reply.kind == "NOAUTH":
            raise ProtocolError(reply.text)

    def ahead_bytes(self, least: int) -> int:
        """Bytes worth having on their way at a time: what the network carries in a round trip.

        More would lie in memory of the server, which then works on cold memory: 8 MiB ahead costs it a
        fifth more CPU time than 1 MiB.
        """
        return max(least, min(REDIS_AHEAD_BYTES_MAX, int(self.round_trip_s * REDIS_AHEAD_RATE)))

    @property
    def is_clean(self) -> bool:
        """Whether every reply that was asked for has been read, and nothing else has come."""
        return not (self._owed or self._body_left or self._is_cut) and self._start == self._stop

    def send(self, views: Sequence[memoryview | bytes], replies: int, deadline: Deadline) -> None:
        """Send commands to which ``replies`` replies are due."""
        if self._is_cut:
            raise ProtocolError("a request was broken off here")
        self._owed += replies
        self._is_cut = True
        self.channel.send([memoryview(view) for view in views], deadline)
        self._is_cut = False

    def ask(self, commands: bytes, replies: int, deadline: Deadline) -> list[Reply]:
        """Send commands and read their replies, all of them short."""
        import hiredis  # noqa: PLC0415

        assert self.is_clean
        self.send([commands], replies, deadline)
        new_reader: Any = hiredis.Reader  # it takes more than its declared types: any buffer, any callable
        reader = new_reader(protocolError=ProtocolError, replyError=ErrorReply, notEnoughData=_NOTHING)
        memory = memoryview(bytearray(_SHORT_BYTES))
        found: list[Reply] = []
        while len(found) < replies:
            count = self.channel.receive_some(memory, deadline)
            reader.feed(memory, 0, count)
            while (reply := reader.gets()) is not _NOTHING:
                found.append(reply)
        self._owed -= replies
        if reader.has_data() or len(found) != replies:
            self._is_cut = True
            raise ProtocolError("the server sent more than was asked for")
        return found

    def head(self, deadline: Deadline) -> Head:
        """Read the first line of the next reply. The replies of an array are owed from then on."""
        if self._body_left or not self._owed:
            raise ProtocolError("no reply is due here")
        line = self._line(deadline)
        self._owed -= 1
        kind, text = line[:1], line[1:]
        if kind in ("+", "-"):
            return Head(kind, 0, text)
        if kind not in (":", "$", "*") or not _is_number(text, least=-1 if kind in ("$", "*") else None):
            raise ProtocolError(f"{line[:80]!r} is not the begin of a reply")
        number = int(text)
        if kind == "$" and number >= 0:
            self._body_left = number + len(_CRLF)
        elif kind == "*":
            self._owed += max(0, number)
        return Head(kind, number, text)

    def version(self, deadline: Deadline) -> str:
        """Read the last VERSION_BYTES of the value, fewer if it is shorter, and the end of the reply."""
        left = self._body_left
        assert left <= len(self._tail)
        tail = memoryview(self._tail)[:left]
        self._take([tail], deadline)
        return self._ended(tail)

    def fill_and_version(self, views: Sequence[memoryview], deadline: Deadline) -> str:
        """Put the value into ``views`` and read its version, in one system call where that is possible."""
        assert sum(map(len, views)) + len(self._tail) == self._body_left
        tail = memoryview(self._tail)
        self._take([*views, tail], deadline)
        return self._ended(tail)

    def fill_to_end(self, views: Sequence[memoryview], deadline: Deadline) -> None:
        """Put all bytes of the value into ``views`` and read the end of the reply."""
        assert sum(map(len, views)) + len(_CRLF) == self._body_left
        tail = memoryview(self._tail)[: len(_CRLF)]
        self._take([*views, tail], deadline)
        self._ended(tail)

    def skip(self, count: int, deadline: Deadline) -> None:
        """Read ``count`` bytes of the value and forget them."""
        if count <= 0:
            return
        memory = memoryview(bytearray(min(count, _SKIP_BYTES)))
        while count:
            piece = memory[: min(count, len(memory))]
            self._take([piece], deadline)
            count -= len(piece)

    @property
    def body_left(self) -> int:
        """Bytes of the announced value that were not read yet."""
        return max(0, self._body_left - len(_CRLF))

    def skip_rest(self, deadline: Deadline) -> None:
        """Forget what is left of the value, if anything."""
        if self._body_left == _CUT:
            raise ProtocolError("a value was broken off")
        if self._body_left:
            self.skip(self.body_left, deadline)
            self.fill_to_end([], deadline)

    def skip_to_version(self, deadline: Deadline) -> str:
        """Forget the value but for its version."""
        self.skip(self.body_left - VERSION_BYTES, deadline)
        return self.version(deadline)

    def _ended(self, tail: memoryview) -> str:
        if bytes(tail[-2:]) != _CRLF:
            raise ProtocolError("a value does not end where the server said")
        return tail[:-2].hex()

    def _take(self, views: Sequence[memoryview], deadline: Deadline) -> None:
        left: list[memoryview] = []
        for view in views:
            early = min(len(view), self._stop - self._start)
            if early:
                view[:early] = self._view[self._start : self._start + early]
                self._start += early
            if early < len(view):
                left.append(view[early:])
        if left:
            body_left, self._body_left = self._body_left, _CUT
            self.channel.receive(left, deadline)
            self._body_left = body_left
        self._body_left -= sum(map(len, views))

    def _line(self, deadline: Deadline) -> str:
        while True:
            end = self._buffer.find(_CRLF, self._start, self._stop)
            if end >= 0:
                line = self._buffer[self._start : end].decode("utf-8", "replace")
                self._start = end + len(_CRLF)
                return line
            held = self._stop - self._start
            if held == len(self._buffer):
                raise ProtocolError("a reply begins with a line that does not end")
            if self._start:
                self._buffer[:held] = self._buffer[self._start : self._stop]
                self._start, self._stop = 0, held
            self._stop += self.channel.receive_some(self._view[self._stop :], deadline)


def _is_number(text: str, least: int | None) -> bool:
    digits = text[1:] if text[:1] == "-" else text
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS_MAX):
        return False
    return least is None or int(text) >= least


_NOTHING: Final = object()
_PING: Final = command(b"PING")
