"""The way to an S3 server that breaks under an open handle, and comes back."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from s3_places import CLIENTS, open_s3_at

from hicache_store.connectors.base import Status
from hicache_store.connectors.s3 import S3Connector
from hicache_store.testing.certificates import Certificates
from hicache_store.testing.contract_base import assert_holds, soon, store
from hicache_store.testing.probes import content, read_of, write_of
from hicache_store.testing.processes import free_ports
from hicache_store.testing.s3_server import S3Server
from tests.connectors.redis_rig import Proxy

OBJECTS = {f"v1/{index:02d}/kv": content(f"v1/{index:02d}/kv", 3_000) for index in range(12)}


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def assert_outage(connector: S3Connector, starts: Callable[[], None], ends: Callable[[], None]) -> None:
    """Between the two, misses and failed puts that are counted; before and after, everything."""
    store(connector, OBJECTS)
    assert_holds(connector, OBJECTS)
    starts()
    pairs = [read_of(key, 3_000) for key in OBJECTS]
    outcomes = connector.read_into([read for read, _ in pairs], soon())
    outcomes += connector.write_from([write_of("v1/aa/kv", b"x" * 50)], soon())
    assert {one.status for one in outcomes} <= {Status.FAILED, Status.TIMED_OUT}
    assert all(one.detail for one in outcomes)
    assert all(target.is_untouched for _, target in pairs)
    assert connector.sizes(list(OBJECTS), soon()) == [None] * len(OBJECTS)
    faults = connector.metrics.snapshot()
    assert sum(number for name, number in faults.items() if name.startswith("s3.fault.")) >= len(OBJECTS)
    ends()
    assert_holds(connector, OBJECTS)
    assert connector.sizes(["v1/aa/kv"], soon()) == [None]
    store(connector, {"v1/aa/kv": content("v1/aa/kv", 900)})
    connector.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_cannot_be_reached_for_a_while(stack: ExitStack, client: str) -> None:
    """Connections end and new ones are closed at once: the same handle goes on when they are not."""
    server = stack.enter_context(S3Server())
    proxy = stack.enter_context(Proxy(server.port))
    connector = open_s3_at(f"http://127.0.0.1:{proxy.port}", client, operation_timeout="2s")

    def starts() -> None:
        (proxy.target,) = free_ports(1)
        proxy.cut_all()

    def ends() -> None:
        proxy.target = server.port

    assert_outage(connector, starts, ends)


@pytest.mark.parametrize("client", CLIENTS)
def test_tls_that_fails_for_a_while(stack: ExitStack, certificates: Certificates, client: str) -> None:
    """A certificate that ran out, or a proxy without one: no handshake, no object, and no restart."""
    good, bad = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    good.load_cert_chain(certificates.certificate, certificates.key)
    server = stack.enter_context(S3Server(tls=good))
    proxy = stack.enter_context(Proxy(server.port))
    endpoint = f"https://localhost:{proxy.port}"
    connector = open_s3_at(endpoint, client, ca_file=certificates.authority, operation_timeout="2s")

    def starts() -> None:
        server._tls = bad
        proxy.cut_all()

    def ends() -> None:
        server._tls = good

    assert_outage(connector, starts, ends)
