"""SGLang's host pools, told by what they have: a host pool in, a :class:`PoolShape` out.

The pools are the ones of ``sglang.srt.mem_cache.pool_host``; S tokens of all slots, P pages, ps tokens a
page, L layers (drafts included), H heads, D and D' widths of K and V, C of a latent row:

==================  ========================  =====================  ==================
layout              MHA, GQA                  K and V differ         MLA
==================  ========================  =====================  ==================
layer_first         (2,L,S,H,D)                                      (L,S,1,C)
page_first          (2,S,L,H,D)               (S,L,H,D), (S,L,H,D')  (S,L,1,C)
page_first_direct   (2,P,L,ps,H,D)            (P,L,ps,H,D), ..       (P,L,ps,1,C)
page_head           (2,P,H,ps,L,D)
page_unified        (P,G,L,2,ps,H/G,D)                               (P,L,ps,C)
==================  ========================  =====================  ==================

Nothing here imports SGLang or torch: tensors come in as objects that have ``shape`` and ``numpy``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hicache_store.errors import ConfigurationError
from hicache_store.layout.box import Box, Span
from hicache_store.layout.dtypes import DType
from hicache_store.layout.layouts import Field, Layout, axes_layout, engine_layout
from hicache_store.layout.model import KVPart, Pool

DENSE_POOLS: Final = frozenset({"MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost"})
LATENT_POOLS: Final = frozenset({"MLATokenToKVPoolHost"})
LOGICAL_POOLS: Final = frozenset({"LogicalHostPool"})
INDEX_POOLS: Final = frozenset({"DSAIndexerPoolHost"})
"""Class names of pools whose memory is understood. A subclass may lay it out anew, so that it is not."""

LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")


@dataclass(frozen=True, slots=True)
class PoolShape:
    """A host pool of known layout: this rank's heads and layers, and the memory they are in.

    ``layers`` counts the target's layers, ``draft_layers`` those packed behind them. ``start_layer`` is
    the pool's own word for its first layer.
    """

    layout: str
    parts: tuple[KVPart, ...]
    heads: int
    layers: int
    draft_layers: int
    start_layer: int
    page_size: int
    pages: int
    dtype: str
    is_latent: bool
    head_group: int | None
    buffers: tuple[Any, ...]

    @property
    def is_split(self) -> bool:
        """Whether K and V are buffers of their own."""
        return len(self.buffers) > 1


def class_of(host_pool: object) -> str:
    """The class name that decides whether a pool's memory is understood."""
    return type(host_pool).__name__


def is_described(host_pool: object) -> bool:
    """Whether :func:`shape_of` knows this class of pool."""
    return class_of(host_pool) in DENSE_POOLS | LATENT_POOLS


def is_logical(host_pool: object) -> bool:
    """Whether the pool only numbers slots, and sidecar pools hold what is in them."""
    return class_of(host_pool) in LOGICAL_POOLS


def shape_of(host_pool: Any) -> PoolShape:
    """The shape of a dense or latent pool.

    Raises :class:`ConfigurationError` for a class, layout or buffer that is not one of the table's.
    """
    name = class_of(host_pool)
    if not is_described(host_pool):
        raise ConfigurationError(
            f"host pools of class {name} are not supported: their memory may be laid out in another way than "
            f"{', '.join(sorted(DENSE_POOLS | LATENT_POOLS))}; run this model without this store"
        )
    if host_pool.kv_buffer is None:
        raise ConfigurationError(
            f"the {name} of this rank has no memory of its own, so it has nothing to store"
        )
    if getattr(host_pool, "_layer_shard_enabled", False):
        raise ConfigurationError(
            "this pool shards layers over context-parallel ranks, which tells no rank which layers it has; "
            "switch the layer sharding off"
        )
    if host_pool.layout not in LAYOUTS:
        raise ConfigurationError(
            f"host layout {host_pool.layout!r} is not supported; start the engine with --hicache-mem-layout "
            f"{', '.join(LAYOUTS[:-1])}"
        )
    shape = _latent(host_pool) if name in LATENT_POOLS else _dense(host_pool)
    _check_buffers(shape)
    return shape


