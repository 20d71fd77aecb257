from __future__ import annotations

import threading
from collections import Counter

import pytest

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Read, Status, Touch, Write
from hicache_store.connectors.memory import MemoryConnector
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.faults import (
    Attempt,
    CountingConnector,
    Fail,
    FaultyConnector,
    FlipBit,
    Hold,
    OverwritingConnector,
    ReadRecord,
    ServeOther,
    TimeOut,
    Truncate,
    Vanish,
    first_of,
    on_calls,
    on_keys,
    seeded,
)
from hicache_store.testing.probes import ProbeSource, ProbeTarget, content, raising, read_of, write_of

SIZE = 1_000
KEYS = [f"v1/{index}" for index in range(4)]
BAD = KEYS[1]


def soon() -> Deadline:
    return Deadline.after(60.0)


def only(fault, *operations, times=None):
    return on_keys(lambda key: key == BAD, fault, operations or ("read",), times)


@pytest.fixture
def inner():
    return MemoryConnector()


def filled(inner, plan) -> FaultyConnector:
    inner.write_from([write_of(key, content(key, SIZE)) for key in KEYS], soon())
    return FaultyConnector(inner, plan)


def read_all(connector, keys=KEYS, deadline=None):
    pairs = [read_of(key, SIZE, 3) for key in keys]
    outcomes = connector.read_into([read for read, _ in pairs], deadline or soon())
    return [outcome.status for outcome in outcomes], [target for _, target in pairs]


def write_all(connector, keys=KEYS):
    writes = [write_of(key, content(key, SIZE)) for key in keys]
    return [outcome.status for outcome in connector.write_from(writes, soon())], writes


def assert_neighbours_fine(statuses, targets):
    for index in (0, 2, 3):
        assert statuses[index] is Status.OK
        assert targets[index].delivered() == content(KEYS[index], SIZE)


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Vanish(), Status.ABSENT),
        (TimeOut(), Status.TIMED_OUT),
        (Truncate(SIZE - 1), Status.WRONG_SIZE),
        (Truncate(0), Status.WRONG_SIZE),
        (ServeOther("v1/nowhere"), Status.ABSENT),
    ],
)
def test_reads_that_touch_nothing(inner, fault, status):
    statuses, targets = read_all(filled(inner, only(fault)))
    assert statuses[1] is status
    assert targets[1].events == []
    assert targets[1].is_untouched
    assert_neighbours_fine(statuses, targets)


def test_a_failing_read_stops_after_a_share(inner):
    statuses, targets = read_all(filled(inner, only(Fail(share=0.4))))
    assert statuses[1] is Status.FAILED
    assert targets[1].events == ["parts", "release"]
    delivered, wanted = targets[1].delivered(), content(BAD, SIZE)
    assert delivered[:400] == wanted[:400]
    assert set(delivered[400:]) == {0xCD}
    assert targets[1].guards_hold
    assert_neighbours_fine(statuses, targets)


def test_a_flipped_bit_is_there_when_the_check_runs(inner):
    connector = filled(inner, only(FlipBit(8 * 700 + 3)))
    statuses, targets = read_all(connector)
    wanted = bytearray(content(BAD, SIZE))
    wanted[700] ^= 8
    assert statuses[1] is Status.OK
    assert targets[1].delivered() == targets[1].at_check == bytes(wanted)
    assert_neighbours_fine(statuses, targets)
    elsewhere = ProbeTarget([(0, [700]), (701, [299])])
    across = ProbeTarget([(600, [99, 0, 2, 10])])
    connector.read_into([Read(BAD, SIZE, elsewhere), Read(BAD, SIZE, across)], soon())
    assert elsewhere.delivered() == elsewhere.wanted(content(BAD, SIZE))
    assert across.delivered() == across.wanted(bytes(wanted))
    assert inner.sizes([BAD], soon()) == [SIZE]
    assert read_all(inner)[1][1].delivered() == content(BAD, SIZE)


def test_another_objects_bytes_are_served(inner):
    statuses, targets = read_all(filled(inner, only(ServeOther(KEYS[3]))))
    assert statuses[1] is Status.OK
    assert targets[1].delivered() == content(KEYS[3], SIZE)


def test_sizes_follow_the_faults(inner):
    for fault, size in ((Vanish(), None), (Fail(), None), (TimeOut(), None), (Truncate(7), 7)):
        connector = filled(inner, only(fault, "sizes"))
        assert connector.sizes([*KEYS, "v1/absent"], soon()) == [SIZE, size, SIZE, SIZE, None]
    assert filled(inner, only(FlipBit(1), "sizes")).sizes(KEYS, soon()) == [SIZE] * 4


