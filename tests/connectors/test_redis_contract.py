"""The shipped contract on Redis, by every way to reach it and with all rights and few."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from hicache_store.config import parse_url
from hicache_store.connectors.redis_connector import connect as open_redis
from hicache_store.testing.certificates import Certificates
from hicache_store.testing.connector_contract import Connect, ConnectorContract
from hicache_store.testing.redis_servers import (
    RedisCluster,
    RedisServer,
    redis_program,
    redis_server,
    supports_tls,
)


def place(url: str) -> Connect:
    """Handles on a place of its own: a prefix that nobody else has."""
    option = f"{'&' if '?' in url else '?'}prefix=contract-{uuid.uuid4().hex}:"
    return lambda: open_redis(parse_url(url + option))


class TestRedis(ConnectorContract):
    @pytest.fixture
    def connect(self, redis_single: RedisServer) -> Connect:
        return place(f"redis://{redis_single.address}")


class TestUnixSocketAndLifetime(ConnectorContract):
    @pytest.fixture
    def connect(self, redis_single: RedisServer) -> Connect:
        return place(f"unix://{redis_single.socket_path}?ttl=1h&threads=2")


class TestValkey(ConnectorContract):
    @pytest.fixture
    def connect(self, valkey_single: RedisServer) -> Connect:
        return place(f"valkey://{valkey_single.address}?threads=1")


@pytest.fixture(scope="module")
def tls_server(certificates: Certificates) -> Iterator[RedisServer]:
    if not supports_tls(redis_program()):
        pytest.skip("NOT RUN: this redis-server was built without TLS")
    with redis_server(certificates=certificates, password="pass/word") as server:
        yield server


class TestTls(ConnectorContract):
    @pytest.fixture
    def connect(self, tls_server: RedisServer, certificates: Certificates) -> Connect:
        login = "default:pass%2Fword"
        url = f"rediss://{login}@localhost:{tls_server.tls_port}?tls_ca={certificates.authority}"
        return place(url + "&threads=1")


class TestWithFewRights(ConnectorContract):
    """An account without transactions, scripts or the server's own figures, on one prefix."""

    @pytest.fixture
    def connect(self, redis_single: RedisServer) -> Iterator[Connect]:
        name = f"few-{uuid.uuid4().hex}"
        allowed = ("ping", "get", "set", "getrange", "strlen", "unlink", "touch", "scan", "object", "select")
        rights = [f"+{command}" for command in allowed]
        redis_single.ask("ACL", "SETUSER", name, "on", ">secret", f"~{name}:*", *rights)
        url = f"redis://{name}:secret@{redis_single.address}?prefix={name}:"
        yield lambda: open_redis(parse_url(url))
        redis_single.ask("ACL", "DELUSER", name)

    def test_it_says_what_it_cannot_promise(self, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
        handle = connect()
        assert not handle.capabilities.conditional_versions
        assert "forbids WATCH" in caplog.text
        handle.close()


class TestCluster(ConnectorContract):
    @pytest.fixture
    def connect(self, redis_three: RedisCluster) -> Connect:
        return place(f"redis+cluster://{redis_three.addresses}")


class TestReadOnly(ConnectorContract):
    """A handle that may only read, beside writers of the same prefix."""

    @pytest.fixture
    def url(self, redis_single: RedisServer) -> str:
        return f"redis://{redis_single.address}/1?prefix=contract-{uuid.uuid4().hex}:"

    @pytest.fixture
    def connect_writer(self, url: str) -> Connect:
        return lambda: open_redis(parse_url(url))

    @pytest.fixture
    def connect(self, url: str) -> Connect:
        return lambda: open_redis(parse_url(f"{url}&readonly=1"))
