"""Small random Llamas on disk, and LoRA adapters for them: enough for a real engine to serve token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

HEADS, HEAD_DIM, HIDDEN, INNER, VOCABULARY = 8, 32, 256, 512, 256
_SPREAD = 0.15
"""Of the random weights. Wide enough for the KV of far tokens to decide outputs, see the controls."""
LONGEST = 2048
"""Tokens of a prompt and its answer."""


@dataclass(frozen=True)
class TinyLlama:
    """One model; two that differ in any field have KV that must not be taken for one another's."""

    seed: int = 0
    layers: int = 4
    kv_heads: int = 4
    rope_theta: float = 10_000.0
    rope_scaling: float | None = None
    """Factor of a linear scaling of positions."""
    dtype: str = "float32"
    """What is in the weights file; what the engine computes in is an option of the engine."""
    windows: Sequence[int | None] = ()
    """A sliding window or None (whole attention) for each layer; all windows are equal."""

    def write(self, folder: Path) -> Path:
        """Configuration and weights. Without a tokenizer: prompts are token ids."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self._configuration()))
        (folder / "generation_config.json").write_text("{}")
        dtype = getattr(torch, self.dtype)
        weights = {name: tensor.to(dtype) for name, tensor in self._weights().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def write_adapter(self, folder: Path, seed: int, rank: int = 8) -> Path:
        """A LoRA of the projections of keys and values, so that the KV of a prompt is the adapter's."""
        folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for layer in range(self.layers):
            for name in ("k_proj", "v_proj"):
                at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                rows = self.kv_heads * HEAD_DIM
                weights[f"{at}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=generator) * _SPREAD
                weights[f"{at}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * _SPREAD
        (folder / "adapter_config.json").write_text(
            json.dumps(
                {
                    "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank,
                    "lora_alpha": 2 * rank, "lora_dropout": 0.0, "target_modules": ["k_proj", "v_proj"],
                }
            )
        )  # fmt: skip
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return folder

    def _configuration(self) -> dict[str, object]:
        found: dict[str, object] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": self.layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": self.kv_heads,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": LONGEST,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "vocab_size": VOCABULARY,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        if self.rope_scaling is not None:
            found["rope_scaling"] = {"rope_type": "linear", "factor": self.rope_scaling}
        if self.windows:
            (found["sliding_window"],) = {window for window in self.windows if window is not None}
            found["layer_types"] = [
                "full_attention" if window is None else "sliding_attention" for window in self.windows
            ]
        return found

    def _weights(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * _SPREAD

        weights = {
            "model.embed_tokens.weight": drawn(VOCABULARY, HIDDEN),
            "model.norm.weight": torch.ones(HIDDEN),
            "lm_head.weight": drawn(VOCABULARY, HIDDEN),
        }
        wide, narrow = HEADS * HEAD_DIM, self.kv_heads * HEAD_DIM
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
                weights[f"{at}.self_attn.{name}_proj.weight"] = drawn(rows, HIDDEN)
            weights[f"{at}.self_attn.o_proj.weight"] = drawn(HIDDEN, wide)
            weights[f"{at}.mlp.gate_proj.weight"] = drawn(INNER, HIDDEN)
            weights[f"{at}.mlp.up_proj.weight"] = drawn(INNER, HIDDEN)
            weights[f"{at}.mlp.down_proj.weight"] = drawn(HIDDEN, INNER)
            weights[f"{at}.input_layernorm.weight"] = torch.ones(HIDDEN)
            weights[f"{at}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        return weights
