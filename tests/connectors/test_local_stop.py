"""What a call may do after its deadline, with system calls that hang."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_faults import (
    MODES,
    SOON_S,
    Call,
    FaultyIO,
    Gate,
    eventually,
    files_below,
    get,
    later,
    open_at,
    put,
    timed_out_at,
)

from hicache_store.clock import Deadline
from hicache_store.connectors.base import (
    TIMED_OUT,
    BufferSource,
    BufferTarget,
    Outcome,
    Read,
    Status,
    Touch,
    Write,
)
from hicache_store.connectors.local import LocalConnector
from hicache_store.errors import DeadlineExceededError, HandleError
from hicache_store.limits import ABANDONED_MAX, MIB
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.probes import ProbeTarget, content, write_of

KEYS = [f"v1/ns/aa/{index:04d}/kv.H000-008.L000-061" for index in range(6)]
SIZE = 3 * MIB + 17
DATA = {key: content(key, SIZE) for key in KEYS}


@pytest.fixture
def io() -> FaultyIO:
    return FaultyIO()


@pytest.fixture
def gate(io: FaultyIO) -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def connect(tmp_path: Path, io: FaultyIO, mode: str) -> LocalConnector:
    return open_at(tmp_path / "store", io, f"io={mode}&threads=2")


def make_directories(store: LocalConnector) -> None:
    """Have every directory of KEYS there, so that all system calls of a write are reached."""
    assert all(put(store, key, b"x" * 100).is_ok for key in KEYS)
    assert all(outcome.is_ok for outcome in store.delete(KEYS, later()))


def descriptors_below(path: Path) -> list[str]:
    """The open files of this process that lie below ``path``."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [name for name in found if name.startswith(str(path))]


def is_object(name: str, *_: object, **__: object) -> bool:
    return name.startswith("v1+")


READ_HANGS = {
    "open": ("open", lambda name, *_, **__: is_object(name)),
    "fstat": ("fstat", lambda *_: True),
    "first preadv": ("preadv", lambda fd, views, offset: offset == 0),
    "last preadv": ("preadv", lambda fd, views, offset: offset == 3 * MIB),
    "close": ("close", lambda fd: True),
}
WRITE_HANGS = {
    "stat": lambda name, **__: is_object(name),
    "open": lambda name, *_, **__: name == ".",
    "pwritev": lambda fd, views, offset: sum(view.nbytes for view in views) > 4096,
    "utime_fd": lambda *_: True,
    "link_fd": lambda fd, name, **_: is_object(name),
}


@pytest.mark.parametrize("hang", READ_HANGS)
def test_a_hung_read_returns_late_but_leaves_the_memory_alone(
    tmp_path: Path, io: FaultyIO, hang: str
) -> None:
    """Straight into place: the call lasts as long as the I/O; then the buffer is the caller's again."""
    store = connect(tmp_path, io, "direct")
    assert all(put(store, key, DATA[key]).is_ok for key in KEYS)
    call, matches = READ_HANGS[hang]
    gate = io.hooks[call] = Gate(matches)
    buffers = [bytearray(SIZE) for _ in KEYS]
    reads = [Read(key, SIZE, BufferTarget.whole(buffer)) for key, buffer in zip(KEYS, buffers, strict=True)]
    clock = FakeClock()
    running = Call(lambda: store.read_into(reads, Deadline.after(1.0, clock)))
    gate.wait_for(2)
    clock.advance(2.0)
    assert running.stays_running(SOON_S)
    gate.opened.set()
    outcomes = running.result()
    for outcome, key, buffer in zip(outcomes, KEYS, buffers, strict=True):
        assert outcome.status in (Status.OK, Status.TIMED_OUT)
        assert outcome.status is Status.TIMED_OUT or buffer == DATA[key]
    assert [outcome.status for outcome in outcomes].count(Status.TIMED_OUT) >= 4
    for buffer in buffers:
        buffer[:] = b"\xee" * SIZE
    store.close()
    assert all(buffer == b"\xee" * SIZE for buffer in buffers)


