"""A server that asks for less: fewer requests at a time while it does, all of them again afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from s3_places import CLIENTS, open_s3_at

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Status
from hicache_store.connectors.s3 import S3Connector
from hicache_store.connectors.s3_gate import Gate
from hicache_store.connectors.s3_plane import FaultKind, PlaneFault
from hicache_store.metrics import Metrics
from hicache_store.testing.probes import content, read_of, write_of
from hicache_store.testing.s3_server import Fault, Request, S3Server, error_reply, on_operations

PATIENCE_S = 60.0
SLOW_DOWN = error_reply(503, "SlowDown", {"retry-after": "120"})
KEYS = [f"v1/{index:03d}/kv" for index in range(64)]


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        running.objects.update({f"store/{key}": content(key, 100) for key in KEYS})
        yield running


def soon() -> Deadline:
    return Deadline.after(PATIENCE_S)


class Busy:
    """A server that takes ``bears`` requests at a time and throttles all beyond, counting both.

    A request stays until the next one has come or a moment has passed, so that those that are sent
    together meet.
    """

    def __init__(self, bears: int) -> None:
        self.bears = bears
        self.taken = self.throttled = self.most = self._inside = 0
        self._changed = threading.Condition()

    def __call__(self, request: Request) -> Fault | None:
        if "/v1/" not in f"/{request.key}":
            return None
        with self._changed:
            self._inside += 1
            self.most = max(self.most, self._inside)
            self._changed.notify_all()
            is_too_much = self._inside > self.bears
            if not is_too_much:
                self._changed.wait(0.005)
            self._inside -= 1
            self.throttled += is_too_much
            self.taken += not is_too_much
        return SLOW_DOWN if is_too_much else None


def read_all(connector: S3Connector) -> int:
    """How many of the objects were read; those that were have their own bytes."""
    pairs = [read_of(key, 100) for key in KEYS]
    outcomes = connector.read_into([read for read, _ in pairs], soon())
    for key, outcome, (_, target) in zip(KEYS, outcomes, pairs, strict=True):
        if outcome.is_ok:
            assert target.delivered() == content(key, 100)
        else:
            assert outcome.status is Status.FAILED
            assert outcome.is_transient
            assert target.is_untouched
    return sum(outcome.is_ok for outcome in outcomes)


@pytest.mark.parametrize("client", CLIENTS)
def test_d11_fewer_requests_at_a_time_while_a_server_throttles(server: S3Server, client: str) -> None:
    """Asked for less, a client that goes on as before is throttled for ever; one that waits for good is
    of no use when the server has recovered."""
    connector = open_s3_at(server.endpoint, client, concurrency=32)
    server.plan = on_operations(SLOW_DOWN, "GET", key="/v1/")
    assert read_all(connector) == 0
    places = connector._engine._requests.places
    assert places == 1
    assert 5 <= connector.metrics.get("s3.slowed_down") <= len(KEYS)
    assert connector._engine._lookups.places == 64, "nobody throttled look-ups"
    server.plan = None
    assert read_all(connector) == 64
    assert 1 < connector._engine._requests.places < 32, "not all at once again"
    for _ in range(9):
        assert read_all(connector) == 64
    assert connector._engine._requests.places == 32
    server.plan = on_operations(SLOW_DOWN, "HEAD")
    for _ in range(7):
        assert connector.sizes(KEYS, soon()) == [None] * 64
    assert connector._engine._lookups.places == 1
    assert connector._engine._requests.places == 32
    server.plan = None
    assert connector.sizes(KEYS, soon()) == [100] * 64
    connector.close()


def test_d11_the_load_settles_at_what_a_server_bears(server: S3Server) -> None:
    """Most requests get through, where without backing off most would be thrown away."""
    connector = open_s3_at(server.endpoint, concurrency=32)
    server.plan = busy = Busy(bears=4)
    read_all(connector)
    assert busy.most > 4, "it began with all it may have"
    busy.taken = busy.throttled = 0
    for _ in range(6):
        read_all(connector)
    assert busy.throttled < busy.taken / 2
    assert connector._engine._requests.places <= 16
    writes = [write_of(f"{key}.new", b"x" * 50) for key in KEYS]
    assert sum(outcome.is_ok for outcome in connector.write_from(writes, soon())) > 32
    busy.bears = 1_000
    for _ in range(10):
        read_all(connector)
    assert connector._engine._requests.places == 32
    connector.close()


# -- the gate ----------------------------------------------------------------------------------


THROTTLED = PlaneFault(FaultKind.THROTTLED)


async def use(gate: Gate, fault: PlaneFault | None = None, until: asyncio.Event | None = None) -> None:
    try:
        async with gate.hold(0):
            if until is not None:
                await until.wait()
            if fault is not None:
                raise fault
    except PlaneFault:
        pass


def test_requests_of_one_burst_count_as_one_complaint() -> None:
    """All that were in flight together are throttled together; that halves the places once."""

    async def scenario() -> None:
        gate, go = Gate(16, 0, Metrics()), asyncio.Event()
        burst = [asyncio.ensure_future(use(gate, THROTTLED, go)) for _ in range(16)]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*burst)
        assert gate.places == 8
        await use(gate, THROTTLED)
        assert gate.places == 4

    asyncio.run(scenario())


def test_places_are_bounded_below_and_above() -> None:
    async def scenario() -> None:
        metrics = Metrics()
        gate = Gate(4, 0, metrics)
        for _ in range(10):
            await use(gate, THROTTLED)
        assert gate.places == 1
        assert metrics.get("s3.slowed_down") == 10
        await asyncio.wait_for(asyncio.gather(*(use(gate) for _ in range(8))), PATIENCE_S)
        for _ in range(100):
            await use(gate)
        assert gate.places == 4

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind is not FaultKind.THROTTLED])
def test_other_faults_ask_for_nothing(kind: FaultKind) -> None:
    async def scenario() -> None:
        gate = Gate(4, 0, Metrics())
        for _ in range(10):
            await use(gate, PlaneFault(kind))
        assert gate.places == 4

    asyncio.run(scenario())


def test_a_gate_for_memory_stays_as_wide_as_it_is() -> None:
    """A throttled request passes through it on its way out as well."""

    async def scenario() -> None:
        gate = Gate(4, 0)
        await use(gate, THROTTLED)
        assert gate.places == 4

    asyncio.run(scenario())


def test_narrowing_lets_nobody_in_until_enough_have_left() -> None:
    async def scenario() -> None:
        gate, go = Gate(4, 0, Metrics()), asyncio.Event()
        inside = [asyncio.ensure_future(use(gate, None, go)) for _ in range(3)]
        await asyncio.sleep(0)
        await use(gate, THROTTLED)
        assert gate.places == 2
        late = asyncio.ensure_future(use(gate))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not late.done()
        go.set()
        await asyncio.wait_for(asyncio.gather(*inside, late), PATIENCE_S)

    asyncio.run(scenario())
