"""S3: the connector against its client library alone, a bare socket and plain boto3, in one run.

A server that stores nothing (:mod:`benchmarks.null_s3`) runs beside the client on the same cores, so that
the client is what is measured. "bare obstore" leaves the bytes in memory of the library; a store must
have them in place, which is the next line. A bare socket speaks just enough HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.measure import Case, Row, take_turns
from benchmarks.redis import HeartBeat, Latencies
from hicache_store.clock import Deadline
from hicache_store.config import parse_url
from hicache_store.connectors.base import BufferSource, BufferTarget, Connector, Read, Write

KIB = 1024
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
BATCH_BYTES_MAX = 128 * 1024 * KIB
IN_FLIGHT = 16
LOOKUPS = 2_000
SLOW_LOOKUPS = 200
PATIENCE_S = 120.0


def soon() -> Deadline:
    return Deadline.after(PATIENCE_S)


@contextlib.contextmanager
def null_server() -> Iterator[int]:
    """The port of a server in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.null_s3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


@dataclass
class Batch:
    """Objects of one size and where their bytes belong."""

    size: int
    keys: list[str]
    views: list[memoryview]

    @classmethod
    def of(cls, size: int, count: int) -> Batch:
        memory = memoryview(np.random.default_rng(3).integers(0, 256, count * size, dtype=np.uint8))
        views = [memory[index * size : (index + 1) * size] for index in range(count)]
        return cls(size, [f"v1/bench/{size}-{index:06d}" for index in range(count)], views)


def on_threads(count: int, items: int, step: Callable[[Any, int], None], states: list[Any]) -> None:
    """``step`` for every index on ``count`` threads, each with a state of its own."""
    cursor = iter(range(items))

    def work(state: Any) -> None:
        for index in cursor:
            step(state, index)

    threads = [threading.Thread(target=work, args=(states[number],)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class BareSockets:
    """The limit: kept connections, the body received into and sent from where it belongs."""

    def __init__(self, port: int, batch: Batch, threads: int) -> None:
        self.batch, self.threads = batch, threads
        self.sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(threads)]
        for each in self.sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self) -> None:
        batch = self.batch

        def step(each: socket.socket, index: int) -> None:
            each.sendall(f"GET /bucket/{batch.keys[index]} HTTP/1.1\r\nhost: null\r\n\r\n".encode())
            view = batch.views[index]
            rest = _head(each)
            view[: len(rest)] = rest
            at = len(rest)
            while at < len(view):
                at += each.recv_into(view[at:])

        on_threads(self.threads, len(batch.keys), step, self.sockets)

    def write(self) -> None:
        batch = self.batch

        def step(each: socket.socket, index: int) -> None:
            line = f"PUT /bucket/{batch.keys[index]} HTTP/1.1\r\nhost: null\r\n"
            each.sendall(f"{line}content-length: {batch.size}\r\n\r\n".encode())
            each.sendall(batch.views[index])
            assert _head(each) == b""

        on_threads(self.threads, len(batch.keys), step, self.sockets)

    def close(self) -> None:
        for each in self.sockets:
            each.close()


