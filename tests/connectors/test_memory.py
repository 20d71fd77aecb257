from __future__ import annotations

import gc
import os
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_store.clock import Deadline
from hicache_store.config import parse_url
from hicache_store.connectors import memory
from hicache_store.connectors.base import BufferSource, BufferTarget, Read, Status, Touch, Write
from hicache_store.connectors.memory import MemoryConnector, MemoryTable, connect
from hicache_store.errors import ConfigurationError, HandleError
from hicache_store.limits import MEMORY_QUOTA_BYTES
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.connector_contract import ConnectorContract

SOON = Deadline.after(3_600.0)


class TestMemoryContract(ConnectorContract):
    @pytest.fixture
    def connect(self):
        table = MemoryTable()
        return lambda: MemoryConnector(table)

    @pytest.fixture
    def connect_bounded(self):
        return lambda quota_bytes: MemoryConnector(MemoryTable(quota_bytes))


class TestNamedMemoryContract(ConnectorContract):
    @pytest.fixture
    def connect(self, request):
        url = parse_url(f"memory://{request.node.name}")
        keeper = connect(url)
        yield lambda: connect(url)
        keeper.close()

    @pytest.fixture
    def connect_bounded(self):
        return lambda quota_bytes: connect(parse_url(f"memory:?quota={quota_bytes}B"))


@dataclass
class Bench:
    """A connector of 1000-byte objects under a fake clock."""

    table: MemoryTable
    clock: FakeClock
    connector: MemoryConnector

    @classmethod
    def of(cls, objects: int, ttl_s: float | None = None) -> Bench:
        clock = FakeClock()
        table = MemoryTable(objects * 1_000, ttl_s, clock)
        return cls(table, clock, MemoryConnector(table))

    def write(self, key: str, depth: int = 0, size: int = 1_000, replace: str | None = None) -> Status:
        source = BufferSource.of(bytes(size))
        return self.connector.write_from([Write(key, size, source, depth, replace)], SOON)[0].status

    def touch(self, key: str, depth: int = 0) -> Status:
        return self.connector.touch([Touch(key, depth)], SOON)[0].status

    def names(self) -> list[str]:
        return [entry.key for entry in self.connector.scan()]


def test_the_earliest_second_goes_first():
    bench = Bench.of(3)
    for key in ("a", "b", "c"):
        bench.write(key, depth=5 if key == "c" else 0)
        bench.clock.advance(1.0)
    assert bench.touch("a") is Status.OK
    assert bench.write("d") is Status.OK
    assert bench.names() == ["a", "c", "d"]
    bench.clock.advance(1.0)
    assert bench.write("e", size=2_000) is Status.OK
    assert bench.names() == ["d", "e"]


def test_within_a_second_the_deepest_goes_first():
    bench = Bench.of(4)
    for depth in (2, 0, 3, 1):
        bench.write(f"old{depth}", depth)
    bench.clock.advance(1.0)
    for step in range(1, 5):
        assert bench.write(f"new{step}", step) is Status.OK
        assert [key for key in bench.names() if key.startswith("old")] == [f"old{d}" for d in range(4 - step)]


def test_a_newcomer_that_would_go_first_is_refused_and_evicts_nothing():
    bench = Bench.of(4)
    for depth in range(4):
        assert bench.write(f"page{depth}", depth) is Status.OK
    assert bench.write("page4", 4) is Status.REFUSED
    assert bench.names() == [f"page{depth}" for depth in range(4)]
    assert bench.write("other1", 1, size=3_500) is Status.REFUSED
    assert bench.names() == [f"page{depth}" for depth in range(4)]
    assert bench.write("other1", 1, size=2_000) is Status.OK
    assert bench.names() == ["other1", "page0", "page1"]
    bench.clock.advance(1.0)
    assert bench.write("page4", 4) is Status.OK


def test_an_object_beyond_the_whole_quota_is_refused():
    bench = Bench.of(4)
    bench.write("a")
    bench.clock.advance(5.0)
    source = BufferSource.of(bytes(4_001))
    outcome = bench.connector.write_from([Write("b", 4_001, source)], SOON)[0]
    assert outcome.status is Status.REFUSED
    assert "4001 bytes exceed the whole quota of 4000" in outcome.detail
    assert bench.names() == ["a"]


