"""What must not share never does, in real engines; and without verification altered bytes show."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_client import Adapter, Batch, Prompt, Setup, running
from vllm_model import TinyLlama

pytestmark = pytest.mark.timeout(900)

_DRAW = random.Random(11)
PROMPTS = [[_DRAW.randrange(256) for _ in range(600)] for _ in range(2)]
STORED = 2 * 576


@dataclass(frozen=True)
class Written:
    """What an engine stored, and what it answered."""

    root: Path
    model: Path
    batch: Batch

    @property
    def connector(self) -> dict[str, Any]:
        return {"url": f"file://{self.root}/store?quota=1GiB"}

    def answers(self, name: str, model: Path, connector: Mapping[str, Any] | None, **more: Any) -> Batch:
        """The prompts' answers of a fresh engine."""
        with running(Setup(model, connector=connector, **more), self.root / f"{name}.log") as engine:
            return engine.generate(PROMPTS)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    root = tmp_path_factory.mktemp("identity")
    found = Written(root, TinyLlama().write(root / "model"), Batch((), {}, 0.0))
    batch = found.answers("writer", found.model, found.connector)
    assert batch.external == 0
    return Written(root, found.model, batch)


@pytest.mark.parametrize("what", ["weights", "rope", "dtype"])
def test_another_model_misses_and_answers_for_itself(written: Written, what: str) -> None:
    model, more = written.model, {}
    if what == "weights":
        model = TinyLlama(seed=1).write(written.root / "other")
    elif what == "rope":
        scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
        more = {"more": {"hf_overrides": {"rope_parameters": scaled}}}
    else:
        more = {"dtype": "bfloat16"}
    plain = written.answers(f"{what}-plain", model, None, **more)
    stored = written.answers(what, model, written.connector, **more)
    assert (stored.external, stored.tokens) == (0, plain.tokens)
    assert stored.tokens != written.batch.tokens or what == "dtype"


def test_a48_salts_and_adapters_have_pages_of_their_own(written: Written) -> None:
    """Nor does it matter how vLLM hashes blocks, and that its hashes are other ones in each process."""
    first = written.root / "adapters" / "first"
    second = written.root / "adapters" / "second"
    TinyLlama().write_adapter(first, seed=3)
    TinyLlama().write_adapter(second, seed=4)
    lora = {
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras": 1,
        "prefix_caching_hash_algo": "xxhash",
    }
    setup = Setup(written.model, connector=written.connector, more=lora)
    asked = {
        "plain": Prompt(PROMPTS[0]),
        "salt": Prompt(PROMPTS[0], salt="a"),
        "other salt": Prompt(PROMPTS[0], salt="b"),
        "adapter": Prompt(PROMPTS[0], lora=Adapter("x", 1, str(first))),
        "other adapter": Prompt(PROMPTS[0], lora=Adapter("x", 2, str(second))),
    }
    with running(setup, written.root / "lora.log", {"PYTHONHASHSEED": "77"}) as engine:
        before = {name: engine.generate([prompt]) for name, prompt in asked.items()}
        hits = {name: batch.external for name, batch in before.items()}
        assert hits == {"plain": 576, "salt": 0, "other salt": 0, "adapter": 0, "other adapter": 0}
        assert engine.forget(external=True)
        for name, prompt in asked.items():
            batch = engine.generate([prompt])
            assert (batch.external, batch.tokens) == (576, before[name].tokens), name
    plain = [written.batch.tokens[0]]
    assert [before[name].tokens for name in ("plain", "salt", "other salt")] == [plain] * 3
    assert len({str(before[name].tokens) for name in ("plain", "adapter", "other adapter")}) == 3


def test_control_altered_bytes_show_where_nothing_is_verified(written: Written) -> None:
    """The comparison of outputs has power: it fails for bytes that verification would have kept out."""
    root = written.root / "control"
    connector = {"url": f"file://{root}?quota=1GiB"}
    written.answers("control-writer", written.model, connector)
    for path in root.rglob("*"):
        if path.is_file() and path.stat().st_size > 100_000:
            content = bytearray(path.read_bytes())
            half = 60_000
            content[:half], content[half : 2 * half] = content[half : 2 * half], content[:half]
            path.chmod(0o600)
            path.write_bytes(content)
    blind = written.answers("control-blind", written.model, {**connector, "verify": False})
    assert blind.external == STORED
    assert blind.tokens != written.batch.tokens
    careful = written.answers("control-careful", written.model, connector)
    assert careful.tokens == written.batch.tokens


def test_layers_with_windows_are_restored_where_vllm_keeps_them_in_groups(written: Written) -> None:
    model = TinyLlama(windows=(None, 96, None, 96)).write(written.root / "windows")
    connector = {"url": f"file://{written.root}/windowed?quota=1GiB"}
    plain = written.answers("windows-plain", model, None)
    with running(Setup(model, connector=connector), written.root / "windows.log") as engine:
        assert engine.call("vllm_faulty:groups") == ["FullAttentionSpec", "SlidingWindowSpec"]
        first = engine.generate(PROMPTS)
        assert (first.external, first.tokens) == (0, plain.tokens)
        assert engine.forget(external=True)
        again = engine.generate(PROMPTS)
        assert (again.external, again.tokens) == (STORED, plain.tokens)
