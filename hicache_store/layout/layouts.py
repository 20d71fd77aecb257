"""Layouts: where every element of a rank's box sits in its buffers.

A layout is a list of :class:`Field`: one kv part of a box of heads and layers in one buffer, placed
affinely. The byte address of (head, layer, slot, token of the slot, dim) is ::

    offset + slot * slot_stride + token * token_stride
           + (head - heads.start) * head_stride + (layer - layers.start) * layer_stride
           + (dim - dims.start) * dim_stride

Every host layout of the engines, separate K and V buffers, one tensor a layer and the stored
object itself are such lists; they differ in data, never in code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hicache_store.errors import ConfigurationError
from hicache_store.layout.box import Box, Span
from hicache_store.layout.model import Pool
from hicache_store.layout.overlap import Places, overlaps

AXES: Final = ("head", "layer", "kv", "slot", "token", "dim")

ENGINE_AXES: Final[Mapping[str, tuple[str, ...]]] = {
    # SGLang host pools; its K/V axis of size 2 is the kv axis here, MLA has a kv axis of size 1.
    "layer_first": ("kv", "layer", "slot", "token", "head", "dim"),
    "page_first": ("kv", "slot", "token", "layer", "head", "dim"),
    "page_first_direct": ("kv", "slot", "layer", "token", "head", "dim"),
    "page_head": ("kv", "slot", "head", "token", "layer", "dim"),
    "page_unified": ("slot", "group", "layer", "kv", "token", "head", "dim"),
    # The stored object's own order, one page after the other.
    "canonical": ("slot", "head", "layer", "kv", "token", "dim"),
    # Rows that hold K and V of a token side by side, heads before tokens or after.
    "head_token_kv": ("layer", "slot", "head", "token", "kv", "dim"),
    "token_head_kv": ("layer", "slot", "token", "head", "kv", "dim"),
}
"""Axis orders by name, outermost first."""


@dataclass(frozen=True, slots=True)
class Field:
    """One kv part of some heads, layers and dims in one buffer.

    Offsets and strides are in bytes; ``dims`` counts elements (bytes, where an element is less).
    """

    buffer: int
    part: int
    heads: Span
    layers: Span
    dims: Span
    offset: int
    head_stride: int
    layer_stride: int
    slot_stride: int
    token_stride: int
    dim_stride: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a box lies in buffers of ``slots`` places of ``slot_tokens`` tokens each."""

    name: str
    box: Box
    slots: int
    slot_tokens: int
    fields: tuple[Field, ...]

    @property
    def buffer_count(self) -> int:
        """Number of buffers the fields refer to."""
        return 1 + max(field.buffer for field in self.fields)

    def buffer_bytes(self, element_bytes: int) -> tuple[int, ...]:
        """Least size of each buffer."""
        sizes = [0] * self.buffer_count
        for field in self.fields:
            end = (
                field.offset
                + (self.slots - 1) * field.slot_stride
                + (self.slot_tokens - 1) * field.token_stride
                + (len(field.heads) - 1) * field.head_stride
                + (len(field.layers) - 1) * field.layer_stride
                + (len(field.dims) - 1) * field.dim_stride
                + element_bytes
            )
            sizes[field.buffer] = max(sizes[field.buffer], end)
        return tuple(sizes)


def axes_layout(
    pool: Pool,
    box: Box,
    axes: Sequence[str],
    *,
    slots: int,
    slot_tokens: int | None = None,
    name: str = "axes",
    split: Sequence[str] = (),
    head_group: int | None = None,
) -> Layout:
    """The layout of C-contiguous buffers whose axes are ``axes``, outermost first.

    ``split`` names axes that are not inside a buffer but choose it: ``("kv",)`` for separate K and
    V, ``("layer",)`` for one tensor a layer, ``("kv", "layer")`` for both (K buffers first). Parts of
    different widths lie block after block where the kv axis stands. ``head_group`` is the number
    of heads inside the ``group`` axis.
    """
    tokens = pool.page_size if slot_tokens is None else slot_tokens
    _check_axes(axes, split)
    heads = box.heads
    group = len(heads) if head_group is None else head_group
    if group < 1 or len(heads) % group:
        raise ConfigurationError(f"{len(heads)} local heads are not a multiple of the head group {group}")
    counts = {
        "slot": slots,
        "token": tokens,
        "layer": 1 if "layer" in split else len(box.layers),
        "head": group if "group" in axes else len(heads),
        "group": len(heads) // group,
    }
    layer_spans = (
        [Span(layer, layer + 1) for layer in range(box.layers.start, box.layers.stop)]
        if "layer" in split
        else [box.layers]
    )
    head_spans = (
        [Span(start, start + group) for start in range(heads.start, heads.stop, group)]
        if "group" in axes
        else [heads]
    )
    fields: list[Field] = []
    for part_index in range(len(pool.parts)):
        strides, part_offset = _part_strides(pool, axes, counts, part_index, is_split="kv" in split)
        for layer_index, layers in enumerate(layer_spans):
            buffer = layer_index + (part_index * len(layer_spans) if "kv" in split else 0)
            for group_index, span in enumerate(head_spans):
                fields.append(
                    Field(
                        buffer=buffer,
                        part=part_index,
                        heads=span,
                        layers=layers,
                        dims=Span(0, pool.part_units[part_index]),
                        offset=part_offset + group_index * strides.get("group", 0),
                        head_stride=strides["head"],
                        layer_stride=strides.get("layer", 0),
                        slot_stride=strides["slot"],
                        token_stride=strides["token"],
                        dim_stride=strides["dim"],
                    )
                )
    layout = Layout(name, box, slots, tokens, tuple(fields))
    check_layout(pool, layout)
    return layout


