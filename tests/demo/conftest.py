from __future__ import annotations

import pytest
import torch

from hicache_store.demo.gguf import GgufFile
from hicache_store.demo.tokenizer import BpeTokenizer
from hicache_store.demo.weights import ModelConfig, ModelSource, smollm2

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_file() -> GgufFile:
    path = smollm2().path
    assert path is not None
    return GgufFile.open(path)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_file: GgufFile) -> BpeTokenizer:
    return BpeTokenizer.of(smollm2_file)


@pytest.fixture(scope="session")
def tiny() -> ModelSource:
    """A random model of 5 layers, 4 KV heads of 2 query heads each: seconds become milliseconds."""
    shape = ModelConfig(
        num_layers=5,
        hidden=64,
        num_query_heads=8,
        num_kv_heads=4,
        head_dim=16,
        ffn=96,
        vocab=256,
        context=512,
    )
    return ModelSource("tiny", config=shape, seed=1)
