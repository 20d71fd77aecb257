"""One rank's part of a Llama: some heads and feed-forward columns of some layers.

Column-parallel matrices (q, k, v, gate, up) keep this rank's output rows, row-parallel ones (attention
output, down) this rank's input columns; their partial results are summed over the tensor-parallel
group, twice a layer. Arithmetic is float32; keys and values pass through the bfloat16 pool even
inside one prefill, so that computed and restored pages are the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from hicache_store.demo.cut import Cut
from hicache_store.demo.fabric import Fabric
from hicache_store.demo.pool import KVPool
from hicache_store.demo.weights import ModelConfig, Rows, Weights
from hicache_store.layout.box import Span


def _rows(heads: Sequence[int], head_dim: int) -> Rows:
    return (np.array(heads, np.int64)[:, None] * head_dim + np.arange(head_dim)).reshape(-1)


def _span(span: Span) -> Rows:
    return np.arange(span.start, span.stop, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights, cut: Cut, index: int) -> _Layer:
        def read(name: str, rows: Rows | None = None) -> torch.Tensor:
            return torch.from_numpy(weights.read(f"blk.{index}.{name}.weight", rows))

        queries = _rows(cut.query_heads, config.head_dim)
        keys = _rows(range(cut.kv.box.heads.start, cut.kv.box.heads.stop), config.head_dim)
        ffn = _span(cut.ffn)
        return cls(
            attention_norm=read("attn_norm")[0],
            qkv=torch.cat([read("attn_q", queries), read("attn_k", keys), read("attn_v", keys)]),
            output=read("attn_output")[:, torch.from_numpy(queries)].contiguous(),
            ffn_norm=read("ffn_norm")[0],
            gate_up=torch.cat([read("ffn_gate", ffn), read("ffn_up", ffn)]),
            down=read("ffn_down")[:, cut.ffn.start : cut.ffn.stop].contiguous(),
        )


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of neighbouring pairs, the order of GGUF's Llama weights.

    ``x`` is float32 (tokens, heads, head_dim), ``turns`` complex64 (tokens, 1, head_dim / 2).
    """
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).reshape(x.shape)


class LlamaPart:
    """The weights of one rank and the arithmetic on them."""

    def __init__(self, config: ModelConfig, weights: Weights, cut: Cut, fabric: Fabric) -> None:
        self.config, self.cut = config, cut
        self._weights, self._fabric = weights, fabric
        layers = cut.kv.box.layers
        self._layers = [_Layer.load(config, weights, cut, i) for i in range(layers.start, layers.stop)]
        powers = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        self._frequencies = config.rope_theta**-powers
        if cut.is_last_stage:
            head = "output.weight" if weights.has("output.weight") else "token_embd.weight"
            self._head = torch.from_numpy(weights.read(head, _span(cut.vocab)))
            self._norm = torch.from_numpy(weights.read("output_norm.weight"))[0]

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Hidden states (tokens, hidden) of token ids."""
        return torch.from_numpy(self._weights.read("token_embd.weight", np.array(tokens, np.int64)))

    def forward(self, hidden: torch.Tensor, pool: KVPool, slots: Sequence[int], start: int) -> torch.Tensor:
        """Run this rank's layers over tokens at positions ``start`` on, which attend to all before.

        ``hidden`` (tokens, hidden) is replicated over the tensor-parallel group, and so is the result;
        keys and values of the tokens are left in the pool.
        """
        count, stop = len(hidden), start + len(hidden)
        positions = torch.arange(start, stop, dtype=torch.float64)
        angles = torch.outer(positions, self._frequencies)
        turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]
        context, written = pool.rows(slots, 0, stop), pool.rows(slots, start, stop)
        heads = len(self.cut.kv.box.heads)
        shared = len(self.cut.query_heads) // heads
        mask = None
        if count > 1:
            mask = torch.arange(stop)[None] <= torch.arange(start, stop)[:, None]
            mask = mask.repeat(shared, 1)
        for index, layer in enumerate(self._layers):
            x = functional.rms_norm(hidden, (self.config.hidden,), layer.attention_norm, self.config.norm_eps)
            qkv = functional.linear(x, layer.qkv).view(count, -1, self.config.head_dim)
            queries, keys, values = torch.split(qkv, [shared * heads, heads, heads], dim=1)
            pool.write(index, written, rotate(keys, turns), values)
            all_keys, all_values = pool.read(index, context)
            # The query heads of one KV head are more queries of it: (heads, shared * tokens, dim).
            asked = rotate(queries, turns).view(count, heads, shared, -1).permute(1, 2, 0, 3)
            found = functional.scaled_dot_product_attention(
                asked.reshape(1, heads, shared * count, -1), all_keys[None], all_values[None], mask
            )
            found = found.view(heads, shared, count, -1).permute(2, 0, 1, 3).reshape(count, -1)
            hidden = hidden + self._fabric.sum(functional.linear(found, layer.output), "attention output")
            x = functional.rms_norm(hidden, (self.config.hidden,), layer.ffn_norm, self.config.norm_eps)
            gate, up = functional.linear(x, layer.gate_up).chunk(2, dim=1)
            down = functional.linear(functional.silu(gate) * up, layer.down)
            hidden = hidden + self._fabric.sum(down, "feed-forward output")
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (this rank's vocabulary) after the last of ``hidden`` (tokens, hidden); last stage only."""
        x = functional.rms_norm(hidden[-1:], (self.config.hidden,), self._norm, self.config.norm_eps)
        return functional.linear(x, self._head)[0]
