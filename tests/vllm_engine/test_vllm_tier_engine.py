"""Real engines that offload to host memory, with the store behind it: the answers are those without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm_client import Setup, running
from vllm_model import TinyLlama

pytestmark = pytest.mark.timeout(900)

_DRAW = random.Random(11)
PROMPTS = [[_DRAW.randrange(256) for _ in range(600)] for _ in range(2)]
CHUNKS, TOKENS = 2 * 18, 2 * 576
"""Whole blocks of both prompts."""
ROW_BYTES = 131_072


def transfer(store: Path) -> dict[str, Any]:
    tier = {"type": "HiCacheTier", "module_path": "hicache_store.engines.vllm_tier"}
    return {
        "kv_connector": "OffloadingOnCPU",
        "kv_connector_module_path": "vllm_tier_shim",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 64 << 20,
            "canonical_layout": True,
            "secondary_tiers": [{**tier, "url": f"file://{store}?quota=1GiB"}],
        },
    }


def test_engines_of_two_sizes_share_rows_and_damaged_ones_are_computed(tmp_path: Path) -> None:
    model = TinyLlama().write(tmp_path / "model")
    with running(Setup(model), tmp_path / "plain") as engine:
        plain = engine.generate(PROMPTS)
        assert plain.external == 0
        assert plain.margin > 0.001, "the prompts do not tell outputs apart"
    setup = Setup(model, transfer=transfer(tmp_path / "store"))
    with running(setup, tmp_path / "writer") as engine:
        written = engine.generate(PROMPTS)
        assert (written.external, written.tokens) == (0, plain.tokens)
        engine.generate([PROMPTS[0][:40]])  # steps in which the rest is offloaded
        assert engine.forget(external=True)
        again = engine.generate(PROMPTS)
        assert (again.external, again.tokens) == (TOKENS, plain.tokens)
    with running(Setup(model, tp=2, transfer=transfer(tmp_path / "store")), tmp_path / "reader") as engine:
        read = engine.generate(PROMPTS)
        assert (read.external, read.tokens) == (TOKENS, plain.tokens)
        assert read.counted["vllm:hicache_tier_rows"] >= CHUNKS
        rows = [
            path
            for path in (tmp_path / "store").rglob("*")
            if path.is_file() and path.stat().st_size >= ROW_BYTES
        ]
        assert len(rows) == CHUNKS
        for path in rows:
            data = bytearray(path.read_bytes())
            data[ROW_BYTES // 2] ^= 1
            path.write_bytes(data)
        assert engine.forget(external=True)
        damaged = engine.generate(PROMPTS)
        assert (damaged.external, damaged.tokens) == (0, plain.tokens)
        assert damaged.counted["vllm:hicache_tier_faults"] >= 1