def test_a_failing_write_takes_bytes_and_leaves_nothing(inner):
    connector = FaultyConnector(inner, only(Fail(), "write", times=1))
    statuses, writes = write_all(connector)
    assert statuses == [Status.OK, Status.FAILED, Status.OK, Status.OK]
    assert writes[1].source.events == ["buffers", "release"]
    assert inner.sizes(KEYS, soon()) == [SIZE, None, SIZE, SIZE]
    assert write_all(connector)[0] == [Status.EXISTS, Status.OK, Status.EXISTS, Status.EXISTS]
    assert connector.injected == {"Fail": 1}


def test_a_lost_write_is_acknowledged(inner):
    statuses, writes = write_all(FaultyConnector(inner, only(Vanish(), "write")))
    assert statuses == [Status.OK] * 4
    assert writes[1].source.events == []
    assert inner.sizes(KEYS, soon()) == [SIZE, None, SIZE, SIZE]


@pytest.mark.parametrize("lands", [False, True])
def test_a_write_that_times_out_may_land(inner, lands):
    statuses, _ = write_all(FaultyConnector(inner, only(TimeOut(lands), "write")))
    assert statuses[1] is Status.TIMED_OUT
    assert inner.sizes(KEYS, soon()) == [SIZE, SIZE if lands else None, SIZE, SIZE]


def test_a_write_may_store_wrong_bytes(inner):
    wrong = bytearray(content(BAD, SIZE))
    wrong[12] ^= 1
    statuses, writes = write_all(FaultyConnector(inner, only(FlipBit(96), "write")))
    assert statuses == [Status.OK] * 4
    assert writes[1].source.events == ["buffers", "release"]
    assert read_all(inner)[1][1].delivered() == bytes(wrong)
    inner.delete([BAD], soon())
    assert write_all(FaultyConnector(inner, only(Truncate(600), "write")))[0][1] is Status.OK
    assert inner.sizes([BAD], soon()) == [600]


def test_a_source_that_raises_fails_its_item_under_every_fault(inner):
    for fault in (Fail(), FlipBit(3), Truncate(4)):
        source = ProbeSource.of(content(BAD, SIZE))
        source.on_buffers = raising(RuntimeError("gone"))
        connector = FaultyConnector(inner, only(fault, "write"))
        assert connector.write_from([Write(BAD, SIZE, source)], soon())[0].status is Status.FAILED
        assert source.events == ["buffers", "release"]
    overwriting = OverwritingConnector(inner)
    source = ProbeSource.of(b"")
    source.on_buffers = raising(RuntimeError("gone"))
    assert overwriting.write_from([Write(BAD, SIZE, source)], soon())[0].status is Status.FAILED


def test_deletes_and_touches_fail_by_item(inner):
    for fault, status, is_there in (
        (Fail(), Status.FAILED, True),
        (TimeOut(), Status.TIMED_OUT, True),
        (Vanish(), Status.OK, True),
        (TimeOut(lands=True), Status.TIMED_OUT, False),
        (FlipBit(1), Status.OK, False),
    ):
        connector = filled(inner, only(fault, "delete", "touch"))
        touched = connector.touch([Touch(key) for key in KEYS], soon())
        assert [one.status for one in touched] == [Status.OK, status, Status.OK, Status.OK]
        deleted = connector.delete(KEYS, soon())
        assert [one.status for one in deleted] == [Status.OK, status, Status.OK, Status.OK]
        assert inner.sizes(KEYS, soon()) == [None, SIZE if is_there else None, None, None]


def test_a_held_item_waits_while_others_are_done(inner):
    hold = Hold(threading.Event())
    connector = filled(inner, only(hold))
    got = []
    thread = threading.Thread(target=lambda: got.append(read_all(connector)))
    thread.start()
    assert hold.entered.wait(60.0)
    assert got == []
    hold.until.set()
    thread.join(60.0)
    statuses, targets = got[0]
    assert statuses == [Status.OK] * 4
    assert targets[1].delivered() == content(BAD, SIZE)


def test_a_held_item_times_out_untouched(inner):
    statuses, targets = read_all(filled(inner, only(Hold(threading.Event()))), deadline=Deadline.after(0.05))
    assert statuses[1] is Status.TIMED_OUT
    assert targets[1].is_untouched
    assert_neighbours_fine(statuses, targets)


def test_a_hung_item_holds_the_call_past_its_deadline(inner):
    clock = FakeClock()
    hold = Hold(threading.Event(), ignores_deadline=True)
    connector = filled(inner, only(hold))
    got = []
    deadline = Deadline.after(5.0, clock)
    thread = threading.Thread(target=lambda: got.append(read_all(connector, deadline=deadline)))
    thread.start()
    assert hold.entered.wait(60.0)
    clock.advance(6.0)
    assert thread.is_alive()
    assert got == []
    hold.until.set()
    thread.join(60.0)
    statuses, targets = got[0]
    assert statuses[1] is Status.TIMED_OUT
    assert targets[1].is_untouched


