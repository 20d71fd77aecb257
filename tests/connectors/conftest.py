"""What the tests of a single Redis server share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from hicache_store.connectors.redis_connector import RedisConnector
from hicache_store.testing.redis_servers import RedisServer
from tests.connectors.redis_rig import Proxy, opened


@pytest.fixture
def prefix() -> str:
    """Keys that no other test has."""
    return f"test-{uuid.uuid4().hex}:"


@pytest.fixture
def handle(redis_single: RedisServer, prefix: str) -> Iterator[RedisConnector]:
    with opened(f"redis://{redis_single.address}?prefix={prefix}") as connector:
        yield connector


@pytest.fixture
def proxy(redis_single: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_single.port) as between:
        yield between
