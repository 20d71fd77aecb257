"""S3: the connector against its client library alone, a bare socket and plain boto3, in one run.

Twice: with a server that stores nothing (:mod:`benchmarks.null_s3`), so that the client is what is
measured, and with SeaweedFS. Both run beside the client on the same cores. "bare obstore" leaves the bytes
in memory of the library, and sends them from memory that must not change; a store must have them in place
and send a copy, which are the lines after it. A bare socket speaks just enough HTTP, without signatures.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

from benchmarks.measure import Case, Row, take_turns
from benchmarks.redis import HeartBeat, Latencies
from benchmarks.s3_clients import (
    IN_FLIGHT,
    KIB,
    PATIENCE_S,
    BareObstore,
    BareSockets,
    Batch,
    PlainBoto,
    Server,
)
from hicache_store.clock import Deadline
from hicache_store.config import parse_url
from hicache_store.connectors.base import BufferSource, BufferTarget, Connector, Read, Write
from hicache_store.testing.servers import seaweedfs

SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
BATCH_BYTES_MAX = 128 * 1024 * KIB
STORED_BATCH_BYTES_MAX = 64 * 1024 * KIB
STORED_ROUNDS_MAX = 3
LOOKUPS = 2_000
SLOW_LOOKUPS = 200


def soon() -> Deadline:
    return Deadline.after(PATIENCE_S)


@contextlib.contextmanager
def null_server() -> Iterator[Server]:
    """A server in a process of its own that takes everything and gives as many bytes as are asked for."""
    command = [sys.executable, "-m", "benchmarks.null_s3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline())
            yield Server("null server", f"http://127.0.0.1:{port}", "bucket", "key", "secret", port)
        finally:
            server.kill()


@contextlib.contextmanager
def real_server() -> Iterator[Server]:
    """SeaweedFS with an empty bucket."""
    with seaweedfs() as endpoint:
        endpoint.make_bucket("bench")
        yield Server("SeaweedFS", endpoint.url, "bench", endpoint.access_key, endpoint.secret_key)


def run(*, threads: int, pages: int, rounds: int) -> Iterator[tuple[str, list[Row]]]:
    """For both servers a table a size, and one for look-ups."""
    with null_server() as server:
        yield from _tables(server, threads, pages, rounds, BATCH_BYTES_MAX)
    with real_server() as server:
        yield from _tables(server, threads, pages, min(rounds, STORED_ROUNDS_MAX), STORED_BATCH_BYTES_MAX)


def _tables(
    server: Server, threads: int, pages: int, rounds: int, bytes_max: int
) -> Iterator[tuple[str, list[Row]]]:
    from hicache_store.connectors.s3 import connect  # noqa: PLC0415

    os.environ.update(server.environment)
    connector = connect(parse_url(f"s3://{server.bucket}?endpoint={server.endpoint}&concurrency={IN_FLIGHT}"))
    try:
        for size in SIZES:
            batch = Batch.of(size, min(pages, bytes_max // size))
            count = f"{len(batch.keys)} objects of {size // KIB} KiB"
            title = f"S3, {count}, {IN_FLIGHT} in flight, {server.name}"
            yield title, _objects(connector, server, batch, threads, rounds)
        yield f"S3, look-ups, {server.name}", _lookups(connector, server, rounds)
    finally:
        connector.close()


def _objects(connector: Connector, server: Server, batch: Batch, threads: int, rounds: int) -> list[Row]:
    obstore, boto = BareObstore(server, batch), PlainBoto(server, batch, IN_FLIGHT)
    times = {"get": Latencies(), "put": Latencies()}

    def get() -> None:
        pairs = zip(batch.keys, batch.views, strict=True)
        reads = [Read(key, batch.size, BufferTarget.whole(view)) for key, view in pairs]
        assert all(outcome.is_ok for outcome in connector.read_into(reads, soon()))

    def put(keys: list[str]) -> None:
        pairs = zip(keys, batch.views, strict=True)
        writes = [Write(key, batch.size, BufferSource.of(view)) for key, view in pairs]
        assert all(outcome.is_ok for outcome in connector.write_from(writes, soon()))

    put(batch.keys)
    works: dict[str, Callable[[], None]] = {
        "bare obstore, get": obstore.read,
        "bare obstore, get into place": obstore.read_into_place,
        "get": times["get"].timed(get),
        "boto3, get": boto.read,
        "bare obstore, put": obstore.write,
        "bare obstore, put of a copy": obstore.write_copied,
        "put": times["put"].timed(lambda: put(batch.fresh())),
        "boto3, put": boto.write,
    }
    with contextlib.ExitStack() as stack:
        stack.callback(obstore.close)
        stack.callback(boto.close)
        if server.port is not None:
            bare = BareSockets(server.port, batch, threads)
            stack.callback(bare.close)
            works = {"bare socket, get": bare.read, "bare socket, put": bare.write, **works}
        total = float(batch.size * len(batch.keys))
        best = take_turns({name: Case(work, total) for name, work in works.items()}, rounds)
        late = {name: _lateness(works[name]) for name in ("get", "put", "boto3, get")}
    rows: list[Row] = []
    for name in sorted(best, key=lambda name: "put" in name):
        verb = "get" if "get" in name else "put"
        limit = best[f"bare obstore, {verb}"]
        words = f"{name} ({times[name].words})" if name in times else name
        if name in late:
            words += f", another thread up to {late[name] * 1e3:.0f} ms late"
        target = "0.80" if name in times and batch.size == 1024 * KIB else ""
        ratio = limit.wall_s / best[name].wall_s
        rows.append(Row(words, best[name], ratio, f"bare obstore, {verb}", target))
    return rows


def _lateness(work: Callable[[], None]) -> float:
    with HeartBeat() as beat:
        work()
    return beat.worst_s


def _lookups(connector: Connector, server: Server, rounds: int) -> list[Row]:
    batch = Batch.of(KIB, LOOKUPS)
    pairs = zip(batch.keys, batch.views, strict=True)
    writes = [Write(key, batch.size, BufferSource.of(view)) for key, view in pairs]
    assert all(outcome.is_ok for outcome in connector.write_from(writes, soon()))
    obstore, boto = BareObstore(server, batch), PlainBoto(server, batch, IN_FLIGHT)

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
