"""What the parts of the connector contract share: fixtures, keys and assertions."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import pytest

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Connector, Outcome, Read, Status, Write
from hicache_store.testing.probes import ProbeSource, ProbeTarget, first_difference, read_of, write_of

Connect: TypeAlias = Callable[[], Connector]
"""Opens another handle on one and the same place, at first empty."""

ConnectBounded: TypeAlias = Callable[[int], Connector]
"""Opens a handle on a fresh place with a quota in bytes."""

PATIENCE_S = 60.0
"""How long a call or a thread may take before it counts as hung."""

SETTLE_S = 2.0
"""How long what a closed handle let go of may take to be gone."""


class ContractBase:
    """The fixtures of the contract; ``connect`` is the one every connector overrides."""

    attempts_max = 1
    """Times a target may go through its whole protocol in one call. A connector that tries another copy
    after a failure sets how many it may try."""

    @pytest.fixture
    def connect(self) -> Connect:
        """Override: a callable that opens another handle on the place under test."""
        raise NotImplementedError("override the fixture `connect` to return a callable that opens a handle")

    @pytest.fixture
    def connector(self, connect: Connect) -> Iterator[Connector]:
        """The handle under test."""
        handle = connect()
        yield handle
        handle.close()

    @pytest.fixture
    def connect_writer(self, connect: Connect) -> Connect:
        """Override when handles of ``connect`` are read-only: opens one on the same place that is not."""
        return connect

    @pytest.fixture
    def writer(self, connector: Connector, connect: Connect, connect_writer: Connect) -> Iterator[Connector]:
        """The handle that fills the place: the one under test, where that may write."""
        handle = connector if connect_writer is connect else connect_writer()
        yield handle
        handle.close()

    @pytest.fixture
    def connect_bounded(self) -> ConnectBounded | None:
        """Override when the connector has a quota whose eviction is ordered."""
        return None


def soon() -> Deadline:
    """A deadline that a working connector meets."""
    return Deadline.after(PATIENCE_S)


def digest(label: str) -> str:
    """64 hexadecimal digits."""
    return hashlib.sha256(label.encode()).hexdigest()


def page_key(label: str, leaf: str = "kv.H000-008.L000-061", namespace: str = "contract") -> str:
    """An object name of the real form."""
    page = digest(label)
    return f"v1/{digest(namespace)}/{page[:2]}/{page}/{leaf}"


def store(writer: Connector, objects: Mapping[str, bytes]) -> None:
    """Write new objects and insist that it worked."""
    outcomes = writer.write_from([write_of(key, data) for key, data in objects.items()], soon())
    assert [outcome.status for outcome in outcomes] == [Status.OK] * len(objects), outcomes


def fetch(connector: Connector, key: str, size_bytes: int) -> tuple[Outcome, ProbeTarget]:
    """Read a whole object."""
    read, target = read_of(key, size_bytes)
    return connector.read_into([read], soon())[0], target


def version_of(connector: Connector, key: str, size_bytes: int) -> str | None:
    """The version that a refused read reports."""
    target = ProbeTarget.whole(size_bytes)
    target.refusal = "asked for the version"
    outcome = connector.read_into([Read(key, size_bytes, target)], soon())[0]
    assert outcome.status is Status.REJECTED, outcome
    if connector.capabilities.conditional_versions:
        assert outcome.version is not None, "a refused object tells its version"
    return outcome.version


def assert_holds(connector: Connector, objects: Mapping[str, bytes]) -> None:
    """Every object is there, of the right size, with exactly these bytes."""
    sizes = connector.sizes(list(objects), soon())
    assert sizes == [len(data) for data in objects.values()]
    pairs = [read_of(key, len(data)) for key, data in objects.items()]
    outcomes = connector.read_into([read for read, _ in pairs], soon())
    for outcome, (_, target), data in zip(outcomes, pairs, objects.values(), strict=True):
        assert outcome.status is Status.OK, outcome
        assert_delivered(target, data)


def assert_delivered(target: ProbeTarget, data: bytes) -> None:
    """One read of the object ``data`` went exactly as the protocol says."""
    assert target.events == ["parts", "check", "release"]
    wanted = target.wanted(data)
    wrong = first_difference(target.delivered(), wanted)
    assert wrong is None
    early = first_difference(target.at_check or b"", wanted)
    assert early is None, "checked before the last byte landed"
    assert target.guards_hold, "bytes were written beside the views"


def assert_absent(connector: Connector, keys: Sequence[str], size_bytes: int = 64) -> None:
    """No object of these keys can be seen in any way."""
    assert connector.sizes(keys, soon()) == [None] * len(keys)
    pairs = [read_of(key, size_bytes) for key in keys]
    outcomes = connector.read_into([read for read, _ in pairs], soon())
    assert [outcome.status for outcome in outcomes] == [Status.ABSENT] * len(keys), outcomes
    assert all(target.events == [] and target.is_untouched for _, target in pairs)
    for key in keys:
        assert key not in [entry.key for entry in connector.scan(key)]


def last_attempt(target: ProbeTarget, attempts_max: int) -> list[str]:
    """The calls of the last of at most ``attempts_max`` equal attempts."""
    length = target.events.index("release") + 1
    attempts = [target.events[at : at + length] for at in range(0, len(target.events), length)]
    assert all(one == attempts[0] for one in attempts), target.events
    assert len(attempts) <= attempts_max, target.events
    return attempts[-1]


def probe(write: Write) -> ProbeSource:
    """The source of a write made by :func:`write_of`."""
    assert isinstance(write.source, ProbeSource)
    return write.source


def run_together(*functions: Callable[[], None]) -> None:
    """Run all at once in threads; raises the first error, and when one hangs."""
    gate = threading.Barrier(len(functions))
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            gate.wait(PATIENCE_S)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"a thread hangs for {PATIENCE_S} s"


def exit_code_of(child: int) -> int:
    """The exit code of a forked ``child``; one that outlives our patience is killed."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
