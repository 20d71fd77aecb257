"""Real SGLang engines on a CPU that share their KV by S3 and by Redis, in place of a directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_client import Answer, options, running
from test_sglang_engine import ALL_STORED, NOTHING_STORED, PROMPTS, configuration, sources, tokens, wait_for
from tiny_model import write_model

from hicache_store.testing.redis_servers import RedisServer, redis_server
from hicache_store.testing.servers import S3Endpoint

pytestmark = pytest.mark.timeout(1_200)


@pytest.fixture
def s3_url(seaweedfs_endpoint: S3Endpoint, monkeypatch: pytest.MonkeyPatch) -> str:
    seaweedfs_endpoint.make_bucket("real-engines")
    for name, value in seaweedfs_endpoint.environment.items():
        monkeypatch.setenv(name, value)
    return "s3://real-engines/kv"


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def test_engines_of_two_topologies_share_by_s3_and_by_redis(
    s3_url: str, redis: RedisServer, tmp_path: Path
) -> None:
    """One starts on S3 and takes Redis later, the other the other way round, and both read what the first
    wrote. When the server of the second loses everything, it computes, answers alike, and stores anew."""
    redis_url = f"redis://{redis.address}/0?prefix=kv"
    write_model(tmp_path / "model")
    written: dict[str, list[Answer]] = {}
    given = options(tmp_path / "model", tp=1, pp=1, layout="page_first", configuration=configuration(s3_url))
    with running(given, tmp_path / "writer.log") as engine:
        written[s3_url] = engine.generate(PROMPTS)
        wait_for(s3_url, PROMPTS, objects=1)
        engine.detach()
        engine.attach(configuration(redis_url))
        engine.forget()
        written[redis_url] = engine.generate(PROMPTS)
        wait_for(redis_url, PROMPTS, objects=1)
    given = options(
        tmp_path / "model", tp=2, pp=1, layout="layer_first", configuration=configuration(redis_url)
    )
    with running(given, tmp_path / "reader.log") as engine:
        by_redis = engine.generate(PROMPTS)
        redis.restart()
        engine.forget()
        computed = engine.generate(PROMPTS)
        wait_for(redis_url, PROMPTS, objects=2)
        engine.forget()
        anew = engine.generate(PROMPTS)
        engine.detach()
        engine.attach(configuration(s3_url))
        engine.forget()
        by_s3 = engine.generate(PROMPTS)
    assert [sources(answers) for answers in written.values()] == [NOTHING_STORED] * 2
    assert [sources(answers) for answers in (by_redis, anew, by_s3)] == [ALL_STORED] * 3
    assert sources(computed) == NOTHING_STORED
    assert tokens(by_redis) == tokens(anew) == tokens(by_s3) == tokens(computed)
    assert {answer.backend for answer in [*by_redis, *by_s3]} == {"HiCacheL3"}
