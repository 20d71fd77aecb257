"""Which namespace the demo's models keep their pages in."""

from __future__ import annotations

import hashlib

from hicache_store.demo.weights import ModelConfig, ModelSource
from hicache_store.layout.namespace import Namespace, namespace
from hicache_store.layout.parallel import ParallelSpec
from hicache_store.layout.weights import WeightsIdentity, local_weights


def weights_identity(source: ModelSource) -> WeightsIdentity:
    """A digest of the model's file; of a random model its seed and a digest of one matrix, which tells a
    changed generator or scale."""
    if source.path is not None:
        return local_weights(source.path, uses_cache=False)
    _, weights = source.open()
    digest = hashlib.sha256(weights.read("blk.0.attn_k.weight").tobytes()).hexdigest()
    return WeightsIdentity.operator(f"random/{source.seed}/{digest}")


def demo_tenant(writer: ParallelSpec, *, is_control: bool) -> str:
    """A demo's own tenant: pages that one topology wrote are told from those of another, which the store
    would serve alike, and altered ones from honest ones."""
    return f"hicache-demo{'-control' if is_control else ''}-{writer.label}"


def demo_namespace(config: ModelConfig, weights: WeightsIdentity, page_size: int, tenant: str) -> Namespace:
    """The namespace of a model's pages, the same on every rank of every topology."""
    fields = {
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        # Keys are rotated in neighbouring pairs, the order of GGUF files.
        "rope_interleave": True,
        "dtype": "float32",
    }
    return namespace(fields, weights, config.kv().facts(page_size), tenant)
