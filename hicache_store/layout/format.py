"""The object format, version 1: a payload, its trailer, and how bytes are proven good.

``payload | cell sums (8 each) | fields (32) | zero padding | tail (32)``

========  =======================================================================================
fields    payload bytes u64, cells u32, layers a cell u32, object bytes u64, trailer sum u64
tail      magic ``HICACHE`` + NUL, version u32, reserved u32 (zero), name digest 16 bytes
========  =======================================================================================

Everything is little-endian. The name digest is xxh3_128 of the object's logical key; its low 64
bits seed every sum, plus the cell's index for cell sums, so data and trailers of different names
never verify together. The trailer sum is xxh3_64 over the trailer without the sum itself. An
object is ``payload + 64 + 8 * cells`` bytes, rounded up to 4096 when the payload is 256 KiB or
more. A *cell* is one head and a run of layers of about 128-512 KiB, a function of the box alone.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import xxhash

from hicache_store.layout.box import Box
from hicache_store.layout.model import Pool
from hicache_store.limits import KIB

MAGIC: Final = b"HICACHE\0"
VERSION: Final = 1
FIELDS: Final = struct.Struct("<QIIQQ")
TAIL: Final = struct.Struct("<8sII16s")
PAD_BYTES: Final = 4096
PAD_FROM_PAYLOAD_BYTES: Final = 256 * KIB
CELL_MIN_BYTES: Final = 128 * KIB
CELL_MAX_BYTES: Final = 512 * KIB

_SUM_BYTES = 8
_TRAILER_SUM_AT = FIELDS.size - _SUM_BYTES
_VERSION_AT = len(MAGIC)
_MASK64 = (1 << 64) - 1


class Verdict(enum.StrEnum):
    """Why the bytes of an object are not what its name says."""

    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    """A whole, sound object of another name."""
    UNKNOWN_VERSION = "unknown_version"
    """Written by a later format; neither deleted nor overwritten."""


@dataclass(frozen=True, slots=True)
class NameSeed:
    """The digest of a logical key and the seed its sums start from."""

    digest: bytes
    seed: int

    @classmethod
    def of(cls, key: str) -> NameSeed:
        """Digest ``key``: xxh3_128, whose low 64 bits are the seed."""
        value = xxhash.xxh3_128_intdigest(key.encode())
        return cls(value.to_bytes(16, "little"), value & _MASK64)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Half-open bytes of an object."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ObjectFormat:
    """Lengths and cells of the object of one box: a pure function of the box.

    What follows from the four given numbers is worked out once, because every read and write asks.
    """

    heads: int
    layers: int
    layer_bytes: int
    layers_per_cell: int
    head_bytes: int = field(init=False, repr=False, compare=False)
    """Payload bytes of one head."""
    payload_bytes: int = field(init=False, repr=False, compare=False)
    """Bytes of the payload."""
    cells_per_head: int = field(init=False, repr=False, compare=False)
    """Runs of layers a head is cut into; the last may be shorter."""
    cells: int = field(init=False, repr=False, compare=False)
    """Number of cells."""
    object_bytes: int = field(init=False, repr=False, compare=False)
    """Length of the whole object."""
    trailer_bytes: int = field(init=False, repr=False, compare=False)
    """Bytes after the payload, padding included."""
    _sums: struct.Struct = field(init=False, repr=False, compare=False)
    _facts: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        head_bytes = self.layers * self.layer_bytes
        payload_bytes = self.heads * head_bytes
        cells_per_head = -(-self.layers // self.layers_per_cell)
        cells = self.heads * cells_per_head
        object_bytes = payload_bytes + FIELDS.size + TAIL.size + _SUM_BYTES * cells
        if payload_bytes >= PAD_FROM_PAYLOAD_BYTES:
            object_bytes = -(-object_bytes // PAD_BYTES) * PAD_BYTES
        facts = FIELDS.pack(payload_bytes, cells, self.layers_per_cell, object_bytes, 0)
        worked_out = {
            "head_bytes": head_bytes,
            "payload_bytes": payload_bytes,
            "cells_per_head": cells_per_head,
            "cells": cells,
            "object_bytes": object_bytes,
            "trailer_bytes": object_bytes - payload_bytes,
            "_sums": struct.Struct(f"<{cells}Q"),
            "_facts": facts[:_TRAILER_SUM_AT],
        }
        for name, value in worked_out.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, pool: Pool, box: Box) -> ObjectFormat:
        """The format of the object that holds ``box``."""
        layer_bytes = len(box.tokens) * pool.token_bytes
        layers = len(box.layers)
        return cls(len(box.heads), layers, layer_bytes, layers_per_cell(layers, layer_bytes))

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) payload bytes of every cell."""
        return _bounds(self.heads, self.layers, self.layer_bytes, self.layers_per_cell)

    def cell_range(self, cell: int) -> ByteRange:
        """Payload bytes of one cell."""
        return ByteRange(*self.bounds[cell])

    def cells_of(self, wanted: Box, box: Box) -> list[int]:
        """Cells of the object of ``box`` that hold any element of ``wanted``, ascending."""
        first_run = (wanted.layers.start - box.layers.start) // self.layers_per_cell
        stop_run = -(-(wanted.layers.stop - box.layers.start) // self.layers_per_cell)
        return [
            head * self.cells_per_head + run
            for head in range(wanted.heads.start - box.heads.start, wanted.heads.stop - box.heads.start)
            for run in range(first_run, stop_run)
        ]

    def seal(self, name: NameSeed, payload: Sequence[memoryview]) -> bytes:
        """The trailer of a payload given as consecutive views."""
        sums = self._sums.pack(*_cell_sums(payload, range(self.cells), self.bounds, 0, name.seed))
        padding = bytes(self.trailer_bytes - len(sums) - FIELDS.size - TAIL.size)
        before = sums + self._facts
        after = padding + TAIL.pack(MAGIC, VERSION, 0, name.digest)
        return b"".join(
            (before, _trailer_sum(before, after, name.seed).to_bytes(_SUM_BYTES, "little"), after)
        )

    def check_trailer(self, name: NameSeed, trailer: memoryview) -> Verdict | None:
        """``None`` when the trailer is sound and belongs to ``name`` and this box."""
        if len(trailer) != self.trailer_bytes:
            return Verdict.CORRUPT
        magic, version, _reserved, digest = TAIL.unpack_from(trailer, self.trailer_bytes - TAIL.size)
        if magic != MAGIC or version < VERSION:  # nothing came before the first version: a torn write
            return Verdict.CORRUPT
        at = self.cells * _SUM_BYTES + _TRAILER_SUM_AT
        before, after = trailer[:at], trailer[at + _SUM_BYTES :]
        stored = int.from_bytes(trailer[at : at + _SUM_BYTES], "little")
        seed = int.from_bytes(digest, "little") & _MASK64
        if version != VERSION:
            # A flipped bit in the version of one of ours is damage, not a later format.
            ours = bytearray(after)
            version_at = len(ours) - TAIL.size + _VERSION_AT
            ours[version_at : version_at + 4] = VERSION.to_bytes(4, "little")
            is_ours = _trailer_sum(before, ours, seed) == stored
            return Verdict.CORRUPT if is_ours else Verdict.UNKNOWN_VERSION
        if _trailer_sum(before, after, seed) != stored:
            return Verdict.CORRUPT
        if digest != name.digest or before[self.cells * _SUM_BYTES :] != self._facts:
            return Verdict.FOREIGN
        return None

    def check_cells(
        self,
        name: NameSeed,
        trailer: memoryview,
        cells: Sequence[int],
        payload: Sequence[memoryview],
        start: int = 0,
    ) -> Verdict | None:
        """``None`` when every cell's bytes match its sum.

        ``payload`` are consecutive views of the object's bytes from ``start`` on; ``cells`` ascend
        and lie wholly inside them.
        """
        stored = self._sums.unpack_from(trailer)
        for cell, value in zip(cells, _cell_sums(payload, cells, self.bounds, start, name.seed), strict=True):
            if stored[cell] != value:
                return Verdict.CORRUPT
        return None


def layers_per_cell(layers: int, layer_bytes: int) -> int:
    """Layers of one cell: the smallest divisor of the box's layers whose cell is 128-512 KiB, else as
    many as reach 128 KiB."""
    for count in range(1, min(layers, CELL_MAX_BYTES // layer_bytes) + 1):
        if layers % count == 0 and CELL_MIN_BYTES <= count * layer_bytes <= CELL_MAX_BYTES:
            return count
    return min(layers, max(1, -(-CELL_MIN_BYTES // layer_bytes)))


@lru_cache(maxsize=1024)
def _bounds(heads: int, layers: int, layer_bytes: int, per_cell: int) -> tuple[tuple[int, int], ...]:
    head_bytes, cell_bytes = layers * layer_bytes, per_cell * layer_bytes
    return tuple(
        (start, min(start + cell_bytes, (head + 1) * head_bytes))
        for head in range(heads)
        for start in range(head * head_bytes, (head + 1) * head_bytes, cell_bytes)
    )


def _trailer_sum(before: bytes | memoryview, after: bytes | bytearray | memoryview, seed: int) -> int:
    """The sum of a trailer's bytes before and after the sum itself."""
    hasher = xxhash.xxh3_64(before, seed)
    hasher.update(after)
    return hasher.intdigest()


def _cell_sums(
    views: Sequence[memoryview],
    cells: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    origin: int,
    seed: int,
) -> Iterator[int]:
    """The sum of each cell; ``views`` follow each other from byte ``origin`` on, cells ascend."""
    index, base = 0, origin
    for cell in cells:
        start, stop = bounds[cell]
        cell_seed = (seed + cell) & _MASK64
        while index < len(views) and base + len(views[index]) <= start:
            base += len(views[index])
            index += 1
        view = views[index]
        if stop <= base + len(view):
            yield xxhash.xxh3_64_intdigest(view[start - base : stop - base], cell_seed)
            continue
        hasher = xxhash.xxh3_64(seed=cell_seed)
        at, offset, scan = start, base, index
        while at < stop:
            view = views[scan]
            take = min(stop, offset + len(view))
            if take > at:
                hasher.update(view[at - offset : take - offset])
                at = take
            offset += len(view)
            scan += 1
        yield hasher.intdigest()