def _dense(pool: Any) -> PoolShape:
    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, tuple) else (pool.kv_buffer,)
    return PoolShape(
        layout=pool.layout,
        parts=(KVPart("k", int(pool.head_dim)), KVPart("v", int(pool.v_head_dim))),
        heads=int(pool.head_num),
        layers=int(pool.target_layer_num),
        draft_layers=int(pool.layer_num) - int(pool.target_layer_num),
        start_layer=int(pool.start_layer or 0),
        page_size=int(pool.page_size),
        pages=int(pool.page_num),
        dtype=str(pool.dtype),
        is_latent=False,
        head_group=int(pool.head_num) // int(pool.head_group_num) if pool.layout == "page_unified" else None,
        buffers=tuple(buffers),
    )


def _latent(pool: Any) -> PoolShape:
    # A packed row holds its own scales beside the latent: the same width may never mean both.
    name = "packed" if getattr(pool, "dsa_kv_cache_store_fp8", False) else "latent"
    return PoolShape(
        layout=pool.layout,
        parts=(KVPart(name, int(pool.kv_cache_dim)),),
        heads=1,
        layers=int(pool.target_layer_num),
        draft_layers=int(pool.layer_num) - int(pool.target_layer_num),
        start_layer=int(pool.start_layer or 0),
        page_size=int(pool.page_size),
        pages=int(pool.page_num),
        dtype=str(pool.dtype),
        is_latent=True,
        head_group=None,
        buffers=(pool.kv_buffer,),
    )


