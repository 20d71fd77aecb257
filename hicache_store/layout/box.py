"""Boxes: what a rank, a chunk or a range read holds of one page, in absolute model coordinates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open range of whole numbers, ``start <= stop``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a span needs 0 <= start <= stop, got {self.start}..{self.stop}")

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, value: int) -> bool:
        return self.start <= value < self.stop

    def covers(self, other: Span) -> bool:
        """Whether ``other`` lies within."""
        return self.start <= other.start and other.stop <= self.stop

    def intersect(self, other: Span) -> Span | None:
        """The common part, ``None`` when it is empty."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def shifted(self, by: int) -> Span:
        """The same length, moved."""
        return Span(self.start + by, self.stop + by)


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Heads, layers and tokens of one page; every kv part and every dim of them."""

    heads: Span
    layers: Span
    tokens: Span

    @classmethod
    def of(cls, heads: tuple[int, int], layers: tuple[int, int], tokens: tuple[int, int]) -> Box:
        """A box from three (start, stop) pairs."""
        return cls(Span(*heads), Span(*layers), Span(*tokens))

    @property
    def cells(self) -> int:
        """Number of (head, layer, token) places."""
        return len(self.heads) * len(self.layers) * len(self.tokens)

    def covers(self, other: Box) -> bool:
        """Whether ``other`` lies within."""
        return (
            self.heads.covers(other.heads)
            and self.layers.covers(other.layers)
            and self.tokens.covers(other.tokens)
        )

    def intersect(self, other: Box) -> Box | None:
        """The common box, ``None`` when it is empty. The only operation that decides what to move."""
        heads = self.heads.intersect(other.heads)
        layers = self.layers.intersect(other.layers)
        tokens = self.tokens.intersect(other.tokens)
        if heads is None or layers is None or tokens is None:
            return None
        return Box(heads, layers, tokens)

    def minus(self, other: Box) -> list[Box]:
        """At most six disjoint boxes that hold what ``other`` does not."""
        common = self.intersect(other)
        if common is None:
            return [self]
        rest: list[Box] = []
        for a, b in ((self.heads.start, common.heads.start), (common.heads.stop, self.heads.stop)):
            if a < b:
                rest.append(Box(Span(a, b), self.layers, self.tokens))
        for a, b in ((self.layers.start, common.layers.start), (common.layers.stop, self.layers.stop)):
            if a < b:
                rest.append(Box(common.heads, Span(a, b), self.tokens))
        for a, b in ((self.tokens.start, common.tokens.start), (common.tokens.stop, self.tokens.stop)):
            if a < b:
                rest.append(Box(common.heads, common.layers, Span(a, b)))
        return rest


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a wanted box that one of several candidate boxes provides."""

    candidate: int
    box: Box


@dataclass(frozen=True, slots=True)
class Cover:
    """How candidates fill a wanted box: disjoint pieces, and what none of them holds."""

    pieces: tuple[Piece, ...]
    missing: tuple[Box, ...]

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing


def cover(wanted: Box, candidates: Iterable[tuple[int, Box]]) -> Cover:
    """Fill ``wanted`` from candidate boxes, the earlier ones first.

    The one function that decides whether a box is stored, for look-up, reader and writer alike:
    the union of the candidates counts, of whatever grids they are.
    """
    open_boxes = [wanted]
    pieces: list[Piece] = []
    for index, box in candidates:
        if not open_boxes:
            break
        left: list[Box] = []
        for hole in open_boxes:
            common = hole.intersect(box)
            if common is None:
                left.append(hole)
                continue
            pieces.append(Piece(index, common))
            left.extend(hole.minus(box))
        open_boxes = left
    return Cover(tuple(pieces), tuple(open_boxes))