def test_plans_choose_by_call_and_by_repetition(inner):
    plan = first_of(on_calls("read", {1: Vanish()}), only(TimeOut(), times=2))
    connector = filled(inner, plan)
    seen = [read_all(connector)[0][:2] for _ in range(4)]
    assert seen == [
        [Status.OK, Status.TIMED_OUT],
        [Status.ABSENT, Status.ABSENT],
        [Status.OK, Status.OK],
        [Status.OK, Status.OK],
    ]
    assert connector.injected == {"TimeOut": 1, "Vanish": 4}


def test_a_seeded_plan_depends_on_seed_key_and_repetition_only():
    rates = [("read", 0.2, Vanish()), ("read", 0.1, TimeOut()), ("write", 0.5, Fail())]
    attempts = [Attempt("read", f"k{i}", call=0, nth=i % 3) for i in range(3_000)]
    drawn = [seeded(7, rates)(attempt) for attempt in attempts]
    later = [Attempt("read", one.key, call=99, nth=one.nth) for one in attempts]
    assert drawn == [seeded(7, rates)(attempt) for attempt in later]
    assert drawn != [seeded(8, rates)(attempt) for attempt in attempts]
    counts = Counter(drawn)
    assert 450 < counts[Vanish()] < 750
    assert 200 < counts[TimeOut()] < 400
    assert Fail() not in counts
    repeated = [seeded(7, rates)(Attempt("read", one.key, 0, 3)) for one in attempts]
    assert drawn != repeated


def test_without_put_if_absent_the_last_writer_stays(inner):
    connector = OverwritingConnector(inner)
    for variant in (1, 2, 3):
        size = SIZE + (variant == 3)
        write = write_of(BAD, content(BAD, size, variant))
        assert connector.write_from([write], soon())[0].status is Status.OK
        assert inner.sizes([BAD], soon()) == [size]
    late = connector.write_from([write_of(BAD, content(BAD, SIZE))], Deadline.after(-1.0))
    assert late[0].status is Status.TIMED_OUT
    assert not connector.capabilities.create_only


def test_counting_tells_calls_items_parts_and_bytes(inner):
    connector = CountingConnector(inner)
    write_all(connector)
    connector.sizes(KEYS, soon())
    ranged = ProbeTarget([(10, [5, 5]), (500, [100])])
    absent, _ = read_of("v1/absent", SIZE)
    connector.read_into([Read(KEYS[2], SIZE, ranged), absent], soon())
    connector.touch([Touch(KEYS[0])], soon())
    connector.delete(KEYS[:3], soon())
    list(connector.scan())
    assert connector.calls == dict.fromkeys(("sizes", "read", "write", "delete", "touch", "scan"), 1)
    assert connector.items == {"sizes": 4, "read": 2, "write": 4, "delete": 3, "touch": 1, "scan": 1}
    assert connector.reads == [ReadRecord(KEYS[2], ((10, 10), (500, 100)))]
    assert (connector.parts, connector.bytes_read, connector.bytes_written) == (2, 110, 4 * SIZE)
    assert connector.statuses["read", Status.ABSENT] == connector.statuses["read", Status.OK] == 1
    connector.reset()
    assert (connector.parts, connector.bytes_written, dict(connector.digests)) == (0, 0, {})


def test_different_contents_of_one_key_are_found_out(inner):
    """Also when the second writer is told that the object exists and no byte of it is stored."""
    connector = CountingConnector(inner)
    write_all(connector)
    write_all(connector)
    connector.assert_one_content_per_key()
    assert [len(connector.digests[key]) for key in KEYS] == [2] * 4
    assert connector.bytes_written == 4 * SIZE
    differing = write_of(BAD, content(BAD, SIZE, variant=1))
    assert connector.write_from([differing], soon())[0].status is Status.EXISTS
    assert differing.source.events == ["buffers", "release"]
    with pytest.raises(AssertionError, match="1 keys were written with different contents"):
        connector.assert_one_content_per_key()


def test_looking_at_an_existing_object_never_changes_an_outcome(inner):
    connector = CountingConnector(inner)
    write_all(connector)
    source = ProbeSource.of(content(BAD, SIZE))
    source.on_buffers = raising(RuntimeError("no staging"))
    assert connector.write_from([Write(BAD, SIZE, source)], soon())[0].status is Status.EXISTS
    assert source.events == ["buffers", "release"]


def test_a_fake_clock_moves_only_by_hand():
    clock = FakeClock(10.0, 100.0)
    deadline = Deadline.after(5.0, clock)
    clock.step_time(-50.0)
    assert (clock.monotonic(), clock.time(), deadline.remaining_s()) == (10.0, 50.0, 5.0)
    clock.advance(5.0)
    assert (clock.monotonic(), clock.time(), deadline.is_past) == (15.0, 55.0, True)
    with pytest.raises(ValueError, match="go back"):
        clock.advance(-1.0)
