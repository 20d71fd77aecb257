"""Breakers and retries before real clients: what an outage costs, and that it ends by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from s3_places import CLIENTS, open_s3_at

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Status
from hicache_store.connectors.breaker import breaking
from hicache_store.connectors.registry import open_connector
from hicache_store.limits import BREAKER_CALLS, BREAKER_COOL_S
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.contract_base import PATIENCE_S, assert_holds, soon, store
from hicache_store.testing.probes import content, read_of, write_of
from hicache_store.testing.redis_servers import redis_server
from hicache_store.testing.s3_server import Broken, Reply, S3Server, error_reply, on_operations
from tests.connectors.redis_rig import Proxy, open_redis, wait_until

KEY = "v1/aa/kv"
OBJECTS = {f"v1/{index:02d}/kv": content(f"v1/{index:02d}/kv", 3_000) for index in range(8)}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
    with S3Server() as running:
        yield running


OUTAGES = {
    "500": error_reply(500, "InternalError"),
    "503": error_reply(503, "SlowDown", {"retry-after": "120"}),
    "429": error_reply(429, "TooManyRequests"),
    "expired": error_reply(403, "ExpiredToken"),
    "reset": Broken(before_headers=True, ending="reset"),
    "200 with an error": Reply(200, b"<Error><Code>InternalError</Code></Error>"),
}
ALL = ("GET", "HEAD", "PUT", "BULK", "DELETE")


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", OUTAGES)
def test_a11_d22_an_s3_outage_is_left_alone_and_ends(server: S3Server, name: str, client: str) -> None:
    """Answers with a bad status count like broken connections; while the breaker is open no request is
    sent, and after the outage the same handle works."""
    clock = FakeClock()
    connector = breaking(open_s3_at(server.endpoint, client), clock=clock)
    store(connector, OBJECTS)
    server.plan = on_operations(OUTAGES[name], *ALL)
    for _ in range(BREAKER_CALLS):
        outcomes = connector.read_into([read_of(key, 3_000)[0] for key in OBJECTS], soon())
        assert {one.status for one in outcomes} == {Status.FAILED}
    assert connector.metrics.get("breaker.opened") == 1
    server.forget_requests()
    for _ in range(20):
        (read,) = connector.read_into([read_of("v1/00/kv", 3_000)[0]], soon())
        (write,) = connector.write_from([write_of(KEY, b"x" * 9)], soon())
        assert {read.status, write.status} == {Status.REFUSED}
        assert connector.sizes(list(OBJECTS), soon()) == [None] * 8
    assert server.count() == 0
    clock.advance(BREAKER_COOL_S)
    assert connector.read_into([read_of("v1/00/kv", 3_000)[0]], soon())[0].status is Status.REFUSED
    assert server.count() <= 2, "one probe, and perhaps one more with new credentials"
    server.plan = None
    clock.advance(2 * BREAKER_COOL_S)
    assert_holds(connector, OBJECTS)
    store(connector, {KEY: content(KEY, 900)})
    assert connector.metrics.get("breaker.closed") == 1
    connector.close()


def test_d22_a_redis_outage_is_left_alone_and_ends() -> None:
    """No connection is even tried while the breaker is open; a restarted server is found by itself."""
    clock = FakeClock()
    with redis_server() as server, Proxy(server.port) as proxy:
        connector = breaking(open_redis(f"redis://127.0.0.1:{proxy.port}"), clock=clock)
        store(connector, OBJECTS)
        server.daemon.kill()
        for _ in range(BREAKER_CALLS):
            outcomes = connector.read_into([read_of(key, 3_000)[0] for key in OBJECTS], soon())
            assert {one.status for one in outcomes} == {Status.FAILED}
        assert connector.metrics.get("breaker.opened") == 1
        counted = connector.metrics.snapshot()
        for _ in range(20):
            (read,) = connector.read_into([read_of("v1/00/kv", 3_000)[0]], soon())
            assert read.status is Status.REFUSED
            assert connector.sizes(list(OBJECTS), soon()) == [None] * 8
        assert connector.metrics.snapshot() == counted | {"breaker.refused": 20 * 9}
        server.restart()

        def is_back() -> bool:
            clock.advance(60.0)
            return connector.write_from([write_of(KEY, b"x" * 9)], soon())[0].is_ok

        wait_until(is_back)
        store(connector, OBJECTS)
        assert_holds(connector, OBJECTS)
        connector.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_d11_nobody_waits_two_minutes_on_a_request_path(server: S3Server, client: str) -> None:
    """503 with Retry-After 120, through what a URL brings by default: misses, long before the deadline of
    the call where the wait is known, and within it anyhow; hits as soon as the server serves again."""
    connector = open_connector(f"s3://bucket/store?endpoint={server.endpoint}&client={client}")
    store(connector, OBJECTS)
    server.plan = on_operations(OUTAGES["503"], *ALL)
    server.forget_requests()
    began = time.monotonic()
    outcomes = connector.read_into([read_of(key, 3_000)[0] for key in OBJECTS], Deadline.after(PATIENCE_S))
    assert time.monotonic() - began < PATIENCE_S / 2
    assert {one.status for one in outcomes} == {Status.FAILED}
    tries = 3 if client == "obstore" else 1  # obstore does not tell the wait, so that it is tried again
    assert server.count("GET") == tries * len(OBJECTS)
    (late,) = connector.read_into([read_of("v1/00/kv", 3_000)[0]], Deadline.after(0.2))
    assert not late.is_ok
    server.plan = None
    wait_until(lambda: connector.read_into([read_of("v1/00/kv", 3_000)[0]], soon())[0].is_ok)
    assert_holds(connector, OBJECTS)
    connector.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_a31_a_body_that_breaks_once_is_read_again(server: S3Server, client: str) -> None:
    """No client tries again once the headers have come; the whole read is, within the same call."""
    connector = open_connector(f"s3://bucket/store?endpoint={server.endpoint}&client={client}")
    store(connector, OBJECTS)
    for fault in (
        Broken(keep=1_500, ending="reset"),
        Broken(keep=1_500, ending="close"),
        Broken(before_headers=True, ending="reset"),
        error_reply(500, "InternalError"),
    ):
        server.plan = on_operations(fault, "GET", times=2)
        pairs = [read_of(key, 3_000) for key in OBJECTS]
        outcomes = connector.read_into([read for read, _ in pairs], soon())
        assert {one.status for one in outcomes} == {Status.OK}, outcomes
        assert [target.delivered() for _, target in pairs] == list(OBJECTS.values())
    assert connector.metrics.get("retry.read") >= 6
    connector.close()