def _expected_shapes(shape: PoolShape) -> list[tuple[int, ...]]:
    count, page, heads = shape.layers + shape.draft_layers, shape.page_size, shape.heads
    tokens = shape.pages * page
    widths = [part.width for part in shape.parts]
    if shape.layout == "page_unified":
        if shape.is_latent:
            return [(shape.pages, count, page, widths[0])]
        group = shape.head_group or heads
        return [(shape.pages, heads // group, count, 2, page, group, widths[0])]
    inner = {
        "layer_first": (count, tokens, heads),
        "page_first": (tokens, count, heads),
        "page_first_direct": (shape.pages, count, page, heads),
        "page_head": (shape.pages, heads, page, count),
    }[shape.layout]
    if shape.is_latent or shape.is_split:
        return [(*inner, width) for width in widths]
    return [(2, *inner, widths[0])]


def _check_buffers(shape: PoolShape) -> None:
    """The buffers must be what the table says, to the last axis: an update of the engine that lays them
    out anew must not be read in the old way."""
    found = [tuple(int(size) for size in buffer.shape) for buffer in shape.buffers]
    expected = _expected_shapes(shape)
    if found != expected or not all(buffer.is_contiguous() for buffer in shape.buffers):
        raise ConfigurationError(
            f"the {shape.layout} host pool has buffers of shape {found}, contiguous ones of {expected} were "
            "expected: this version of the engine lays them out in another way than the ones tested"
        )


@dataclass(frozen=True, slots=True)
class IndexShape:
    """Index keys of sparse attention: of each layer one opaque row of ``row_bytes`` for a whole page.

    (L,P,row) in layer_first, (P,L,1,row) in the others; packed draft layers stand behind the target's.
    """

    is_layer_first: bool
    layers: int
    draft_layers: int
    pages: int
    page_size: int
    row_bytes: int
    buffer: Any


def index_shape_of(host_pool: Any) -> IndexShape | None:
    """The shape of a pool of index keys, ``None`` where it is not one or not laid out as in the table."""
    buffer = getattr(host_pool, "index_k_with_scale_buffer", None)
    if class_of(host_pool) not in INDEX_POOLS or buffer is None:
        return None
    layers, pages = int(host_pool.layer_num), int(host_pool.indexer_page_num)
    row_bytes = int(host_pool.indexer_page_stride_size) * int(buffer.element_size())
    is_layer_first = host_pool.layout == "layer_first"
    expected = (layers, pages) if is_layer_first else (pages, layers, 1)
    if tuple(buffer.shape[:-1]) != expected or buffer.shape[-1] * buffer.element_size() != row_bytes:
        return None
    if not buffer.is_contiguous():
        return None
    target = int(host_pool.target_layer_num)
    return IndexShape(
        is_layer_first, target, layers - target, pages, int(host_pool.page_size), row_bytes, buffer
    )


def index_layout(shape: IndexShape, pool: Pool, layers: Span, *, is_draft: bool = False) -> Layout:
    """Where layers of a pool of index keys lie; ``layers`` as for :func:`pool_layout`."""
    count = shape.layers + shape.draft_layers
    outer = ("layer", "slot") if shape.is_layer_first else ("slot", "layer")
    whole = Pool("index", count, 1, pool.parts, pool.dtype, page_size=1)
    box = Box(Span(0, 1), Span(0, count), Span(0, 1))
    layout = axes_layout(whole, box, (*outer, "token", "head", "kv", "dim"), slots=shape.pages)
    fields = tuple(_restricted(field, shape.layers if is_draft else 0, layers) for field in layout.fields)
    return replace(layout, box=Box(Span(0, 1), layers, Span(0, 1)), fields=fields)


def byte_buffers(buffers: Sequence[Any]) -> list[Any]:
    """The tensors' memory as flat arrays of bytes, without a copy."""
    import torch  # noqa: PLC0415, the caller has tensors, so it is loaded

    return [tensor.view(torch.uint8).numpy().reshape(-1) for tensor in buffers]


def pool_layout(
    shape: PoolShape, dtype: DType, heads: Span, layers: Span, *, is_draft: bool = False
) -> Layout:
    """Where this rank's box lies in the pool's memory.

    ``layers`` are those of the target, or with ``is_draft`` of the packed draft layers, counted from 0 in
    a pool of their own.
    """
    count = shape.layers + shape.draft_layers
    whole = Pool("kv", count, max(heads.stop, 1), shape.parts, dtype, shape.page_size)
    layout = engine_layout(
        shape.layout,
        whole,
        Box(heads, Span(0, count), Span(0, shape.page_size)),
        slots=shape.pages,
        split=("kv",) if shape.is_split else (),
        head_group=shape.head_group,
    )
    first = shape.layers if is_draft else 0
    fields = tuple(_restricted(field, first, layers) for field in layout.fields)
    return replace(layout, box=Box(heads, layers, Span(0, shape.page_size)), fields=fields)


def _restricted(field: Field, first: int, layers: Span) -> Field:
    """The part of a field that holds ``len(layers)`` layers of the pool from ``first`` on."""
    return replace(field, layers=layers, offset=field.offset + first * field.layer_stride)


def probe(host_pool: Any, shape: PoolShape, layout: Layout) -> None:
    """Compare the layout with the addresses that the engine itself gives for a page of the target.

    Reads no memory. Raises :class:`ConfigurationError` where they differ, which no check of shapes sees.
    """
    if shape.layout == "page_unified":
        return  # the engine has no addresses for it either
    import torch  # noqa: PLC0415, the engine has loaded it

    slot = shape.pages - 1
    tokens = torch.arange(slot * shape.page_size, (slot + 1) * shape.page_size)
    pointers, lengths = host_pool.get_page_buffer_meta(tokens)
    bases = [int(buffer.data_ptr()) for buffer in shape.buffers]
    count = shape.layers + shape.draft_layers
    steps = range(count) if shape.layout == "layer_first" else range(1)
    expected = [
        bases[field.buffer] + field.offset + slot * field.slot_stride + step * field.layer_stride
        for step in steps
        for field in layout.fields
    ]
    row_bytes = [DType.of(_byte_dtype(shape.dtype)).row_bytes(part.width) for part in shape.parts]
    total = shape.page_size * shape.heads * count * sum(row_bytes)
    if [int(pointer) for pointer in pointers] != expected or sum(lengths) != total:
        raise ConfigurationError(
            f"the engine places a page of its {shape.layout} host pool elsewhere than expected; this version "
            "lays pages out in another way than the ones tested"
        )


def _byte_dtype(name: str) -> str:
    return "int8" if name.removeprefix("torch.") == "uint8" else name


def slots_of(host_indices: Any, page_size: int, count: int) -> list[int]:
    """The slot of each of ``count`` pages: SGLang gives the token positions of whole pages.

    Raises :class:`ConfigurationError` where they are not.
    """
    first = host_indices[::page_size].tolist()
    if len(host_indices) != count * page_size or any(token % page_size for token in first):
        raise ConfigurationError(
            f"{len(host_indices)} token positions do not name {count} whole pages of {page_size} tokens"
        )
    return [token // page_size for token in first]


def flat_page_bytes(host_pool: Any) -> tuple[int, Any]:
    """Bytes of a page of a pool that only the engine can take apart, and the dtype of its flat form."""
    page = host_pool.get_dummy_flat_data_page()
    return math.prod(page.shape) * page.element_size(), page.dtype
