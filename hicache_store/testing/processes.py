"""Server processes of tests and benchmarks: private, on loopback, and ended with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

HOST: Final = "127.0.0.1"

START_S: Final = 60.0
"""How long a server may take until it answers; a loaded machine needs ten times its usual 4 s."""

TERMINATE_S: Final = 2.0
"""Time between TERM and KILL; some servers wait for their peers for minutes."""

_START_TRIES: Final = 3
_PORTS: Final = range(10_000, 22_000)
_PORT_TWIN: Final = 10_000
_LOG_TAIL_BYTES: Final = 4_000
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

MakeCommand: TypeAlias = Callable[[Path, Sequence[int]], Sequence[str]]
"""From the server's directory and its ports to its command line."""


class MissingServerError(RuntimeError):
    """A server program that is not installed on this machine."""


class StartError(RuntimeError):
    """A server that did not come up; the text ends with its log."""


@dataclass(slots=True)
class Daemon:
    """One running server process in a directory of its own."""

    name: str
    directory: Path
    ports: tuple[int, ...]
    command: Sequence[str]
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self.process.poll() is None

    def start(self) -> None:
        """Start the process, again after :meth:`kill` or :meth:`stop`, with what its directory holds."""
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(  # noqa: S603
                list(self.command),
                cwd=self.directory,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  # one call of a library that is loaded
            )

    def stop(self) -> None:
        """TERM, then KILL after TERMINATE_S; returns when the process is gone."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self.process.wait(TERMINATE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """KILL; returns when the process is gone."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def pause(self) -> None:
        """Let the process answer nothing while its connections stay open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        self._signal(signal.SIGCONT)

    def log_tail(self) -> str:
        """The end of what the server printed."""
        text = (self.directory / "log").read_bytes()[-_LOG_TAIL_BYTES:]
        return text.decode("utf-8", "replace")

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)


def _die_with_parent() -> None:
    """A run that is killed must not leave servers behind; they end with the thread that started them."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_ports(count: int) -> tuple[int, ...]:
    """Ports of 127.0.0.1 that nobody listens on now, nor on each one's twin 10,000 above.

    All lie below the range from which the kernel takes ports of outgoing connections, so that only
    another server can take one before it is used.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.choice(_PORTS)  # noqa: S311
        if port not in found and _is_free(port) and _is_free(port + _PORT_TWIN):
            found.append(port)
    return tuple(found)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def daemon(
    name: str,
    make_command: MakeCommand,
    is_ready: Callable[[Daemon], bool],
    *,
    ports: int = 1,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Iterator[Daemon]:
    """A server that answered ``is_ready``, stopped at the end, its directory removed with it.

    ``is_ready`` is asked again until it returns true; an exception of it means not yet. A server that
    exits early is started again on other ports. Raises :class:`StartError` with its log.
    """
    base = Path(tempfile.mkdtemp(prefix=f"hicache-{name}-")) if directory is None else directory
    try:
        server = _start(name, base, make_command, is_ready, ports, environment or {})
        try:
            yield server
        finally:
            server.stop()
    finally:
        if directory is None:
            shutil.rmtree(base, ignore_errors=True)


def _start(
    name: str,
    base: Path,
    make_command: MakeCommand,
    is_ready: Callable[[Daemon], bool],
    ports: int,
    environment: Mapping[str, str],
) -> Daemon:
    errors: list[str] = []
    for attempt in range(_START_TRIES):
        directory = base / f"{name}-{attempt}"
        directory.mkdir(mode=0o700)
        chosen = free_ports(ports)
        own = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(directory), "TMPDIR": str(directory)}
        command = make_command(directory, chosen)
        server = Daemon(name, directory, chosen, command, {**own, **environment})
        try:
            error = await_ready(server, is_ready)
        except BaseException:
            server.stop()
            raise
        if error is None:
            return server
        has_exited = not server.is_running
        server.stop()
        errors.append(f"{error}\n{server.log_tail()}")
        if not has_exited:
            break
    raise StartError(f"{name} did not start: {errors[-1]}")


def await_ready(server: Daemon, is_ready: Callable[[Daemon], bool]) -> str | None:
    """Wait until ``is_ready``; the reason when the process ended or START_S passed."""
    give_up_at = time.monotonic() + START_S
    last = "it never answered"
    while time.monotonic() < give_up_at:
        if not server.is_running:
            return f"exited with {server.process.returncode}"
        try:
            if is_ready(server):
                return None
        except Exception as error:
            last = f"{type(error).__name__}: {error}"
        time.sleep(0.05)
    return f"not ready after {START_S:g} s; last: {last}"
