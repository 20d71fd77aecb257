"""A small random Qwen2 on disk, with a tokenizer of single bytes: enough for a real engine to serve."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCABULARY = 4, 4, 2, 16, 64, 128, 256
_SPREAD = 0.08
"""Of the random weights. Wide enough for the KV of far tokens to decide outputs, see the controls."""

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_model(folder: Path, seed: int = 0) -> None:
    """Configuration, weights and tokenizer; other seeds are other weights of equal shape."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048})
    )
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * _SPREAD

    weights = {
        "model.embed_tokens.weight": drawn(VOCABULARY, HIDDEN) / _SPREAD,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": drawn(VOCABULARY, HIDDEN),
    }
    wide, narrow = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
            weights[f"{at}.self_attn.{name}_proj.weight"] = drawn(rows, HIDDEN) * 4
            weights[f"{at}.self_attn.{name}_proj.bias"] = drawn(rows)
        weights[f"{at}.self_attn.o_proj.weight"] = drawn(HIDDEN, wide) * 4
        weights[f"{at}.mlp.gate_proj.weight"] = drawn(INNER, HIDDEN)
        weights[f"{at}.mlp.up_proj.weight"] = drawn(INNER, HIDDEN)
        weights[f"{at}.mlp.down_proj.weight"] = drawn(HIDDEN, INNER)
        weights[f"{at}.input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[f"{at}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    return weights


def _tokenizer() -> dict[str, object]:
    """Every byte is a token: no merges, under the names that byte-level tokenizers give to bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    names = {byte: chr(byte) if byte in printable else chr(next(others)) for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {name: byte for byte, name in names.items()}, "merges": []},
    }
