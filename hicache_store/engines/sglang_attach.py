"""Attaching SGLang's host pools: every check that can refuse is made here, before a page moves."""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass, replace
from typing import Any, Final

from hicache_store.connectors.base import Connector
from hicache_store.engines.identity import (
    RunningModel,
    agreed,
    config_of,
    logical_dtype,
    namespace_of,
    weights_of,
)
from hicache_store.engines.options import EngineOptions
from hicache_store.engines.sglang_pools import (
    DENSE_POOLS,
    IndexShape,
    PoolShape,
    byte_buffers,
    class_of,
    index_layout,
    index_shape_of,
    is_described,
    is_logical,
    pool_layout,
    probe,
    shape_of,
)
from hicache_store.engines.sglang_stores import (
    DirectStore,
    FlatStore,
    Limits,
    LogicalStore,
    PoolStore,
)
from hicache_store.engines.sharing import BorrowedConnector, spec_of
from hicache_store.errors import ConfigurationError, IdentityError, TopologyError
from hicache_store.layout.box import Span
from hicache_store.layout.dtypes import DType
from hicache_store.layout.model import Attention, KVPart, ModelKV, Pool
from hicache_store.layout.namespace import Namespace
from hicache_store.layout.parallel import ParallelSpec, Rank, head_spans
from hicache_store.metrics import Metrics
from hicache_store.store import PoolBuffers, Store

log = logging.getLogger("hicache_store")

_POOL_NAME: Final = re.compile(r"[a-z][a-z0-9]{0,15}(?:_[a-z0-9]{1,6})?")
_DRAFTS: Final = ("draft", "draft_indexer", "draft_swa")
_ALWAYS_SHARDED: Final = ("mamba", "draft", "draft_swa")
"""Sidecars that every tensor-parallel rank has a part of its own of, also beside a replicated target."""
_LAYOUT_FREE: Final = ("DSAIndexerPoolHost", "MambaPoolHost")
"""Pools whose flat page is the same in every host layout."""


@dataclass(frozen=True, slots=True)
class Place:
    """This rank, as SGLang numbers it. ``is_replicated`` tells that every tensor-parallel rank holds the
    same KV and that SGLang has one of them write it."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    is_replicated: bool


@dataclass(frozen=True, slots=True)
class Site:
    """What every pool of one engine is attached with."""

    connector: Connector
    place: Place
    options: EngineOptions
    running: RunningModel
    metrics: Metrics

    @property
    def limits(self) -> Limits:
        """Deadlines of one call."""
        return Limits(self.options.timeout_s, self.options.lookup_timeout_s)


@dataclass(frozen=True, slots=True)
class Anchor:
    """The pool that SGLang anchors its pages in, and the namespace that it gives to all others."""

    model: ModelKV
    namespace: Namespace
    store: PoolStore
    layers: Span
    """This rank's layers among those of ``model``."""


def attach_anchor(site: Site, host_pool: Any) -> Anchor:
    """The namespace of the model and the store of the anchor pool.

    Raises :class:`ConfigurationError` for whatever cannot work, with the numbers and the way out.
    """
    if is_logical(host_pool):
        model = _logical_model(site)
        identity = namespace_of(model, int(host_pool.page_size), site.running, site.options)
        return Anchor(model, identity, LogicalStore(), Span(0, model.num_layers))
    shape = shape_of(host_pool)
    layers, total = _layers_of_rank(shape, site)
    model = _model_of(shape, total, site)
    identity = namespace_of(model, shape.page_size, site.running, site.options)
    pool = model.pool(shape.page_size)
    parts = [(_direct(site, host_pool, shape, identity, pool, layers), pool.name)]
    if shape.draft_layers:
        drafts = Pool(
            "draft",
            shape.draft_layers,
            model.num_kv_heads,
            model.parts,
            model.dtype,
            shape.page_size,
            identity=f"packed {_draft_weights(site)}",
        )
        span = Span(0, shape.draft_layers)
        parts.append((_direct(site, host_pool, shape, identity, drafts, span, is_draft=True), drafts.name))
    store = DirectStore(tuple(parts), shape.page_size, _page_bytes(shape), site.limits)
    return Anchor(model, identity, store, layers)


