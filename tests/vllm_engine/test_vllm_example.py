"""What the other tests stand on, shown with vLLM's own sample connector in place of this package's.

An engine answers alike in fresh processes, its counter tells what a connector loaded, and answers depend on
what was loaded.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_client import Batch, Setup, running
from vllm_model import TinyLlama

pytestmark = pytest.mark.timeout(900)

_DRAW = random.Random(1)
PROMPTS = [[_DRAW.randrange(256) for _ in range(600)] for _ in range(2)]
WHOLE_BLOCKS = 576
"""Tokens of a prompt in blocks of 32, short of the last one."""


def test_loaded_blocks_decide_the_answer_and_are_counted(tmp_path: Path) -> None:
    model = TinyLlama().write(tmp_path / "model")
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "store")},
    }

    def fresh(name: str) -> Batch:
        with running(Setup(model, transfer=transfer), tmp_path / f"{name}.log") as engine:
            return engine.generate(PROMPTS)

    computed, loaded = fresh("computed"), fresh("loaded")
    for file in (tmp_path / "store").rglob("*.safetensors"):
        save_file({name: torch.zeros_like(kv) for name, kv in load_file(file).items()}, file)
    altered = fresh("altered")

    assert (computed.external, computed.queried) == (0, 1200)
    assert loaded.external == altered.external == 2 * WHOLE_BLOCKS
    assert loaded.cached == [WHOLE_BLOCKS] * 2
    assert loaded.tokens == computed.tokens
    assert all(
        one.tokens != other.tokens for one, other in zip(altered.answers, computed.answers, strict=True)
    )
