"""Many requests at once: how many run together, what they hold, and what a caller in a loop sees."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from s3_places import CLIENTS, open_s3_at

from benchmarks.s3 import null_server
from hicache_store.clock import Deadline
from hicache_store.connectors.base import (
    OK,
    TIMED_OUT,
    BufferSource,
    BufferTarget,
    Outcome,
    Read,
    Status,
    Write,
)
from hicache_store.connectors.s3_async import AsyncS3
from hicache_store.connectors.s3_gate import Gate
from hicache_store.connectors.s3_landing import Batch, Buffers
from hicache_store.connectors.s3_plane import PlaneFault
from hicache_store.connectors.s3_threads import LoopThread, Threads
from hicache_store.errors import HandleError
from hicache_store.limits import ABANDONED_MAX
from hicache_store.metrics import Metrics
from hicache_store.testing.probes import ProbeTarget, content, read_of, write_of
from hicache_store.testing.s3_server import Broken, Request, S3Server, on_operations

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


def soon() -> Deadline:
    return Deadline.after(PATIENCE_S)


def together(count: int) -> Callable[[Request], None]:
    """A plan that answers requests only when ``count`` of them are there at the same time."""
    barrier = threading.Barrier(count)

    def plan(request: Request) -> None:
        if "/v1/" in request.key:
            barrier.wait(PATIENCE_S)

    return plan


class Peak:
    """A plan that measures how many requests are on the server at the same time."""

    def __init__(self) -> None:
        self.most = self._now = 0
        self._lock = threading.Lock()

    def __call__(self, _: Request) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.005)
        with self._lock:
            self._now -= 1


# -- requests in flight ------------------------------------------------------------------------


@pytest.mark.parametrize("client", CLIENTS)
def test_c06_requests_of_a_batch_run_together(server: S3Server, client: str) -> None:
    """As many as the concurrency says, and a look-up more: round trips do not add up."""
    keys = [f"v1/{index:02d}/kv" for index in range(32)]
    connector = open_s3_at(server.endpoint, client, concurrency=16)
    server.plan = together(16)
    writes = [write_of(key, content(key, 500)) for key in keys]
    assert {outcome.status for outcome in connector.write_from(writes, soon())} == {Status.OK}
    pairs = [read_of(key, 500) for key in keys]
    outcomes = connector.read_into([read for read, _ in pairs], soon())
    assert {outcome.status for outcome in outcomes} == {Status.OK}
    assert [target.delivered() for _, target in pairs] == [content(key, 500) for key in keys]
    if client == "obstore":
        server.plan = together(64)
    assert connector.sizes(keys * 2, soon()) == [500] * 64
    connector.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_c10_connections_are_bounded_and_kept(
    server: S3Server, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One pool as large as the concurrency: no handshake a request, no complaint of a full pool."""
    connector = open_s3_at(server.endpoint, client, concurrency=8)
    before = server.connections
    peak = Peak()
    server.plan = peak
    keys = [f"v1/{index:03d}/kv" for index in range(60)]
    writes = [write_of(key, content(key, 100)) for key in keys]
    assert {outcome.status for outcome in connector.write_from(writes, soon())} == {Status.OK}
    callers = [
        threading.Thread(target=lambda: connector.read_into([read_of(key, 100)[0] for key in keys], soon()))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(PATIENCE_S)
    assert peak.most <= 8
    assert server.connections - before <= 16
    assert "pool" not in caplog.text
    connector.close()


def test_ranges_of_one_object_run_together(server: S3Server) -> None:
    """A read of several parts costs one round trip."""
    server.objects["store/v1/kv"] = content("kv", 50_000)
    connector = open_s3_at(server.endpoint)
    ranges = [(start, start + 1_000) for start in range(0, 50_000, 10_000)]
    server.plan = together(len(ranges))
    target = ProbeTarget([(start + 10, [500]) for start, _ in ranges])
    assert connector.read_into([Read("v1/kv", 50_000, target, ranges)], soon())[0].status is Status.OK
    assert target.delivered() == target.wanted(content("kv", 50_000))
    connector.close()


def test_many_ranges_of_one_object_leave_room_for_others(server: S3Server) -> None:
    server.objects["store/v1/kv"] = content("kv", 50_000)
    connector = open_s3_at(server.endpoint)
    server.plan = peak = Peak()
    ranges = [(start, start + 10) for start in range(0, 50_000, 1_000)]
    target = ProbeTarget([(start, [10]) for start, _ in ranges])
    assert connector.read_into([Read("v1/kv", 50_000, target, ranges)], soon())[0].status is Status.OK
    assert target.delivered() == target.wanted(content("kv", 50_000))
    assert peak.most <= 8
    connector.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_a54_cancelled_and_slow_bodies_spoil_no_other(server: S3Server, client: str) -> None:
    """Fifty large reads at once, some left behind half way: every completed one is its own object."""
    size = 1_500_000
    keys = [f"v1/{index:02d}/kv" for index in range(50)]
    digests = {}
    for key in keys:
        data = content(key, size)
        server.objects[f"store/{key}"] = data
        digests[key] = hashlib.sha256(data).digest()
    connector = open_s3_at(server.endpoint, client)
    slow = threading.Event()

    def stall_some(request: Request):
        is_stalled = request.operation == "GET" and int(request.key.split("/")[2]) % 5 == 0
        return Broken(keep=size // 2, ending="stall") if is_stalled and not slow.is_set() else None

    server.plan = stall_some
    for deadline_s in (1.0, PATIENCE_S):
        if deadline_s == PATIENCE_S:
            slow.set()
        pairs = [read_of(key, size) for key in keys]
        outcomes = connector.read_into([read for read, _ in pairs], Deadline.after(deadline_s))
        for key, outcome, (_, target) in zip(keys, outcomes, pairs, strict=True):
            if outcome.is_ok:
                assert hashlib.sha256(target.delivered()).digest() == digests[key]
            else:
                assert outcome.status in (Status.TIMED_OUT, Status.REFUSED, Status.FAILED)
                assert target.is_untouched
    if client == "obstore":
        assert all(outcome.is_ok for outcome in outcomes)
    connector.close()


def test_c08_another_thread_keeps_running(server: S3Server) -> None:
    """While a batch moves, a thread that wants to run every millisecond does so hundreds of times."""
    size = 1 << 20
    keys = [f"v1/{index:02d}/kv" for index in range(32)]
    server.objects.update({f"store/{key}": bytes(size) for key in keys})
    connector = open_s3_at(server.endpoint)
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    rounds = 0
    end = time.monotonic() + PATIENCE_S
    while ticks[0] < 300 and time.monotonic() < end:
        outcomes = connector.read_into([read_of(key, size)[0] for key in keys], soon())
        assert all(outcome.is_ok for outcome in outcomes)
        rounds += 1
    stop.set()
    thread.join()
    assert ticks[0] >= 5 * rounds
    connector.close()


# -- a caller that lives in a loop -------------------------------------------------------------


def test_a_loop_goes_on_while_objects_move(server: S3Server) -> None:
    """Targets and sources are called on threads: one that blocks holds up nobody else of the loop."""

    async def scenario() -> None:
        store = await AsyncS3.connect(f"s3://bucket/store?endpoint={server.endpoint}")
        try:
            key, release = "v1/aa/kv", threading.Event()
            outcome = (await store.write_from([write_of(key, content(key, 5_000))], soon()))[0]
            assert outcome.status is Status.OK
            assert await store.sizes([key, "v1/bb"], soon()) == [5_000, None]
            read, target = read_of(key, 5_000)
            target.on_parts = lambda: release.wait(PATIENCE_S)
            pending = asyncio.ensure_future(store.read_into([read], soon()))
            while not target.events:
                await asyncio.sleep(0.001)
            assert await store.sizes([key], soon()) == [5_000]
            assert not pending.done()
            release.set()
            assert (await pending)[0].status is Status.OK
            assert target.delivered() == content(key, 5_000)
            assert [entry.key async for entry in store.scan("v1/")] == [key]
        finally:
            await store.close()
        with pytest.raises(HandleError):
            await store.sizes([key], soon())

    asyncio.run(scenario())


@pytest.mark.parametrize("client", ["aiobotocore", "obstore", "boto3"])
def test_a_cancelled_call_touches_nothing_afterwards(server: S3Server, client: str) -> None:
    """The coroutine ends only when no thread is in the caller's memory, and nothing lands later."""
    key = "v1/aa/kv"
    server.objects[f"store/{key}"] = content(key, 5_000)

    async def scenario() -> None:
        store = await AsyncS3.connect(f"s3://bucket/store?endpoint={server.endpoint}&client={client}")
        inside, release = threading.Event(), threading.Event()
        read, target = read_of(key, 5_000)

        def hold() -> None:
            inside.set()
            release.wait(PATIENCE_S)

        target.on_parts = hold
        entered = asyncio.ensure_future(store.read_into([read], soon()))
        while not inside.is_set():
            await asyncio.sleep(0.001)
        server.plan = on_operations(Broken(keep=10, ending="stall"), "GET")
        stalled_read, untouched = read_of(key, 5_000)
        stalled = asyncio.ensure_future(store.read_into([stalled_read], soon()))
        while server.count("GET") < 2:
            await asyncio.sleep(0.001)
        entered.cancel()
        stalled.cancel()
        await asyncio.wait({stalled})
        assert stalled.cancelled()
        assert untouched.is_untouched
        for _ in range(10):
            await asyncio.sleep(0.005)
            assert not entered.done(), "a thread is in the caller's memory"
        release.set()
        await asyncio.wait({entered})
        assert entered.cancelled()
        assert target.events.count("parts") == target.events.count("release") == 1
        target.memory[:] = b"\xee" * len(target.memory)
        await store.close()
        assert target.memory.count(0xEE) == len(target.memory)

    asyncio.run(scenario())


def test_an_awaited_call_returns_at_its_deadline(server: S3Server) -> None:
    server.objects["store/v1/aa/kv"] = content("kv", 5_000)

    async def scenario() -> None:
        store = await AsyncS3.connect(f"s3://bucket/store?endpoint={server.endpoint}")
        server.plan = on_operations(Broken(drips=True), "GET")
        read, target = read_of("v1/aa/kv", 5_000)
        assert await store.read_into([read], Deadline.after(0.1)) == [TIMED_OUT]
        assert target.is_untouched
        assert await store.read_into([read], Deadline.after(-1.0)) == [TIMED_OUT]
        await store.close()

    asyncio.run(scenario())


# -- the parts ---------------------------------------------------------------------------------


def test_the_gate_bounds_requests_and_bytes_in_order() -> None:
    async def scenario() -> None:
        gate, order = Gate(3, 100), []
        leave = {name: asyncio.Event() for name in "abcdefg"}

        async def one(name: str, size: int) -> None:
            async with gate.hold(size):
                order.append(name)
                await leave[name].wait()

        sizes = {"a": 40, "b": 40, "c": 40, "d": 10, "e": 1_000, "f": 0, "g": 0}
        tasks = {name: asyncio.ensure_future(one(name, size)) for name, size in sizes.items()}
        await asyncio.sleep(0)
        assert order == ["a", "b"], "c does not fit, and d does not overtake it"
        tasks["d"].cancel()
        leave["a"].set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == ["a", "b", "c"]
        for name in "bc":
            leave[name].set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == ["a", "b", "c", "e", "f", "g"][: len(order)]
        assert order[3] == "e", "more than all is let in alone"
        for event in leave.values():
            event.set()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert order == ["a", "b", "c", "e", "f", "g"]
        async with gate.hold(100):
            pass

    asyncio.run(scenario())


def test_the_gate_survives_cancelled_waits() -> None:
    """A place that was given to a waiter in the moment of its cancellation is not lost."""

    async def scenario() -> None:
        gate = Gate(1, 10)

        async def one() -> None:
            async with gate.hold(1):
                pass

        for _ in range(20):
            async with gate.hold(1):
                waiter = asyncio.ensure_future(one())
                await asyncio.sleep(0)
            waiter.cancel()
            await asyncio.wait({waiter})
        await asyncio.wait_for(one(), PATIENCE_S)

    asyncio.run(scenario())


def test_threads_replace_hung_ones_up_to_a_bound() -> None:
    """Abandoned work is bounded; at the bound calls fail at once, and when it ends they work again."""
    metrics = Metrics()

    async def scenario() -> None:
        pool, release = Threads(2, "pool", metrics), threading.Event()
        assert await pool.run(lambda _: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda _: 1 // 0)
        stopped: list[bool] = []

        def hang(is_stopped: Callable[[], bool]) -> None:
            release.wait(PATIENCE_S)
            stopped.append(is_stopped())

        for _ in range(ABANDONED_MAX):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.run(hang), 0.05)
        with pytest.raises(PlaneFault, match="too much hung work"):
            await pool.run(lambda _: 7)
        release.set()
        end = time.monotonic() + PATIENCE_S
        while len(stopped) < ABANDONED_MAX and time.monotonic() < end:
            await asyncio.sleep(0.005)
        assert stopped == [True] * ABANDONED_MAX
        while time.monotonic() < end:
            try:
                assert await pool.run(lambda _: 7) == 7
                break
            except PlaneFault:
                await asyncio.sleep(0.005)
        pool.close()
        with pytest.raises(PlaneFault):
            await pool.run(lambda _: 7)

    asyncio.run(scenario())
    assert metrics.get("s3.threads_abandoned") == ABANDONED_MAX


def test_two_jobs_never_wait_for_one_thread() -> None:
    """As long as the pool may have another one."""

    async def scenario() -> None:
        pool, barrier = Threads(4, "pool", Metrics()), threading.Barrier(4)
        await pool.run(lambda _: None)
        await asyncio.gather(*(pool.run(lambda _: barrier.wait(PATIENCE_S)) for _ in range(4)))
        pool.close()

    asyncio.run(scenario())


def test_a_finished_batch_lets_nobody_in() -> None:
    batch = Batch(2, soon())
    assert batch.enter()
    batch.finish()
    assert not batch.enter()
    batch.record(0, OK)
    left = threading.Thread(target=batch.wait_until_left)
    left.start()
    assert left.is_alive()
    batch.leave()
    left.join(PATIENCE_S)
    assert not left.is_alive()
    batch.record(1, Outcome(Status.OK))
    assert batch.outcomes == [OK, TIMED_OUT], "what comes after the return is nobody's"


def test_buffers_are_given_out_again_and_bounded() -> None:
    buffers = Buffers(1_000)
    first = buffers.take(600)
    buffers.give_back(first)
    assert buffers.take(600) is first
    assert buffers.take(600) is not first
    second = buffers.take(500)
    buffers.give_back(first)
    buffers.give_back(second)
    assert buffers.take(500) is second
    assert buffers.take(600) is not first, "old sizes make room for new ones"
    large = buffers.take(5_000)
    buffers.give_back(large)
    assert buffers.take(5_000) is not large


def test_a_closed_loop_refuses_and_cancels() -> None:
    loop = LoopThread("test loop")
    pending = loop.submit(asyncio.sleep(PATIENCE_S))
    loop.close()
    loop.close()
    assert pending.cancelled()
    with pytest.raises(HandleError, match="closed"):
        loop.submit(asyncio.sleep(0))


@pytest.mark.soak
def test_memory_stays_flat_over_ten_gigabytes() -> None:
    """Batch after batch, read and written, the process holds no more than after the first ones."""
    size, count = 4 << 20, 32
    with null_server() as port:
        connector = open_s3_at(f"http://127.0.0.1:{port}")
        memory = memoryview(bytearray(size * count))
        views = [memory[index * size : (index + 1) * size] for index in range(count)]
        keys = [f"v1/{size}-{index}" for index in range(count)]
        reads = [Read(key, size, BufferTarget.whole(view)) for key, view in zip(keys, views, strict=True)]
        writes = [Write(key, size, BufferSource.of(view)) for key, view in zip(keys, views, strict=True)]

        def resident() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        after_first = 0
        for turn in range(80):
            assert all(outcome.is_ok for outcome in connector.read_into(reads, soon()))
            if turn % 4 == 0:
                assert all(outcome.is_ok for outcome in connector.write_from(writes, soon()))
            if turn == 8:
                after_first = resident()
        assert resident() - after_first < 128 << 20
        connector.close()
