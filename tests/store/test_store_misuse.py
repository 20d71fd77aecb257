"""What callers get wrong costs them an error or a miss, and nobody else an object."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from store_rig import Place, attach_rank, chain, namespace_of, tiny, write_pages

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Connector, Outcome, Read
from hicache_store.errors import ConfigurationError
from hicache_store.layout.grid import Grid
from hicache_store.layout.layouts import engine_layout
from hicache_store.layout.model import Pool
from hicache_store.layout.names import marker_key
from hicache_store.layout.parallel import ParallelSpec, Rank, shard
from hicache_store.layout.plan import Segment, placement_of_slot
from hicache_store.layout.records import encode_grid, first_slot, frame
from hicache_store.limits import BAD_KEY_S, MARKER_BYTES
from hicache_store.store import EndReason, PageState, PoolBuffers, Store
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.faults import CountingConnector

POOL = tiny(4, 4).pool(2)
HASHES = chain(3, 2)


# -- places ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64])
def test_slots_in_numpy_integers_mean_what_they_say(kind: type[np.integer]) -> None:
    """Their arithmetic wraps around: a block table of int32 must not send a page to another slot."""
    place = Place()
    pool = tiny(4, 4, width=64).pool(64)
    slots = 127
    box = shard(pool, ParallelSpec(), Rank()).box
    layout = engine_layout("canonical", pool, box, slots=slots)
    memory = np.random.default_rng(5).integers(0, 256, layout.buffer_bytes(pool.unit_bytes)[0], np.uint8)
    page_bytes = len(memory) // slots
    assert page_bytes * slots > np.iinfo(np.int16).max
    given = [PoolBuffers(pool, layout, [memory])]
    source, target = 121, 126
    wanted = memory[source * page_bytes : (source + 1) * page_bytes].copy()
    with Store.attach(place.open(), namespace_of(pool), given, ParallelSpec(), Rank()) as store:
        hashes = chain(1, 64)
        stored = store.backup(hashes, [(Segment(kind(source), kind(0), kind(64)),)])
        assert stored.states == (PageState.STORED,)
        before = memory.copy()
        assert store.restore(hashes, [((kind(target), kind(0), kind(64)),)]).pages == 1
    before[target * page_bytes : (target + 1) * page_bytes] = wanted
    assert np.array_equal(memory, before)


@pytest.mark.parametrize("segment", [(0.0, 0, 2), ("0", 0, 2), (0, 0), 7, (None, 0, 2), (0, 0, 2, 1)])
def test_what_is_no_segment_is_refused(segment: object) -> None:
    with attach_rank(Place(), POOL, "tp1", Rank()) as rig:
        with pytest.raises(ConfigurationError, match="is no segment"):
            rig.store.restore(HASHES[:1], [(segment,)])
        with pytest.raises(ConfigurationError, match="is no segment"):
            rig.store.backup(HASHES[:1], [(segment,)])


@pytest.mark.parametrize(
    "placements",
    [
        [placement_of_slot(1, 2)] * 2,
        [placement_of_slot(1, 2), (Segment(0, 0, 1), Segment(1, 1, 1))],
        [(Segment(0, 0, 1), Segment(1, 1, 1)), placement_of_slot(2, 2), (Segment(3, 0, 1), Segment(0, 0, 1))],
    ],
)
def test_two_pages_in_one_place_are_refused(placements: list) -> None:
    """Both would be told to be there, and each read would find the other's bytes. To back one place up as
    two pages is legal."""
    place = Place()
    write_pages(place, POOL, "tp1", HASHES)
    with attach_rank(place, POOL, "tp1", Rank(), pages=4) as rig:
        with pytest.raises(ConfigurationError, match="is named twice"):
            rig.store.restore(HASHES[: len(placements)], placements)
        assert rig.store.backup(chain(2, 2, seed=b"x" * 32), [placement_of_slot(0, 2)] * 2).pages == 2


class ScribblingTarget:
    """A target whose memory somebody else writes between the read and its check."""

    def __init__(self, inner: object, memory: np.ndarray) -> None:
        self._inner, self._memory = inner, memory

    def parts(self) -> object:
        return self._inner.parts()

    def check(self) -> str | None:
        self._memory ^= 0xFF
        try:
            return self._inner.check()
        finally:
            self._memory ^= 0xFF

    def release(self) -> None:
        self._inner.release()


def test_a_slot_that_somebody_else_writes_costs_no_object() -> None:
    """The bytes in the slot were refused, the object is sound: it stays, and the next restore has it."""
    place = Place()
    write_pages(place, POOL, "tp1", HASHES)
    before = place.objects()
    disturbed: list[np.ndarray] = []

    def wrap(connector: Connector) -> Connector:
        read_into = connector.read_into

        def disturbing(reads: list[Read], deadline: Deadline) -> list[Outcome]:
            if not disturbed or not reads[0].key.startswith("v1/"):
                return read_into(reads, deadline)
            memory = disturbed.pop()
            return read_into(
                [read._replace(target=ScribblingTarget(read.target, memory)) for read in reads], deadline
            )

        connector.read_into = disturbing  # type: ignore[method-assign]
        return connector

    place.wrap = wrap
    form = engine_layout("canonical", POOL, shard(POOL, ParallelSpec(), Rank()).box, slots=3)
    memory = np.zeros(form.buffer_bytes(POOL.unit_bytes)[0], np.uint8)
    given = [PoolBuffers(POOL, form, [memory])]
    where = [placement_of_slot(slot, 2) for slot in range(3)]
    with Store.attach(place.open(), namespace_of(POOL), given, ParallelSpec(), Rank()) as store:
        disturbed.append(memory)
        report = store.restore(HASHES, where)
        assert (report.pages, report.end.reason) == (0, EndReason.FAILED)
        assert "slot was written meanwhile" in report.end.detail
        assert store.metrics.get("object.slot_disturbed") == 3
        assert store.metrics.get("object.corrupt") == 0
        assert place.objects() == before
        assert store.restore(HASHES, where).pages == 3


def test_buffers_that_share_memory_are_refused() -> None:
    box = shard(POOL, ParallelSpec(), Rank()).box
    layout = engine_layout("layer_first", POOL, box, slots=2, split=("kv",))
    sizes = layout.buffer_bytes(POOL.unit_bytes)
    assert len(sizes) == 2
    memory = np.zeros(sum(sizes), np.uint8)

    def attach(*buffers: np.ndarray) -> None:
        given = [PoolBuffers(POOL, layout, buffers)]
        Store.attach(Place().open(), namespace_of(POOL), given, ParallelSpec(), Rank()).close()

    attach(memory[: sizes[0]], memory[sizes[0] :])
    for other in (memory[: sizes[1]], memory[sizes[0] - 1 : sizes[0] - 1 + sizes[1]]):
        with pytest.raises(ConfigurationError, match="share"):
            attach(memory[: sizes[0]], other)


# -- identity ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed", [{"identity": "draft B"}, {"layer_ids": (1, 3, 5, 7)}, {"layer_ids": None, "identity": ""}]
)
def test_whatever_a_main_pool_is_said_to_be_is_in_its_names(changed: dict) -> None:
    given = {"layer_ids": (0, 2, 4, 6), "identity": "draft A"}

    def pool(**facts: object) -> Pool:
        return Pool("kv", 4, 4, POOL.parts, POOL.dtype, 2, **facts)

    assert pool(layer_ids=(0, 1, 2, 3)).key_name == POOL.key_name == "kv"
    place, written = Place(), pool(**given)
    write_pages(place, written, "tp1", HASHES)
    with attach_rank(place, written, "tp1", Rank(), pages=3) as rig:
        assert rig.restore(HASHES).pages == 3
    with attach_rank(place, pool(**{**given, **changed}), "tp1", Rank(), pages=3) as rig:
        assert rig.store.contains(HASHES).pages == 0
        assert rig.restore(HASHES).pages == 0


# -- what others have put there ----------------------------------------------------------------


@pytest.mark.parametrize("layers", [2**62, 999_999_937, 70_000])
def test_a_marker_of_absurd_layers_changes_nothing(layers: int) -> None:
    place = Place()
    write_pages(place, POOL, "tp1", HASHES)
    grid = Grid("kv", (0, 4), (0, layers))
    key = marker_key(namespace_of(POOL).digest, first_slot(grid))
    place.put(key, frame(key, encode_grid(grid)).ljust(MARKER_BYTES, b"\0")[:MARKER_BYTES])
    with attach_rank(place, POOL, "tp2", Rank(), pages=3) as rig:
        assert rig.restore(HASHES).pages == 3
        assert rig.store.contains(chain(2, 2, seed=b"y" * 32)).pages == 0


def test_a_reader_sees_what_somebody_else_has_put_right() -> None:
    """A handle that may not remove a bad object looks again after a while, and at once when it is read."""
    place, clock = Place(), FakeClock()
    write_pages(place, POOL, "tp1", HASHES)
    key = next(key for key in place.objects() if f"/{HASHES[1]}/" in key)
    sound = place.objects()[key]

    class ReadOnly:
        def __init__(self, inner: Connector) -> None:
            self._inner = inner

        def delete(self, keys: list[str], deadline: Deadline, versions: object = None) -> list[Outcome]:
            raise AssertionError("a reader deletes nothing")

        def __getattr__(self, name: str) -> object:
            if name == "capabilities":
                return dataclasses.replace(self._inner.capabilities, is_read_only=True)
            return getattr(self._inner, name)

    place.put(key, sound[:3] + bytes([sound[3] ^ 1]) + sound[4:])
    place.wrap = ReadOnly
    with attach_rank(place, POOL, "tp1", Rank(), pages=3, clock=clock) as rig:
        assert rig.restore(HASHES).pages == 1
        assert rig.store.contains(HASHES).pages == 1
        place.put(key, sound)
        clock.advance(BAD_KEY_S + 1)
        assert rig.store.contains(HASHES).pages == 3
        place.put(key, sound[:3] + bytes([sound[3] ^ 1]) + sound[4:])
        assert rig.restore(HASHES).pages == 1
        place.put(key, sound)
        assert rig.restore(HASHES).pages == 3
        assert rig.store.contains(HASHES).pages == 3


# -- time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [float("nan"), float("inf"), 1e10, "soon", 10**400])
def test_times_that_no_clock_takes_are_refused(given: object) -> None:
    with attach_rank(Place(), POOL, "tp1", Rank()) as rig:
        with pytest.raises(ConfigurationError, match="timeout_s"):
            rig.store.contains(HASHES, timeout_s=given)
        with pytest.raises(ConfigurationError, match="max_age_s"):
            rig.store.contains(HASHES, max_age_s=given)
        with pytest.raises(ConfigurationError, match="timeout_s"):
            rig.store.restore(HASHES[:1], rig.placements, timeout_s=given)
    with pytest.raises(ConfigurationError, match="timeout_s"):
        attach_rank(Place(), POOL, "tp1", Rank(), timeout_s=given)


@pytest.mark.parametrize("given", [0, -1, float("inf"), float("nan"), 1.5, "64MiB"])
def test_staging_is_a_number_of_bytes(given: object) -> None:
    with pytest.raises(ConfigurationError, match="staging_bytes"):
        attach_rank(Place(), POOL, "tp1", Rank(), staging_bytes=given)


def test_times_may_be_numpy_numbers() -> None:
    place = Place()
    write_pages(place, POOL, "tp1", HASHES)
    with attach_rank(place, POOL, "tp1", Rank(), pages=3, timeout_s=np.float32(20)) as rig:
        assert rig.restore(HASHES, timeout_s=np.float32(20)).pages == 3


def test_planning_ends_with_the_deadline() -> None:
    """A call whose time has run out plans nothing more, however many pages it was given."""
    place, pages = Place(), 600
    hashes = chain(pages, 2)
    watched: list[CountingConnector] = []

    def watch(connector: Connector) -> Connector:
        watched.append(CountingConnector(connector))
        return watched[-1]

    place.wrap = watch
    with attach_rank(place, POOL, "tp1", Rank(), pages=pages) as rig:
        assert rig.backup(hashes[:1]).pages == 1  # the grid's marker is there
        watched[0].reset()
        report = rig.restore(hashes, timeout_s=0.0)
        assert (report.pages, report.end.reason) == (0, EndReason.TIMED_OUT)
        assert watched[0].items["read"] == 0
        stored = rig.backup(hashes[1:], timeout_s=0.0)
        assert set(stored.states) == {PageState.TIMED_OUT}
        assert watched[0].items["write"] == 0