@pytest.mark.parametrize("hang", READ_HANGS)
def test_an_abandoned_read_returns_on_time_and_never_writes_again(
    tmp_path: Path, io: FaultyIO, hang: str
) -> None:
    """By way of private memory: the call returns while the I/O hangs, and the late bytes go nowhere."""
    store = connect(tmp_path, io, "bounce")
    assert all(put(store, key, DATA[key]).is_ok for key in KEYS)
    call, matches = READ_HANGS[hang]
    gate = io.hooks[call] = Gate(matches)
    targets: list[ProbeTarget] = []

    def read(deadline: Deadline) -> list[Outcome]:
        targets[:] = [ProbeTarget.whole(SIZE) for _ in KEYS]
        reads = [Read(key, SIZE, target) for key, target in zip(KEYS, targets, strict=True)]
        return store.read_into(reads, deadline)

    outcomes = timed_out_at(gate, read)
    assert {outcome.status for outcome in outcomes} == {Status.TIMED_OUT}
    called = [list(target.events) for target in targets]
    for target in targets:
        target.memory[:] = b"\xee" * len(target.memory)
    assert store._workers.stuck > 0
    gate.opened.set()
    eventually(lambda: store._workers.stuck == 0)
    assert all(target.memory.count(0xEE) == len(target.memory) for target in targets)
    assert [target.events for target in targets] == called
    assert call == "close" or called == [[]] * 6
    assert get(store, KEYS[0], SIZE)[1] == DATA[KEYS[0]]
    store.close()


@pytest.mark.parametrize("call", WRITE_HANGS)
def test_a_hung_write_returns_late_and_says_what_is_there(tmp_path: Path, io: FaultyIO, call: str) -> None:
    """Straight from the source: once the call has returned, refilling the source changes nothing."""
    store = connect(tmp_path, io, "direct")
    make_directories(store)
    gate = io.hooks[call] = Gate(WRITE_HANGS[call])
    buffers = [bytearray(DATA[key]) for key in KEYS]
    writes = [Write(key, SIZE, BufferSource.of(buffer)) for key, buffer in zip(KEYS, buffers, strict=True)]
    clock = FakeClock()
    running = Call(lambda: store.write_from(writes, Deadline.after(1.0, clock)))
    gate.wait_for()
    clock.advance(2.0)
    assert running.stays_running(SOON_S)
    gate.opened.set()
    outcomes = running.result()
    for buffer in buffers:
        buffer[:] = b"\xee" * SIZE
    for outcome, key in zip(outcomes, KEYS, strict=True):
        if outcome.status is Status.OK:  # it was already being given its name
            assert call == "link_fd"
            assert get(store, key, SIZE)[1] == DATA[key]
        else:
            assert outcome.status is Status.TIMED_OUT
            assert store.sizes([key], later()) == [None]
    stored = sum(outcome.status is Status.OK for outcome in outcomes)
    assert len(files_below(tmp_path / "store")) == stored <= 2
    assert store._account is not None
    assert store._account.used_bytes() == stored * SIZE
    store.close()


@pytest.mark.parametrize("call", WRITE_HANGS)
def test_an_abandoned_write_returns_on_time_and_no_object_appears(
    tmp_path: Path, io: FaultyIO, call: str
) -> None:
    """By way of private memory: neither the refilled source nor anything else is stored later."""
    store = connect(tmp_path, io, "bounce")
    make_directories(store)
    gate = io.hooks[call] = Gate(WRITE_HANGS[call])
    buffers = [bytearray(DATA[key]) for key in KEYS]
    writes = [Write(key, SIZE, BufferSource.of(buffer)) for key, buffer in zip(KEYS, buffers, strict=True)]
    outcomes = timed_out_at(gate, lambda deadline: store.write_from(writes, deadline))
    assert {outcome.status for outcome in outcomes} == {Status.TIMED_OUT}
    for buffer in buffers:
        buffer[:] = b"\xee" * SIZE
    gate.opened.set()
    eventually(lambda: store._workers.stuck == 0)
    assert store.sizes(KEYS, later()) == [None] * 6
    assert files_below(tmp_path / "store") == []
    assert store._account is not None
    eventually(lambda: store._account.used_bytes() == 0)  # type: ignore[union-attr]
    assert put(store, KEYS[0], DATA[KEYS[0]]).status is Status.OK
    assert get(store, KEYS[0], SIZE)[1] == DATA[KEYS[0]]
    store.close()


