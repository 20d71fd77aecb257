"""The dense oracle: what pages and objects hold, worked out the slow and obvious way.

Everything the planner, the copies and the format do is judged by this module. It shares no
arithmetic with them: pages are dense arrays, the pools of engines are real numpy arrays addressed
by plain indexing, an object is written row by row, and its trailer is built from the description
alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from hicache_store.layout.box import Box, Span
from hicache_store.layout.layouts import Field, Layout, axes_layout, engine_layout
from hicache_store.layout.model import Pool
from hicache_store.layout.plan import Placement
from hicache_store.testing.engine_forms import FORMS_BY_LABEL, EngineForm, Geometry, Spot
from hicache_store.testing.probes import POISON


@dataclass(frozen=True, slots=True)
class Dense:
    """The values of a box of one page.

    ``parts`` are arrays of shape (heads, layers, tokens, units), one for each kv part, of unsigned
    little-endian integers as wide as an element (of bytes, for elements below a byte).
    """

    box: Box
    parts: tuple[np.ndarray, ...]

    def part_of(self, box: Box) -> Dense:
        """The values of a smaller box; ``ValueError`` unless it lies within."""
        if not self.box.covers(box):
            raise ValueError(f"{box} does not lie in {self.box}")
        heads, layers, tokens = (
            slice(inner.start - outer.start, inner.stop - outer.start)
            for inner, outer in (
                (box.heads, self.box.heads),
                (box.layers, self.box.layers),
                (box.tokens, self.box.tokens),
            )
        )
        return Dense(box, tuple(part[heads, layers, tokens] for part in self.parts))

    def equals(self, other: Dense) -> bool:
        """Whether box and every bit agree."""
        return (
            self.box == other.box
            and len(self.parts) == len(other.parts)
            and all(np.array_equal(a, b) for a, b in zip(self.parts, other.parts, strict=True))
        )


def unit_dtype(pool: Pool) -> np.dtype[np.unsignedinteger]:
    """The unsigned integer that stands for one element: all bits count, none is a NaN."""
    return np.dtype(f"<u{pool.unit_bytes}")


def dense_page(pool: Pool, page: int = 0, seed: int = 0) -> Dense:
    """A whole page of values that tell where they belong.

    A value is the low bits of a 64-bit code made from (page, part, head, layer, token, dim) and
    mixed by a bijection; the codes of all places differ, so a misplaced row shows unless it is a
    single byte and unlucky (1 in 256). It depends on those coordinates and ``seed`` only: a pool of
    more heads or layers holds the same values where both have some.
    """
    box = pool.page_box
    parts = []
    for index, part in enumerate(pool.part_units):
        head, layer, token, dim = np.ogrid[: len(box.heads), : len(box.layers), : len(box.tokens), :part]
        code: np.ndarray = np.full((), page << 49, np.uint64)
        for value, shift in ((index, 46), (head, 38), (layer, 28), (token, 16), (dim, 0)):
            code = code | np.asarray(value).astype(np.uint64) << np.uint64(shift)
        mixed = _mix(code ^ _mix(np.array(seed, dtype=np.uint64)))
        parts.append((mixed >> np.uint64(11)).astype(unit_dtype(pool)))
    return Dense(box, tuple(parts))


def _mix(code: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        code = code + np.uint64(0x9E3779B97F4A7C15)
        code = (code ^ code >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        code = (code ^ code >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return np.asarray(code ^ code >> np.uint64(31))


class EnginePool:
    """The arrays of one rank's pool in one form, filled with poison."""

    def __init__(
        self,
        pool: Pool,
        box: Box,
        form: EngineForm | str = "layer_first",
        *,
        slots: int = 4,
        slot_tokens: int | None = None,
        head_group: int | None = None,
    ) -> None:
        self.pool = pool
        self.box = box
        self.form = FORMS_BY_LABEL[form] if isinstance(form, str) else form
        self.slots = slots
        self.slot_tokens = pool.page_size if slot_tokens is None else slot_tokens
        self.head_group = head_group
        heads = len(box.heads)
        self.geometry = Geometry(
            heads,
            len(box.layers),
            slots,
            self.slot_tokens,
            pool.part_units,
            heads if head_group is None else head_group,
        )
        self.arrays = [np.empty(shape, unit_dtype(pool)) for shape in self.form.shapes(self.geometry)]
        self.poison()

    def poison(self) -> None:
        """Fill every byte with poison."""
        for array in self.arrays:
            array.view(np.uint8)[...] = POISON

    def layout(self) -> Layout:
        """The layout that the planner is given for these arrays."""
        form = self.form
        if isinstance(form.layout, str):
            return engine_layout(
                form.layout,
                self.pool,
                self.box,
                slots=self.slots,
                slot_tokens=self.slot_tokens,
                split=form.split,
                head_group=self.head_group,
            )
        return axes_layout(
            self.pool,
            self.box,
            form.layout,
            slots=self.slots,
            slot_tokens=self.slot_tokens,
            name=form.label,
            split=form.split,
        )

    def buffers(self) -> list[memoryview]:
        """The arrays as flat bytes, in the layout's order of buffers."""
        return [array.reshape(-1).view(np.uint8).data for array in self.arrays]

    def snapshot(self) -> list[bytes]:
        """A copy of every byte."""
        return [array.tobytes() for array in self.arrays]

    def rows(
        self, part: int, head: int, layer: int, placement: Placement
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """The (tokens, units) views of a page, with the tokens each holds; head and layer are absolute."""
        first = 0
        for segment in placement:
            start = segment.slot * self.slot_tokens + segment.slot_token
            spot = Spot(
                part,
                head - self.box.heads.start,
                layer - self.box.layers.start,
                segment.slot,
                slice(segment.slot_token, segment.slot_token + segment.tokens),
                slice(start, start + segment.tokens),
            )
            yield slice(first, first + segment.tokens), self.form.rows(self.geometry, self.arrays, spot)
            first += segment.tokens

    def write_page(self, placement: Placement, dense: Dense, box: Box | None = None) -> None:
        """Put the values of ``box`` (all that the pool and ``dense`` share) where a page lies."""
        wanted = self.box.intersect(dense.box if box is None else box)
        if wanted is None:
            return
        values = dense.part_of(wanted)
        for index, part in enumerate(values.parts):
            for head in range(wanted.heads.start, wanted.heads.stop):
                for layer in range(wanted.layers.start, wanted.layers.stop):
                    for tokens, view in self.rows(index, head, layer, placement):
                        view[...] = part[head - wanted.heads.start, layer - wanted.layers.start, tokens]

    def read_page(self, placement: Placement, box: Box | None = None) -> Dense:
        """The values of ``box`` (the rank's, by default) of the page that lies there."""
        box = self.box if box is None else box
        shape = (len(box.heads), len(box.layers), len(box.tokens))
        parts = tuple(np.empty((*shape, units), unit_dtype(self.pool)) for units in self.pool.part_units)
        for index, part in enumerate(parts):
            for head in range(len(box.heads)):
                for layer in range(len(box.layers)):
                    places = self.rows(index, head + box.heads.start, layer + box.layers.start, placement)
                    for tokens, view in places:
                        part[head, layer, tokens] = view
        return Dense(box, parts)

    def is_poison_outside(self, placements: Sequence[Placement], box: Box | None = None) -> bool:
        """Whether nothing was written but ``box`` (the rank's, by default) of these pages."""
        kept = [array.copy() for array in self.arrays]
        box = self.box if box is None else box
        for placement in placements:
            for part in range(len(self.pool.parts)):
                for head in range(box.heads.start, box.heads.stop):
                    for layer in range(box.layers.start, box.layers.stop):
                        for _, view in self.rows(part, head, layer, placement):
                            view.view(np.uint8)[...] = POISON
        clean = all(bool(np.all(array.view(np.uint8) == POISON)) for array in self.arrays)
        for array, copy in zip(self.arrays, kept, strict=True):
            array[...] = copy
        return clean


def layout_of_views(box: Box, bases: Sequence[np.ndarray], views: Sequence[tuple[int, np.ndarray]]) -> Layout:
    """The layout of arbitrary strided views, one for each kv part: (index of its base, array).

    A view has the axes (head, layer, slot, token, dim) in any strides over its base, a contiguous
    array whose flat bytes are the buffer.
    """
    fields = []
    for part, (base, view) in enumerate(views):
        offset = view.__array_interface__["data"][0] - bases[base].__array_interface__["data"][0]
        strides = dict(zip(("head", "layer", "slot", "token", "dim"), view.strides, strict=True))
        fields.append(
            Field(
                buffer=base,
                part=part,
                heads=box.heads,
                layers=box.layers,
                dims=Span(0, view.shape[4]),
                offset=offset,
                head_stride=strides["head"],
                layer_stride=strides["layer"],
                slot_stride=strides["slot"],
                token_stride=strides["token"],
                dim_stride=strides["dim"],
            )
        )
    return Layout("views", box, views[0][1].shape[2], views[0][1].shape[3], tuple(fields))


def object_payload(dense: Dense, box: Box) -> bytes:
    """The payload of the object of ``box``: loops over head, layer, kv part and token."""
    values = dense.part_of(box)
    rows: list[bytes] = []
    for head in range(len(box.heads)):
        for layer in range(len(box.layers)):
            for part in values.parts:
                for token in range(len(box.tokens)):
                    rows.append(part[head, layer, token].tobytes())
    return b"".join(rows)


def object_bytes(dense: Dense, box: Box, key: str) -> bytes:
    """The whole object of ``box`` under the logical key ``key``."""
    payload = object_payload(dense, box)
    heads, layers = len(box.heads), len(box.layers)
    return payload + object_trailer(payload, heads, layers, len(payload) // (heads * layers), key)


def cell_layers(layers: int, layer_bytes: int) -> int:
    """Layers of one cell when one head of one layer takes ``layer_bytes``."""
    divisors = [count for count in range(1, layers + 1) if layers % count == 0]
    fitting = [count for count in divisors if 128 * 1024 <= count * layer_bytes <= 512 * 1024]
    if fitting:
        return fitting[0]
    count = 1
    while count < layers and count * layer_bytes < 128 * 1024:
        count += 1
    return count


def object_trailer(payload: bytes, heads: int, layers: int, layer_bytes: int, key: str) -> bytes:
    """The trailer as the format describes it: cell sums, fields, padding, tail."""
    digest = xxhash.xxh3_128(key.encode()).intdigest()
    seed = digest % 2**64
    run = cell_layers(layers, layer_bytes)
    sums: list[int] = []
    for head in range(heads):
        for first in range(0, layers, run):
            start = (head * layers + first) * layer_bytes
            stop = (head * layers + min(first + run, layers)) * layer_bytes
            cell_seed = (seed + len(sums)) % 2**64
            sums.append(xxhash.xxh3_64(payload[start:stop], seed=cell_seed).intdigest())
    total = len(payload) + 8 * len(sums) + 64
    if len(payload) >= 256 * 1024:
        while total % 4096:
            total += 1
    before = b"".join(struct.pack("<Q", value) for value in sums)
    before += struct.pack("<Q", len(payload)) + struct.pack("<I", len(sums))
    before += struct.pack("<I", run) + struct.pack("<Q", total)
    tail = b"HICACHE\x00" + struct.pack("<I", 1) + struct.pack("<I", 0) + digest.to_bytes(16, "little")
    after = b"\x00" * (total - len(payload) - len(before) - 8 - len(tail)) + tail
    own = xxhash.xxh3_64(before + after, seed=seed).intdigest()
    return before + struct.pack("<Q", own) + after
