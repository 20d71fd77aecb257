"""The main job on Redis and on S3: one topology writes, others read, and a lost server is a miss."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from sglang_rig import Model, ranks

from hicache_store.testing.redis_servers import RedisServer
from hicache_store.testing.servers import S3Endpoint

MODEL = Model(heads=4, layers=6)
HASHES = MODEL.hashes(5)


@pytest.fixture
def redis_url(redis_single: RedisServer) -> str:
    return f"redis://{redis_single.address}/0?prefix={uuid.uuid4().hex}"


@pytest.fixture
def s3_url(seaweedfs_endpoint: S3Endpoint) -> Iterator[str]:
    bucket = f"b{uuid.uuid4().hex[:12]}"
    seaweedfs_endpoint.make_bucket(bucket)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in seaweedfs_endpoint.environment.items():
            environment.setenv(name, value)
        yield f"s3://{bucket}/kv"


@pytest.mark.parametrize("storage", ["redis_url", "s3_url"])
def test_tp4_pp2_writes_and_others_read(storage: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(storage)
    with ranks(MODEL, url, tp_size=4, pp_size=2, layout="page_first") as writers:
        for rank in writers:
            assert rank.write(HASHES, [4, 0, 3, 1, 2]) == [True] * 5
    for shape in ({"tp_size": 2, "layout": "page_head"}, {"tp_size": 1}, {"tp_size": 8, "pp_size": 3}):
        with ranks(MODEL, url, **shape) as readers:
            for rank in readers:
                assert rank.backend.batch_exists([*HASHES, *MODEL.hashes(3, "x")]) == 5
                assert rank.read(HASHES, [9, 5, 7, 6, 8]) == [True] * 5
                assert rank.holds(HASHES, [9, 5, 7, 6, 8])


def test_a_lost_server_is_a_miss_and_comes_back(redis_single: RedisServer, redis_url: str) -> None:
    with ranks(MODEL, redis_url, timeout_s=2, lookup_timeout_s=2) as (rank,):
        assert rank.write(HASHES, range(5)) == [True] * 5
        redis_single.restart()  # empty
        assert rank.backend.batch_exists(HASHES) == 0
        assert rank.read(HASHES, range(5, 10)) == [False] * 5
        for _ in range(20):
            if rank.write(HASHES, range(5)) == [True] * 5:
                break
        assert rank.read(HASHES, range(5, 10)) == [True] * 5
        assert rank.holds(HASHES, range(5, 10))