@pytest.mark.parametrize("hang", ["open", "fstat", "first preadv"])
def test_the_deadline_is_looked_at_between_pieces(tmp_path: Path, io: FaultyIO, hang: str) -> None:
    """One system call may overrun the deadline, not a whole object."""
    store = open_at(tmp_path / "store", io, "io=direct&threads=1")
    assert put(store, KEYS[0], DATA[KEYS[0]]).is_ok
    call, matches = READ_HANGS[hang]
    gate = io.hooks[call] = Gate(matches)
    buffer = bytearray(SIZE)
    read = Read(KEYS[0], SIZE, BufferTarget.whole(buffer))
    clock = FakeClock()
    running = Call(lambda: store.read_into([read], Deadline.after(1.0, clock)))
    gate.wait_for()
    clock.advance(2.0)
    before = io.calls["preadv"]
    gate.opened.set()
    assert running.result()[0].status is Status.TIMED_OUT
    assert io.calls["preadv"] == before
    assert not any(buffer[MIB:])
    store.close()


def test_nothing_is_published_past_the_deadline(tmp_path: Path, io: FaultyIO) -> None:
    """All bytes are written when the time runs out: the object is not given its name any more."""
    store = connect(tmp_path, io, "direct")
    gate = io.hooks["utime_fd"] = Gate()
    clock = FakeClock()
    write = write_of(KEYS[0], DATA[KEYS[0]])
    running = Call(lambda: store.write_from([write], Deadline.after(1.0, clock)))
    gate.wait_for()
    clock.advance(2.0)
    links = io.calls["link_fd"]
    gate.opened.set()
    assert running.result()[0].status is Status.TIMED_OUT
    assert io.calls["link_fd"] == links
    assert files_below(tmp_path / "store") == []
    store.close()


@pytest.mark.parametrize("operation", ["sizes", "touch", "delete"])
def test_small_calls_on_a_hung_mount_return_on_time(tmp_path: Path, io: FaultyIO, operation: str) -> None:
    """Look-ups, touches and deletes of an abandoning store keep their deadline too."""
    store = connect(tmp_path, io, "bounce")
    assert all(put(store, key, b"x" * 100).is_ok for key in KEYS)
    gate = io.hooks["stat"] = Gate(lambda name, **__: is_object(name))
    touches = [Touch(key) for key in KEYS]
    if operation == "sizes":
        assert timed_out_at(gate, lambda deadline: store.sizes(KEYS, deadline)) == [None] * 6
    elif operation == "touch":
        assert timed_out_at(gate, lambda deadline: store.touch(touches, deadline)) == [TIMED_OUT] * 6
    else:
        assert timed_out_at(gate, lambda deadline: store.delete(KEYS, deadline)) == [TIMED_OUT] * 6
    gate.opened.set()
    eventually(lambda: store._workers.stuck == 0)
    assert store.sizes(KEYS, later()) == [100] * 6
    store.close()


def test_a_hung_account_does_not_hold_up_an_abandoning_write(tmp_path: Path, io: FaultyIO) -> None:
    """The lock of the byte counter may hang like any file: the reservation is given back when it ends."""
    store = connect(tmp_path, io, "bounce")
    gate = io.hooks["flock"] = Gate()
    write = write_of(KEYS[0], DATA[KEYS[0]])
    assert timed_out_at(gate, lambda deadline: store.write_from([write], deadline)) == [TIMED_OUT]
    gate.opened.set()
    eventually(lambda: store._workers.stuck == 0)
    assert store._account is not None
    assert store._account.used_bytes() == 0
    assert put(store, KEYS[0], DATA[KEYS[0]]).status is Status.OK
    assert store._account.used_bytes() == SIZE
    store.close()


