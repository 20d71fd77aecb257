"""Session-wide pytest fixtures of real servers, as a plugin: list this module in ``pytest_plugins``.

One server of a kind serves the whole run, so a test works below a bucket or key prefix of its own. A
server that is not installed skips its tests, and says what to install.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import pytest

from hicache_store.testing.certificates import Certificates, make_certificates
from hicache_store.testing.processes import MissingServerError
from hicache_store.testing.redis_servers import (
    RedisCluster,
    RedisServer,
    redis_cluster,
    redis_server,
    valkey_program,
)
from hicache_store.testing.servers import S3Endpoint, juicefs_gateway, moto_server, seaweedfs

ServerT = TypeVar("ServerT")


def _started(manager: Callable[[], AbstractContextManager[ServerT]]) -> Iterator[ServerT]:
    """The server of ``manager`` while the run lasts; a missing program is a skip."""
    context = manager()
    try:
        server = context.__enter__()
    except MissingServerError as error:
        pytest.skip(f"NOT RUN: {error}")
    yield server
    context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[S3Endpoint]:
    """moto: exact, no signatures."""
    yield from _started(moto_server)


@pytest.fixture(scope="session")
def seaweedfs_endpoint() -> Iterator[S3Endpoint]:
    """SeaweedFS: a complete S3 server."""
    yield from _started(seaweedfs)


@pytest.fixture(scope="session")
def juicefs_endpoint() -> Iterator[S3Endpoint]:
    """The JuiceFS gateway: an older S3-compatible server."""
    yield from _started(juicefs_gateway)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """A certificate for this machine and the authority that signed it."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def redis_single() -> Iterator[RedisServer]:
    """One Redis server without a password."""
    yield from _started(redis_server)


@pytest.fixture(scope="session")
def valkey_single() -> Iterator[RedisServer]:
    """One Valkey server without a password."""
    yield from _started(lambda: redis_server(program=valkey_program(), name="valkey"))


@pytest.fixture(scope="session")
def redis_three() -> Iterator[RedisCluster]:
    """A Redis cluster of three masters."""
    yield from _started(redis_cluster)
