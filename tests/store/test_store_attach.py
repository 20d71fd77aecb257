"""What cannot work is refused at attach, naming the numbers; what is misused raises."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from store_rig import Place, attach_rank, chain, namespace_of, page_values, tiny

from hicache_store.errors import ConfigurationError, TopologyError
from hicache_store.layout.box import Box
from hicache_store.layout.layouts import Layout, engine_layout
from hicache_store.layout.model import KVPart, Pool
from hicache_store.layout.parallel import ParallelSpec, Rank, shard
from hicache_store.layout.plan import Segment, placement_of_slot
from hicache_store.store import FixedGrid, PageState, PoolBuffers, Store
from hicache_store.testing.oracle import EnginePool

POOL = tiny(4, 4).pool(2)
NS = namespace_of(POOL)


class ClosingConnector:
    """Remembers whether it was closed."""

    def __init__(self) -> None:
        self._inner = Place().open()
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        self._inner.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def attach(pool: Pool = POOL, spec: str = "tp1pp1", rank: Rank = Rank(), **changed: object) -> None:  # noqa: B008
    """Attach with one thing changed; the connector must be closed when that fails."""
    parallel = ParallelSpec.parse(spec)
    arrays = EnginePool(pool, shard(pool, parallel, Rank()).box)
    given = {
        "namespace": NS,
        "pools": [PoolBuffers(pool, arrays.layout(), arrays.buffers())],
        "parallel": parallel,
        "rank": rank,
        **changed,
    }
    connector = ClosingConnector()
    try:
        Store.attach(connector, **given).close()
    finally:
        assert connector.is_closed


def buffers(layout: Layout, pool: Pool = POOL, short: int = 0) -> list[np.ndarray]:
    return [np.zeros(size - short, np.uint8) for size in layout.buffer_bytes(pool.unit_bytes)]


def layout(box: Box = POOL.page_box, **options: object) -> Layout:
    return engine_layout("layer_first", POOL, box, slots=2, **options)


HALF = Box.of((0, 2), (0, 4), (0, 2))
HALF_TOKENS = dataclasses.replace(layout(), box=Box.of((0, 4), (0, 4), (0, 1)))
REFUSED = {
    "an unknown writer": ({"writer": "all"}, "writer='all' is not accepted; give 'elected' or 'caller'"),
    "no time": ({"timeout_s": 0.0}, "timeout_s=0.0 is not accepted"),
    "no end": ({"timeout_s": math.inf}, "timeout_s=inf is not accepted"),
    "no number": ({"timeout_s": math.nan}, "timeout_s=nan is not accepted"),
    "no pool": ({"pools": []}, r"pools of different names, got \[\]"),
    "a pool twice": (
        {"pools": [PoolBuffers(POOL, layout(), buffers(layout()))] * 2},
        r"pools of different names, got \['kv', 'kv'\]",
    ),
    "a rank outside": ({"rank": Rank(tp=1)}, "tp rank 1 is outside 0..0"),
    "a short buffer": (
        {"pools": [PoolBuffers(POOL, layout(), buffers(layout(), short=1))]},
        "buffer 0 has 511 bytes, layout layer_first with 2 slots of 2 tokens needs 512",
    ),
    "a buffer too few": (
        {"pools": [PoolBuffers(POOL, layout(split=("kv",)), buffers(layout()))]},
        "uses 2 buffers, 1 are given",
    ),
    "a buffer that is none": ({"pools": [PoolBuffers(POOL, layout(), [object()])]}, "has no buffer protocol"),
    "a buffer with holes": (
        {"pools": [PoolBuffers(POOL, layout(), [np.zeros(512, np.uint8)[::2]])]},
        "buffer 0 is not contiguous",
    ),
    "half the heads": (
        {"pools": [PoolBuffers(POOL, layout(HALF), buffers(layout()))]},
        "the layout holds heads 0-2 .*, the rank holds heads 0-4",
    ),
    "half the tokens": (
        {"pools": [PoolBuffers(POOL, HALF_TOKENS, buffers(layout()))]},
        "tokens 0-1, the rank holds .* tokens 0-2",
    ),
    "a grid that cuts across": (
        {"grid": FixedGrid(3, 4), "spec": "tp2pp1"},
        "heads 0-2 x layers 0-4 is not a union of chunks",
    ),
    "a grid of nothing": ({"grid": FixedGrid(0, 4)}, "at least 1 head and 1 layer an object, got 0 heads"),
    "staging too small": (
        {"staging_bytes": 351},
        "staging_bytes=351 cannot hold an object of 352 bytes; give at least 352",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused_with_the_numbers(what: str) -> None:
    changed, message = REFUSED[what]
    with pytest.raises(ConfigurationError, match=message):
        attach(**changed)


def test_the_control_attaches() -> None:
    attach()


def test_a_grid_of_too_many_objects_a_page_is_refused() -> None:
    """A writer that could look at only some of its own objects would store only some of a page."""
    pool = tiny(8, 80, 1, "int8").pool(1)
    with pytest.raises(ConfigurationError, match="tp0pp0 into 640 objects, at most 512"):
        attach(pool, namespace=namespace_of(pool), grid=FixedGrid(1, 1))


def test_a_stage_without_layers_of_a_pool_is_refused() -> None:
    pool = Pool("window", 2, 2, (KVPart("k", 2),), POOL.dtype, 2, layer_ids=(0, 1))
    arrays = EnginePool(pool, pool.page_box)
    with pytest.raises(
        TopologyError, match=r"rank tp0pp1 holds no layer of pool window \(2 layers over 2 stages\)"
    ):
        Store.attach(
            Place().open(),
            NS,
            [PoolBuffers(pool, arrays.layout(), arrays.buffers())],
            ParallelSpec(1, 2),
            Rank(pp=1),
            model_layers=4,
        )


MISUSES = {
    "a hash too short": (["ab"], None, "is not a page hash of 64 lower-case hex digits"),
    "upper case": (["A" * 64], None, "is not a page hash"),
    "a path": (["../" + "a" * 61], None, "is not a page hash"),
    "a hash too long": (["a" * 64 + "\n"], None, "is not a page hash"),
    "a slot outside": (None, [(Segment(3, 0, 2),)], "slot 3"),
    "a negative slot": (None, [(Segment(-1, 0, 2),)], "slot -1"),
    "tokens outside": (None, [(Segment(0, 1, 2),)], "tokens 1..3 of slot 0 are outside"),
    "too few tokens": (None, [(Segment(0, 0, 1),)], "a placement of 1 tokens does not hold a page of 2"),
    "nothing": (None, [()], "a placement of 0 tokens does not hold a page of 2"),
    "one token twice": (None, [(Segment(0, 0, 1), Segment(0, 0, 1))], "twice|overlap|same"),
}


@pytest.mark.parametrize("what", MISUSES)
@pytest.mark.parametrize("operation", ["backup", "restore", "submit_backup", "submit_restore"])
def test_misuse_raises_before_anything_moves(what: str, operation: str) -> None:
    hashes, placements, message = MISUSES[what]
    place = Place()
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2) as rank:
        call = getattr(rank.store, operation)
        with pytest.raises(ConfigurationError, match=message):
            call(hashes or chain(1, 2), placements or rank.placements[:1])
        assert rank.arrays.is_poison_outside([])
    assert place.objects() == {}


@pytest.mark.parametrize("bad", ["../../etc/passwd", "a" * 63, "A" * 64, "g" * 64, "", "a" * 64 + "/x"])
def test_nothing_but_a_digest_becomes_part_of_a_key(bad: str) -> None:
    with attach_rank(Place(), POOL, "tp1pp1", Rank(), pages=2) as rank:
        with pytest.raises(ConfigurationError, match="is not a page hash"):
            rank.store.contains([*chain(1, 2), bad])
        with pytest.raises(ConfigurationError, match="is not a page hash"):
            rank.store.restore(chain(1, 2), rank.placements[:1], prefix=[bad])


def test_other_misuse_raises_too() -> None:
    with attach_rank(Place(), POOL, "tp1pp1", Rank(), pages=2) as rank:
        with pytest.raises(ConfigurationError, match="2 page hashes came with 1 placements"):
            rank.store.backup(chain(2, 2), rank.placements[:1])
        for call in (rank.store.backup, rank.store.restore):
            with pytest.raises(ConfigurationError, match="pool 'draft' is not attached; attached are kv"):
                call(chain(1, 2), rank.placements[:1], pool="draft")
        with pytest.raises(ConfigurationError, match="pool 'draft' is not attached"):
            rank.store.contains(chain(1, 2), pool="draft")


@pytest.mark.parametrize("timeout_s", [math.inf, math.nan])
def test_a_call_without_an_end_is_refused(timeout_s: float) -> None:
    with attach_rank(Place(), POOL, "tp1pp1", Rank()) as rank:
        for call in (rank.backup, rank.restore, rank.store.contains):
            with pytest.raises(ConfigurationError, match="give a finite time"):
                call(chain(1, 2), timeout_s=timeout_s)


def test_read_only_buffers_can_be_backed_up_and_not_restored_into() -> None:
    place = Place()
    arrays = EnginePool(POOL, POOL.page_box)
    arrays.write_page(placement_of_slot(1, 2), page_values(POOL, 0))
    views = [buffer.toreadonly() for buffer in arrays.buffers()]
    pools = [PoolBuffers(POOL, arrays.layout(), views)]
    with Store.attach(place.open(), NS, pools, ParallelSpec(), Rank()) as store:
        assert store.backup(chain(1, 2), [placement_of_slot(1, 2)]).states == (PageState.STORED,)
        with pytest.raises(ConfigurationError, match="pool kv has read-only buffers"):
            store.restore(chain(1, 2), [placement_of_slot(1, 2)])


class CostlyConnector(ClosingConnector):
    """Says that each of its requests costs as much as some bytes."""

    def __init__(self, request_cost_bytes: int) -> None:
        super().__init__()
        self.capabilities = dataclasses.replace(
            self._inner.capabilities, request_cost_bytes=request_cost_bytes
        )


@pytest.mark.parametrize(
    ("request_cost_bytes", "tokens"),
    [(4 * 128, None), (4 * 129, 4), (4 * 256, 4), (4 * 257, 6), (1 << 20, 4096)],
)
def test_small_objects_are_warned_of_with_the_page_that_would_do(request_cost_bytes, tokens, caplog):
    pool = tiny(4, 4).pool(2)  # 4 heads x 4 layers x 2 tokens x 2 parts x 2 elements of 2 bytes
    whole = engine_layout("layer_first", pool, shard(pool, ParallelSpec(), Rank()).box, slots=1)
    given = PoolBuffers(pool, whole, buffers(whole, pool))
    assert pool.payload_bytes(whole.box) == 256
    fixed = FixedGrid(heads_per_object=2, layers_per_object=4)
    with Store.attach(
        CostlyConnector(request_cost_bytes), namespace_of(pool), [given], ParallelSpec(), Rank(), grid=fixed
    ) as store:
        assert store.metrics.get("attach.small_objects") == (tokens is not None)
    said = [record.getMessage() for record in caplog.records if "payload bytes" in record.getMessage()]
    if tokens is None:
        assert said == []
    else:
        (words,) = said
        assert "pool kv: an object of a page of 2 tokens has 128 payload bytes" in words
        assert f"use pages of {tokens} tokens or more" in words
