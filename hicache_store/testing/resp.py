"""A client of the Redis protocol in a few lines, for preparing servers and looking behind a store's back.

It shares no code with what it helps to test.
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Final, TypeAlias

Reply: TypeAlias = "bytes | int | str | list[Reply] | None"

_TIMEOUT_S: Final = 20.0


class RespError(RuntimeError):
    """An error reply."""


class RespClient:
    """One connection; every call sends one command and waits for its reply."""

    def __init__(self, address: tuple[str, int] | str, password: str | None = None) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.settimeout(_TIMEOUT_S)
        try:
            self._socket.connect(address)
            self._file = self._socket.makefile("rb")
            if password is not None:
                self.ask("AUTH", password)
        except BaseException:
            self._socket.close()
            raise

    def ask(self, *words: str | bytes | int) -> Reply:
        """The reply to one command; an error reply raises :class:`RespError`."""
        encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        body = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)
        self._socket.sendall(b"*%d\r\n%b" % (len(encoded), body))
        return self._reply()

    def close(self) -> None:
        """End the connection."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> RespClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reply(self) -> Reply:
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError(f"the server ended the connection after {line!r}")
        mark, rest = line[:1], line[1:-2]
        if mark == b"-":
            raise RespError(rest.decode("utf-8", "replace"))
        if mark == b"+":
            return rest.decode("utf-8", "replace")
        number = int(rest)
        if mark == b":":
            return number
        if number < 0:
            return None
        if mark == b"$":
            return self._file.read(number + 2)[:-2]
        return [self._reply() for _ in range(number)]