def test_a_replacement_counts_what_it_frees():
    bench = Bench.of(4)
    for key in "abcd":
        bench.write(key)
    version = next(iter(bench.connector.scan("b"))).version
    assert bench.write("b", size=1_000, replace=version) is Status.OK
    assert bench.table.used_bytes == 4_000
    assert bench.names() == ["a", "b", "c", "d"]
    version = next(iter(bench.connector.scan("b"))).version
    bench.clock.advance(1.0)
    assert bench.write("b", size=2_500, replace=version) is Status.OK
    assert bench.table.used_bytes == 3_500
    assert "b" in bench.names()
    bench.connector.delete(bench.names(), SOON)
    assert bench.table.used_bytes == 0


def test_objects_leave_after_their_time_since_last_use():
    bench = Bench.of(10, ttl_s=60.0)
    for key in ("idle", "touched", "found"):
        bench.write(key)
    bench.write("meta/v1/manifest")
    bench.clock.advance(40.0)
    assert bench.touch("touched") is Status.OK
    assert bench.write("found") is Status.EXISTS
    bench.clock.step_time(-10_000.0)
    bench.clock.advance(19.9)
    assert bench.names() == ["found", "idle", "meta/v1/manifest", "touched"]
    bench.clock.advance(0.1)
    assert bench.connector.sizes(["idle", "touched", "found"], SOON) == [None, 1_000, 1_000]
    assert bench.touch("idle") is Status.ABSENT
    assert bench.write("idle") is Status.OK
    bench.clock.advance(60.0)
    target = BufferTarget.whole(bytearray(1_000))
    assert bench.connector.read_into([Read("touched", 1_000, target)], SOON)[0].status is Status.ABSENT
    assert bench.connector.delete(["found"], SOON)[0].status is Status.ABSENT
    assert bench.names() == ["meta/v1/manifest"]
    assert bench.table.used_bytes == 0


def test_expired_objects_make_room_before_live_ones():
    bench = Bench.of(3, ttl_s=60.0)
    for key in ("a", "b"):
        bench.write(key)
    bench.clock.advance(30.0)
    bench.write("c")
    bench.clock.advance(30.0)
    assert bench.write("d", size=2_000) is Status.OK
    assert bench.names() == ["c", "d"]


def test_writing_sweeps_what_has_expired_though_there_is_room():
    bench = Bench.of(100, ttl_s=60.0)
    for index in range(50):
        bench.write(f"old{index}")
    bench.clock.advance(60.0)
    bench.write("new")
    assert bench.table.used_bytes == 1_000


def test_metadata_stays_outside_the_quota(monkeypatch):
    monkeypatch.setattr(memory, "MEMORY_META_BYTES", 5_000)
    bench = Bench.of(2)
    for index in range(5):
        assert bench.write(f"meta/v1/{index}") is Status.OK
    for index in range(4):
        bench.clock.advance(1.0)
        assert bench.write(f"v1/{index}") is Status.OK
    assert bench.names() == [*(f"meta/v1/{index}" for index in range(5)), "v1/2", "v1/3"]
    assert bench.write("meta/v1/5") is Status.REFUSED
    version = next(iter(bench.connector.scan("meta/v1/0"))).version
    assert bench.write("meta/v1/0", size=1_000, replace=version) is Status.OK
    assert bench.connector.delete(["meta/v1/1"], SOON)[0].status is Status.OK
    assert bench.write("meta/v1/5") is Status.OK


