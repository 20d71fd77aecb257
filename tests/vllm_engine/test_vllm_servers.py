"""Real engines over Redis and S3, both at once under vLLM's MultiConnector, and a server that is lost."""

from __future__ import annotations

import random
import uuid
from pathlib import Path
from typing import Any

import pytest
from vllm_client import Batch, Setup, own_transfer, running
from vllm_model import TinyLlama

from hicache_store.testing.redis_servers import RedisServer
from hicache_store.testing.servers import S3Endpoint

pytestmark = pytest.mark.timeout(900)

_DRAW = random.Random(13)
PROMPTS = [[_DRAW.randrange(256) for _ in range(600)] for _ in range(2)]
STORED = 2 * 576


def _answers(
    setup: Setup, log: Path, environment: dict[str, str], prompts: list[list[int]] = PROMPTS
) -> Batch:
    with running(setup, log, environment) as engine:
        return engine.generate(prompts)


def test_one_engine_writes_to_redis_and_s3_and_others_read_each(
    tmp_path: Path, redis_single: RedisServer, seaweedfs_endpoint: S3Endpoint
) -> None:
    model = TinyLlama().write(tmp_path / "model")
    bucket = f"b{uuid.uuid4().hex[:12]}"
    seaweedfs_endpoint.make_bucket(bucket)
    environment = dict(seaweedfs_endpoint.environment)
    urls = {"redis": f"redis://{redis_single.address}/0?prefix={uuid.uuid4().hex}", "s3": f"s3://{bucket}/kv"}
    both: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [own_transfer({"url": url}) for url in urls.values()]},
    }
    first = _answers(Setup(model, transfer=both), tmp_path / "both.log", environment)
    assert first.external == 0
    for name, tp in (("redis", 2), ("s3", 1)):
        setup = Setup(model, tp=tp, connector={"url": urls[name]})
        batch = _answers(setup, tmp_path / f"{name}.log", environment)
        assert (batch.external, batch.tokens) == (STORED, first.tokens), name


def test_two_ranks_write_to_s3_and_a_lost_redis_is_a_miss(
    tmp_path: Path, redis_single: RedisServer, seaweedfs_endpoint: S3Endpoint
) -> None:
    model = TinyLlama().write(tmp_path / "model")
    bucket = f"b{uuid.uuid4().hex[:12]}"
    seaweedfs_endpoint.make_bucket(bucket)
    environment = dict(seaweedfs_endpoint.environment)
    two = Setup(model, tp=2, connector={"url": f"s3://{bucket}/kv"})
    first = _answers(two, tmp_path / "s3.log", environment)
    assert first.external == 0
    connector = {
        "url": f"redis://{redis_single.address}/0?prefix={uuid.uuid4().hex}",
        "timeout_s": 2,
        "lookup_timeout_s": 1,
    }
    with running(Setup(model, connector=connector), tmp_path / "redis.log") as engine:
        assert engine.generate(PROMPTS).tokens == first.tokens
        assert engine.forget(external=True)
        assert engine.generate(PROMPTS).external == STORED
        redis_single.restart()  # empty
        assert engine.forget(external=True)
        lost = engine.generate(PROMPTS)
        assert (lost.external, lost.tokens) == (0, first.tokens)
    one = Setup(model, connector={"url": f"s3://{bucket}/kv"})
    batch = _answers(one, tmp_path / "one.log", environment)
    assert (batch.external, batch.tokens) == (STORED, first.tokens)
