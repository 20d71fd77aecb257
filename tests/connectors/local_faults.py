"""System calls that tests can make fail, fall short, hang or be counted; and stores to use them on."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hicache_store.clock import SYSTEM_CLOCK, Clock, Deadline
from hicache_store.config import parse_url
from hicache_store.connectors.base import BufferSource, BufferTarget, Outcome, Read, Write
from hicache_store.connectors.local import LocalConnector, open_local
from hicache_store.connectors.local_attach import read_settings
from hicache_store.connectors.local_io import PosixIO
from hicache_store.connectors.local_names import directory_of, file_name
from hicache_store.connectors.local_publish import Method

LONG_S = 30.0
SOON_S = 0.05
MODES = ("direct", "bounce")

Hook = Callable[..., Any]
"""Called with the real system call and its arguments."""


class FaultyIO:
    """Passes every call of :class:`PosixIO` on, unless a hook is set for it."""

    def __init__(self) -> None:
        self._real = PosixIO()
        self._lock = threading.Lock()
        self.hooks: dict[str, Hook] = {}
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.calls[name] += 1
                hook = self.hooks.get(name)
            return real(*args, **kwargs) if hook is None else hook(real, *args, **kwargs)

        return call


class Gate:
    """A system call that hangs until it is opened. ``arrived`` counts those inside."""

    def __init__(self, matches: Callable[..., bool] = lambda *_, **__: True) -> None:
        self._matches = matches
        self._arrivals = threading.Semaphore(0)
        self.has_arrivals = False
        self.opened = threading.Event()

    def __call__(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.opened.is_set() and self._matches(*args, **kwargs):
            self.has_arrivals = True
            self._arrivals.release()
            assert self.opened.wait(LONG_S)
        return real(*args, **kwargs)

    def wait_for(self, count: int = 1) -> None:
        for _ in range(count):
            assert self._arrivals.acquire(timeout=LONG_S)


def is_tmpfile(name: str, flags: int, *_: Any, **__: Any) -> bool:
    """Whether an ``open`` asks for a file without a name."""
    return flags & os.O_TMPFILE == os.O_TMPFILE


def without_better_than(method: Method) -> FaultyIO:
    """System calls of a file system that has no better way of publishing than ``method``."""
    io = FaultyIO()
    if method != "tmpfile":
        io.hooks["open"] = failing(errno.EOPNOTSUPP, is_tmpfile)
    if method == "rename":
        io.hooks["link"] = io.hooks["link_fd"] = failing(errno.EPERM)
    return io


def failing(code: int, matches: Callable[..., bool] = lambda *_, **__: True) -> Hook:
    """A hook that raises the error ``code`` where ``matches`` says so."""

    def hook(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if matches(*args, **kwargs):
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    return hook


class SmallDisk:
    """A file system of few bytes: writes fall short at its end, then fail with ENOSPC."""

    def __init__(self, io: FaultyIO, free_bytes: int) -> None:
        self._lock = threading.Lock()
        self.free_bytes = free_bytes
        self._sizes: dict[int, int] = {}
        io.hooks["pwritev"] = self._pwritev
        io.hooks["close"] = self._close

    def _pwritev(self, real: Callable[..., int], fd: int, views: Any, offset: int) -> int:
        with self._lock:
            room = self.free_bytes
            wanted = sum(view.nbytes for view in views)
            taken = min(room, wanted)
            if taken == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.free_bytes -= taken
            self._sizes[fd] = self._sizes.get(fd, 0) + taken
        done = 0
        for view in views:
            part = view[: taken - done]
            if part.nbytes:
                assert real(fd, [part], offset + done) == part.nbytes
                done += part.nbytes
        return done

    def _close(self, real: Callable[[int], None], fd: int) -> None:
        is_gone = os.fstat(fd).st_nlink == 0
        real(fd)
        with self._lock:
            size = self._sizes.pop(fd, 0)
            if is_gone:
                self.free_bytes += size


def open_at(
    path: Path | str, io: FaultyIO | None = None, query: str = "", clock: Clock = SYSTEM_CLOCK, **kwargs: Any
) -> LocalConnector:
    """A store below ``path``; without background sweeps unless the query asks for them."""
    query = query if "sweep=" in query else "&".join(filter(None, (query, "sweep=0")))
    settings = read_settings(parse_url(f"file://{path}?{query}"))
    return open_local(settings, io, clock, **kwargs)  # type: ignore[arg-type]


def later() -> Deadline:
    return Deadline.after(LONG_S)


def timed_out_at(gate: Gate, call: Callable[[Deadline], Any]) -> Any:
    """The result of a call that runs out of time while it hangs at ``gate``.

    On a busy machine a short deadline may pass before the call gets there: then a longer one.
    """
    for timeout_s in (SOON_S, 0.25, 1.0, 5.0, 20.0):
        result = call(Deadline.after(timeout_s))
        if gate.has_arrivals:
            return result
    raise AssertionError("the call never came to the gate")


def put(store: LocalConnector, key: str, data: bytes, **kwargs: Any) -> Outcome:
    return store.write_from([Write(key, len(data), BufferSource.of(data), **kwargs)], later())[0]


def get(store: LocalConnector, key: str, size: int) -> tuple[Outcome, bytes]:
    buffer = bytearray(size)
    outcome = store.read_into([Read(key, size, BufferTarget.whole(buffer))], later())[0]
    return outcome, bytes(buffer)


def path_of(root: Path | str, key: str) -> Path:
    """Where the file of ``key`` lies."""
    return Path(root, *directory_of(key), file_name(key))


def files_below(root: Path | str) -> list[str]:
    """Every file of objects and metadata, temporary ones too."""
    found = []
    for top in ("objects", "meta"):
        for directory, _, names in os.walk(Path(root, top)):
            found += [os.path.join(directory, name) for name in names]
    return sorted(found)


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds."""
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("never happened")


class Call:
    """A call running in a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._results: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._results.append(function()), daemon=True)
        self._thread.start()

    def stays_running(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(LONG_S)
        assert self._results, "the call hangs or raised"
        return self._results[0]