def attach_sidecar(site: Site, anchor: Anchor, host_pool: Any, name: str) -> PoolStore:
    """The store of a pool beside the anchor.

    In place, and shared by other tensor-parallel sizes, where its heads are known; else by flat pages
    that belong to equal ranks only. Raises :class:`ConfigurationError` naming the pool where neither works.
    """
    if is_logical(host_pool):
        return LogicalStore()
    place = site.place
    is_sharded = not place.is_replicated or name in _ALWAYS_SHARDED
    kind = class_of(host_pool)
    if place.is_replicated and place.tp_size > 1 and name in _DRAFTS and kind in DENSE_POOLS:
        log.warning(
            "pool %s has heads of every rank, but SGLang has rank 0 alone write beside a replicated target: "
            "no prefix will be restorable with this draft model",
            name,
        )
    heads = _sidecar_heads(host_pool, place, is_sharded=is_sharded)
    if heads is not None:
        return _described_sidecar(site, anchor, host_pool, name, heads)
    index = index_shape_of(host_pool)
    if name == "indexer" and index and place.is_replicated and index.layers == len(anchor.layers):
        return _index_sidecar(site, anchor, index)
    identity = [name, kind, str(getattr(host_pool, "dtype", "")), *_stage_identity(site, host_pool)]
    if is_sharded:
        identity.append(f"tp{place.tp_rank}of{place.tp_size}")
    if kind not in _LAYOUT_FREE:
        identity.append(str(getattr(host_pool, "layout", "")))
    if name in _DRAFTS:
        identity.append(_draft_weights(site))
    try:
        return FlatStore(
            host_pool,
            _pool_name(name),
            " ".join(identity),
            BorrowedConnector(site.connector),
            anchor.namespace,
            site.limits,
            site.metrics,
        )
    except (NotImplementedError, AttributeError) as error:
        raise ConfigurationError(
            f"pool {name} ({kind}) cannot be taken apart into pages, so prefixes of this model cannot be "
            f"stored whole: {error}"
        ) from error


def _described_sidecar(site: Site, anchor: Anchor, host_pool: Any, name: str, heads: int) -> PoolStore:
    shape = shape_of(host_pool)
    count = shape.layers + shape.draft_layers
    dtype = anchor.model.dtype if shape.dtype.endswith("int8") else DType.of(shape.dtype)
    identity = [name, *_stage_identity(site, host_pool)]
    if name in _DRAFTS or shape.draft_layers:
        identity.append(_draft_weights(site))
    pool = Pool(
        _pool_name(name), count, heads, shape.parts, dtype, shape.page_size, identity=" ".join(identity)
    )
    whole = replace(shape, layers=count, draft_layers=0)
    store = _direct(site, host_pool, whole, anchor.namespace, pool, Span(0, count))
    return DirectStore(((store, pool.name),), shape.page_size, _page_bytes(whole), site.limits)


def _direct(
    site: Site,
    host_pool: Any,
    shape: PoolShape,
    identity: Namespace,
    pool: Pool,
    layers: Span,
    *,
    is_draft: bool = False,
) -> Store:
    place = site.place
    heads = head_spans(pool.num_heads, ParallelSpec(place.tp_size))[place.tp_rank]
    if len(heads) != shape.heads:
        raise TopologyError(
            f"a rank holds {shape.heads} KV heads, where {pool.num_heads} heads over tensor-parallel size "
            f"{place.tp_size} give it {len(heads)}; correct total_kv_heads"
        )
    layout = pool_layout(shape, pool.dtype, heads, layers, is_draft=is_draft)
    if not is_draft:
        probe(host_pool, shape, layout)
    buffers = PoolBuffers(pool, layout, byte_buffers(shape.buffers))
    return _attach(site, identity, buffers, layers)


def _index_sidecar(site: Site, anchor: Anchor, shape: IndexShape) -> PoolStore:
    """Index keys of every layer of this rank, shared by all sizes: which layers they are is told by the
    anchor."""
    parts = (KVPart("index", shape.row_bytes),)
    dtype, buffers = DType.of("int8"), byte_buffers([shape.buffer])
    pool = Pool("indexer", anchor.model.num_layers, 1, parts, dtype, page_size=1)
    described = PoolBuffers(pool, index_layout(shape, pool, anchor.layers), buffers)
    stores = [(_attach(site, anchor.namespace, described, anchor.layers), pool.name)]
    if shape.draft_layers:
        span = Span(0, shape.draft_layers)
        drafts = Pool(
            "draft_idx",
            shape.draft_layers,
            1,
            parts,
            dtype,
            page_size=1,
            identity=f"packed {_draft_weights(site)}",
        )
        packed = PoolBuffers(drafts, index_layout(shape, drafts, span, is_draft=True), buffers)
        stores.append((_attach(site, anchor.namespace, packed, span), drafts.name))
    size = (shape.layers + shape.draft_layers) * shape.row_bytes
    return DirectStore(tuple(stores), shape.page_size, size, site.limits, is_whole_pages=True)


