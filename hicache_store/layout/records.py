"""Namespace records: the manifest and the grid markers, framed so that damage shows.

A record is canonical JSON, zero padding, and a 32-byte tail (magic ``HICMETA`` + NUL, version
u32, body length u32, xxh3_128 of the record's key, a NUL and the body). Its length is a multiple
of 4096; a marker is exactly one such block, so that all slots are read in one batch.
"""

from __future__ import annotations

import json
import struct
from typing import Final

import xxhash

from hicache_store.errors import ConfigurationError
from hicache_store.layout.grid import Grid
from hicache_store.limits import MARKER_BYTES, MARKER_SLOTS

MAGIC: Final = b"HICMETA\0"
VERSION: Final = 1
BLOCK_BYTES: Final = 4096
_TAIL: Final = struct.Struct("<8sII16s")


def frame(key: str, body: bytes) -> bytes:
    """The record that keeps ``body`` under ``key``."""
    total = -(-(len(body) + _TAIL.size) // BLOCK_BYTES) * BLOCK_BYTES
    tail = _TAIL.pack(MAGIC, VERSION, len(body), _digest(key, body))
    return body + bytes(total - len(body) - len(tail)) + tail


def unframe(key: str, raw: bytes) -> bytes | None:
    """The body of a record, ``None`` when it is damaged, of another key or of a later version."""
    if len(raw) < BLOCK_BYTES or len(raw) % BLOCK_BYTES:
        return None
    magic, version, length, digest = _TAIL.unpack(raw[-_TAIL.size :])
    if magic != MAGIC or version != VERSION or length > len(raw) - _TAIL.size:
        return None
    body = raw[:length]
    if digest != _digest(key, body) or any(raw[length : len(raw) - _TAIL.size]):
        return None
    return body


def _digest(key: str, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(key.encode() + b"\0" + body)


def encode_grid(grid: Grid) -> bytes:
    """The body of a grid's marker; raises when the cuts do not fit one block."""
    body = json.dumps(
        {"head_cuts": grid.head_cuts, "layer_cuts": grid.layer_cuts, "pool": grid.pool},
        sort_keys=True,
        separators=(",", ":"),
    ).encode()
    if len(body) + _TAIL.size > MARKER_BYTES:
        raise ConfigurationError(
            f"a grid of {len(grid.head_cuts)} head cuts and {len(grid.layer_cuts)} layer cuts does not fit "
            f"its {MARKER_BYTES}-byte marker; use fewer, larger chunks"
        )
    return body


def decode_grid(body: bytes) -> Grid | None:
    """The grid of a marker's body, ``None`` when it is not one."""
    try:
        fields = json.loads(body)
        heads, layers, pool = fields["head_cuts"], fields["layer_cuts"], fields["pool"]
        if not all(type(cut) is int for cut in (*heads, *layers)) or type(pool) is not str:
            return None
        return Grid(pool, tuple(heads), tuple(layers))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def first_slot(grid: Grid) -> int:
    """The slot where the probe for a grid's marker starts: its digest mod the number of slots."""
    return xxhash.xxh3_64_intdigest(encode_grid(grid)) % MARKER_SLOTS