def engine_layout(
    name: str,
    pool: Pool,
    box: Box,
    *,
    slots: int,
    slot_tokens: int | None = None,
    split: Sequence[str] = (),
    head_group: int | None = None,
) -> Layout:
    """A layout by its name in :data:`ENGINE_AXES`; ``split`` takes axes out into separate buffers."""
    if name not in ENGINE_AXES:
        raise ConfigurationError(f"unknown host layout {name!r}; known: {', '.join(ENGINE_AXES)}")
    axes = tuple(axis for axis in ENGINE_AXES[name] if axis not in split)
    return axes_layout(
        pool,
        box,
        axes,
        slots=slots,
        slot_tokens=slot_tokens,
        name=name,
        split=split,
        head_group=head_group,
    )


def object_layout(pool: Pool, box: Box) -> Layout:
    """The payload of the object of ``box``: (head, layer, kv, token, dim), one slot, one buffer."""
    return axes_layout(
        pool, box, ENGINE_AXES["canonical"], slots=1, slot_tokens=len(box.tokens), name="object"
    )


def check_layout(pool: Pool, layout: Layout) -> None:
    """Raise :class:`ConfigurationError` unless the fields hold every element of the box exactly once
    and no two elements of any slots share a byte."""
    if layout.slots < 1 or layout.slot_tokens < 1:
        raise ConfigurationError(
            f"layout {layout.name} has {layout.slots} slots of {layout.slot_tokens} tokens; give at least 1"
        )
    _check_tiling(pool, layout)
    buffers: dict[int, list[Places]] = {}
    for field in layout.fields:
        axes = (
            (len(field.heads), field.head_stride),
            (len(field.layers), field.layer_stride),
            (layout.slot_tokens, field.token_stride),
            (len(field.dims), field.dim_stride),
        )
        strides = [stride for size, stride in (*axes, (layout.slots, field.slot_stride)) if size > 1]
        if field.offset < 0 or any(stride < 1 for stride in strides):
            raise ConfigurationError(
                f"layout {layout.name}: offset {field.offset} must not be negative, and strides {strides} "
                "must be positive"
            )
        buffers.setdefault(field.buffer, []).append(
            Places(field.offset, axes, pool.unit_bytes, field.slot_stride)
        )
    for buffer, places in buffers.items():
        if overlaps(places, layout.slots):
            raise ConfigurationError(
                f"layout {layout.name}: elements of buffer {buffer} overlap; its strides do not fit "
                f"{layout.slots} slots of {layout.slot_tokens} tokens, {len(layout.box.heads)} heads and "
                f"{len(layout.box.layers)} layers"
            )


def _check_tiling(pool: Pool, layout: Layout) -> None:
    box = layout.box
    elements = 0
    for field in layout.fields:
        width = pool.part_units[field.part] if field.part < len(pool.parts) else 0
        is_inside = box.heads.covers(field.heads) and box.layers.covers(field.layers)
        if not is_inside or field.dims.stop > width or field.buffer < 0 or field.part < 0:
            raise ConfigurationError(f"layout {layout.name}: a field reaches outside the rank's box")
        held = len(field.heads) * len(field.layers) * len(field.dims)
        if held == 0:
            raise ConfigurationError(f"layout {layout.name}: a field of part {field.part} holds nothing")
        elements += held
    wanted = len(box.heads) * len(box.layers) * sum(pool.part_units)
    overlapping = any(
        a.part == b.part
        and a.heads.intersect(b.heads) is not None
        and a.layers.intersect(b.layers) is not None
        and a.dims.intersect(b.dims) is not None
        for i, a in enumerate(layout.fields)
        for b in layout.fields[i + 1 :]
    )
    if elements != wanted or overlapping:
        raise ConfigurationError(
            f"layout {layout.name}: its fields hold {elements} elements a token where the rank's box has "
            f"{wanted}; every head, layer, part and dim must appear exactly once"
        )


def _check_axes(axes: Sequence[str], split: Sequence[str]) -> None:
    given = [axis for axis in (*axes, *split) if axis != "group"]
    if sorted(given) != sorted(AXES) or any(axis not in ("kv", "layer") for axis in split):
        raise ConfigurationError(
            f"axes {list(axes)} with {list(split)} split off must be {', '.join(AXES)} once each "
            "(plus group); only kv and layer can be split off"
        )


def _part_strides(
    pool: Pool, axes: Sequence[str], counts: Mapping[str, int], part: int, *, is_split: bool
) -> tuple[dict[str, int], int]:
    """Byte strides of every axis for one part, and the part's offset in its buffer.

    Inside the kv axis blocks are as long as the part's own rows make them; outside it, as all parts
    together. A dim axis that is not innermost has strides of whole elements.
    """
    inner = list(axes[axes.index("kv") + 1 :]) if "kv" in axes else list(axes)
    outer = list(axes[: axes.index("kv")]) if "kv" in axes else []
    if "dim" in outer:
        raise ConfigurationError("the dim axis cannot lie outside the kv axis")

    def block(index: int) -> int:
        return pool.part_row_bytes[index] * math.prod(counts[axis] for axis in inner if axis != "dim")

    strides: dict[str, int] = {}
    width = pool.part_units[part]
    unit = pool.unit_bytes if inner[-1] != "dim" else pool.part_row_bytes[part]
    if inner[-1] == "dim":
        strides["dim"] = pool.unit_bytes
        inner = inner[:-1]
    for axis in reversed(inner):
        strides[axis] = unit
        unit *= width if axis == "dim" else counts[axis]
    unit = block(part) if is_split or not outer else sum(block(i) for i in range(len(pool.parts)))
    for axis in reversed(outer):
        strides[axis] = unit
        unit *= counts[axis]
    offset = 0 if is_split else sum(block(i) for i in range(part))
    return strides, offset
