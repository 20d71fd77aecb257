"""A reader of GGUF model files: metadata, and tensors dequantised to float32 on demand.

The file is little-endian: a header (magic ``GGUF``, version, counts), typed key/value metadata, one
record a tensor (name, dimensions with the fastest first, type, offset), then the tensor data, whose
start and offsets are multiples of ``general.alignment`` (32 unless given).

Block types pack 32 consecutive elements of a row:

* ``Q4_1``: float16 scale d, float16 minimum m, 16 bytes; the low nibble of byte i is element i, the
  high nibble element i + 16; value = d * nibble + m.
* ``Q8_0``: float16 scale d, 32 int8; value = d * int8.

Nothing in the file is trusted: every length is checked against the bytes that are left.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from hicache_store.errors import HicacheError

Scalar: TypeAlias = int | float | bool | str
Metadata: TypeAlias = Scalar | tuple[Scalar, ...]
FloatArray: TypeAlias = npt.NDArray[np.float32]
T = TypeVar("T")

_BLOCK: Final = 32
_DIMENSIONS_MAX: Final = 4
_VERSIONS: Final = (2, 3)
_STRING, _ARRAY = 8, 9
_LENGTH: Final = struct.Struct("<Q")
_SCALARS: Final[Mapping[int, str]] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip


class GgufError(HicacheError, ValueError):
    """A file that is not GGUF, is cut short, or holds a type this reader does not know."""


def _f32(raw: npt.NDArray[np.uint8]) -> FloatArray:
    return raw.view("<f4").astype(np.float32)


def _f16(raw: npt.NDArray[np.uint8]) -> FloatArray:
    return raw.view("<f2").astype(np.float32)


def _q4_1(raw: npt.NDArray[np.uint8]) -> FloatArray:
    blocks = raw.reshape(-1, 20)
    scales = blocks[:, :4].copy().view("<f2").astype(np.float32)
    out = np.empty((len(blocks), _BLOCK), np.float32)
    out[:, :16] = blocks[:, 4:] & 15
    out[:, 16:] = blocks[:, 4:] >> 4
    out *= scales[:, :1]
    out += scales[:, 1:]
    return out


def _q8_0(raw: npt.NDArray[np.uint8]) -> FloatArray:
    blocks = raw.reshape(-1, 34)
    scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
    out = blocks[:, 2:].view(np.int8).astype(np.float32)
    out *= scales
    return out


@dataclass(frozen=True, slots=True)
class _Encoding:
    name: str
    elements: int
    """Elements of one block."""
    size_bytes: int
    """Bytes of one block."""
    decode: Callable[[npt.NDArray[np.uint8]], FloatArray]


_ENCODINGS: Final[Mapping[int, _Encoding]] = {
    0: _Encoding("F32", 1, 4, _f32),
    1: _Encoding("F16", 1, 2, _f16),
    3: _Encoding("Q4_1", _BLOCK, 20, _q4_1),
    8: _Encoding("Q8_0", _BLOCK, 34, _q8_0),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the file. ``shape`` is slowest first, so a matrix is (rows, columns)."""

    name: str
    shape: tuple[int, ...]
    encoding: str
    raw: npt.NDArray[np.uint8]
    """(rows, bytes of a row), a view of the mapped file."""
    decode: Callable[[npt.NDArray[np.uint8]], FloatArray]

    def rows(self, start: int, stop: int) -> FloatArray:
        """Rows ``start`` to ``stop`` as float32 (rows, columns); a vector has one row."""
        return self._decoded(self.raw[start:stop])

    def take(self, indices: npt.NDArray[np.int64]) -> FloatArray:
        """The given rows as float32 (len(indices), columns)."""
        return self._decoded(self.raw[indices])

    def _decoded(self, raw: npt.NDArray[np.uint8]) -> FloatArray:
        return self.decode(np.ascontiguousarray(raw)).reshape(len(raw), self.shape[-1])


