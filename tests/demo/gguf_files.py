"""A writer of small GGUF files, independent of the reader under test."""

from __future__ import annotations

import struct

import numpy as np

U32, F32, BOOL, STRING, ARRAY, I64 = 4, 6, 7, 8, 9, 11


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def strings(*values: str) -> tuple[int, bytes]:
    return ARRAY, struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values))


def integers(*values: int) -> tuple[int, bytes]:
    return ARRAY, struct.pack("<IQ", U32, len(values)) + struct.pack(f"<{len(values)}I", *values)


def build(
    metadata: dict[str, tuple[int, bytes]],
    tensors: dict[str, tuple[int, tuple[int, ...], bytes]],
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """The file of metadata (type, raw value) and tensors (type, dims with the fastest first, raw data)."""
    head = magic + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, (kind, raw) in metadata.items():
        head += text(key) + struct.pack("<I", kind) + raw
    data = b""
    for name, (kind, dims, raw) in tensors.items():
        data += bytes(-len(data) % alignment)
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        data += raw
    return head + bytes(-len(head) % alignment) + data


def q4_1(scale: float, minimum: float, nibbles: list[int]) -> bytes:
    packed = [nibbles[i] | nibbles[i + 16] << 4 for i in range(16)]
    return np.array([scale, minimum], "<f2").tobytes() + bytes(packed)


def q8_0(scale: float, values: list[int]) -> bytes:
    return np.array([scale], "<f2").tobytes() + np.array(values, np.int8).tobytes()
