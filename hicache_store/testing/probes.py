"""Targets and sources that watch how they are used, and content that tells on itself."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache_store.connectors.base import Part, Read, Write

POISON = 0xCD
"""What a target holds before a read."""

GUARD_BYTES = 16
"""Poison between any two views of a target, so that a write past the end shows."""

_HEADER = struct.Struct("<QI")
_PERIOD_BYTES = 65_521  # a prime: content shifted by any power of two differs from itself


def content(key: str, size_bytes: int, variant: int = 0) -> bytes:
    """The bytes of ``key`` as writer ``variant`` would store them, at least 12 of them."""
    stream = hashlib.shake_128(f"{variant}/{size_bytes}/{key}".encode("utf-8", "surrogatepass"))
    block = stream.digest(min(size_bytes, _PERIOD_BYTES))
    body = (block * (size_bytes // len(block) + 1))[: size_bytes - _HEADER.size]
    return _HEADER.pack(size_bytes, variant) + body


def variant_of(key: str, data: bytes) -> int | None:
    """Which writer's content of ``key`` this is, whole; ``None`` when it is nobody's."""
    if len(data) < _HEADER.size:
        return None
    size_bytes, variant = _HEADER.unpack_from(data)
    if size_bytes != len(data) or data != content(key, len(data), variant):
        return None
    return int(variant)


def first_difference(got: bytes, wanted: bytes) -> str | None:
    """Where two byte strings part, in words; ``None`` when they are equal."""
    if got == wanted:
        return None
    if len(got) != len(wanted):
        return f"{len(got)} bytes instead of {len(wanted)}"
    at = int((np.frombuffer(got, np.uint8) != np.frombuffer(wanted, np.uint8)).argmax())
    return f"byte {at} of {len(wanted)} is {got[at]:#04x} instead of {wanted[at]:#04x}"


@dataclass(slots=True)
class ProbeTarget:
    """A target in poisoned memory, which records every call of the protocol.

    ``ranges`` are (offset in the object, lengths of the views). ``events`` holds the calls in
    order. ``at_check`` is what the views held when :meth:`check` was called.
    """

    ranges: Sequence[tuple[int, Sequence[int]]]
    refusal: str | None = None
    on_parts: Callable[[], object] = lambda: None
    on_check: Callable[[], object] = lambda: None
    on_release: Callable[[], object] = lambda: None
    read_only: bool = False
    events: list[str] = field(default_factory=list)
    at_check: bytes | None = None
    memory: bytearray = field(init=False)
    places: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.places = []
        at = GUARD_BYTES
        for _, lengths in self.ranges:
            for length in lengths:
                self.places.append((at, length))
                at += length + GUARD_BYTES
        self.memory = bytearray([POISON]) * at

    @classmethod
    def whole(cls, size_bytes: int, pieces: int = 1) -> ProbeTarget:
        """A target for a whole object, in views of uneven lengths."""
        return cls([(0, uneven(size_bytes, pieces))])

    def parts(self) -> Sequence[Part]:
        """The ranges with their views."""
        self.events.append("parts")
        self.on_parts()
        whole = memoryview(self.memory)
        if self.read_only:
            whole = whole.toreadonly()
        views = iter([whole[at : at + length] for at, length in self.places])
        return [(offset, [next(views) for _ in lengths]) for offset, lengths in self.ranges]

    def check(self) -> str | None:
        """The refusal this target was made with."""
        self.events.append("check")
        self.at_check = self.delivered()
        self.on_check()
        return self.refusal

    def release(self) -> None:
        """Record the call."""
        self.events.append("release")
        self.on_release()

    def delivered(self) -> bytes:
        """What the views hold, one after the other."""
        return b"".join(bytes(self.memory[at : at + length]) for at, length in self.places)

    def wanted(self, data: bytes) -> bytes:
        """What :meth:`delivered` should be, were the object ``data``."""
        return b"".join(data[offset : offset + sum(lengths)] for offset, lengths in self.ranges)

    @property
    def is_untouched(self) -> bool:
        """Whether no byte at all was written."""
        return self.memory.count(POISON) == len(self.memory)

    @property
    def guards_hold(self) -> bool:
        """Whether nothing was written beside the views."""
        rest = bytearray(self.memory)
        for at, length in self.places:
            rest[at : at + length] = bytes([POISON]) * length
        return rest.count(POISON) == len(rest)


@dataclass(slots=True)
class ProbeSource:
    """A source that records every call of the protocol."""

    views: Sequence[memoryview]
    on_buffers: Callable[[], object] = lambda: None
    on_release: Callable[[], object] = lambda: None
    events: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, data: bytes, pieces: int = 1) -> ProbeSource:
        """A source of ``data`` in views of uneven lengths."""
        views, at = [], 0
        for length in uneven(len(data), pieces):
            views.append(memoryview(data)[at : at + length])
            at += length
        return cls(views)

    def buffers(self) -> Sequence[memoryview]:
        """The views."""
        self.events.append("buffers")
        self.on_buffers()
        return self.views

    def release(self) -> None:
        """Record the call."""
        self.events.append("release")
        self.on_release()


def uneven(size_bytes: int, pieces: int) -> list[int]:
    """``pieces`` odd lengths that add up to ``size_bytes``, every third of them zero."""
    lengths, left = [], size_bytes
    for index in range(pieces - 1):
        length = 0 if index % 3 == 1 else min(left, size_bytes // pieces | 1)
        lengths.append(length)
        left -= length
    return [*lengths, left]


def read_of(key: str, size_bytes: int, pieces: int = 1) -> tuple[Read, ProbeTarget]:
    """A read of a whole object and its target."""
    target = ProbeTarget.whole(size_bytes, pieces)
    return Read(key, size_bytes, target), target


def write_of(key: str, data: bytes, depth: int = 0, replace: str | None = None, pieces: int = 1) -> Write:
    """A write of ``data`` from a :class:`ProbeSource`."""
    return Write(key, len(data), ProbeSource.of(data, pieces), depth, replace)


def raising(error: Exception) -> Callable[[], None]:
    """A hook that raises."""

    def hook() -> None:
        raise error

    return hook
