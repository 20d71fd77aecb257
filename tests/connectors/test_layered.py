"""Two layers: where bytes come from, what is dropped, who fetches, what survives which failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from urllib.parse import quote

import pytest

from hicache_store.clock import Deadline
from hicache_store.connectors.base import OK, Outcome, Read, Status, Write
from hicache_store.connectors.layered import LayeredConnector
from hicache_store.connectors.memory import MemoryConnector
from hicache_store.connectors.registry import open_connector
from hicache_store.errors import ConfigurationError, HandleError
from hicache_store.testing.contract_base import (
    PATIENCE_S,
    assert_delivered,
    assert_holds,
    digest,
    fetch,
    page_key,
    run_together,
    soon,
    store,
)
from hicache_store.testing.faults import Fail, FaultyConnector, FlipBit, Hold, TimeOut, on_keys
from hicache_store.testing.probes import ProbeTarget, content, read_of, write_of

SIZE = 5_000


def anything(key: str) -> bool:
    return True


class Place:
    """Two faulty layers in memory and what is before them."""

    def __init__(self, **options) -> None:
        self.fast_objects, self.slow_objects = MemoryConnector(), MemoryConnector()
        self.fast, self.slow = FaultyConnector(self.fast_objects), FaultyConnector(self.slow_objects)
        self.layered = LayeredConnector(self.fast, self.slow, **options)

    def count(self, name: str) -> int:
        return self.layered.metrics.get(f"layered.{name}")

    def flush(self) -> None:
        assert self.layered.flush(soon())

    def put(self, label: str) -> str:
        """An object that only the slow layer has."""
        key = page_key(label)
        store(self.slow_objects, {key: content(key, SIZE)})
        return key


@pytest.fixture
def make():
    places: list[Place] = []

    def build(**options) -> Place:
        places.append(Place(**options))
        return places[-1]

    yield build
    for place in places:
        place.layered.close()


@pytest.fixture
def place(make: Callable[..., Place]) -> Place:
    return make()


def checked_target(key: str) -> ProbeTarget:
    """A target whose check compares with the real content, as the sums of an object do."""
    target = ProbeTarget.whole(SIZE)

    def judge() -> None:
        target.refusal = None if target.at_check == content(key, SIZE) else "a sum differs"

    target.on_check = judge
    return target


# -- reads ---------------------------------------------------------------------------------


def test_what_was_read_from_the_slow_layer_is_then_in_the_fast_one(place: Place) -> None:
    key = place.put("fill")
    assert_holds(place.layered, {key: content(key, SIZE)})
    place.flush()
    assert_holds(place.fast_objects, {key: content(key, SIZE)})
    place.slow.plan = on_keys(anything, Fail(), ("read", "sizes"))
    assert_holds(place.layered, {key: content(key, SIZE)})
    assert (place.count("read_from_slow"), place.count("read_from_fast")) == (1, 1)


def test_a_fast_copy_that_fails_its_check_is_dropped_and_the_slow_one_read_in_the_same_call(
    place: Place,
) -> None:
    key, good = place.put("bad copy"), place.put("good copy")
    body = bytearray(content(key, SIZE))
    body[77] ^= 1
    store(place.fast_objects, {key: bytes(body), good: content(good, SIZE)})
    targets = [checked_target(key), checked_target(good)]
    reads = [Read(name, SIZE, target) for name, target in zip((key, good), targets, strict=True)]
    assert [one.status for one in place.layered.read_into(reads, soon())] == [Status.OK] * 2
    assert targets[0].events == ["parts", "check", "release"] * 2
    assert targets[0].delivered() == content(key, SIZE)
    assert targets[1].events == ["parts", "check", "release"]
    assert place.count("fast_bad") == 1
    place.flush()
    assert_holds(place.fast_objects, {key: content(key, SIZE), good: content(good, SIZE)})


def test_d07_a_fast_copy_that_was_cut_is_replaced(place: Place) -> None:
    """A zero-length or short copy, as a full disk leaves it, costs a read and nothing more."""
    key = place.put("cut copy")
    store(place.fast_objects, {key: content(key, 50)})
    assert fetch(place.layered, key, SIZE)[0].status is Status.OK
    place.flush()
    assert_holds(place.fast_objects, {key: content(key, SIZE)})


def test_when_both_copies_are_bad_the_slow_version_is_told(place: Place) -> None:
    """What the caller then replaces or removes is the object, not its copy."""
    key = page_key("both bad")
    store(place.fast_objects, {key: content(key, SIZE, 5)})
    store(place.slow_objects, {page_key("other"): b"x" * 20, key: content(key, SIZE, 6)})
    outcome = place.layered.read_into([Read(key, SIZE, checked_target(key))], soon())[0]
    assert outcome.status is Status.REJECTED
    repair = write_of(key, content(key, SIZE), replace=outcome.version)
    assert place.layered.write_from([repair], soon())[0].status is Status.OK
    place.flush()
    for layer in (place.slow_objects, place.fast_objects, place.layered):
        assert_holds(layer, {key: content(key, SIZE)})


@pytest.mark.parametrize("fault", [Fail(), TimeOut(), FlipBit(900)], ids=lambda fault: type(fault).__name__)
def test_a_fast_layer_that_fails_costs_no_hit(place: Place, fault) -> None:
    key = place.put("fast fails")
    store(place.fast_objects, {key: content(key, SIZE)})
    place.fast.plan = on_keys(anything, fault, ("read", "sizes"))
    assert place.layered.sizes([key], soon()) == [SIZE]
    target = checked_target(key)
    assert place.layered.read_into([Read(key, SIZE, target)], soon())[0].status is Status.OK
    assert target.delivered() == content(key, SIZE)


def test_a_fast_layer_that_hangs_leaves_time_for_the_slow_one(place: Place) -> None:
    key = place.put("fast hangs")
    never = threading.Event()
    place.fast.plan = on_keys(anything, Hold(never), ("read", "sizes"))
    assert fetch_within(place.layered, key, 0.4).status is Status.OK
    assert place.layered.sizes([key], Deadline.after(0.4)) == [SIZE]


def fetch_within(layered: LayeredConnector, key: str, seconds: float) -> Outcome:
    return layered.read_into([read_of(key, SIZE)[0]], Deadline.after(seconds))[0]


def test_readers_of_one_key_fetch_it_once(place: Place) -> None:
    """A prefix that eight requests share at once is one fetch; the others get its bytes."""
    key = place.put("shared prefix")
    hold = Hold(threading.Event())
    place.slow.plan = on_keys(anything, hold, ("read",))
    targets = [checked_target(key) for _ in range(8)]
    done: list[Status] = []

    def first() -> None:
        done.append(place.layered.read_into([Read(key, SIZE, targets[0])], soon())[0].status)

    def later(index: int) -> Callable[[], None]:
        def run() -> None:
            assert hold.entered.wait(PATIENCE_S)
            done.append(place.layered.read_into([Read(key, SIZE, targets[index])], soon())[0].status)

        return run

    def release() -> None:
        assert hold.entered.wait(PATIENCE_S)
        assert fetch_within(place.layered, key, 0.05).status is Status.TIMED_OUT, "who waits has a deadline"
        hold.until.set()

    run_together(first, *[later(index) for index in range(1, 8)], release)
    assert done == [Status.OK] * 8
    assert all(target.delivered() == content(key, SIZE) for target in targets)
    assert place.slow.injected["Hold"] == 1
    assert place.count("read_from_slow") == 1


def test_when_the_first_fails_the_others_fetch_for_themselves(place: Place) -> None:
    key = place.put("first fails")
    bad = ProbeTarget.whole(SIZE)
    bad.refusal = "no"
    hold = Hold(threading.Event())
    place.slow.plan = on_keys(anything, hold, ("read",), times=1)
    second = checked_target(key)

    def other() -> None:
        assert hold.entered.wait(PATIENCE_S)
        threading.Timer(0.05, hold.until.set).start()
        assert place.layered.read_into([Read(key, SIZE, second)], soon())[0].status is Status.OK

    run_together(lambda: place.layered.read_into([Read(key, SIZE, bad)], soon()) and None, other)
    assert bad.events == ["parts", "check", "release"]
    assert second.delivered() == content(key, SIZE)


def test_a_part_of_an_object_fills_nothing_unless_it_is_asked_for(make: Callable[..., Place]) -> None:
    for fill, copies in (("seen", 0), ("whole", 1), ("none", 0)):
        place = make(fill=fill)
        key = place.put("part")
        target = ProbeTarget([(1_000, [500, 7])])
        read = Read(key, SIZE, target, ((1_000, 1_507),))
        assert place.layered.read_into([read], soon())[0].status is Status.OK
        assert_delivered(target, content(key, SIZE))
        narrow = ProbeTarget([(10, [5])])  # it says nothing of ranges and asks for a part all the same
        assert place.layered.read_into([Read(key, SIZE, narrow)], soon())[0].status is Status.OK
        place.flush()
        assert len(list(place.fast_objects.scan())) == copies, fill


def test_a_full_queue_drops_fills_and_blocks_no_read(make: Callable[..., Place]) -> None:
    """The fast layer takes nothing for now: reads go on, memory stays bounded, drops are counted."""
    place = make(queue_bytes=3 * SIZE)
    hold = Hold(threading.Event(), ignores_deadline=True)
    place.fast.plan = on_keys(anything, hold, ("write",))
    keys = [place.put(f"flood {index}") for index in range(20)]
    for key in keys:
        assert fetch(place.layered, key, SIZE)[0].status is Status.OK
    assert place.count("fill_dropped.full") == 17
    hold.until.set()
    place.flush()
    assert len(list(place.fast_objects.scan())) == 3
    for key in keys:
        assert fetch(place.layered, key, SIZE)[0].status is Status.OK


def test_manifests_and_markers_never_come_from_the_fast_layer(place: Place) -> None:
    """Their content may change under a key, by another node's hand."""
    key = f"meta/v1/{digest('m')}/grid-00"
    store(place.layered, {key: b"an old marker"})
    assert fetch(place.layered, key, 13)[1].delivered() == b"an old marker"
    place.flush()
    assert list(place.fast_objects.scan()) == []
    assert place.slow_objects.delete([key], soon()) == [OK]
    assert place.layered.sizes([key], soon()) == [None]
    assert fetch(place.layered, key, 13)[0].status is Status.ABSENT