def test_touching_for_ever_does_not_grow_memory():
    bench = Bench.of(10)
    for index in range(10):
        bench.write(f"k{index}")
    for turn in range(5_000):
        bench.touch(f"k{turn % 10}")
        bench.touch("meta/absent")
    assert len(bench.table._order) <= 2 * 10 + 64 + 1


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 12), st.integers(0, 4), st.integers(1, 4)),
        st.tuples(st.just("touch"), st.integers(0, 12), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("delete"), st.integers(0, 12), st.just(0), st.just(0)),
        st.tuples(st.just("pass"), st.integers(1, 3), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_eviction_agrees_with_a_sorted_list(steps):
    """The heap against the rule written down plainly: sort, drop from the front, refuse the first."""
    bench = Bench.of(8)
    model: dict[str, tuple[int, int, int, int]] = {}  # key -> second, -depth, order of use, size
    second = 0
    for order, (what, number, depth, size) in enumerate(steps):
        key = f"k{number}"
        if what == "pass":
            second += number
            bench.clock.advance(float(number))
        elif what == "delete":
            model.pop(key, None)
            bench.connector.delete([key], SOON)
        elif what == "touch":
            if key in model:
                model[key] = (second, -depth, order, model[key][3])
            bench.touch(key, depth)
        else:
            status = bench.write(key, depth, size * 1_000)
            if key in model:
                is_equal = model[key][3] == size
                assert status is (Status.EXISTS if is_equal else Status.CONFLICT)
                if is_equal:
                    model[key] = (second, -depth, order, size)
                continue
            after = dict(model)
            queue = sorted(after, key=lambda name: after[name][:3])
            while sum(one[3] for one in after.values()) + size > 8 and after[queue[0]][:2] <= (
                second,
                -depth,
            ):
                del after[queue.pop(0)]
            fits = sum(one[3] for one in after.values()) + size <= 8
            assert status is (Status.OK if fits else Status.REFUSED)
            if fits:
                model = {**after, key: (second, -depth, order, size)}
        assert bench.names() == sorted(model)
        assert bench.table.used_bytes == 1_000 * sum(one[3] for one in model.values())


def test_handles_of_one_name_share_until_the_last_closes():
    first, second = connect(parse_url("memory://shared")), connect(parse_url("memory://shared"))
    other, private = connect(parse_url("memory://other")), connect(parse_url("memory:"))
    first.write_from([Write("k", 3, BufferSource.of(b"abc"))], SOON)
    assert second.sizes(["k"], SOON) == [3]
    assert other.sizes(["k"], SOON) == private.sizes(["k"], SOON) == [None]
    assert connect(parse_url("memory:")).sizes(["k"], SOON) == [None]
    first.close()
    assert second.sizes(["k"], SOON) == [3]
    second.close()
    gc.collect()
    assert connect(parse_url("memory://shared")).sizes(["k"], SOON) == [None]


def test_options_of_a_named_place_belong_to_its_first_handle():
    first = connect(parse_url("memory://options?quota=2MiB&ttl=1h"))
    connect(parse_url("memory://options"))
    connect(parse_url("memory://options?quota=2097152B&ttl=60m"))
    with pytest.raises(ConfigurationError, match="open with quota=2097152, not 3000000"):
        connect(parse_url("memory://options?quota=3MB"))
    with pytest.raises(ConfigurationError, match=r"open with ttl=3600\.0, not 5\.0"):
        connect(parse_url("memory://options?ttl=5s"))
    assert first.write_from([Write("k", 3, BufferSource.of(b"abc"))], SOON)[0].is_ok


@pytest.mark.parametrize("query", ["quota=0", "quota=-1", "quota=lots", "ttl=0.5", "ttl=soon", "size=1MiB"])
def test_options_that_are_not_right_are_refused(query):
    with pytest.raises(ConfigurationError):
        connect(parse_url(f"memory://x?{query}"))


def test_the_quota_is_bounded_by_default():
    connector = connect(parse_url("memory:"))
    size = MEMORY_QUOTA_BYTES + 1
    outcome = connector.write_from([Write("k", size, BufferSource([]))], SOON)[0]
    assert outcome.status is Status.REFUSED


def test_a_forked_child_has_places_of_its_own():
    """A copy of a shared place that no longer follows it must not pass for it."""
    parent = connect(parse_url("memory://forked"))
    parent.write_from([Write("k", 3, BufferSource.of(b"abc"))], SOON)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(HandleError):
                parent.sizes(["k"], SOON)
            code = 0 if connect(parse_url("memory://forked")).sizes(["k"], SOON) == [None] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert parent.sizes(["k"], SOON) == [3]
