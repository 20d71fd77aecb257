"""Between a Redis connector and its server: a proxy that stalls and cuts, and a server that lies."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hicache_store.config import parse_url
from hicache_store.connectors.redis_connector import RedisConnector, connect

HOST = "127.0.0.1"
PIECE_BYTES = 64 * 1024


def open_redis(url: str) -> RedisConnector:
    """The bare connector, without the wrappers that a store puts around it."""
    return connect(parse_url(url))


def close_hard(sock: socket.socket) -> None:
    """End a connection as the kernel does for a process that died with unread data: RST."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


@dataclass
class Proxy:
    """Forwards connections to a port of this machine and interferes with the replies.

    ``stall()`` holds replies back until ``resume()``; ``cut_replies_after`` ends the next connection
    that has forwarded so many bytes of replies, once. ``hold_requests_after`` stops forwarding what the
    client sends after so many bytes. A ``turn`` is a change from replies back to requests on one
    connection: what a network with a long round trip would charge for.
    """

    target: int
    connections: int = 0
    turns: int = 0
    request_bytes: int = 0
    reply_bytes: int = 0
    cut_replies_after: int | None = None
    hold_requests_after: int | None = None
    _flows: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sockets: list[socket.socket] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._flows.set()
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._flows.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()
        for thread in self._threads:
            thread.join(20)

    def stall(self) -> None:
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    def cut_all(self) -> None:
        """End every connection."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for sock in sockets:
            close_hard(sock)

    def forget_counts(self) -> None:
        self.connections = self.turns = self.request_bytes = self.reply_bytes = 0

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((HOST, self.target), 20)
            except OSError:
                close_hard(client)
                continue
            server.settimeout(None)
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets += [client, server]
                self.connections += 1
            state = {"replied": False, "sent": 0, "got": 0}
            self._start(self._requests, client, server, state)
            self._start(self._replies, server, client, state)

    def _requests(self, client: socket.socket, server: socket.socket, state: dict[str, int]) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(PIECE_BYTES):
                with self._lock:
                    self.request_bytes += len(data)
                    self.turns += bool(state["replied"]) or not state["sent"]
                    state["replied"] = False
                state["sent"] += len(data)
                limit = self.hold_requests_after
                if limit is not None and state["sent"] > limit:
                    continue  # swallowed: the server never sees the rest
                server.sendall(data)
        close_hard(server)

    def _replies(self, server: socket.socket, client: socket.socket, state: dict[str, int]) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(PIECE_BYTES):
                self._flows.wait()
                limit = self.cut_replies_after
                if limit is not None and state["got"] + len(data) > limit:
                    self.cut_replies_after = None
                    client.sendall(data[: limit - state["got"]])
                    client.shutdown(socket.SHUT_WR)
                    break
                client.sendall(data)
                with self._lock:
                    self.reply_bytes += len(data)
                    state["replied"] = True
                state["got"] += len(data)
        with contextlib.suppress(OSError):
            server.close()
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


Answer = Callable[[Sequence[bytes]], bytes | None]
"""From the words of a command to the bytes sent back; ``None`` ends the connection."""

_WORD = re.compile(rb"\$(\d+)\r\n")


def usual(words: Sequence[bytes]) -> bytes:
    """What a server says to what every handle asks at first."""
    name = words[0].upper()
    if name == b"PING":
        return b"+PONG\r\n"
    if name == b"INFO":
        info = b"role:master\r\nmaxmemory:1000\r\nmaxmemory_policy:allkeys-lru\r\ncluster_enabled:0\r\n"
        return b"$%d\r\n%b\r\n" % (len(info), info)
    return b"+OK\r\n"


@dataclass
class LyingServer:
    """Speaks the protocol and answers what it is told to answer.

    ``answer`` is asked for every command but those of the handshake, which get the usual replies.
    """

    answer: Answer
    commands: list[tuple[bytes, ...]] = field(default_factory=list)
    connections: int = 0
    _sockets: list[socket.socket] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._run(self._accept)

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def __enter__(self) -> LyingServer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            close_hard(sock)
        for thread in self._threads:
            thread.join(20)

    def push(self, data: bytes) -> None:
        """Send bytes that nobody asked for on every open connection."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.sendall(data)

    def _run(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                self._sockets.append(sock)
                self._run(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            file = sock.makefile("rb")
            for words in iter(lambda: read_command(file), ()):
                handshake = words[0].upper() in (b"PING", b"INFO", b"CLIENT", b"WATCH", b"UNWATCH", b"AUTH")
                if handshake:
                    sock.sendall(usual(words))
                    continue
                self.commands.append(tuple(words))
                reply = self.answer(words)
                if reply is None:
                    break
                sock.sendall(reply)
        close_hard(sock)


def read_command(file: object) -> tuple[bytes, ...]:
    """The next command of a connection, ``()`` at its end."""
    line: bytes = file.readline()  # type: ignore[attr-defined]
    if not line.startswith(b"*"):
        return ()
    words = []
    for _ in range(int(line[1:])):
        found = _WORD.fullmatch(file.readline())  # type: ignore[attr-defined]
        if found is None:
            return ()
        words.append(file.read(int(found[1]) + 2)[:-2])  # type: ignore[attr-defined]
    return tuple(words)


def bulk(data: bytes) -> bytes:
    """A value as it is sent."""
    return b"$%d\r\n%b\r\n" % (len(data), data)


@contextlib.contextmanager
def opened(url: str) -> Iterator[RedisConnector]:
    """A handle that is closed at the end."""
    handle = open_redis(url)
    try:
        yield handle
    finally:
        handle.close()


def wait_until(is_true: Callable[[], bool]) -> None:
    """Until it is, for a minute at most."""
    for _ in range(6_000):
        if is_true():
            return
        threading.Event().wait(0.01)
    raise AssertionError("waited for a minute")
