"""Counting, limits and hedged reads, and the options of any URL."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from hicache_store.clock import Deadline
from hicache_store.config import parse_url
from hicache_store.connectors.base import Capabilities, Outcome, Read, Status, Touch, Write
from hicache_store.connectors.limited import hedged, limited
from hicache_store.connectors.memory import MemoryConnector
from hicache_store.connectors.metered import metered
from hicache_store.connectors.registry import open_connector
from hicache_store.connectors.wrapping import WrappedConnector, split_options, unwrapped
from hicache_store.errors import ConfigurationError
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.contract_base import (
    PATIENCE_S,
    assert_delivered,
    page_key,
    run_together,
    soon,
    store,
)
from hicache_store.testing.probes import content, read_of, write_of


def test_calls_items_bytes_time_and_outcomes_are_counted() -> None:
    clock = FakeClock()
    connector = metered(MemoryConnector(), clock=clock)
    key, gone = page_key("metered"), page_key("gone")
    store(connector, {key: content(key, 500)})
    read, target = read_of(key, 500)
    target.on_parts = lambda: clock.advance(0.02)
    connector.read_into([read, read_of(gone, 700)[0]], Deadline.after(60.0))
    connector.sizes([key, gone, gone], soon())
    connector.delete([key], soon())
    assert connector.metrics.snapshot() == {
        "io.delete.calls": 1, "io.delete.items": 1, "io.delete.microseconds": 0, "io.delete.ok": 1,
        "io.delete.within_1ms": 1,
        "io.read.absent": 1, "io.read.bytes": 500, "io.read.calls": 1, "io.read.items": 2,
        "io.read.microseconds": 20_000, "io.read.ok": 1, "io.read.within_64ms": 1,
        "io.sizes.calls": 1, "io.sizes.items": 3, "io.sizes.microseconds": 0, "io.sizes.present": 1,
        "io.sizes.unknown": 2, "io.sizes.within_1ms": 1,
        "io.write.bytes": 500, "io.write.calls": 1, "io.write.items": 1, "io.write.microseconds": 0,
        "io.write.ok": 1, "io.write.within_1ms": 1,
    }  # fmt: skip


class Watched(MemoryConnector):
    """Tells how many items and bytes were under way at most."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.items = self.bytes = self.most_items = self.most_bytes = 0

    def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        n_bytes = sum(write.size_bytes for write in writes)
        with self.lock:
            self.items, self.bytes = self.items + len(writes), self.bytes + n_bytes
            self.most_items = max(self.items, self.most_items)
            self.most_bytes = max(self.bytes, self.most_bytes)
        outcomes = super().write_from(writes, deadline)
        with self.lock:
            self.items, self.bytes = self.items - len(writes), self.bytes - n_bytes
        return outcomes


def test_items_and_bytes_in_flight_are_bounded() -> None:
    inner = Watched()
    connector = limited(inner, 5, 1_000)

    def write(caller: int) -> None:
        keys = [page_key(f"limited {caller} {index}") for index in range(40)]
        writes = [write_of(key, content(key, 300)) for key in keys]
        writes[7] = write_of(keys[7], content(keys[7], 4_000))
        assert {one.status for one in connector.write_from(writes, soon())} == {Status.OK}

    run_together(*[lambda caller=caller: write(caller) for caller in range(4)])
    assert inner.most_items <= 5
    assert inner.most_bytes == 4_000, "an object beyond the bound goes alone"
    assert len(list(inner.scan())) == 160


def test_d06_waiting_for_room_ends_at_the_deadline() -> None:
    """The wait for a free place is part of the total deadline, and a place comes back."""
    inner = MemoryConnector()
    connector = limited(inner, 1)
    read, target = read_of(page_key("absent"), 100)
    late: list[Outcome] = []
    key = page_key("held")
    store(inner, {key: content(key, 100)})
    held, holder = read_of(key, 100)
    holder.on_parts = lambda: late.extend(connector.read_into([read], Deadline.after(0.05)))
    assert connector.read_into([held], soon())[0].status is Status.OK
    assert [one.status for one in late] == [Status.TIMED_OUT]
    assert target.events == []
    assert connector.read_into([read], soon())[0].status is Status.ABSENT


