"""Which bytes of an object a reader fetches for a part of its box, and which cells prove them.

Wanted ranges are widened to whole cells. Ranges of one object that lie at most one request's cost
apart are read as one, and so is the trailer; otherwise the trailer is one range more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hicache_store.layout.box import Box
from hicache_store.layout.format import ByteRange, ObjectFormat
from hicache_store.layout.model import Pool


@dataclass(frozen=True, slots=True)
class Fetch:
    """One contiguous range of an object and the cells that lie wholly in it and are wanted."""

    start: int
    stop: int
    cells: tuple[int, ...]

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PieceRead:
    """What is fetched of one object for one piece.

    ``is_exact`` tells that the wanted cells hold the piece and nothing else, so that its bytes can
    be read straight into place.
    """

    object_box: Box
    piece: Box
    format: ObjectFormat
    fetches: tuple[Fetch, ...]
    wanted_bytes: int
    is_exact: bool

    @property
    def fetched_bytes(self) -> int:
        """Bytes that travel, trailer included."""
        return sum(len(fetch) for fetch in self.fetches)

    @property
    def trailer_bytes(self) -> int:
        """Fetched bytes of the trailer."""
        return sum(max(0, fetch.stop - self.format.payload_bytes) for fetch in self.fetches)

    @property
    def over_read_bytes(self) -> int:
        """Fetched payload bytes that the piece does not want."""
        return self.fetched_bytes - self.trailer_bytes - self.wanted_bytes

    @property
    def first_byte(self) -> int:
        """Offset of the first wanted byte of the payload."""
        layers_before = self.piece.layers.start - self.object_box.layers.start
        heads_before = self.piece.heads.start - self.object_box.heads.start
        return heads_before * self.format.head_bytes + layers_before * self.format.layer_bytes


def plan_piece(
    pool: Pool, object_box: Box, piece: Box, *, request_cost_bytes: int, verify: bool = True
) -> PieceRead:
    """How to read ``piece`` out of the object of ``object_box``."""
    shape = ObjectFormat.of(pool, object_box)
    cells = shape.cells_of(piece, object_box)
    wanted = pool.payload_bytes(piece)
    fetches: list[Fetch] = []
    for cell in cells:
        span = shape.cell_range(cell)
        last = fetches[-1] if fetches else None
        if last is not None and span.start - last.stop <= request_cost_bytes:
            fetches[-1] = Fetch(last.start, span.stop, (*last.cells, cell))
        else:
            fetches.append(Fetch(span.start, span.stop, (cell,)))
    if verify:
        last = fetches[-1]
        if shape.payload_bytes - last.stop <= request_cost_bytes:
            fetches[-1] = Fetch(last.start, shape.object_bytes, last.cells)
        else:
            fetches.append(Fetch(shape.payload_bytes, shape.object_bytes, ()))
    is_exact = sum(len(span) for span in map(shape.cell_range, cells)) == wanted
    return PieceRead(object_box, piece, shape, tuple(fetches), wanted, is_exact)


def fillers(fetch: Fetch, taken: Sequence[ByteRange]) -> list[ByteRange]:
    """The ranges of a fetch that no taken range holds; ``taken`` ascend inside the fetch."""
    gaps: list[ByteRange] = []
    at = fetch.start
    for span in taken:
        if span.start > at:
            gaps.append(ByteRange(at, span.start))
        at = span.stop
    if at < fetch.stop:
        gaps.append(ByteRange(at, fetch.stop))
    return gaps
