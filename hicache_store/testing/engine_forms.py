"""Pools as engines shape them, as real numpy arrays, addressed by plain indexing.

Each form says the shapes of its arrays and how to index the rows of one head of one layer. The
layout the planner is given for a form is found by name; whether both agree is what tests show.
Shapes are written with S tokens of all slots, P or B slots (pages, blocks), ps or N tokens a slot,
L layers, H heads, G head groups, D elements a row, C of an MLA row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one rank's pool. ``units`` are the elements of a row of each kv part."""

    heads: int
    layers: int
    slots: int
    slot_tokens: int
    units: tuple[int, ...]
    group: int

    @property
    def rows(self) -> int:
        """Tokens of all slots."""
        return self.slots * self.slot_tokens


class Spot(NamedTuple):
    """Some tokens of one slot, of one head of one layer of one kv part, counted within the pool."""

    part: int
    head: int
    layer: int
    slot: int
    tokens: slice
    rows: slice
    """The same tokens, counted over all slots."""


Shape = tuple[int, ...]
ShapesOf = Callable[[Geometry], list[Shape]]
RowsOf = Callable[[Geometry, list[np.ndarray], Spot], np.ndarray]


@dataclass(frozen=True, slots=True)
class EngineForm:
    """One way an engine shapes its KV arrays.

    ``shape`` is written for readers. ``layout`` is the name of a host layout, or its axes where it
    has none; ``split`` as for :func:`hicache_store.layout.layouts.engine_layout`. ``rows`` indexes
    a (tokens, units) view.
    """

    label: str
    shape: str
    layout: str | tuple[str, ...]
    split: tuple[str, ...]
    shapes: ShapesOf
    rows: RowsOf


def _stack(g: Geometry, *shape: int) -> Shape:
    """The kv axis in front of ``shape``: (2, *shape, D), nothing in front for a single part, and flat
    bytes where the widths differ, one array after the other."""
    if len(g.units) == 1:
        return (*shape, g.units[0])
    if len(set(g.units)) == 1:
        return (len(g.units), *shape, g.units[0])
    return (math.prod(shape) * sum(g.units),)


def _part(g: Geometry, stack: np.ndarray, part: int, *shape: int) -> np.ndarray:
    """The array (*shape, D) of one part in a stack."""
    if len(g.units) == 1:
        return stack
    if len(set(g.units)) == 1:
        return np.asarray(stack[part])
    start = math.prod(shape) * sum(g.units[:part])
    return stack[start : start + math.prod(shape) * g.units[part]].reshape(*shape, g.units[part])


def _columns(g: Geometry, part: int) -> slice:
    """Where a part stands in a row that holds all parts side by side."""
    return slice(sum(g.units[:part]), sum(g.units[: part + 1]))


_PER_LAYER: Final = ("layer",)
_PER_PART: Final = ("kv",)