# -- writes and removals -------------------------------------------------------------------


def test_the_slow_layer_decides_what_a_write_became(place: Place) -> None:
    keys = [page_key(f"decides {index}") for index in range(3)]
    place.slow.plan = on_keys(lambda key: key == keys[1], Fail("out of space"), ("write",))
    place.fast.plan = on_keys(lambda key: key == keys[2], Fail("the cache broke"), ("write",))
    outcomes = place.layered.write_from([write_of(key, content(key, SIZE)) for key in keys], soon())
    assert [one.status for one in outcomes] == [Status.OK, Status.FAILED, Status.OK]
    place.flush()
    assert [entry.key for entry in place.fast_objects.scan()] == [keys[0]]
    assert place.count("fill_dropped.failed") == 1
    assert place.layered.sizes([keys[1]], soon()) == [None]


def test_what_is_removed_does_not_come_back(place: Place) -> None:
    """Not from the fast layer, not from a copy that waits, is being written or is being fetched."""
    key = place.put("zombie")
    hold = Hold(threading.Event(), ignores_deadline=True)
    place.fast.plan = on_keys(anything, hold, ("write",), times=1)
    assert fetch(place.layered, key, SIZE)[0].status is Status.OK
    assert hold.entered.wait(PATIENCE_S)
    assert place.layered.delete([key], soon())[0].status is Status.OK
    assert place.layered.sizes([key], soon()) == [None], "the copy in hand is no answer any more"
    hold.until.set()
    place.flush()
    assert list(place.fast_objects.scan()) == []

    fetched = place.put("fetched meanwhile")
    read, target = read_of(fetched, SIZE)
    target.on_parts = lambda: place.layered.delete([fetched], soon())
    assert place.layered.read_into([read], soon())[0].status is Status.OK
    place.flush()
    assert place.layered.sizes([fetched], soon()) == [None]


