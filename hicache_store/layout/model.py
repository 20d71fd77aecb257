"""Models and pools as data: the axes of the KV arrays a page is made of."""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from hicache_store.errors import ConfigurationError, TopologyError
from hicache_store.layout.box import Box, Span
from hicache_store.layout.dtypes import DType
from hicache_store.layout.hashing import ChainKind
from hicache_store.layout.namespace import KVFacts

_POOL_NAME = re.compile(r"[a-z][a-z0-9]{0,15}(?:_[a-z0-9]{1,6})?")
MAIN_POOL = "kv"


class Attention(enum.StrEnum):
    """How heads share keys and values."""

    MHA = "mha"
    GQA = "gqa"
    MLA = "mla"


class HitRule(enum.StrEnum):
    """Which pages of a pool a usable prefix needs."""

    EVERY_PAGE = "every_page"
    TRAILING_WINDOW = "trailing_window"


@dataclass(frozen=True, slots=True)
class KVPart:
    """One of the arrays of a head: K, V, or the MLA latent with its rope part. ``width`` in elements."""

    name: str
    width: int

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigurationError(f"kv part {self.name!r} has width {self.width}; give at least 1")


@dataclass(frozen=True, slots=True)
class Pool:
    """One array of pages with the axes (head, layer, kv part, token, dim).

    ``layer_ids`` are the model's own layer numbers, ascending; a pool over all layers leaves it
    out. Boxes, names and grids count the pool's layers from zero. A model whose layers differ in
    geometry has one pool for each geometry. ``is_shardable`` tells that every byte belongs to a
    head: only then may ranks of different sizes share objects. ``identity`` is anything beyond the
    namespace that decides the values of a pool, such as the digest of a draft model's weights.
    """

    name: str
    num_layers: int
    num_heads: int
    parts: tuple[KVPart, ...]
    dtype: DType
    page_size: int
    layer_ids: tuple[int, ...] | None = None
    hit_rule: HitRule = HitRule.EVERY_PAGE
    window_pages: int = 0
    is_shardable: bool = True
    identity: str = ""
    key_name: str = field(init=False, repr=False, compare=False)
    """The pool's name inside object names. The namespace fixes the geometry of the main pool over all
    layers; any other carries a digest of its own, so that pools of unlike geometry or origin never
    meet."""
    part_row_bytes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    unit_bytes: int = field(init=False, repr=False, compare=False)
    """Bytes of one element; elements below a byte are moved in whole bytes."""

    def __post_init__(self) -> None:
        if not _POOL_NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"pool name {self.name!r} is not accepted; use a lower-case letter and up to 15 letters or "
                "digits, optionally _ and up to 6 more"
            )
        for what, value in (
            ("layers", self.num_layers),
            ("heads", self.num_heads),
            ("tokens a page", self.page_size),
            ("kv parts", len(self.parts)),
        ):
            if value < 1:
                raise ConfigurationError(f"pool {self.name} has {value} {what}; give at least 1")
        if self.layer_ids is not None:
            ids = self.layer_ids
            if len(ids) != self.num_layers or ids[0] < 0 or any(a >= b for a, b in pairwise(ids)):
                raise ConfigurationError(
                    f"pool {self.name}: layer_ids must be {self.num_layers} ascending numbers from 0 up, "
                    f"got {list(ids)}"
                )
        if self.hit_rule is HitRule.TRAILING_WINDOW and self.window_pages < 1:
            raise ConfigurationError(f"pool {self.name}: a trailing window needs window_pages of at least 1")
        row_bytes = tuple(self.dtype.row_bytes(part.width) for part in self.parts)
        object.__setattr__(self, "part_row_bytes", row_bytes)
        object.__setattr__(self, "key_name", self._key_name())
        object.__setattr__(self, "unit_bytes", max(1, self.dtype.bits // 8))

    def _key_name(self) -> str:
        holds_all = self.layer_ids is None or self.layer_ids == tuple(range(self.num_layers))
        if self.name == MAIN_POOL and holds_all and not self.identity:
            return self.name
        facts = (
            [part.name for part in self.parts],
            [part.width for part in self.parts],
            [self.num_heads, self.page_size, list(self.layer_ids or range(self.num_layers))],
            [self.dtype.name, self.hit_rule.value, self.window_pages, self.identity],
        )
        return f"{self.name}_{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]}"

    @property
    def part_units(self) -> tuple[int, ...]:
        """Elements (or bytes, see ``unit_bytes``) of one row of each part."""
        return tuple(row // self.unit_bytes for row in self.part_row_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one head of one layer, all kv parts."""
        return sum(self.part_row_bytes)

    def payload_bytes(self, box: Box) -> int:
        """Bytes of a box: the length of its object's payload."""
        return box.cells * self.token_bytes

    @property
    def page_box(self) -> Box:
        """The whole page."""
        return Box(Span(0, self.num_heads), Span(0, self.num_layers), Span(0, self.page_size))

    def local_layers(self, stage: Span) -> Span:
        """The pool's layers that lie in a pipeline stage of model layers (may be empty)."""
        if self.layer_ids is None:
            return Span(min(stage.start, self.num_layers), min(stage.stop, self.num_layers))
        start = sum(1 for layer in self.layer_ids if layer < stage.start)
        stop = sum(1 for layer in self.layer_ids if layer < stage.stop)
        return Span(start, stop)


@dataclass(frozen=True, slots=True)
class ModelKV:
    """The facts of a model that shape its KV.

    ``num_layers`` counts target layers only: packed draft layers lengthen a pool, not the model.
    """

    num_layers: int
    num_kv_heads: int
    parts: tuple[KVPart, ...]
    dtype: DType
    attention: Attention

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_kv_heads < 1 or not self.parts:
            raise ConfigurationError(
                f"a model needs layers, KV heads and kv parts; got {self.num_layers} layers, "
                f"{self.num_kv_heads} heads, {len(self.parts)} parts"
            )
        if self.attention is Attention.MLA and self.num_kv_heads != 1:
            raise TopologyError(f"MLA keeps one latent head, got {self.num_kv_heads} KV heads; use 1")

    @classmethod
    def dense(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        v_head_dim: int | None = None,
        num_query_heads: int | None = None,
    ) -> ModelKV:
        """MHA or GQA: K of ``head_dim`` and V of ``v_head_dim`` (the same by default) per head."""
        attention = Attention.MHA if num_query_heads == num_kv_heads else Attention.GQA
        parts = (KVPart("k", head_dim), KVPart("v", head_dim if v_head_dim is None else v_head_dim))
        return cls(num_layers, num_kv_heads, parts, DType.of(dtype), attention)

    @classmethod
    def mla(cls, *, num_layers: int, latent_dim: int, rope_dim: int, dtype: str) -> ModelKV:
        """MLA: one head whose row is the latent, then the rope part."""
        part = KVPart("latent", latent_dim + rope_dim)
        return cls(num_layers, 1, (part,), DType.of(dtype), Attention.MLA)

    def facts(
        self,
        page_size: int,
        *,
        chain: ChainKind = ChainKind.PLAIN,
        scales: Literal["none", "weights"] = "none",
    ) -> KVFacts:
        """What a namespace records of this model's KV.

        MHA and GQA are one kind here: how many query heads share a key changes no stored byte, and
        the configuration tells it anyway.
        """
        return KVFacts(
            num_kv_heads=self.num_kv_heads,
            parts=tuple((part.name, part.width) for part in self.parts),
            dtype=self.dtype.name,
            attention="mla" if self.attention is Attention.MLA else "dense",
            page_size=page_size,
            num_layers=self.num_layers,
            chain=chain,
            scales=scales,
        )

    def pool(self, page_size: int, *, name: str = "kv", draft_layers: int = 0) -> Pool:
        """The main pool; packed draft layers follow the target's on the layer axis.

        Such layers are named by their number alone. Where servers of one target may run different
        drafts, give the draft layers a pool of their own, with the draft's weights as its ``identity``.
        """
        return Pool(
            name=name,
            num_layers=self.num_layers + draft_layers,
            num_heads=self.num_kv_heads,
            parts=self.parts,
            dtype=self.dtype,
            page_size=page_size,
        )

    def group_pool(
        self,
        name: str,
        page_size: int,
        *,
        layer_ids: Sequence[int],
        num_heads: int,
        parts: Sequence[KVPart],
    ) -> Pool:
        """A pool of the layers that share one geometry, for models whose layers differ."""
        return Pool(
            name=name,
            num_layers=len(layer_ids),
            num_heads=num_heads,
            parts=tuple(parts),
            dtype=self.dtype,
            page_size=page_size,
            layer_ids=tuple(layer_ids),
        )
