"""The strided copy: one region between a pool's buffer and an object, as one numpy assignment.

The merged row is a single opaque element, so that numpy moves whole rows and the copy costs one
call whatever the number of rows. numpy releases the interpreter lock while it copies.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hicache_store.layout.plan import CopyPlan, Region, Segment


@lru_cache(maxsize=4096)
def _row_dtype(row_bytes: int) -> np.dtype[np.void]:
    return np.dtype((np.void, row_bytes))


def _views(
    region: Region, segment: Segment, pool_buffer: memoryview, object_buffer: memoryview, object_base: int
) -> tuple[np.ndarray, np.ndarray]:
    dtype = _row_dtype(region.row_bytes)
    shape = tuple(axis.size for axis in region.axes)
    offset = region.pool_offset + segment.slot * region.slot_stride + segment.slot_token * region.token_stride
    in_pool: np.ndarray = np.ndarray(
        shape, dtype, pool_buffer, offset, tuple(axis.pool_stride for axis in region.axes)
    )
    in_object: np.ndarray = np.ndarray(
        shape,
        dtype,
        object_buffer,
        region.object_offset - object_base,
        tuple(axis.object_stride for axis in region.axes),
    )
    return in_pool, in_object


def pack(
    plan: CopyPlan,
    segment: Segment,
    buffers: list[memoryview],
    payload: memoryview,
    payload_base: int = 0,
) -> None:
    """Copy a segment's part of a page out of the pool's buffers into an object's payload.

    ``payload`` starts at byte ``payload_base`` of the object.
    """
    for region in plan.regions:
        in_pool, in_object = _views(region, segment, buffers[region.buffer], payload, payload_base)
        in_object[...] = in_pool


def unpack(
    plan: CopyPlan,
    segment: Segment,
    buffers: list[memoryview],
    payload: memoryview,
    payload_base: int = 0,
) -> None:
    """Copy a segment's part of a page out of an object's payload into the pool's buffers."""
    for region in plan.regions:
        in_pool, in_object = _views(region, segment, buffers[region.buffer], payload, payload_base)
        in_pool[...] = in_object