def _attach(site: Site, identity: Namespace, buffers: PoolBuffers, layers: Span) -> Store:
    place = site.place
    spec, stage = spec_of(place.tp_size, layers, buffers.pool.num_layers)
    return Store.attach(
        BorrowedConnector(site.connector),
        identity,
        [buffers],
        spec,
        Rank(place.tp_rank, stage),
        writer="caller" if place.is_replicated else "elected",
        verify=site.options.verify,
        timeout_s=site.options.timeout_s,
        metrics=site.metrics,
    )


def _layers_of_rank(shape: PoolShape, site: Site) -> tuple[Span, int]:
    """The rank's layers among those that the whole model keeps in pools of this kind, and their number.

    A pool of one stage tells its count only; for more the stage is needed, and for a model whose layers
    differ which of them have full attention.
    """
    running, given, place = site.running, site.options.num_layers, site.place
    if place.pp_size == 1:
        if given is not None and given != shape.layers:
            raise IdentityError(
                f"the pool has {shape.layers} layers, num_layers says {given}; correct the key"
            )
        return Span(0, shape.layers), shape.layers
    total = agreed("num_layers", running.num_layers, given, "number of layers")
    start, stop = running.stage or (shape.start_layer, shape.start_layer + shape.layers)
    if running.layer_ids is not None:
        ids = running.layer_ids
        first, last = (sum(1 for layer in ids if layer < end) for end in (start, stop))
        if last - first == shape.layers:
            return Span(first, last), len(ids)
    elif stop - start == shape.layers and stop <= total and shape.start_layer == start:
        return Span(start, stop), total
    raise TopologyError(
        f"stage {place.pp_rank} of {place.pp_size} has {shape.layers} layers from layer {shape.start_layer} "
        f"on, the model says layers {start} to {stop} of {total}; its layers cannot be told apart: run it "
        "with one pipeline stage, or without this store"
    )


def _model_of(shape: PoolShape, total: int, site: Site) -> ModelKV:
    running, options = site.running, site.options
    dtype = DType.of(logical_dtype(shape.dtype, running.kv_dtype, options.dtype))
    if shape.is_latent:
        return ModelKV(total, 1, shape.parts, dtype, Attention.MLA)
    # The operator's word wins: where layers differ in heads, the model tells those of one kind only.
    told = running.total_kv_heads if options.total_kv_heads is None else options.total_kv_heads
    heads = agreed("total_kv_heads", told, None, "number of KV heads")
    return ModelKV(total, heads, shape.parts, dtype, Attention.GQA)


def _logical_model(site: Site) -> ModelKV:
    """A model whose KV is in sidecar pools only: their own names carry their geometry."""
    config = config_of(site.running, site.options)
    dtype = site.running.kv_dtype or site.options.dtype or config.get("dtype") or config.get("torch_dtype")
    named = agreed("dtype", None if dtype is None else str(dtype), None, "KV dtype")
    layers = agreed("num_layers", site.running.num_layers, site.options.num_layers, "number of layers")
    return ModelKV(layers, 1, (KVPart("logical", 8),), DType.of(named), Attention.MLA)


def _sidecar_heads(host_pool: Any, place: Place, *, is_sharded: bool) -> int | None:
    """KV heads over all ranks of a pool of understood memory, ``None`` where they cannot be told.

    SGLang gives a rank the quotient, and one head where there are more ranks than heads: only then is the
    product not the number of heads.
    """
    if not is_described(host_pool):
        return None
    shape = shape_of(host_pool)
    if shape.is_latent or place.tp_size == 1:
        return shape.heads
    return shape.heads * place.tp_size if is_sharded and shape.heads > 1 else None


def _stage_identity(site: Site, host_pool: Any) -> list[str]:
    """What ties a sidecar to a pipeline stage: no pool but the anchor tells which layers it holds."""
    place = site.place
    if place.pp_size == 1:
        return []
    start, count = getattr(host_pool, "start_layer", None), getattr(host_pool, "layer_num", None)
    return [f"pp{place.pp_rank}of{place.pp_size}", f"from{start}", f"layers{count}"]


def _draft_weights(site: Site) -> str:
    """The identity of the draft model's weights; drafts inside the target's checkpoint have the target's."""
    running, given = site.running, site.options.draft_weights
    if given is None and running.draft_path in (None, running.model_path):
        return "target"
    return str(weights_of(given, running.draft_path, running.draft_revision, key="draft_weights").record())


def _page_bytes(shape: PoolShape) -> int:
    element = next(iter(shape.buffers)).element_size()
    layers = shape.layers + shape.draft_layers
    return int(element * layers * shape.heads * shape.page_size * sum(part.width for part in shape.parts))


def _pool_name(name: str) -> str:
    if name != "kv" and _POOL_NAME.fullmatch(name):
        return name
    return f"side_{hashlib.sha256(name.encode()).hexdigest()[:6]}"
