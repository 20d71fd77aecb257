"""Hedged reads of connectors that take a target through its protocol more than once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Capabilities, Outcome, Read, Status
from hicache_store.connectors.layered import LayeredConnector
from hicache_store.connectors.layered_copies import CapturingSource, CapturingTarget
from hicache_store.connectors.limited import hedged
from hicache_store.connectors.memory import MemoryConnector
from hicache_store.connectors.wrapping import WrappedConnector
from hicache_store.testing.contract_base import PATIENCE_S, page_key, soon, store
from hicache_store.testing.faults import FaultyConnector, Hold, on_keys
from hicache_store.testing.probes import ProbeSource, ProbeTarget, content, raising

SIZE = 2_000
KEY = page_key("hedged layers")
EARLY_S = 0.3
"""How long a call is watched for coming back too early; one that is right passes whatever this is."""


class OwnMemory(MemoryConnector):
    """Says of its reads what hedging asks for."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, stop="abandons")

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        return super().read_into(reads, soon())  # as a hung system call, which knows no deadline


class Layers:
    """Hedged layers whose fast copy is bad."""

    def __init__(self) -> None:
        fast, slow = OwnMemory(), OwnMemory()
        store(fast, {KEY: content(KEY, SIZE, 1)})
        store(slow, {KEY: content(KEY, SIZE)})
        self.slow = FaultyConnector(slow)
        self.hedged: WrappedConnector = hedged(LayeredConnector(fast, self.slow, fill="none"), 0.01)
        self.outcomes: list[Outcome] = []

    def read(self, target: ProbeTarget, seconds: float) -> threading.Thread:
        """A caller with a deadline, in a thread."""

        def call() -> None:
            self.outcomes += self.hedged.read_into([Read(KEY, SIZE, target)], Deadline.after(seconds))

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def layers() -> Iterator[Layers]:
    place = Layers()
    yield place
    place.hedged.close()


def picky_target() -> ProbeTarget:
    """Refuses what is not the object."""
    target = ProbeTarget.whole(SIZE)

    def judge() -> None:
        target.refusal = None if target.at_check == content(KEY, SIZE) else "a sum differs"

    target.on_check = judge
    return target


def test_a_second_landing_is_waited_for_as_the_first_one_is(layers: Layers) -> None:
    """The fast copy was refused and given back; the slow one lands across the deadline."""
    target = picky_target()
    judge, lands, may_end = target.on_check, threading.Event(), threading.Event()

    def check() -> None:
        judge()
        if target.refusal is None:
            lands.set()
            assert may_end.wait(PATIENCE_S)
            target.memory[:] = b"\xee" * len(target.memory)  # as a check that copies staged bytes does

    target.on_check = check
    caller = layers.read(target, 0.05)
    assert lands.wait(PATIENCE_S)
    caller.join(EARLY_S)
    assert caller.is_alive(), "the call came back while its target was written"
    may_end.set()
    caller.join(PATIENCE_S)
    assert [one.status for one in layers.outcomes] == [Status.OK]
    assert target.events == ["parts", "check", "release"] * 2


def test_after_the_call_no_further_try_reaches_the_target(layers: Layers) -> None:
    """Neither its parts nor its release: what it took first was given back first."""
    hold = Hold(threading.Event(), ignores_deadline=True)
    layers.slow.plan = on_keys(lambda key: True, hold, ("read",))
    late = threading.Semaphore(0)
    inner_read = layers.slow.read_into
    layers.slow.read_into = lambda *call: (inner_read(*call), late.release())[0]  # type: ignore[method-assign]
    target = picky_target()
    layers.read(target, 0.1).join(PATIENCE_S)
    assert [one.status for one in layers.outcomes] == [Status.TIMED_OUT]
    assert target.events == ["parts", "check", "release"]
    hold.until.set()
    assert late.acquire(timeout=PATIENCE_S)
    assert target.events == ["parts", "check", "release"]


def test_a_failed_second_landing_is_no_success(layers: Layers) -> None:
    """What the first check said does not speak for bytes that came later."""
    target = ProbeTarget.whole(SIZE)
    target.refusal = "a sum differs"
    target.on_release = lambda: setattr(target, "on_parts", raising(OSError("the pool is gone")))
    layers.read(target, PATIENCE_S).join(PATIENCE_S)
    assert [one.status for one in layers.outcomes] == [Status.FAILED]
    assert target.events == ["parts", "check", "release", "parts", "release"]


def test_captured_bytes_are_those_of_the_last_try() -> None:
    target = ProbeTarget.whole(3)
    capture = CapturingTarget(target, 3)
    capture.parts()[0][1][0][:] = b"one"
    assert (capture.check(), capture.data) == (None, b"one")
    capture.release()
    target.refusal = "no"
    capture.parts()
    assert (capture.check(), capture.data) == ("no", None)

    source = ProbeSource.of(b"one")
    captured = CapturingSource(source, 3)
    captured.buffers()
    assert captured.data == b"one"
    source.on_buffers = raising(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        captured.buffers()
    assert captured.data is None
