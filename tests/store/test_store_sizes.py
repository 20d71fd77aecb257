"""Pages of any size: cut into objects that every storage takes, or refused at attach with the numbers."""

from __future__ import annotations

import pytest
from store_rig import Place, attach_rank, tiny

from hicache_store.errors import ConfigurationError
from hicache_store.layout.format import ObjectFormat
from hicache_store.layout.grid import own_grid
from hicache_store.layout.model import ModelKV
from hicache_store.layout.parallel import ParallelSpec, Rank, shard
from hicache_store.limits import MIB, OBJECT_PAYLOAD_CAP_BYTES, REDIS_VALUE_BYTES
from hicache_store.store import FixedGrid


@pytest.mark.parametrize("page_size", [64, 256, 2_400])
@pytest.mark.parametrize("spec", ["tp1pp1", "tp2pp2", "tp8pp1"])
def test_d14_d23_a_page_of_any_size_is_objects_of_a_few_megabytes(page_size: int, spec: str) -> None:
    """600 MiB in one value stop a server and are past the limits of some: no object is larger than the cap
    and its trailer, which every storage takes, and together they are the page."""
    pool = ModelKV.dense(num_layers=64, num_kv_heads=8, head_dim=128, dtype="bf16").pool(page_size)
    parallel = ParallelSpec.parse(spec)
    payload = 0
    for rank in parallel.ranks():
        held = shard(pool, parallel, rank)
        assert held is not None
        chunks = own_grid(pool, parallel, held.box).chunks_within(held.box)
        for chunk in chunks:
            layout = ObjectFormat.of(pool, chunk)
            payload += layout.payload_bytes
            assert layout.payload_bytes <= OBJECT_PAYLOAD_CAP_BYTES or len(chunk.layers) == 1
            assert layout.object_bytes <= REDIS_VALUE_BYTES
    assert payload == 64 * 8 * 128 * 2 * 2 * page_size
    if page_size == 2_400:
        assert payload == 600 * MIB


def test_d23_what_cannot_be_held_is_refused_at_attach_with_the_numbers() -> None:
    """Not at the first put, and not by an assertion."""
    pool = tiny(4, 4).pool(64)
    grid = FixedGrid(heads_per_object=4, layers_per_object=4)
    with pytest.raises(ConfigurationError, match=r"staging_bytes=4096 cannot hold an object of \d+ bytes"):
        attach_rank(Place(), pool, "tp1pp1", Rank(), grid=grid, staging_bytes=4_096)
