"""Which weights and which dtype an engine runs, and the one namespace that all engines give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache_store.engines.identity import (
    RunningModel,
    agreed,
    config_of,
    logical_dtype,
    namespace_of,
    weights_of,
)
from hicache_store.engines.options import EngineOptions
from hicache_store.engines.sharing import spec_of
from hicache_store.errors import IdentityError
from hicache_store.layout.box import Span
from hicache_store.layout.hashing import ChainKind
from hicache_store.layout.model import ModelKV
from hicache_store.layout.namespace import namespace
from hicache_store.layout.parallel import Rank, shard
from hicache_store.layout.weights import WeightsIdentity, WeightsKind

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
MODEL = ModelKV.dense(num_layers=6, num_kv_heads=4, head_dim=8, dtype="bfloat16")


def test_what_the_model_tells_and_what_is_given_must_agree() -> None:
    assert agreed("k", 3, None, "number") == 3
    assert agreed("k", None, 4, "number") == 4
    assert agreed("k", 5, 5, "number") == 5
    with pytest.raises(IdentityError, match="the running model has number 3, the configuration says k=4"):
        agreed("k", 3, 4, "number")
    with pytest.raises(IdentityError, match='add "k"'):
        agreed("k", None, None, "number")


@pytest.mark.parametrize(
    ("pool", "told", "given", "named"),
    [
        ("torch.bfloat16", None, None, "bfloat16"),
        ("torch.float16", "float16", "fp16", "float16"),
        ("torch.uint8", "fp8_e4m3", None, "float8_e4m3fn"),
        ("torch.uint8", None, "float8_e5m2fnuz", "float8_e5m2fnuz"),
        ("torch.float8_e4m3fn", "fp8_e4m3", None, "float8_e4m3fn"),
    ],
)
def test_the_logical_dtype_of_a_pool(pool: str, told: str | None, given: str | None, named: str) -> None:
    assert logical_dtype(pool, told, given) == named


@pytest.mark.parametrize(
    ("pool", "told", "given"),
    [
        ("torch.uint8", None, None),
        ("torch.uint8", "bfloat16", None),
        ("torch.uint8", "fp8_e4m3", "fp8_e5m2"),
        ("torch.bfloat16", "fp8_e4m3", None),
        ("torch.bfloat16", None, "float16"),
    ],
)
def test_a_dtype_that_cannot_be_told_refuses(pool: str, told: str | None, given: str | None) -> None:
    with pytest.raises(IdentityError):
        logical_dtype(pool, told, given)


def test_weights_by_the_operators_word(tmp_path: Path) -> None:
    assert weights_of("tag", None, None) == WeightsIdentity.operator("tag")
    assert weights_of(f"hub:org/m@{COMMIT}", None, None) == WeightsIdentity.hub_commit("org/m", COMMIT)
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert weights_of("full", str(tmp_path), None).kind is WeightsKind.FULL
    assert weights_of(None, str(tmp_path), None).kind is WeightsKind.SAMPLED
    with pytest.raises(IdentityError, match='"draft_weights"'):
        weights_of(None, None, None, key="draft_weights")


def test_weights_of_a_hub_are_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the folder of a snapshot, or by a revision that is a commit; a branch alone is refused."""
    snapshot = tmp_path / "hub" / "models--org--m" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    by_commit = WeightsIdentity.hub_commit("org/m", COMMIT)
    assert weights_of(None, str(snapshot), None) == by_commit
    assert weights_of(None, "org/m", COMMIT) == by_commit
    monkeypatch.setattr("hicache_store.engines.identity._cached_commit", lambda *_: None)
    for revision in (None, "main", COMMIT[:12]):
        with pytest.raises(IdentityError, match="can move to others"):
            weights_of(None, "org/m", revision)


def test_the_configuration_comes_from_the_engine_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    told = RunningModel(config={"model_type": "told"})
    options = EngineOptions(url="memory://x", config=str(tmp_path))
    assert config_of(told, options) == {"model_type": "told"}
    assert config_of(RunningModel(), options) == CONFIG
    for text in ("[]", "no json"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(IdentityError):
            config_of(RunningModel(), options)


def test_one_namespace_for_engines_and_stand_alone_use() -> None:
    options = EngineOptions(url="memory://x", weights="w", tenant="t")
    made = namespace_of(MODEL, 16, RunningModel(config=CONFIG), options)
    assert made == namespace(CONFIG, WeightsIdentity.operator("w"), MODEL.facts(16), "t")
    eagle = namespace_of(MODEL, 16, RunningModel(config=CONFIG, chain=ChainKind.BIGRAM), options)
    assert eagle != made


def test_scales_from_a_file_of_their_own_refuse() -> None:
    model = ModelKV.dense(num_layers=6, num_kv_heads=4, head_dim=8, dtype="float8_e4m3fn")
    options = EngineOptions(url="memory://x", weights="w")
    running = RunningModel(config={**CONFIG, "dtype": "bfloat16"}, scales_file="/scales.json")
    with pytest.raises(IdentityError, match=r"/scales\.json"):
        namespace_of(model, 16, running, options)


@pytest.mark.parametrize("layers", [(0, 6), (0, 2), (2, 5), (3, 6)])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_a_stage_is_told_without_the_others(layers: tuple[int, int], tp_size: int) -> None:
    spec, stage = spec_of(tp_size, Span(*layers), 6)
    held = shard(MODEL.pool(16), spec, Rank(tp_size - 1, stage))
    assert held is not None
    assert held.box.layers == Span(*layers)
    assert held.box.heads.stop == 4