def test_what_the_slow_layer_keeps_the_fast_one_keeps(place: Place) -> None:
    key = page_key("kept")
    store(place.layered, {key: content(key, SIZE)})
    place.flush()
    assert place.layered.delete([key], soon(), ["made up"])[0].status is Status.CONFLICT
    place.slow.plan = on_keys(anything, Fail(), ("delete",))
    assert place.layered.delete([key], soon())[0].status is Status.FAILED
    assert_holds(place.fast_objects, {key: content(key, SIZE)})


def test_a_read_only_fast_layer_is_left_as_it_is(make: Callable[..., Place]) -> None:
    place = make(mode="read-only-fast")
    key, bad = place.put("plain"), place.put("bad")
    store(place.fast_objects, {bad: content(bad, SIZE, 9)})
    target = checked_target(bad)
    assert place.layered.read_into([Read(bad, SIZE, target)], soon())[0].status is Status.OK
    assert_holds(place.layered, {key: content(key, SIZE)})
    assert place.layered.delete([bad], soon())[0].status is Status.OK
    assert_holds(place.fast_objects, {bad: content(bad, SIZE, 9)})


def test_tools_see_the_union_once(place: Place) -> None:
    shared, slow_only, fast_only = page_key("shared"), place.put("slow only"), page_key("fast only")
    store(place.layered, {shared: content(shared, SIZE)})
    place.flush()
    store(place.fast_objects, {fast_only: content(fast_only, SIZE)})
    seen = [entry.key for entry in place.layered.scan("v1/")]
    assert sorted(seen) == sorted([shared, slow_only, fast_only])
    assert place.layered.sizes([shared, slow_only], soon()) == [SIZE] * 2


