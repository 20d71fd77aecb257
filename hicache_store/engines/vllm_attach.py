"""The namespace and the pool of a vLLM engine, and the stores of its scheduler and of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hicache_store.engines.identity import agreed, logical_dtype, namespace_of
from hicache_store.engines.sharing import spec_of
from hicache_store.engines.vllm_codec import LayerSpec, layer_specs
from hicache_store.engines.vllm_options import VllmOptions
from hicache_store.engines.vllm_running import Place, running_model
from hicache_store.errors import TopologyError
from hicache_store.layout.box import Span
from hicache_store.layout.dtypes import DType
from hicache_store.layout.layouts import engine_layout
from hicache_store.layout.model import Attention, KVPart, ModelKV, Pool
from hicache_store.layout.namespace import Namespace
from hicache_store.layout.parallel import ParallelSpec, Rank, Shard, head_spans, shard
from hicache_store.metrics import Metrics
from hicache_store.store import PoolBuffers, Store


@dataclass(frozen=True, slots=True)
class ModelPages:
    """The pages of the model that an engine runs: what they are named under, and of what they consist."""

    namespace: Namespace
    pool: Pool
    layers: tuple[LayerSpec, ...]
    """This process's layers; of an engine with pipeline stages, its scheduler knows the first stage's."""


def model_pages(vllm_config: Any, kv_cache_config: Any, options: VllmOptions) -> ModelPages:
    """The pages of the running model, the same in every process of the engine.

    Raises :class:`ConfigurationError` for whatever cannot be stored rightly, with the way out.
    """
    running, shared = running_model(vllm_config), options.shared
    total = agreed("num_layers", running.num_layers, shared.num_layers, "number of layers")
    layers = layer_specs(kv_cache_config, total)
    first = layers[0]
    dtype = DType.of(logical_dtype(str(first.spec.dtype), running.kv_dtype, shared.dtype))
    if first.is_latent:
        parts: tuple[KVPart, ...] = (KVPart("latent", first.widths[0]),)
        model = ModelKV(total, 1, parts, dtype, Attention.MLA)
    else:
        told = running.total_kv_heads if shared.total_kv_heads is None else shared.total_kv_heads
        heads = agreed("total_kv_heads", told, None, "number of KV heads")
        parts = (KVPart("k", first.widths[0]), KVPart("v", first.widths[1]))
        model = ModelKV(total, heads, parts, dtype, Attention.GQA)
    identity = namespace_of(model, options.page_size, running, shared)
    return ModelPages(identity, model.pool(options.page_size), layers)


def shard_of(pages: ModelPages, place: Place) -> tuple[ParallelSpec, Rank, Shard]:
    """The part of every page that a rank holds, checked against what its layers really keep."""
    pool, layers = pages.pool, pages.layers
    span = Span(layers[0].layer, layers[-1].layer + 1)
    spec, stage = spec_of(place.tp_size, span, pool.num_layers)
    heads = head_spans(pool.num_heads, spec)[place.tp_rank]
    if len(heads) != layers[0].heads:
        raise TopologyError(
            f"a rank holds {layers[0].heads} KV heads, where {pool.num_heads} heads over tensor-parallel "
            f"size {place.tp_size} give it {len(heads)}; correct total_kv_heads"
        )
    rank = Rank(place.tp_rank, stage)
    held = shard(pool, spec, rank)
    if held is None:
        raise TopologyError(f"rank {rank.label} holds no layer of {pool.num_layers}; run fewer stages")
    return spec, rank, held


def attach(
    storage: str,
    pages: ModelPages,
    buffers: PoolBuffers,
    parallel: tuple[ParallelSpec, Rank],
    options: VllmOptions,
    metrics: Metrics,
) -> Store:
    """The store of one process."""
    return Store.attach(
        storage,
        pages.namespace,
        [buffers],
        *parallel,
        verify=options.shared.verify,
        timeout_s=options.shared.timeout_s,
        metrics=metrics,
    )


def attach_for_lookups(pages: ModelPages, options: VllmOptions, metrics: Metrics) -> Store:
    """The store of a scheduler: it asks for whole pages, so that what it finds is there for every rank.

    It restores nothing, so its one slot is memory that is never touched.
    """
    pool = pages.pool
    layout = engine_layout("canonical", pool, pool.page_box, slots=1)
    memory = np.empty(pool.payload_bytes(pool.page_box), np.uint8)
    buffers = PoolBuffers(pool, layout, [memory])
    return attach(options.shared.url, pages, buffers, (ParallelSpec(), Rank()), options, metrics)