class _Cursor:
    """Reads forward through the mapped bytes and refuses to pass their end."""

    def __init__(self, data: npt.NDArray[np.uint8], path: Path) -> None:
        self.data, self.path, self.position = data, path, 0

    def refuse(self, why: str) -> GgufError:
        return GgufError(f"{self.path}: {why}, at byte {self.position} of {len(self.data)}")

    def take(self, size_bytes: int, what: str) -> memoryview:
        left = len(self.data) - self.position
        if size_bytes > left:
            raise self.refuse(f"the file ends inside {what} ({size_bytes} bytes wanted, {left} left)")
        start, self.position = self.position, self.position + size_bytes
        return self.data[start : self.position].data

    def scalar(self, code: str, what: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(code, self.take(struct.calcsize(code), what))[0]
        return value

    def count(self, code: str, what: str) -> int:
        return int(self.scalar(code, what))

    def string(self, what: str) -> str:
        raw = bytes(self.take(self.count("<Q", what), what))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.refuse(f"{what} is not UTF-8") from error

    def value(self, kind: int, what: str) -> Metadata:
        if kind != _ARRAY:
            return self.item(kind, what)
        kind, length = self.count("<I", what), self.count("<Q", what)
        smallest = 8 if kind == _STRING else 1
        if length * smallest > len(self.data) - self.position:
            raise self.refuse(f"the file ends inside {what} ({length} elements announced)")
        return self.strings(length, what) if kind == _STRING else self.scalars(kind, length, what)

    def scalars(self, kind: int, length: int, what: str) -> tuple[Scalar, ...]:
        return tuple(self.item(kind, what) for _ in range(length))

    def strings(self, length: int, what: str) -> tuple[str, ...]:
        # A vocabulary is 10^5 strings: one check and one slice each, not a call of every layer above.
        view, position, found = self.data.data, self.position, []
        try:
            for _ in range(length):
                stop = position + 8 + _LENGTH.unpack_from(view, position)[0]
                found.append(str(view[position + 8 : stop], "utf-8"))
                position = stop
        except (struct.error, OverflowError, UnicodeDecodeError) as error:
            raise self.refuse(f"{what} is cut short or not UTF-8: {error}") from error
        if position > len(view):
            raise self.refuse(f"{what} is cut short")
        self.position = position
        return tuple(found)

    def item(self, kind: int, what: str) -> Scalar:
        if kind == _STRING:
            return self.string(what)
        if kind not in _SCALARS:
            raise self.refuse(f"{what} has value type {kind}, which this reader does not know")
        return self.scalar(_SCALARS[kind], what)


@dataclass(frozen=True, slots=True)
class _Record:
    name: str
    dimensions: tuple[int, ...]
    kind: int
    offset: int


def _record(cursor: _Cursor) -> _Record:
    name = cursor.string("a tensor's name")
    rank = cursor.count("<I", name)
    if not 1 <= rank <= _DIMENSIONS_MAX:
        raise cursor.refuse(f"tensor {name} has {rank} dimensions, 1 to {_DIMENSIONS_MAX} are known")
    dimensions = tuple(cursor.count("<Q", name) for _ in range(rank))
    if 0 in dimensions:
        raise cursor.refuse(f"tensor {name} is empty: {dimensions}")
    return _Record(name, dimensions, cursor.count("<I", name), cursor.count("<Q", name))


def _tensor(cursor: _Cursor, record: _Record, base: int, alignment: int) -> Tensor:
    encoding = _ENCODINGS.get(record.kind)
    if encoding is None:
        known = ", ".join(e.name for e in _ENCODINGS.values())
        raise cursor.refuse(f"tensor {record.name} has type {record.kind}; {known} are known")
    columns, rows = record.dimensions[0], math.prod(record.dimensions[1:])
    if columns % encoding.elements:
        raise cursor.refuse(f"tensor {record.name} has {columns} columns, no multiple of {encoding.elements}")
    if record.offset % alignment:
        raise cursor.refuse(f"tensor {record.name} is at {record.offset}, no multiple of {alignment}")
    row_bytes = columns // encoding.elements * encoding.size_bytes
    cursor.position = base + record.offset
    if cursor.position + rows * row_bytes > len(cursor.data):
        raise cursor.refuse(f"the file ends inside tensor {record.name} ({rows * row_bytes} bytes wanted)")
    raw = cursor.data[cursor.position : cursor.position + rows * row_bytes].reshape(rows, row_bytes)
    return Tensor(record.name, record.dimensions[::-1], encoding.name, raw, encoding.decode)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file: ``metadata`` by key and ``tensors`` by name."""

    path: Path
    metadata: Mapping[str, Metadata]
    tensors: Mapping[str, Tensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Map ``path`` and read its header; raises :class:`GgufError` on anything it cannot hold."""
        try:
            data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise GgufError(f"{path}: cannot be mapped: {error}") from error
        cursor = _Cursor(data.view(np.ndarray), path)
        if bytes(cursor.take(4, "the magic")) != b"GGUF":
            raise cursor.refuse("this is not a GGUF file")
        version = cursor.count("<I", "the version")
        if version not in _VERSIONS:
            raise cursor.refuse(f"version {version} of GGUF is not one of {_VERSIONS}")
        tensor_count, value_count = cursor.count("<Q", "the counts"), cursor.count("<Q", "the counts")
        metadata: dict[str, Metadata] = {}
        for _ in range(value_count):
            key = cursor.string("a metadata key")
            metadata[key] = cursor.value(cursor.count("<I", key), f"metadata {key}")
        records = [_record(cursor) for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise cursor.refuse(f"general.alignment {alignment!r} is not a power of two")
        base = -(-cursor.position // alignment) * alignment
        tensors = {record.name: _tensor(cursor, record, base, alignment) for record in records}
        if len(tensors) != tensor_count:
            raise cursor.refuse("two tensors have one name")
        return cls(path, metadata, tensors)

    def get(self, key: str, kind: type[T]) -> T:
        """The metadata value ``key`` of type ``kind``; raises :class:`GgufError` without one."""
        value = self.metadata.get(key)
        if isinstance(value, kind):
            return value
        raise GgufError(f"{self.path}: metadata {key} is {type(value).__name__}, not {kind.__name__}")

    def tensor(self, name: str) -> Tensor:
        """The tensor ``name``; raises :class:`GgufError` without one."""
        if name in self.tensors:
            return self.tensors[name]
        raise GgufError(f"{self.path}: there is no tensor {name}")
