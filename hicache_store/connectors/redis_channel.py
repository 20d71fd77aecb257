"""Bytes over one socket within a deadline, straight from and into memory that others own.

A plain socket blocks in the kernel with a time limit (SO_RCVTIMEO, SO_SNDTIMEO), so that a value of any
size is one system call and the interpreter lock changes hands once; the kernel counts the limit over
the whole call, drip or not. Sending on a unix socket counts it anew for every buffer of the kernel, so
there the socket is polled. TLS has neither: it loops with the socket's own timeout.

All raise ``TimeoutError`` at the deadline and ``OSError`` when the connection is of no use any more.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Final, Protocol

from hicache_store.clock import Deadline
from hicache_store.connectors.local_io import IOV_MAX

_SHORTEST_S: Final = 0.001  # zero would mean no limit
_LONGEST_S: Final = 86_400.0
_SLACK: Final = 0.01
_TIMEVAL: Final = struct.Struct("@ll")
_ALONE_BYTES: Final = 256 * 1024
_TLS_PIECE_BYTES: Final = 1 << 20


class Channel(Protocol):
    """One connection as a stream of bytes."""

    def send(self, views: Sequence[memoryview], deadline: Deadline) -> None:
        """Send all of ``views``, one after the other."""
        ...

    def receive(self, views: Sequence[memoryview], deadline: Deadline) -> None:
        """Fill all of ``views``, one after the other."""
        ...

    def receive_some(self, view: memoryview, deadline: Deadline) -> int:
        """Receive what is there, at least one byte, at most ``view``; the number of bytes."""
        ...

    def is_fresh(self) -> bool:
        """Whether the connection is open and nothing unasked has arrived; never waits."""
        ...

    def interrupt(self) -> None:
        """End the connection under whoever waits for it in another thread."""
        ...

    def close(self) -> None:
        """Give the socket back."""
        ...


def open_channel(connected: socket.socket) -> Channel:
    """The channel over a connected socket, which it owns from now on."""
    if isinstance(connected, ssl.SSLSocket):
        return TlsChannel(connected)
    return PlainChannel(connected)


class PlainChannel:
    """TCP or a unix socket."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        self._socket = connected
        self._limits: dict[int, float] = {}
        self._polls = connected.family == socket.AF_UNIX

    def send(self, views: Sequence[memoryview], deadline: Deadline) -> None:
        """Send all of ``views``."""
        left = [view for view in views if len(view)]
        flags = socket.MSG_DONTWAIT if self._polls else 0
        while left:
            remaining_s = _remaining_s(deadline)
            if not self._polls:
                self._limit(socket.SO_SNDTIMEO, remaining_s)
            try:
                sent = self._socket.sendmsg(_together(left), (), flags)
            except BlockingIOError:
                if self._polls:
                    self._wait_until_writable(remaining_s)
                continue  # the next turn sees that the deadline has passed
            left = _after(left, sent)

    def receive(self, views: Sequence[memoryview], deadline: Deadline) -> None:
        """Fill all of ``views``."""
        left = [view for view in views if len(view)]
        while left:
            self._limit(socket.SO_RCVTIMEO, _remaining_s(deadline))
            try:
                count = self._socket.recvmsg_into(left[:IOV_MAX], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            left = _after(left, _some(count))

    def receive_some(self, view: memoryview, deadline: Deadline) -> int:
        """Receive what is there."""
        while True:
            self._limit(socket.SO_RCVTIMEO, _remaining_s(deadline))
            with contextlib.suppress(BlockingIOError):
                return _some(self._socket.recv_into(view))

    def is_fresh(self) -> bool:
        """Whether the connection is open and silent."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def interrupt(self) -> None:
        """Wake whoever waits in this socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _limit(self, option: int, seconds: float) -> None:
        """Let the next call wait for ``seconds``, or up to _SLACK of them longer: setting costs a call."""
        if seconds <= self._limits.get(option, 0.0) <= seconds * (1.0 + _SLACK):
            return
        self._limits[option] = seconds
        whole = int(seconds)
        timeval = _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)

    def _wait_until_writable(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        poll.poll(seconds * 1e3)


class TlsChannel:
    """TLS over TCP."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._socket = connected

    def send(self, views: Sequence[memoryview], deadline: Deadline) -> None:
        """Send all of ``views``."""
        for view in views:
            start = 0
            while start < len(view):
                self._socket.settimeout(_remaining_s(deadline))
                start += self._socket.send(view[start : start + _TLS_PIECE_BYTES])

    def receive(self, views: Sequence[memoryview], deadline: Deadline) -> None:
        """Fill all of ``views``."""
        for view in views:
            start = 0
            while start < len(view):
                start += self.receive_some(view[start:], deadline)

    def receive_some(self, view: memoryview, deadline: Deadline) -> int:
        """Receive what is there."""
        self._socket.settimeout(_remaining_s(deadline))
        return _some(self._socket.recv_into(view))

    def is_fresh(self) -> bool:
        """Whether the peer has not ended the connection; TLS may send tickets unasked."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return not self._socket.pending() and not poll.poll(0)

    def interrupt(self) -> None:
        """Wake whoever waits in this socket."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _remaining_s(deadline: Deadline) -> float:
    left = deadline.remaining_s()
    if left <= 0.0:
        raise TimeoutError("the deadline has passed")
    return min(max(left, _SHORTEST_S), _LONGEST_S)


def _some(count: int) -> int:
    if count == 0:
        raise ConnectionResetError("the server ended the connection")
    return count


def _together(views: Sequence[memoryview]) -> Sequence[memoryview]:
    """The first of ``views``, as many as are worth one system call.

    A large one goes alone: behind a short one its bytes would not be aligned in the kernel's pages, and
    copying them costs half as much again (measured from 256 KiB on).
    """
    if len(views[0]) >= _ALONE_BYTES:
        return views[:1]
    for index, view in enumerate(views):
        if len(view) >= _ALONE_BYTES or index == IOV_MAX:
            return views[:index]
    return views


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """``views`` without their first ``count`` bytes."""
    index = 0
    while index < len(views) and count >= len(views[index]):
        count -= len(views[index])
        index += 1
    rest = views[index:]
    if count:
        rest[0] = rest[0][count:]
    return rest
