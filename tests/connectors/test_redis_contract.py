"""The shipped contract on Redis: one server, a unix socket, Valkey, a cluster, and read-only handles."""

from __future__ import annotations

import uuid

import pytest

from hicache_store.config import parse_url
from hicache_store.connectors.redis_connector import connect as open_redis
from hicache_store.testing.connector_contract import Connect, ConnectorContract
from hicache_store.testing.redis_servers import RedisCluster, RedisServer


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
