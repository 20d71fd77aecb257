"""The record of a file store's byte counter, and the arithmetic that keeps it from being too low."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from typing import Final

_MAGIC = b"hicacct1"
_RECORD = struct.Struct("<8s5Q")
_OUTSTANDING = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_UNKNOWN = 2**64 - 1

RECORD_BYTES: Final = _RECORD.size + _CHECKSUM.size
OUTSTANDING_BYTES: Final = _OUTSTANDING.size + _CHECKSUM.size


@dataclass(slots=True)
class Counter:
    """What the counter file holds; changed only while that file is locked.

    ``total_bytes`` is never below what is stored plus what is reserved; ``None`` until a walk has
    counted. ``reserved_bytes`` is the reserved part, too high while a dead writer's file is there.
    The two ``gross`` fields only grow: they tell what went on during a walk. ``epoch`` changes with
    every recount.
    """

    epoch: int
    total_bytes: int | None
    reserved_bytes: int = 0
    gross_reserved_bytes: int = 0
    gross_released_bytes: int = 0

    def add(self, change_bytes: int) -> None:
        """Change the total, if it is known."""
        if self.total_bytes is not None:
            self.total_bytes = max(0, self.total_bytes + change_bytes)

    def release(self, n_bytes: int) -> None:
        """Take off ``n_bytes`` of objects that are gone."""
        self.add(-n_bytes)
        self.gross_released_bytes += n_bytes


@dataclass(frozen=True, slots=True)
class Recount:
    """Where the counter stood before a walk.

    A walk sees every object that was there when it began and stays. It may miss what was written
    meanwhile; that was reserved before (``reserved_bytes``) or since (the growth of the gross
    counter). The sum of the three is never too low. It may hold twice what was stored meanwhile, so
    the counter, itself an upper bound, is kept where it is the lower of the two, unless the walk
    proves it wrong by seeing more than the counter holds plus what was released meanwhile.
    """

    epoch: int
    reserved_bytes: int
    gross_reserved_bytes: int
    gross_released_bytes: int

    def apply(self, counter: Counter, walked_bytes: int) -> bool:
        """Set the total from what the walk saw; ``False`` when another recount came between."""
        if counter.epoch != self.epoch:
            return False
        grown = counter.gross_reserved_bytes - self.gross_reserved_bytes
        released = counter.gross_released_bytes - self.gross_released_bytes
        upper = walked_bytes + self.reserved_bytes + grown
        known = counter.total_bytes
        is_wrong = known is None or known < walked_bytes - released
        counter.total_bytes = upper if is_wrong or known is None else min(known, upper)
        counter.epoch = new_epoch()
        return True


def new_epoch() -> int:
    """A number that no earlier state of any counter had; never 0."""
    return int.from_bytes(os.urandom(8), "little") | 1


def _sealed(body: bytes) -> bytes:
    return body + _CHECKSUM.pack(zlib.crc32(body))


def _unsealed(data: bytes, size: int) -> bytes | None:
    body = data[:size]
    is_whole = len(data) == size + _CHECKSUM.size and data[size:] == _CHECKSUM.pack(zlib.crc32(body))
    return body if is_whole else None


def encode_counter(counter: Counter) -> bytes:
    """The RECORD_BYTES of ``counter``: magic, five little-endian u64, CRC-32."""
    total = _UNKNOWN if counter.total_bytes is None else counter.total_bytes
    gross = (counter.gross_reserved_bytes, counter.gross_released_bytes)
    return _sealed(_RECORD.pack(_MAGIC, counter.epoch, total, counter.reserved_bytes, *gross))


def decode_counter(data: bytes) -> Counter | None:
    """The counter in ``data``, ``None`` when it is damaged or of another version."""
    body = _unsealed(data, _RECORD.size)
    if body is None or body[: len(_MAGIC)] != _MAGIC:
        return None
    _, epoch, total, reserved, gross_reserved, gross_released = _RECORD.unpack(body)
    return Counter(epoch, None if total == _UNKNOWN else total, reserved, gross_reserved, gross_released)


def encode_outstanding(n_bytes: int) -> bytes:
    """The content of a writer's file: the bytes it has reserved and not settled, CRC-32."""
    return _sealed(_OUTSTANDING.pack(n_bytes))


def decode_outstanding(data: bytes) -> int:
    """The bytes of a writer's file; 0 for one that was created and never filled."""
    body = _unsealed(data, _OUTSTANDING.size)
    return 0 if body is None else int(_OUTSTANDING.unpack(body)[0])
