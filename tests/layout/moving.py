"""Moving pages by plans, segment by segment, as the tests of layouts do it."""

from __future__ import annotations

from collections.abc import Iterator

from hicache_store.kernels.strided import pack, unpack
from hicache_store.layout.box import Box, Span
from hicache_store.layout.layouts import Layout
from hicache_store.layout.model import Pool
from hicache_store.layout.plan import CopyPlan, Placement, Segment, plan_copy
from hicache_store.testing.oracle import EnginePool
from hicache_store.testing.probes import POISON


def bound(
    pool: Pool, layout: Layout, object_box: Box, piece: Box, placement: Placement
) -> Iterator[tuple[CopyPlan, Segment]]:
    first = object_box.tokens.start
    for segment in placement:
        yield (
            plan_copy(pool, layout, object_box, piece, Span(first, first + segment.tokens)),
            segment,
        )
        first += segment.tokens


def poisoned(size: int) -> bytearray:
    return bytearray([POISON]) * size


def restore(engine: EnginePool, payload: bytes, object_box: Box, piece: Box, placement: Placement) -> None:
    for plan, segment in bound(engine.pool, engine.layout(), object_box, piece, placement):
        unpack(plan, segment, engine.buffers(), memoryview(payload))


def backup(engine: EnginePool, object_box: Box, placement: Placement) -> bytes:
    payload = poisoned(engine.pool.payload_bytes(object_box))
    for plan, segment in bound(engine.pool, engine.layout(), object_box, object_box, placement):
        pack(plan, segment, engine.buffers(), memoryview(payload))
    return bytes(payload)