ENGINE_FORMS: Final[tuple[EngineForm, ...]] = (
    EngineForm(
        "layer_first",
        "(2,L,S,H,D), MLA (L,S,1,C)",
        "layer_first",
        (),
        lambda g: [_stack(g, g.layers, g.rows, g.heads)],
        lambda g, a, s: _part(g, a[0], s.part, g.layers, g.rows, g.heads)[s.layer, s.rows, s.head],
    ),
    EngineForm(
        "layer_first_kv_apart",
        "K (L,S,H,D) and V (L,S,H,D')",
        "layer_first",
        _PER_PART,
        lambda g: [(g.layers, g.rows, g.heads, units) for units in g.units],
        lambda _, a, s: a[s.part][s.layer, s.rows, s.head],
    ),
    EngineForm(
        "tensor_per_layer",
        "a list of (2,S,H,D)",
        "layer_first",
        _PER_LAYER,
        lambda g: [_stack(g, g.rows, g.heads)] * g.layers,
        lambda g, a, s: _part(g, a[s.layer], s.part, g.rows, g.heads)[s.rows, s.head],
    ),
    EngineForm(
        "k_and_v_per_layer",
        "a list of K (S,H,D), then a list of V (S,H,D')",
        "layer_first",
        ("kv", "layer"),
        lambda g: [(g.rows, g.heads, units) for units in g.units for _ in range(g.layers)],
        lambda g, a, s: a[s.part * g.layers + s.layer][s.rows, s.head],
    ),
    EngineForm(
        "page_first",
        "(2,S,L,H,D), MLA (S,L,1,C)",
        "page_first",
        (),
        lambda g: [_stack(g, g.rows, g.layers, g.heads)],
        lambda g, a, s: _part(g, a[0], s.part, g.rows, g.layers, g.heads)[s.rows, s.layer, s.head],
    ),
    EngineForm(
        "page_first_kv_apart",
        "K (S,L,H,D) and V (S,L,H,D')",
        "page_first",
        _PER_PART,
        lambda g: [(g.rows, g.layers, g.heads, units) for units in g.units],
        lambda _, a, s: a[s.part][s.rows, s.layer, s.head],
    ),
    EngineForm(
        "page_first_direct",
        "(2,P,L,ps,H,D), MLA (P,L,ps,1,C)",
        "page_first_direct",
        (),
        lambda g: [_stack(g, g.slots, g.layers, g.slot_tokens, g.heads)],
        lambda g, a, s: _part(g, a[0], s.part, g.slots, g.layers, g.slot_tokens, g.heads)[
            s.slot, s.layer, s.tokens, s.head
        ],
    ),
    EngineForm(
        "page_first_direct_kv_apart",
        "K (P,L,ps,H,D) and V (P,L,ps,H,D')",
        "page_first_direct",
        _PER_PART,
        lambda g: [(g.slots, g.layers, g.slot_tokens, g.heads, units) for units in g.units],
        lambda _, a, s: a[s.part][s.slot, s.layer, s.tokens, s.head],
    ),
    EngineForm(
        "page_head",
        "(2,P,H,ps,L,D)",
        "page_head",
        (),
        lambda g: [_stack(g, g.slots, g.heads, g.slot_tokens, g.layers)],
        lambda g, a, s: _part(g, a[0], s.part, g.slots, g.heads, g.slot_tokens, g.layers)[
            s.slot, s.head, s.tokens, s.layer
        ],
    ),
    EngineForm(
        "page_unified",
        "(P,G,L,2,ps,H/G,D), MLA (P,L,ps,C)",
        "page_unified",
        (),
        lambda g: [(g.slots, g.heads // g.group, g.layers, *_stack(g, g.slot_tokens, g.group))],
        lambda g, a, s: _part(g, a[0][s.slot, s.head // g.group, s.layer], s.part, g.slot_tokens, g.group)[
            s.tokens, s.head % g.group
        ],
    ),
    EngineForm(
        "canonical",
        "(P,H,L,2,T,D): the stored object, page after page",
        "canonical",
        (),
        lambda g: [(g.slots, g.heads, g.layers, *_stack(g, g.slot_tokens))],
        lambda g, a, s: _part(g, a[0][s.slot, s.head, s.layer], s.part, g.slot_tokens)[s.tokens],
    ),
    EngineForm(
        "head_token_kv",
        "(L,B,H,N,K|V)",
        "head_token_kv",
        (),
        lambda g: [(g.layers, g.slots, g.heads, g.slot_tokens, sum(g.units))],
        lambda g, a, s: a[0][s.layer, s.slot, s.head, s.tokens, _columns(g, s.part)],
    ),
    EngineForm(
        "head_token_kv_per_layer",
        "a list of (B,H,N,K|V)",
        "head_token_kv",
        _PER_LAYER,
        lambda g: [(g.slots, g.heads, g.slot_tokens, sum(g.units))] * g.layers,
        lambda g, a, s: a[s.layer][s.slot, s.head, s.tokens, _columns(g, s.part)],
    ),
    EngineForm(
        "token_head_kv",
        "(L,B,N,H,K|V)",
        "token_head_kv",
        (),
        lambda g: [(g.layers, g.slots, g.slot_tokens, g.heads, sum(g.units))],
        lambda g, a, s: a[0][s.layer, s.slot, s.tokens, s.head, _columns(g, s.part)],
    ),
    EngineForm(
        "token_head_kv_per_layer",
        "a list of (B,N,H,K|V)",
        "token_head_kv",
        _PER_LAYER,
        lambda g: [(g.slots, g.slot_tokens, g.heads, sum(g.units))] * g.layers,
        lambda g, a, s: a[s.layer][s.slot, s.tokens, s.head, _columns(g, s.part)],
    ),
    EngineForm(
        "block_kv_per_layer",
        "a list of (B,2,N,H,D)",
        ("slot", "kv", "token", "head", "dim"),
        _PER_LAYER,
        lambda g: [(g.slots, *_stack(g, g.slot_tokens, g.heads))] * g.layers,
        lambda g, a, s: _part(g, a[s.layer][s.slot], s.part, g.slot_tokens, g.heads)[s.tokens, s.head],
    ),
    EngineForm(
        "kv_block_head_per_layer",
        "a list of (2,B,H,N,D)",
        ("kv", "slot", "head", "token", "dim"),
        _PER_LAYER,
        lambda g: [_stack(g, g.slots, g.heads, g.slot_tokens)] * g.layers,
        lambda g, a, s: _part(g, a[s.layer], s.part, g.slots, g.heads, g.slot_tokens)[
            s.slot, s.head, s.tokens
        ],
    ),
)
"""Every shape of KV arrays that engines are known to use, by host layout and way of splitting."""

FORMS_BY_LABEL: Final = {form.label: form for form in ENGINE_FORMS}
