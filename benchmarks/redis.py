"""Redis: the connector against a socket that does nothing else, and against redis-py, in one run.

The server runs beside the client on the same cores. The limits are bare: one GET (or SET) after the
other on each of as many sockets, received straight into (sent straight from) the memory where the bytes
belong, without looking at them.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.measure import Case, Row, take_turns
from hicache_store.clock import Deadline
from hicache_store.connectors.base import BufferSource, BufferTarget, Connector, Read, Write
from hicache_store.connectors.registry import open_connector
from hicache_store.testing.redis_servers import RedisServer, redis_server

KIB = 1024
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
BATCH_BYTES_MAX = 128 * 1024 * KIB
LOOKUPS = 10_000
PATIENCE_S = 120.0
WHO = ("bare ", "", "redis-py ")


def soon() -> Deadline:
    return Deadline.after(PATIENCE_S)


@dataclass
class Latencies:
    """The time of every round of a case."""

    seconds: list[float] = field(default_factory=list)

    def timed(self, run: Callable[[], None]) -> Callable[[], None]:
        def work() -> None:
            began = time.perf_counter()
            run()
            self.seconds.append(time.perf_counter() - began)

        return work

    @property
    def words(self) -> str:
        p50, p99 = np.percentile(self.seconds, [50, 99]) * 1e3
        return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"


@dataclass
class Watch:
    """What a case costs beside the client's own time: how long each round takes, the server's CPU."""

    server: RedisServer
    total_bytes: float
    latencies: Latencies = field(default_factory=Latencies)
    server_cpu_s: float = float("inf")
    _began_cpu_s: float = 0.0

    def case(self, run: Callable[[], None], after: Callable[[], None] = lambda: None) -> Case:
        def before() -> None:
            self._began_cpu_s = self._cpu_s()

        def finish() -> None:
            self.server_cpu_s = min(self.server_cpu_s, self._cpu_s() - self._began_cpu_s)
            after()

        return Case(self.latencies.timed(run), self.total_bytes, before=before, after=finish)

    def _cpu_s(self) -> float:
        fields = ("used_cpu_user_main_thread", "used_cpu_sys_main_thread")
        return sum(float(self.server.info(name) or 0) for name in fields)

    @property
    def words(self) -> str:
        return f"{self.latencies.words}, server {self.server_cpu_s / self.total_bytes * 1e9:.2f}"


class BareSockets:
    """The limit: sockets that speak just enough of the protocol."""

    def __init__(self, server: RedisServer, threads: int, views: list[memoryview], keys: list[bytes]) -> None:
        self.views, self.keys = views, keys
        self.sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(threads)]
        for each in self.sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _on_all(self, step: Callable[[socket.socket, Iterator[int]], None]) -> None:
        cursor = iter(range(len(self.keys)))
        threads = [threading.Thread(target=step, args=(each, cursor)) for each in self.sockets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def read(self) -> None:
        def step(each: socket.socket, cursor: Iterator[int]) -> None:
            head = bytearray(64)
            for index in cursor:
                key, view = self.keys[index], self.views[index]
                line = b"$%d\r\n" % len(view)
                each.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
                _receive(each, memoryview(head)[: len(line)])
                assert head.startswith(line)
                _receive(each, view)
                _receive(each, memoryview(head)[:2])

        self._on_all(step)

    def write(self, prefix: bytes) -> None:
        def step(each: socket.socket, cursor: Iterator[int]) -> None:
            head = bytearray(5)
            for index in cursor:
                key, view = prefix + self.keys[index], self.views[index]
                each.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(view)))
                each.sendall(view)
                each.sendall(b"\r\n")
                _receive(each, memoryview(head))
                assert head == b"+OK\r\n"

        self._on_all(step)

    def close(self) -> None:
        for each in self.sockets:
            each.close()


def _receive(each: socket.socket, view: memoryview) -> None:
    got = 0
    while got < len(view):
        got += each.recv_into(view[got:])


class PlainClient:
    """redis-py with hiredis as most would use it: one client, a pool, a copy into place."""

    def __init__(self, server: RedisServer, threads: int, views: list[memoryview], keys: list[bytes]) -> None:
        import redis  # noqa: PLC0415

        self.client = redis.Redis(host="127.0.0.1", port=server.port)
        self.threads, self.views, self.keys = threads, views, keys

    def _on_all(self, step: Callable[[int], None]) -> None:
        cursor = iter(range(len(self.keys)))

        def work() -> None:
            for index in cursor:
                step(index)

        threads = [threading.Thread(target=work) for _ in range(self.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def read(self) -> None:
        def step(index: int) -> None:
            self.views[index][:] = self.client.get(self.keys[index])

        self._on_all(step)

    def write(self, prefix: bytes) -> None:
        self._on_all(lambda index: self.client.set(prefix + self.keys[index], bytes(self.views[index])))

    def close(self) -> None:
        self.client.close()


class HeartBeat:
    """How late another thread of the process gets that wants to run every millisecond."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self.worst_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            self.worst_s, last = max(self.worst_s, now - last - 0.001), now

    def __enter__(self) -> HeartBeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def run(*, threads: int, pages: int, rounds: int) -> Iterator[tuple[str, list[Row]]]:
    """A table a size, and one for look-ups."""
    with redis_server(settings={"maxmemory": "2gb", "maxmemory-policy": "allkeys-lru"}) as server:
        connector = open_connector(f"redis://{server.address}?threads={threads}")
        try:
            for size in SIZES:
                count = min(pages, BATCH_BYTES_MAX // size)
                title = f"Redis, {count} values of {size // KIB} KiB, TCP on this machine"
                yield title, _values(server, connector, size, count, threads, rounds)
                server.ask("FLUSHALL")
            yield "Redis, look-ups", _lookups(server, connector, rounds)
        finally:
            connector.close()


def _values(
    server: RedisServer, connector: Connector, size: int, count: int, threads: int, rounds: int
) -> list[Row]:
    memory = memoryview(np.random.default_rng(3).integers(0, 256, count * size, dtype=np.uint8))
    views = [memory[index * size : (index + 1) * size] for index in range(count)]
    keys = [f"v1/bench/{index:064d}/kv" for index in range(count)]
    encoded = [key.encode() for key in keys]
    bare = BareSockets(server, threads, views, encoded)
    plain = PlainClient(server, threads, views, encoded)
    serial = itertools.count()

    def put(prefix: str) -> None:
        writes = [
            Write(prefix + key, size, BufferSource.of(view)) for key, view in zip(keys, views, strict=True)
        ]
        assert all(outcome.is_ok for outcome in connector.write_from(writes, soon()))

    def get() -> None:
        reads = [Read(key, size, BufferTarget.whole(view)) for key, view in zip(keys, views, strict=True)]
        assert all(outcome.is_ok for outcome in connector.read_into(reads, soon()))

    def forget() -> None:
        for found in _keys_of_puts(server):
            server.ask("DEL", found)

    def fresh(write: Callable[[bytes], None]) -> Callable[[], None]:
        return lambda: write(b"put%d/" % next(serial))

    total = float(count * size)
    bare.write(b"")
    put("")
    watches = {f"{who}{verb}": Watch(server, total) for verb in ("get", "put") for who in WHO}
    runs: dict[str, Callable[[], None]] = {
        "bare get": bare.read,
        "get": get,
        "redis-py get": plain.read,
        "bare put": fresh(bare.write),
        "put": fresh(lambda prefix: put(prefix.decode())),
        "redis-py put": fresh(plain.write),
    }
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    cases = {
        name: watches[name].case(run, forget if name.endswith("put") else nothing)
        for name, run in runs.items()
    }
    best = take_turns(cases, rounds)
    with HeartBeat() as beat:
        get()
    bare.close()
    plain.close()
    print(f"\nanother thread of the process is at most {beat.worst_s * 1e3:.0f} ms late during a get")
    rows: list[Row] = []
    for name in runs:
        verb = name.rpartition(" ")[2]
        limit = best[f"bare {verb}"]
        ratio = None if name.startswith("bare") else limit.wall_s / best[name].wall_s
        target = "0.70" if size == 1024 * KIB and name == "get" else ""
        rows.append(Row(f"{name} ({watches[name].words})", best[name], ratio, f"bare {verb}", target))
    return rows


def _keys_of_puts(server: RedisServer) -> list[bytes]:
    found = server.ask("KEYS", "*put*/*")
    assert isinstance(found, list)
    return [key for key in found if isinstance(key, bytes)]


def _lookups(server: RedisServer, connector: Connector, rounds: int) -> list[Row]:
    import redis  # noqa: PLC0415

    keys = [f"v1/bench/{index:064d}/kv" for index in range(LOOKUPS)]
    for start in range(0, LOOKUPS, 100):
        writes = [Write(key, 16, BufferSource.of(bytes(16))) for key in keys[start : start + 100 : 2]]
        connector.write_from(writes, soon())
    client = redis.Redis(host="127.0.0.1", port=server.port)

    def ours() -> None:
        assert sum(size is not None for size in connector.sizes(keys, soon())) == LOOKUPS // 2

    def theirs() -> None:
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.strlen("hicache:" + key)
        assert sum(size > 0 for size in pipeline.execute()) == LOOKUPS // 2

    cases = {"ours": Case(ours, LOOKUPS), "redis-py": Case(theirs, LOOKUPS)}
    best = take_turns(cases, rounds)
    client.close()
    return [
        Row(f"sizes of {LOOKUPS:,} keys, one call", best["ours"], unit="key"),
        Row(
            "redis-py, pipelined STRLEN",
            best["redis-py"],
            best["ours"].wall_s / best["redis-py"].wall_s,
            "ours",
            unit="key",
        ),
    ]