# -- write-back ----------------------------------------------------------------------------


def test_written_back_objects_are_own_copies_until_the_slow_layer_has_them(
    make: Callable[..., Place],
) -> None:
    """The caller's memory is free at once; a slow layer that fails for now gets them later."""
    place = make(mode="write-back")
    place.slow.plan = on_keys(anything, TimeOut(), ("write",), times=2)
    key = page_key("back")
    buffer = bytearray(content(key, SIZE))
    write = Write(key, SIZE, write_of(key, b"").source)
    write.source.views = [memoryview(buffer)]  # type: ignore[attr-defined]
    assert place.layered.write_from([write], soon())[0].status is Status.OK
    buffer[:] = b"\xee" * SIZE
    place.fast_objects.delete([key], soon())
    assert_holds(place.layered, {key: content(key, SIZE)})
    place.flush()
    assert_holds(place.slow_objects, {key: content(key, SIZE)})


def test_d17_every_object_that_is_not_taken_is_counted_and_can_be_put_again(
    make: Callable[..., Place],
) -> None:
    """A full queue refuses; accepted and refused add up, and a refused one succeeds later."""
    place = make(mode="write-back", queue_bytes=10 * SIZE)
    hold = Hold(threading.Event(), ignores_deadline=True)
    place.slow.plan = on_keys(anything, hold, ("write",))
    keys = [page_key(f"queue {index}") for index in range(100)]
    outcomes = place.layered.write_from([write_of(key, content(key, SIZE)) for key in keys], soon())
    assert [one.status for one in outcomes] == [Status.OK] * 10 + [Status.REFUSED] * 90
    assert place.count("write_dropped.full") == 90
    hold.until.set()
    place.flush()
    place.slow.plan = on_keys(anything, Fail("disk full"), ("write",))
    store(place.layered, {keys[10]: content(keys[10], SIZE)})
    place.flush()
    assert place.count("write_dropped.failed") == 1
    place.slow.plan = on_keys(lambda key: False, Fail())
    place.fast_objects.delete(keys, soon())
    store(place.layered, {key: content(key, SIZE) for key in keys[10:20]})
    place.flush()
    assert_holds(place.slow_objects, {key: content(key, SIZE) for key in keys[:20]})


def test_closing_waits_for_what_is_on_its_way_and_not_for_ever() -> None:
    for drain_s, arrives in ((PATIENCE_S, True), (0.05, False)):
        table_handle = open_connector(f"memory://drain-{drain_s}")
        hold = Hold(threading.Event(), ignores_deadline=True)
        slow = FaultyConnector(
            open_connector(f"memory://drain-{drain_s}"), on_keys(anything, hold, ("write",))
        )
        layered = LayeredConnector(MemoryConnector(), slow, mode="write-back", drain_s=drain_s)
        key = page_key("drain")
        store(layered, {key: content(key, SIZE)})
        assert hold.entered.wait(PATIENCE_S)
        if arrives:
            threading.Timer(0.05, hold.until.set).start()
        layered.close()
        assert table_handle.sizes([key], soon()) == [SIZE if arrives else None]
        hold.until.set()
        table_handle.close()


