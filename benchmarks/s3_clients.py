"""Clients to measure an S3 store against: a bare socket, obstore alone, plain boto3."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

KIB = 1024
IN_FLIGHT = 16
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Server:
    """Where the objects go. ``port`` is given where requests need no signature."""

    name: str
    endpoint: str
    bucket: str
    access_key: str
    secret_key: str
    port: int | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """What the standard variables say of the keys."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}


@dataclass
class Batch:
    """Objects of one size and where their bytes belong."""

    size: int
    keys: list[str]
    views: list[memoryview]
    _serial: itertools.count[int] = field(default_factory=itertools.count)

    def fresh(self) -> list[str]:
        """As many keys that nobody has written yet."""
        serial = next(self._serial)
        return [f"{key}-{serial}" for key in self.keys]

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
        batch, keys = self.batch, self.batch.fresh()

        def step(each: socket.socket, index: int) -> None:
            line = f"PUT /bucket/{keys[index]} HTTP/1.1\r\nhost: null\r\n"
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

    def __init__(self, server: Server, batch: Batch) -> None:
        import obstore  # noqa: PLC0415
        from obstore.store import S3Store  # noqa: PLC0415

        self.obstore, self.batch = obstore, batch
        self.bodies = [np.ones(batch.size, np.uint8) for _ in range(IN_FLIGHT)]
        self.store = S3Store(
            server.bucket,
            config={
                "endpoint": server.endpoint,
                "region": "us-east-1",
                "access_key_id": server.access_key,
                "secret_access_key": server.secret_key,
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
        keys = self.batch.fresh()

        async def one(index: int) -> None:
            await self.obstore.put_async(
                self.store, keys[index], self.batch.views[index], use_multipart=False
            )

        self._all(one, len(self.batch.keys))

    def write_copied(self) -> None:
        """What a call that may be left before its request has ended costs at least."""
        keys = self.batch.fresh()
        idle = self.bodies

        async def one(index: int) -> None:
            body = idle.pop()
            np.copyto(body, np.frombuffer(self.batch.views[index], np.uint8))
            await self.obstore.put_async(self.store, keys[index], body.data, use_multipart=False)
            idle.append(body)

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

    def __init__(self, server: Server, batch: Batch, threads: int) -> None:
        import boto3  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415

        self.batch, self.threads, self.bucket = batch, threads, server.bucket
        config = Config(max_pool_connections=threads, s3={"addressing_style": "path"})
        self.client = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            region_name="us-east-1",
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
            config=config,
        )

    def _all(self, step: Callable[[int], None], count: int) -> None:
        on_threads(self.threads, count, lambda _, index: step(index), [None] * self.threads)

    def read(self) -> None:
        def step(index: int) -> None:
            answer = self.client.get_object(Bucket=self.bucket, Key=self.batch.keys[index])
            self.batch.views[index][:] = answer["Body"].read()

        self._all(step, len(self.batch.keys))

    def write(self) -> None:
        keys = self.batch.fresh()

        def step(index: int) -> None:
            body = bytes(self.batch.views[index])
            self.client.put_object(Bucket=self.bucket, Key=keys[index], Body=body)

        self._all(step, len(self.batch.keys))

    def look_up(self, keys: list[str]) -> None:
        self._all(lambda index: self.client.head_object(Bucket=self.bucket, Key=keys[index]), len(keys))

    def close(self) -> None:
        self.client.close()
