"""The contract of ``read_into``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Connector, Outcome, Part, Read, Status, Write
from hicache_store.limits import MIB
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.contract_base import (
    Connect,
    ContractBase,
    assert_absent,
    assert_delivered,
    assert_holds,
    fetch,
    last_attempt,
    page_key,
    soon,
    store,
    version_of,
)
from hicache_store.testing.probes import (
    POISON,
    ProbeSource,
    ProbeTarget,
    content,
    first_difference,
    raising,
    read_of,
    write_of,
)

SIZES = (13, 64, 4_095, 4_096, 4_097, 65_537, 300_001)


@dataclass
class ViewTarget:
    """A target of one part whose views the test made itself."""

    views: Sequence[memoryview]
    events: list[str] = field(default_factory=list)

    def parts(self) -> Sequence[Part]:
        """The one part."""
        self.events.append("parts")
        return [(0, self.views)]

    def check(self) -> str | None:
        """Accept anything."""
        self.events.append("check")
        return None

    def release(self) -> None:
        """Record the call."""
        self.events.append("release")


class ReadContract(ContractBase):
    """Bytes arrive whole, in place, checked, or not at all."""

    def test_gather_lists_of_any_length_round_trip(self, connector: Connector, writer: Connector) -> None:
        """Odd sizes, odd cuts and empty views on both sides."""
        cuts = [(size, wrote, read) for size in SIZES for wrote, read in ((1, 7), (7, 1), (33, 20))]
        keys = [page_key(f"gather {cut}") for cut in cuts]
        data = [content(key, cut[0]) for key, cut in zip(keys, cuts, strict=True)]
        writes = [write_of(k, d, pieces=c[1]) for k, d, c in zip(keys, data, cuts, strict=True)]
        assert {outcome.status for outcome in writer.write_from(writes, soon())} == {Status.OK}
        assert connector.sizes(keys, soon()) == [len(one) for one in data]
        pairs = [read_of(key, cut[0], cut[2]) for key, cut in zip(keys, cuts, strict=True)]
        outcomes = connector.read_into([read for read, _ in pairs], soon())
        assert {outcome.status for outcome in outcomes} == {Status.OK}
        for (_, target), one in zip(pairs, data, strict=True):
            assert_delivered(target, one)

    def test_parts_land_where_they_belong(self, connector: Connector, writer: Connector) -> None:
        """Several ranges of one object, out of order, touching, overlapping and empty."""
        key, size = page_key("parts"), 200_003
        data = content(key, size)
        store(writer, {key: data})
        layouts: list[list[tuple[int, list[int]]]] = [
            [(0, [1])],
            [(size - 1, [1])],
            [(size, [0])],
            [(77_777, [5, 0, 100, 4_096])],
            [(150_000, [50_003]), (0, [3, 4]), (7, [0]), (4_096, [4_096])],
            [(0, [100_001]), (100_001, [100_002])],
            [(10, [1_000]), (10, [1_000]), (500, [1_000])],
            [(offset, [61]) for offset in range(0, size - 61, 3_001)],
        ]
        targets = [ProbeTarget(ranges) for ranges in layouts]
        outcomes = connector.read_into([Read(key, size, target) for target in targets], soon())
        assert {outcome.status for outcome in outcomes} == {Status.OK}
        for target in targets:
            assert_delivered(target, data)

    def test_reading_no_bytes_still_checks(self, connector: Connector, writer: Connector) -> None:
        """No parts, a part without views and a part of empty views are reads like any other."""
        key = page_key("nothing wanted")
        store(writer, {key: content(key, 100)})
        layouts: list[list[tuple[int, list[int]]]] = [[], [(0, [])], [(5, [0, 0])]]
        targets = [ProbeTarget(ranges) for ranges in layouts]
        outcomes = connector.read_into([Read(key, 100, target) for target in targets], soon())
        assert {outcome.status for outcome in outcomes} == {Status.OK}
        for target in targets:
            assert target.events == ["parts", "check", "release"]

    def test_wrong_size_delivers_nothing(self, connector: Connector, writer: Connector) -> None:
        """An object of another length than expected is told apart before any byte moves."""
        key, other = page_key("wrong size"), page_key("wrong size, neighbour")
        store(writer, {key: content(key, 5_000), other: content(other, 5_000)})
        asked = [4_999, 5_001, 12, 50_000, 5_000]
        pairs = [read_of(key, size) for size in asked] + [read_of(other, 5_000)]
        outcomes = connector.read_into([read for read, _ in pairs], soon())
        wanted = [Status.WRONG_SIZE] * 4 + [Status.OK] * 2
        assert [outcome.status for outcome in outcomes] == wanted
        for outcome, (_, target) in zip(outcomes[:4], pairs[:4], strict=True):
            assert target.events == []
            assert target.is_untouched
            assert outcome.version is not None or not connector.capabilities.conditional_versions
        assert_delivered(pairs[4][1], content(key, 5_000))
        assert_delivered(pairs[5][1], content(other, 5_000))

    def test_absent_objects_are_values(self, connector: Connector) -> None:
        """A miss raises nothing and touches nothing."""
        assert_absent(connector, [page_key(f"absent {index}") for index in range(5)])

    def test_outcomes_keep_the_order_of_the_items(self, connector: Connector, writer: Connector) -> None:
        """Present, absent and wrongly sized items, interleaved without a period."""
        cases = (Status.OK, Status.ABSENT, Status.WRONG_SIZE)
        kinds = [cases[index * index // 7 % 3] for index in range(96)]
        keys = [page_key(f"order {index}") for index in range(96)]
        lengths = [20 + index * 977 % 3_000 for index in range(96)]
        there = [i for i, kind in enumerate(kinds) if kind is not Status.ABSENT]
        store(writer, {keys[i]: content(keys[i], lengths[i]) for i in there})
        assert connector.sizes(keys, soon()) == [lengths[i] if i in there else None for i in range(96)]
        asked = [n + (kind is Status.WRONG_SIZE) for n, kind in zip(lengths, kinds, strict=True)]
        pairs = [read_of(key, size) for key, size in zip(keys, asked, strict=True)]
        outcomes = connector.read_into([read for read, _ in pairs], soon())
        assert [outcome.status for outcome in outcomes] == kinds
        for i in range(96):
            if kinds[i] is Status.OK:
                assert_delivered(pairs[i][1], content(keys[i], lengths[i]))

    def _read_around(self, connector: Connector, writer: Connector, bad: ProbeTarget) -> Outcome:
        """The outcome of ``bad`` on an object of 3000 bytes; its neighbours must fare well."""
        keys = [page_key(f"around {index}") for index in range(9)]
        objects = {key: content(key, 3_000) for key in keys}
        store(writer, objects)
        pairs = [read_of(key, 3_000) for key in keys]
        reads = [read for read, _ in pairs]
        reads[3] = Read(keys[3], 3_000, bad)
        outcomes = connector.read_into(reads, soon())
        assert len(outcomes) == 9
        for index in (0, 1, 2, 4, 5, 6, 7, 8):
            assert outcomes[index].status is Status.OK, outcomes[index]
            assert_delivered(pairs[index][1], objects[keys[index]])
        bad.events = last_attempt(bad, self.attempts_max)
        assert bad.events.count("parts") == bad.events.count("release") == 1
        assert bad.events[-1] == "release"
        assert_holds(connector, objects)
        return outcomes[3]

    def test_parts_that_raise_fail_one_item(self, connector: Connector, writer: Connector) -> None:
        """The target that cannot say where its bytes go is released and not checked."""
        bad = ProbeTarget.whole(3_000)
        bad.on_parts = raising(MemoryError("no staging left"))
        outcome = self._read_around(connector, writer, bad)
        assert outcome.status is Status.FAILED
        assert bad.events == ["parts", "release"]
        assert bad.is_untouched

    def test_check_that_raises_fails_one_item(self, connector: Connector, writer: Connector) -> None:
        """An exception of the check is that item's failure."""
        bad = ProbeTarget.whole(3_000)
        bad.on_check = raising(ZeroDivisionError("a bug in a check"))
        assert self._read_around(connector, writer, bad).status is Status.FAILED
        assert bad.events == ["parts", "check", "release"]

    def test_check_that_refuses_rejects_one_item(self, connector: Connector, writer: Connector) -> None:
        """The check's word is handed on, with the version of what was refused."""
        bad = ProbeTarget.whole(3_000)
        bad.refusal = "sum 0 of 12 differs"
        outcome = self._read_around(connector, writer, bad)
        assert outcome.status is Status.REJECTED
        assert "sum 0 of 12 differs" in outcome.detail
        assert outcome.version is not None or not connector.capabilities.conditional_versions
        assert bad.events == ["parts", "check", "release"]

    def test_release_that_raises_harms_no_other(self, connector: Connector, writer: Connector) -> None:
        """Even giving back may fail; nobody else notices."""
        bad = ProbeTarget.whole(3_000)
        bad.on_release = raising(KeyError("released twice"))
        self._read_around(connector, writer, bad)
        assert bad.events == ["parts", "check", "release"]

    def test_read_only_views_fail_one_item(self, connector: Connector, writer: Connector) -> None:
        """A target that cannot be written to is never reported as filled."""
        bad = ProbeTarget.whole(3_000)
        bad.read_only = True
        assert self._read_around(connector, writer, bad).status is Status.FAILED
        assert bad.events == ["parts", "release"]
        assert bad.is_untouched

    def test_parts_beyond_the_object_fail_one_item(self, connector: Connector, writer: Connector) -> None:
        """A range that the object does not have is a failure, not a short read."""
        for ranges in ([(2_990, [11])], [(-1, [5])], [(0, [10]), (3_000, [1])], [(0, [1_500, 1_501])]):
            bad = ProbeTarget(ranges)
            assert self._read_around(connector, writer, bad).status is Status.FAILED
            assert "check" not in bad.events
            assert bad.guards_hold
            cleared = writer.delete([page_key(f"around {index}") for index in range(9)], soon())
            assert {outcome.status for outcome in cleared} == {Status.OK}

    def test_an_object_that_changes_under_a_read(self, connector: Connector, connect_writer: Connect) -> None:
        """Replaced or deleted after the read began: old bytes, new bytes or a miss, never a mixture."""
        other, size = connect_writer(), 3 * MIB + 1
        for is_deleted in (False, True):
            key = page_key(f"changes under a read {is_deleted}")
            old, new = content(key, size, 1), content(key, size, 2)
            store(other, {key: old})
            version = version_of(connector, key, size)
            repair = write_of(key, new, replace=version or "no versions here")
            target = ProbeTarget([(2 * MIB, [MIB, 1]), (0, [2 * MIB])])
            if is_deleted:
                target.on_parts = partial(other.delete, [key], soon())
            else:
                target.on_parts = partial(other.write_from, [repair], soon())
            outcome = connector.read_into([Read(key, size, target)], soon())[0]
            if outcome.status is Status.OK:
                assert target.delivered() in (target.wanted(old), target.wanted(new))
            else:
                assert outcome.status in (Status.ABSENT, Status.FAILED, Status.CONFLICT)
                assert "check" not in target.events
            assert target.events.count("parts") == target.events.count("release") == 1
        other.close()

    def test_one_key_into_two_targets(self, connector: Connector, writer: Connector) -> None:
        """The same object twice in a batch, whole and in part."""
        key = page_key("twice")
        data = content(key, 70_001)
        store(writer, {key: data})
        targets = [ProbeTarget.whole(70_001), ProbeTarget([(500, [9_000])]), ProbeTarget.whole(70_001, 5)]
        outcomes = connector.read_into([Read(key, 70_001, target) for target in targets], soon())
        assert [outcome.status for outcome in outcomes] == [Status.OK] * 3
        for target in targets:
            assert_delivered(target, data)
        assert connector.sizes([key, key], soon()) == [70_001, 70_001]

    def test_large_objects_round_trip(self, connector: Connector, writer: Connector) -> None:
        """17 MiB and three bytes: more than any piece, part or buffer of a connector."""
        key, size = page_key("large"), 17 * MIB + 3
        data = content(key, size)
        outcomes = writer.write_from([write_of(key, data, pieces=4)], soon())
        assert outcomes[0].status is Status.OK, outcomes
        targets = [ProbeTarget.whole(size, 3), ProbeTarget([(9 * MIB - 1, [MIB, 3]), (5, [2 * MIB + 1])])]
        outcomes = connector.read_into([Read(key, size, target) for target in targets], soon())
        assert [outcome.status for outcome in outcomes] == [Status.OK] * 2
        for target in targets:
            assert_delivered(target, data)

    def test_views_of_any_format(self, connector: Connector, writer: Connector) -> None:
        """Typed and many-dimensional contiguous views, empty ones among them, are plain bytes."""
        for dtype in ("u1", "<f4", "<u2", ">u4", "V16", "?"):
            key = page_key(f"format {dtype}")
            data = content(key, 4_096)
            source = np.frombuffer(data, np.uint8).view(dtype).reshape(4, 2, -1)
            empty = np.zeros((0, 4), dtype).data
            views = ProbeSource([source[:1].data, empty, source[1:].data])
            assert writer.write_from([Write(key, 4_096, views)], soon())[0].status is Status.OK
            landed = np.full(4_096, POISON, np.uint8).view(dtype).reshape(source.shape)
            target = ViewTarget([landed[:3].data, empty, landed[3:].data])
            assert connector.read_into([Read(key, 4_096, target)], soon())[0].status is Status.OK
            assert first_difference(landed.tobytes(), data) is None, dtype

    def test_views_that_are_not_contiguous(self, connector: Connector, writer: Connector) -> None:
        """They are filled in place or refused; never filled in a copy and called done."""
        key = page_key("strided target")
        data = content(key, 512)
        store(writer, {key: data})
        wide = np.full((32, 48), POISON, np.uint8)
        strided = [wide[:, :16], wide[::2, :32], wide.T[:16, :32], wide.reshape(-1)[1::2][:512]]
        for view in strided:
            wide[:] = POISON
            target = ViewTarget([view.data])
            outcome = connector.read_into([Read(key, 512, target)], soon())[0]
            if outcome.is_ok:
                assert view.tobytes() == data
                view[:] = POISON
            else:
                assert outcome.status is Status.FAILED
                assert "check" not in target.events
            assert (wide == POISON).all(), "bytes landed beside the view, or in one that was refused"

    def test_past_deadline_reads_nothing(self, connector: Connector, writer: Connector) -> None:
        """No time left: every item times out and no target is touched."""
        keys = [page_key(f"late read {index}") for index in range(20)]
        store(writer, {key: content(key, 2_000) for key in keys})
        pairs = [read_of(key, 2_000) for key in keys]
        outcomes = connector.read_into([read for read, _ in pairs], Deadline.after(-1.0))
        assert [outcome.status for outcome in outcomes] == [Status.TIMED_OUT] * 20
        assert all(target.is_untouched and "check" not in target.events for _, target in pairs)
        assert all(t.events.count("parts") == t.events.count("release") for _, t in pairs)
        assert connector.sizes(keys, Deadline.after(-1.0)) == [None] * 20
        assert fetch(connector, keys[0], 2_000)[0].status is Status.OK

    def test_deadline_that_passes_midway(self, connector: Connector, writer: Connector) -> None:
        """Items are done or timed out, and nothing lands once the call has returned."""
        count = 8 + 4 * connector.capabilities.concurrency
        keys = [page_key(f"midway {index}") for index in range(count)]
        store(writer, {key: content(key, 2_000) for key in keys})
        clock = FakeClock()
        pairs = [read_of(key, 2_000) for key in keys]
        for _, target in pairs:
            target.on_parts = lambda: clock.advance(20.0)
        outcomes = connector.read_into([read for read, _ in pairs], Deadline.after(10.0, clock))
        assert {outcome.status for outcome in outcomes} <= {Status.OK, Status.TIMED_OUT}
        assert Status.TIMED_OUT in {outcome.status for outcome in outcomes}
        for key, outcome, (_, target) in zip(keys, outcomes, pairs, strict=True):
            assert target.events.count("parts") == target.events.count("release") <= 1
            if outcome.status is Status.OK:
                assert_delivered(target, content(key, 2_000))
            target.memory[:] = b"\xee" * len(target.memory)
        connector.close()
        assert all(target.memory.count(0xEE) == len(target.memory) for _, target in pairs)