def test_any_time_to_drain_is_one_that_can_be_waited() -> None:
    for drain_s in (1e10, 1e300, float("inf")):
        fast, slow = MemoryConnector(), MemoryConnector()
        layered = LayeredConnector(fast, slow, mode="write-back", drain_s=drain_s)
        store(layered, {page_key("patient"): content("patient", SIZE)})
        layered.close()
        for layer in (fast, slow):
            with pytest.raises(HandleError, match="closed"):
                layer.sizes(["v1/x"], soon())


def test_whatever_interrupts_closing_the_layers_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for the drain may be interrupted, and the fast layer may fail to close."""
    fast, slow = MemoryConnector(), MemoryConnector()
    layered = LayeredConnector(fast, slow)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layered._pending, "close", interrupted)
    monkeypatch.setattr(fast, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        layered.close()
    with pytest.raises(HandleError, match="closed"):
        slow.sizes(["v1/x"], soon())


def test_a_removal_reaches_what_is_being_written_back(make: Callable[..., Place]) -> None:
    place = make(mode="write-back")
    hold = Hold(threading.Event(), ignores_deadline=True)
    place.slow.plan = on_keys(anything, hold, ("write",), times=1)
    key = page_key("removed on its way")
    store(place.layered, {key: content(key, SIZE)})
    assert hold.entered.wait(PATIENCE_S)
    assert place.layered.delete([key], soon())[0].status is Status.OK
    hold.until.set()
    place.flush()
    assert place.layered.sizes([key], soon()) == [None]
    store(place.layered, {key: content(key, SIZE)})
    place.flush()
    assert_holds(place.slow_objects, {key: content(key, SIZE)})


# -- round trips, threads, URLs ------------------------------------------------------------


class FarAway(MemoryConnector):
    """Counts calls: each is one round trip."""

    trips = 0

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        self.trips += 1
        return super().sizes(keys, deadline)

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        self.trips += 1
        return super().read_into(reads, deadline)


def test_c01_c09_round_trips_do_not_grow_with_pages() -> None:
    """A look-up or a restore of a thousand pages is one call to each layer, with hits, misses and both."""
    fast, slow = FarAway(), FarAway()
    layered = LayeredConnector(fast, slow)
    keys = [page_key(f"trips {index}") for index in range(1_000)]
    store(slow, {key: content(key, 50) for key in keys[::2]})
    assert sum(size is not None for size in layered.sizes(keys, soon())) == 500
    assert (fast.trips, slow.trips) == (1, 1)
    layered.read_into([read_of(key, 50)[0] for key in keys], soon())
    assert (fast.trips, slow.trips) == (2, 2)
    layered.close()


def test_d10_threads_are_given_back() -> None:
    before = threading.active_count()
    for index in range(30):
        layered = LayeredConnector(MemoryConnector(), MemoryConnector(), mode="write-back")
        key = page_key(f"cycle {index}")
        store(layered, {key: content(key, 500)})
        layered.close()
    end = time.monotonic() + PATIENCE_S
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_d21_objects_that_are_there_do_not_fail_a_batch(place: Place) -> None:
    keys = [page_key(f"batch {index}") for index in range(16)]
    store(place.layered, {keys[index]: content(keys[index], SIZE) for index in (3, 7)})
    outcomes = place.layered.write_from([write_of(key, content(key, SIZE)) for key in keys], soon())
    assert all(outcome.is_ok for outcome in outcomes)
    assert [index for index, one in enumerate(outcomes) if one.status is Status.EXISTS] == [3, 7]
    assert_holds(place.layered, {key: content(key, SIZE) for key in keys})


def test_the_url_names_both_layers() -> None:
    fast, slow = quote("memory:?quota=1MiB", safe=""), quote("memory:", safe="")
    open_connector(f"layered:?fast={fast}&slow={slow}&mode=write-back&fill=whole&queue=1MiB&drain=1s").close()
    for url in ("layered:", f"layered:?fast={fast}", f"layered://here?fast={fast}&slow={slow}"):
        with pytest.raises(ConfigurationError, match="takes two stores, percent-encoded"):
            open_connector(url)
    with pytest.raises(ConfigurationError, match="no connector for scheme 'tape'"):
        open_connector(f"layered:?fast={fast}&slow=tape%3A%2F%2Fx")
    with pytest.raises(ConfigurationError, match="mode='sometimes'"):
        open_connector(f"layered:?fast={fast}&slow={slow}&mode=sometimes")
