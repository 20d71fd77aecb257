"""Chunk grids: how a writer cuts its box into objects, and how a grid is told to others.

A grid is the head cuts of the whole model and the layer cuts of one pipeline stage, so that every
rank of a stage announces the same bytes and none has to know the other stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from hicache_store.errors import ConfigurationError
from hicache_store.layout.box import Box, Span
from hicache_store.layout.model import Pool
from hicache_store.layout.parallel import ParallelSpec, head_spans
from hicache_store.limits import OBJECT_PAYLOAD_CAP_BYTES


@dataclass(frozen=True, slots=True, order=True)
class Grid:
    """Cuts of one pool: ascending head cuts from 0 to the head count, ascending layer cuts of a stage."""

    pool: str
    head_cuts: tuple[int, ...]
    layer_cuts: tuple[int, ...]

    def __post_init__(self) -> None:
        for what, cuts in (("head", self.head_cuts), ("layer", self.layer_cuts)):
            if len(cuts) < 2 or cuts[0] < 0 or any(a >= b for a, b in pairwise(cuts)):
                raise ConfigurationError(f"{what} cuts {list(cuts)} must be at least two ascending numbers")

    def chunks(self, page_size: int) -> tuple[Box, ...]:
        """Every chunk of the grid, head-major: the boxes that are objects."""
        return tuple(
            Box(Span(h0, h1), Span(l0, l1), Span(0, page_size))
            for h0, h1 in pairwise(self.head_cuts)
            for l0, l1 in pairwise(self.layer_cuts)
        )

    def chunks_touching(self, box: Box) -> Iterator[Box]:
        """The chunks that share anything with ``box``, made one at a time: a marker read from the storage
        may describe more chunks than anybody should build."""
        heads = [Span(*cut) for cut in pairwise(self.head_cuts) if Span(*cut).intersect(box.heads)]
        layers = [Span(*cut) for cut in pairwise(self.layer_cuts) if Span(*cut).intersect(box.layers)]
        return (Box(h, stage, Span(0, box.tokens.stop)) for h in heads for stage in layers)

    def chunks_within(self, box: Box) -> tuple[Box, ...]:
        """The chunks that tile ``box``; raises when the box is not a union of chunks."""
        inside = tuple(self.chunks_touching(box))
        if not inside or not all(box.covers(chunk) for chunk in inside):
            raise ConfigurationError(
                f"heads {box.heads.start}-{box.heads.stop} x layers {box.layers.start}-{box.layers.stop} "
                f"is not a union of chunks of the grid with head cuts {list(self.head_cuts)} and layer cuts "
                f"{list(self.layer_cuts)}; choose cuts that contain the rank's own bounds, or no fixed grid"
            )
        if sum(chunk.cells for chunk in inside) != box.cells:
            raise ConfigurationError(
                f"the grid's cuts {list(self.head_cuts)} x {list(self.layer_cuts)} do not reach over "
                f"heads {box.heads.start}-{box.heads.stop} x layers {box.layers.start}-{box.layers.stop}"
            )
        return inside


def own_grid(pool: Pool, spec: ParallelSpec, box: Box, payload_cap: int = OBJECT_PAYLOAD_CAP_BYTES) -> Grid:
    """The default grid of a writer: its own shard, layers halved until a chunk is at most the cap.

    Halving n layers gives parts of ``n // 2`` and ``n - n // 2``; a single layer is never cut.
    """
    spans = sorted(set(head_spans(pool.num_heads, spec)))
    head_cuts = (0, *(span.stop for span in spans))
    widest = max(len(span) for span in spans)
    layer_bytes = widest * len(box.tokens) * pool.token_bytes
    cuts = [box.layers.start, box.layers.stop]
    while any((b - a) * layer_bytes > payload_cap and b - a > 1 for a, b in pairwise(cuts)):
        halved = [cuts[0]]
        for a, b in pairwise(cuts):
            if b - a > 1:
                halved.append(a + (b - a) // 2)
            halved.append(b)
        cuts = halved
    return Grid(pool.key_name, head_cuts, tuple(cuts))


def fixed_grid(pool: Pool, *, heads_per_object: int, layers_per_object: int, stage: Span) -> Grid:
    """A fleet-wide grid, restricted to one stage: cuts at multiples of the two sizes."""
    if heads_per_object < 1 or layers_per_object < 1:
        raise ConfigurationError(
            f"a fixed grid needs at least 1 head and 1 layer an object, got {heads_per_object} heads "
            f"and {layers_per_object} layers"
        )
    heads = [*range(0, pool.num_heads, heads_per_object), pool.num_heads]
    first = -(-(stage.start + 1) // layers_per_object) * layers_per_object
    layers = [stage.start, *range(first, stage.stop, layers_per_object), stage.stop]
    return Grid(pool.key_name, tuple(heads), tuple(layers))