def test_a_long_outage_is_bounded_and_ends_without_a_restart(tmp_path: Path, io: FaultyIO) -> None:
    """Calls on a hung mount time out, then are refused at once; when it answers again all works."""
    store = connect(tmp_path, io, "bounce")
    assert put(store, KEYS[0], DATA[KEYS[0]]).is_ok
    threads = threading.active_count()
    gate = io.hooks["open"] = Gate(lambda name, *_, **__: is_object(name))
    read = Read(KEYS[0], SIZE, BufferTarget.whole(bytearray(SIZE)))
    while store._workers.stuck < ABANDONED_MAX:
        assert store.read_into([read], Deadline.after(0.01)) == [TIMED_OUT]
    refused = store.read_into([read], later())[0]
    assert refused.status is Status.REFUSED
    assert "stuck" in refused.detail
    assert store.sizes(KEYS, later()) == [None] * 6
    assert threading.active_count() <= threads + ABANDONED_MAX + 2
    gate.opened.set()
    eventually(lambda: store._workers.stuck == 0)
    assert get(store, KEYS[0], SIZE)[1] == DATA[KEYS[0]]
    store.close()


def test_closing_on_a_hung_mount_closes_nothing_that_is_still_in_use(
    tmp_path: Path, io: FaultyIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stuck worker keeps its descriptors; when it ends it touches nothing and gives them back."""
    monkeypatch.setattr("hicache_store.connectors.workers.CLOSE_JOIN_S", SOON_S)
    store = connect(tmp_path, io, "bounce")
    gate = io.hooks["link_fd"] = Gate(lambda fd, name, **_: is_object(name))
    write = write_of(KEYS[0], DATA[KEYS[0]])
    assert timed_out_at(gate, lambda deadline: store.write_from([write], deadline)) == [TIMED_OUT]
    store.close()
    with pytest.raises(HandleError):
        store.sizes(KEYS, later())
    gate.opened.set()
    eventually(lambda: store._workers.alive == 0)
    assert files_below(tmp_path / "store") == []
    assert descriptors_below(tmp_path) == []


@pytest.mark.parametrize("call", ["filesystem_type", "mkdir", "link_fd", "flock"])
def test_attaching_to_a_hung_mount_fails_on_time(
    tmp_path: Path, io: FaultyIO, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Attaching has a deadline of its own, and what it opened late is closed again."""
    monkeypatch.setattr("hicache_store.connectors.workers.CLOSE_JOIN_S", SOON_S)
    gate = io.hooks[call] = Gate()
    with pytest.raises(DeadlineExceededError, match="did not answer"):
        open_at(tmp_path / "store", io, timeout_s=4 * SOON_S)
    gate.opened.set()
    eventually(lambda: descriptors_below(tmp_path) == [])
    store = open_at(tmp_path / "store", io)
    assert put(store, KEYS[0], b"x" * 100).is_ok
    store.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_hang_in_one_call_leaves_other_calls_served(tmp_path: Path, io: FaultyIO, mode: str) -> None:
    """While both threads of one batch hang, another caller's batch goes on."""
    store = connect(tmp_path, io, mode)
    assert all(put(store, key, DATA[key]).is_ok for key in KEYS)
    gate = io.hooks["open"] = Gate(lambda name, *_, **__: is_object(name) and KEYS[0].split("/")[3] in name)
    stuck = Call(
        lambda: store.read_into([Read(KEYS[0], SIZE, ProbeTarget.whole(SIZE))] * 2, Deadline.after(1.0))
    )
    gate.wait_for(2)
    assert get(store, KEYS[1], SIZE)[1] == DATA[KEYS[1]]
    gate.opened.set()
    stuck.result()
    store.close()