class Slow(MemoryConnector):
    """The reads of one call wait for ``gate``; memory of their own is what they say they have."""

    def __init__(self, held_calls: int) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.calls = 0
        self.lock = threading.Lock()
        self.held_calls = held_calls
        self.ended = threading.Semaphore(0)

    @property
    def capabilities(self) -> Capabilities:
        said = super().capabilities
        return Capabilities(**{name: getattr(said, name) for name in said.__slots__} | {"stop": "abandons"})

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        with self.lock:
            self.calls += 1
            is_held = self.calls <= self.held_calls
        if is_held:
            assert self.gate.wait(PATIENCE_S)
        outcomes = super().read_into(reads, soon())  # as a hung system call, which knows no deadline
        self.ended.release()
        return outcomes


def test_the_second_read_wins_and_the_first_never_touches_the_target() -> None:
    inner = Slow(held_calls=1)
    connector = hedged(inner, 0.01)
    key = page_key("hedged")
    store(inner, {key: content(key, 5_000)})
    read, target = read_of(key, 5_000)
    absent, _ = read_of(page_key("nobody"), 10)
    outcomes = connector.read_into([read, absent], soon())
    assert [one.status for one in outcomes] == [Status.OK, Status.ABSENT]
    assert_delivered(target, content(key, 5_000))
    target.memory[:] = b"\xee" * len(target.memory)
    inner.gate.set()
    for _ in range(2):
        assert inner.ended.acquire(timeout=PATIENCE_S)
    assert target.events == ["parts", "check", "release"]
    assert target.memory.count(0xEE) == len(target.memory)
    assert connector.metrics.get("hedge.second_won") == 1


def test_at_the_deadline_neither_read_lands_any_more() -> None:
    inner = Slow(held_calls=2)
    connector = hedged(inner, 0.005)
    key = page_key("late")
    store(inner, {key: content(key, 100)})
    read, target = read_of(key, 100)
    assert connector.read_into([read], Deadline.after(0.05))[0].status is Status.TIMED_OUT
    inner.gate.set()
    for _ in range(2):
        assert inner.ended.acquire(timeout=PATIENCE_S)
    assert target.events == []
    assert target.is_untouched


def test_a_fast_read_is_not_hedged() -> None:
    inner = Slow(held_calls=0)
    connector = hedged(inner, PATIENCE_S)
    key = page_key("fast")
    store(inner, {key: content(key, 100)})
    read, target = read_of(key, 100)
    target.refusal = "bad"
    outcome = connector.read_into([read], soon())[0]
    assert (outcome.status, outcome.version is None) == (Status.REJECTED, False)
    assert inner.calls == 1


def test_reads_into_the_callers_memory_cannot_be_hedged(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="for files give io=bounce"):
        open_connector(f"file://{tmp_path}/direct?io=direct&hedge=50ms&sweep=0")
    open_connector(f"file://{tmp_path}/bounce?io=bounce&hedge=50ms&sweep=0").close()


def test_options_of_any_scheme_are_taken_out_of_the_url() -> None:
    connector = open_connector("memory:?retries=3&quota=1MiB&breaker=1&in_flight=8&metered=1")
    layers = 0
    inner = connector
    while isinstance(inner, WrappedConnector):
        inner, layers = inner.inner, layers + 1
    assert layers == 4
    assert unwrapped(connector) is inner
    assert isinstance(inner, MemoryConnector)
    assert connector.touch([Touch("k")], soon())[0].status is Status.ABSENT
    assert isinstance(open_connector("memory:"), MemoryConnector)
    with pytest.raises(ConfigurationError, match="option retries='99' is not accepted"):
        open_connector("memory:?retries=99")


def test_storage_behind_a_network_is_retried_and_has_a_breaker_by_default() -> None:
    for url, retries, has_breaker in (("s3://b", 2, True), ("redis://h?retries=0&breaker=0", 0, False),
                                      ("file:///x", 0, False), ("layered:?fast=a", 0, False)):  # fmt: skip
        rest, options = split_options(parse_url(url), is_own=True)
        assert (options.get("retries", int), options.get("breaker", bool)) == (retries, has_breaker)
        assert {name for name, _ in rest.query} <= {"fast"}
    _, options = split_options(parse_url("theirs://b"), is_own=False)
    assert options.get("retries", int) == 0
