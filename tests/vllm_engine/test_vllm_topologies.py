"""Real engines of every shape over one store: each writes prompts of its own, fresh ones read the others'.

The tokens are those of an engine without a store, in fp32, and vLLM's own counter says how many came from it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_client import Batch, Setup, running
from vllm_model import TinyLlama

pytestmark = pytest.mark.timeout(1_200)

_DRAW = random.Random(9)
SHAPES: Mapping[str, Mapping[str, int]] = {
    "tp1": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "block64": {"block": 64},
}
PROMPTS = {name: [[_DRAW.randrange(256) for _ in range(600)] for _ in range(2)] for name in SHAPES}
STORED = 2 * 576
"""Tokens of the whole pages of one writer's prompts."""


@dataclass(frozen=True)
class Written:
    """One store that engines of every shape wrote to, and the answers of one without a store."""

    root: Path
    model: Path
    expected: Mapping[str, list[tuple[int, ...]]]

    def engine(self, name: str, *, is_stored: bool = True, **shape: Any) -> Any:
        connector = {"url": f"file://{self.root}/store?quota=1GiB"} if is_stored else None
        return running(Setup(self.model, connector=connector, **shape), self.root / f"{name}.log")

    def read(self, reader: str, writers: Sequence[str]) -> dict[str, Batch]:
        with self.engine(f"{reader}-reads", **SHAPES[reader]) as engine:
            return {writer: engine.generate(PROMPTS[writer]) for writer in writers}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    root = tmp_path_factory.mktemp("topologies")
    empty = Written(root, TinyLlama().write(root / "model"), {})
    with empty.engine("reference", is_stored=False) as engine:
        batches = {name: engine.generate(prompts) for name, prompts in PROMPTS.items()}
    assert min(batch.margin for batch in batches.values()) > 0.01, "the prompts do not tell outputs apart"
    found = Written(root, empty.model, {name: batch.tokens for name, batch in batches.items()})
    for name, shape in SHAPES.items():
        with found.engine(f"{name}-writes", **shape) as engine:
            batch = engine.generate(PROMPTS[name])
            assert (batch.external, batch.tokens) == (0, found.expected[name]), name
    return found


@pytest.mark.parametrize(
    ("reader", "writers"),
    [
        ("tp1", ["tp1", "tp2", "pp2", "block64"]),
        ("tp2", ["tp1", "tp2", "pp2"]),
        ("pp2", ["tp1", "tp2", "pp2"]),
        ("block64", ["tp1", "tp2"]),
    ],
)
def test_an_engine_of_any_shape_continues_from_what_others_wrote(
    written: Written, reader: str, writers: list[str]
) -> None:
    for writer, batch in written.read(reader, writers).items():
        assert (batch.external, batch.tokens) == (STORED, written.expected[writer]), writer