def _head(each: socket.socket) -> bytes:
    """Read the headers of an answer; what came of the body beyond them."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += each.recv(4096)
    assert data.startswith(b"HTTP/1.1 200")
    return data.partition(b"\r\n\r\n")[2]


class BareObstore:
    """The client library alone, IN_FLIGHT requests from one loop."""

    def __init__(self, endpoint: str, batch: Batch) -> None:
        import obstore  # noqa: PLC0415
        from obstore.store import S3Store  # noqa: PLC0415

        self.obstore, self.batch = obstore, batch
        self.store = S3Store(
            "bucket",
            config={
                "endpoint": endpoint,
                "region": "us-east-1",
                "access_key_id": "key",
                "secret_access_key": "secret",
                "virtual_hosted_style_request": False,
                "unsigned_payload": True,
            },
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def _all(self, one: Callable[[int], Awaitable[None]], count: int) -> None:
        async def everything() -> None:
            cursor = iter(range(count))

            async def run() -> None:
                for index in cursor:
                    await one(index)

            await asyncio.gather(*(run() for _ in range(IN_FLIGHT)))

        asyncio.run_coroutine_threadsafe(everything(), self.loop).result(PATIENCE_S)

    def read(self) -> None:
        async def one(index: int) -> None:
            answer = await self.obstore.get_async(self.store, self.batch.keys[index])
            assert len(await answer.bytes_async()) == self.batch.size

        self._all(one, len(self.batch.keys))

    def read_into_place(self) -> None:
        async def one(index: int) -> None:
            answer = await self.obstore.get_async(self.store, self.batch.keys[index])
            body = np.frombuffer(await answer.bytes_async(), np.uint8)
            np.copyto(np.frombuffer(self.batch.views[index], np.uint8), body)

        self._all(one, len(self.batch.keys))

    def write(self) -> None:
        async def one(index: int) -> None:
            batch = self.batch
            await self.obstore.put_async(
                self.store, batch.keys[index], batch.views[index], use_multipart=False
            )

        self._all(one, len(self.batch.keys))

    def look_up(self, keys: list[str]) -> None:
        async def one(index: int) -> None:
            await self.obstore.head_async(self.store, keys[index])

        self._all(one, len(keys))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


class PlainBoto:
    """boto3 as most would use it: one client, a thread a request in flight, a copy into place."""

    def __init__(self, endpoint: str, batch: Batch, threads: int) -> None:
        import boto3  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415

        self.batch, self.threads = batch, threads
        config = Config(max_pool_connections=threads, s3={"addressing_style": "path"})
        self.client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            config=config,
        )

    def _all(self, step: Callable[[int], None], count: int) -> None:
        on_threads(self.threads, count, lambda _, index: step(index), [None] * self.threads)

    def read(self) -> None:
        def step(index: int) -> None:
            answer = self.client.get_object(Bucket="bucket", Key=self.batch.keys[index])
            self.batch.views[index][:] = answer["Body"].read()

        self._all(step, len(self.batch.keys))

    def write(self) -> None:
        def step(index: int) -> None:
            body = bytes(self.batch.views[index])
            self.client.put_object(Bucket="bucket", Key=self.batch.keys[index], Body=body)

        self._all(step, len(self.batch.keys))

    def look_up(self, keys: list[str]) -> None:
        self._all(lambda index: self.client.head_object(Bucket="bucket", Key=keys[index]), len(keys))

    def close(self) -> None:
        self.client.close()


def run(*, threads: int, pages: int, rounds: int) -> Iterator[tuple[str, list[Row]]]:
    """A table a size, and one for look-ups."""
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "key")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "secret")
    from hicache_store.connectors.s3 import connect  # noqa: PLC0415

    with null_server() as port:
        endpoint = f"http://127.0.0.1:{port}"
        connector = connect(parse_url(f"s3://bucket/b?endpoint={endpoint}&concurrency={IN_FLIGHT}"))
        try:
            for size in SIZES:
                batch = Batch.of(size, min(pages, BATCH_BYTES_MAX // size))
                title = (
                    f"S3, {len(batch.keys)} objects of {size // KIB} KiB, {IN_FLIGHT} in flight, null server"
                )
                yield title, _objects(connector, port, batch, threads, rounds)
            yield "S3, look-ups, null server", _lookups(connector, port, threads, rounds)
        finally:
            connector.close()


def _objects(connector: Connector, port: int, batch: Batch, threads: int, rounds: int) -> list[Row]:
    endpoint = f"http://127.0.0.1:{port}"
    bare, obstore = BareSockets(port, batch, threads), BareObstore(endpoint, batch)
    boto = PlainBoto(endpoint, batch, IN_FLIGHT)
    pairs = list(zip(batch.keys, batch.views, strict=True))

    def get() -> None:
        reads = [Read(key, batch.size, BufferTarget.whole(view)) for key, view in pairs]
        assert all(outcome.is_ok for outcome in connector.read_into(reads, soon()))

    def put() -> None:
        writes = [Write(key, batch.size, BufferSource.of(view)) for key, view in pairs]
        assert all(outcome.is_ok for outcome in connector.write_from(writes, soon()))

    total = float(batch.size * len(batch.keys))
    times = {"get": Latencies(), "put": Latencies()}
    cases = {
        "bare socket, get": Case(bare.read, total),
        "bare obstore, get": Case(obstore.read, total),
        "bare obstore, get into place": Case(obstore.read_into_place, total),
        "get": Case(times["get"].timed(get), total),
        "boto3, get": Case(boto.read, total),
        "bare socket, put": Case(bare.write, total),
        "bare obstore, put": Case(obstore.write, total),
        "put": Case(times["put"].timed(put), total),
        "boto3, put": Case(boto.write, total),
    }
    best = take_turns(cases, rounds)
    late = {name: _lateness(work) for name, work in {"get": get, "put": put, "boto3, get": boto.read}.items()}
    for client in (bare, obstore, boto):
        client.close()
    rows: list[Row] = []
    for name, timing in best.items():
        verb = "get" if "get" in name else "put"
        limit = best[f"bare obstore, {verb}"]
        words = f"{name} ({times[name].words})" if name in times else name
        if name in late:
            words += f", another thread up to {late[name] * 1e3:.0f} ms late"
        target = "0.80" if name in times and batch.size == 1024 * KIB else ""
        rows.append(Row(words, timing, limit.wall_s / timing.wall_s, f"bare obstore, {verb}", target))
    return rows


def _lateness(work: Callable[[], None]) -> float:
    with HeartBeat() as beat:
        work()
    return beat.worst_s


def _lookups(connector: Connector, port: int, threads: int, rounds: int) -> list[Row]:
    endpoint = f"http://127.0.0.1:{port}"
    batch = Batch.of(KIB, LOOKUPS)
    obstore, boto = BareObstore(endpoint, batch), PlainBoto(endpoint, batch, IN_FLIGHT)

    def ours() -> None:
        assert connector.sizes(batch.keys, soon()) == [KIB] * LOOKUPS

    cases = {
        "bare obstore, HEAD": Case(lambda: obstore.look_up(batch.keys), LOOKUPS),
        f"sizes of {LOOKUPS:,} keys, one call": Case(ours, LOOKUPS),
        "boto3, HEAD": Case(lambda: boto.look_up(batch.keys[:SLOW_LOOKUPS]), SLOW_LOOKUPS),
    }
    best = take_turns(cases, rounds)
    obstore.close()
    boto.close()
    limit = best["bare obstore, HEAD"]
    return [
        Row(name, timing, limit.us_each / timing.us_each, "bare obstore, HEAD", unit="key")
        for name, timing in best.items()
    ]
