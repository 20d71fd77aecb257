"""One store under a real SGLang engine and a real vLLM engine: one model, one name, the same bytes."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm_client import Setup, own_transfer, running
from vllm_model import TinyLlama

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
SGLANG_PYTHON = ROOT / os.environ.get("HICACHE_SGLANG_PYTHON", ".venv-engines/bin/python")
PAGE = 32
_DRAW = random.Random(17)
PROMPTS = [[_DRAW.randrange(256) for _ in range(600)] for _ in range(2)]
OTHERS = [[_DRAW.randrange(256) for _ in range(600)] for _ in range(2)]
STORED = 600 // PAGE * PAGE


def sglang(
    model: Path, url: str, prompts: list[list[int]], folder: Path, dtype: str
) -> tuple[list[tuple[int, ...]], list[int]]:
    """A fresh SGLang engine's greedy tokens, and how many tokens of each prompt it had from the store."""
    asked = folder / "prompts.json"
    asked.write_text(json.dumps(prompts))
    script = ROOT / "tests" / "engines" / "serve_once.py"
    run = subprocess.run(
        [SGLANG_PYTHON, script, model, url, asked, folder, dtype],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    answers = json.loads(run.stdout.splitlines()[-1])
    return [tuple(tokens) for tokens, _ in answers], [stored for _, stored in answers]


def objects(store: Path) -> dict[str, bytes]:
    """Every page object of a store of local files by its name."""
    folder = store / "objects"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def over(*urls: str) -> dict[str, Any]:
    """A vLLM engine that reads from the first store that has a prefix, and writes to all."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [own_transfer({"url": url, "page_size": PAGE}) for url in urls]
        },
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_of_one_engine_are_the_other_ones(tmp_path: Path, dtype: str) -> None:
    """vLLM's second store gets what it has in its own blocks after it loaded SGLang's pages: the same bytes
    under the same names, though SGLang keeps tokens before heads and vLLM's CPU kernels transpose keys."""
    model = TinyLlama().write(tmp_path / "model")
    url, copy = (f"file://{tmp_path}/{name}?quota=1GiB" for name in ("shared", "copy"))
    tokens, stored = sglang(model, url, PROMPTS, tmp_path, dtype)
    assert stored == [0, 0]
    written = objects(tmp_path / "shared")
    setup = Setup(model, dtype=dtype, transfer=over(url, copy))
    with running(setup, tmp_path / "vllm.log") as engine:
        read = engine.generate(PROMPTS)
        own = engine.generate(OTHERS)
    assert (read.external, own.external) == (2 * STORED, 0)
    copied = objects(tmp_path / "copy")
    common = written.keys() & copied.keys()  # SGLang also stores pages of its answers
    assert len(common) == 2 * STORED // PAGE
    assert all(copied[name] == written[name] for name in common)
    if dtype == "float32":
        assert read.tokens == tokens
        tokens, stored = sglang(model, url, OTHERS, tmp_path, dtype)
        assert (stored, tokens) == ([STORED, STORED], own.tokens)
