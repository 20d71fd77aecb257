"""What look-ups in two layers say when the layers differ, and what writes make of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Status, Touch
from hicache_store.connectors.layered import LayeredConnector
from hicache_store.connectors.layered_memory import SlowMemory
from hicache_store.connectors.memory import MemoryConnector
from hicache_store.limits import LAYER_CONFIRMED_MAX, LAYER_CONFIRMED_S, LAYER_LOST_S, LAYER_RETRY_MAX_S
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.contract_base import assert_holds, fetch, page_key, soon, store
from hicache_store.testing.faults import Fail, FaultyConnector, Hold, TimeOut, on_keys
from hicache_store.testing.probes import content, write_of

SIZE = 3_000


class Counting(FaultyConnector):
    """Counts the keys that are looked up."""

    asked = 0

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        self.asked += len(keys)
        return super().sizes(keys, deadline)


class Place:
    """Two layers in memory, the slow one watched, under a clock of the test."""

    def __init__(self, **options) -> None:
        self.clock = FakeClock()
        self.fast, self.objects = MemoryConnector(), MemoryConnector()
        self.slow = Counting(self.objects)
        self.options = options
        self.layered = LayeredConnector(self.fast, self.slow, clock=self.clock, **options)

    def put(self, label: str, fast: int | None = SIZE, slow: int | None = SIZE) -> str:
        key = page_key(label)
        for layer, size in ((self.fast, fast), (self.objects, slow)):
            if size is not None:
                store(layer, {key: content(key, size)})
        return key

    def size(self, key: str) -> int | None:
        return self.layered.sizes([key], soon())[0]

    def write(self, key: str, replace: str | None = None):  # type: ignore[no-untyped-def]
        write = write_of(key, content(key, SIZE), replace=replace)
        return self.layered.write_from([write], soon())[0]

    def flush(self) -> None:
        assert self.layered.flush(soon())


@pytest.fixture
def make() -> Iterator[Callable[..., Place]]:
    places: list[Place] = []

    def build(**options) -> Place:
        places.append(Place(**options))
        return places[-1]

    yield build
    for place in places:
        place.layered.close()


MODES = ("write-through", "write-back", "read-only-fast")


@pytest.mark.parametrize("mode", MODES)
def test_a_cut_fast_copy_hides_no_object(make: Callable[..., Place], mode: str) -> None:
    """An engine restores only what a look-up found: the length of the slow layer's object counts."""
    place = make(mode=mode)
    key = place.put("cut", fast=100)
    assert place.size(key) == SIZE
    assert place.size(key) == SIZE, "a length that was confirmed is not the copy's"
    assert place.layered.metrics.get("layered.fast_differs") == 2
    assert fetch(place.layered, key, SIZE)[0].status is Status.OK
    place.flush()
    assert place.fast.sizes([key], soon()) == [100 if mode == "read-only-fast" else SIZE]


def test_what_the_slow_layer_lost_is_absent_and_written_again(make: Callable[..., Place]) -> None:
    """The place is the slow layer: what only a cache still has, no other machine can see."""
    place = make()
    key = place.put("lost", slow=None)
    assert place.size(key) is None
    assert place.write(key).status is Status.OK
    assert_holds(place.objects, {key: content(key, SIZE)})
    assert place.size(key) == SIZE
    assert place.layered.metrics.get("layered.slow_lost") == 1


def test_written_back_what_the_slow_layer_lost_is_sent_again(make: Callable[..., Place]) -> None:
    """For a while it may be on its way there from another handle."""
    place = make(mode="write-back")
    key = place.put("lost", slow=None)
    assert place.size(key) == SIZE
    place.clock.advance(LAYER_LOST_S - 1)
    assert place.size(key) == SIZE
    place.clock.advance(1)
    assert place.size(key) is None
    assert place.write(key).status is Status.EXISTS
    place.flush()
    assert_holds(place.objects, {key: content(key, SIZE)})
    assert place.size(key) == SIZE
    assert place.objects.delete([key], soon())[0].is_ok
    place.clock.advance(LAYER_CONFIRMED_S + 1)
    assert place.size(key) == SIZE, "it was there meanwhile: the time starts anew"


def test_what_cannot_be_written_again_the_fast_layer_vouches_for(make: Callable[..., Place]) -> None:
    place = make(mode="read-only-fast")
    assert place.size(place.put("only fast", slow=None)) == SIZE


@pytest.mark.parametrize("fault", [Fail(), TimeOut()], ids=["fails", "times out"])
def test_a_slow_layer_that_cannot_tell_costs_no_hit(make: Callable[..., Place], fault) -> None:
    place = make()
    key = place.put("no word")
    place.slow.plan = on_keys(lambda key: True, fault, ("sizes", "read"))
    assert place.size(key) == SIZE
    assert fetch(place.layered, key, SIZE)[0].status is Status.OK


def test_a_slow_layer_that_hangs_is_asked_again_later(make: Callable[..., Place]) -> None:
    """It takes half the time of one look-up, not of each."""
    place = make()
    key = place.put("hangs")
    place.slow.plan = on_keys(lambda key: True, Hold(threading.Event()), ("sizes",))
    for _ in range(3):
        deadline = Deadline.after(0.2)
        assert place.layered.sizes([key], deadline) == [SIZE]
    assert place.slow.asked == 1
    place.slow.plan = on_keys(lambda key: False, Fail())
    place.clock.advance(LAYER_RETRY_MAX_S)
    assert place.size(key) == SIZE
    assert place.slow.asked == 2


def test_what_was_confirmed_is_asked_for_again_after_a_while(make: Callable[..., Place]) -> None:
    place = make()
    looked_up, written, read = place.put("looked up"), page_key("written"), place.put("read", fast=None)
    assert place.size(looked_up) == SIZE
    assert place.write(written).status is Status.OK
    assert fetch(place.layered, read, SIZE)[0].status is Status.OK
    place.flush()
    keys, before = [looked_up, written, read], place.slow.asked
    assert place.layered.sizes(keys, soon()) == [SIZE] * 3
    assert place.slow.asked == before
    place.clock.advance(LAYER_CONFIRMED_S + 1)
    assert place.layered.sizes(keys, soon()) == [SIZE] * 3
    assert place.slow.asked == before + 3


def test_what_is_seen_to_be_gone_is_not_confirmed_any_more(make: Callable[..., Place]) -> None:
    place = make()
    touched, removed, read = (place.put(label) for label in ("touched", "removed", "read"))
    assert place.layered.sizes([touched, removed, read], soon()) == [SIZE] * 3
    place.objects.delete([touched, removed, read], soon())
    place.layered.touch([Touch(touched)], soon())
    place.fast.delete([read], soon())
    assert fetch(place.layered, read, SIZE)[0].status is Status.ABSENT
    store(place.fast, {read: content(read, SIZE)})
    assert place.layered.delete([removed], soon())[0].is_ok
    store(place.fast, {removed: content(removed, SIZE)})
    assert place.layered.sizes([touched, removed, read], soon()) == [None] * 3


def test_a_cut_fast_copy_stops_no_write_back(make: Callable[..., Place]) -> None:
    """It is no object that a write could be in conflict with."""
    place = make(mode="write-back")
    lost, held = place.put("cut and lost", fast=100, slow=None), place.put("cut", fast=100)
    assert (place.write(lost).status, place.write(held).status) == (Status.OK, Status.EXISTS)
    assert place.fast.sizes([lost, held], soon()) == [None, None]
    place.flush()
    assert_holds(place.objects, {key: content(key, SIZE) for key in (lost, held)})


@pytest.mark.parametrize("fast", [SIZE, 70], ids=["sound copy", "cut copy"])
def test_a_cut_object_of_the_slow_layer_is_replaced_by_its_version(
    make: Callable[..., Place], fast: int
) -> None:
    """A write-back that met it says so, with what a writer needs to replace it."""
    place = make(mode="write-back")
    key = place.put("cut slow", fast=fast, slow=50)
    assert place.size(key) == 50
    met = place.write(key)
    assert (met.status, met.version is None) == (Status.CONFLICT, False)
    assert place.write(key, replace=met.version).status is Status.OK
    place.flush()
    for layer in (place.objects, place.fast, place.layered):
        assert_holds(layer, {key: content(key, SIZE)})


def test_the_memory_of_what_is_confirmed_is_bounded() -> None:
    memory = SlowMemory(FakeClock())
    keys = [f"v1/{index}" for index in range(LAYER_CONFIRMED_MAX + 10)]
    memory.confirm((key, 1) for key in keys)
    memory.confirm([("meta/v1/x", 1)])
    memory.lost_s([f"lost/{key}" for key in keys])
    known = memory.sizes(keys)
    assert (known[:10], sum(size == 1 for size in known)) == ([None] * 10, LAYER_CONFIRMED_MAX)
    assert memory.sizes(["meta/v1/x"]) == [None]
    assert len(memory._lost) == LAYER_CONFIRMED_MAX


def test_who_meets_another_write_of_its_key_is_not_told_that_the_queue_is_full(
    make: Callable[..., Place],
) -> None:
    """Not even where that one has just arrived when it is looked for."""
    place = make(mode="write-back")
    key = page_key("two writers")
    pending = place.layered._pending
    tried = pending.try_reserve

    def met(*given, **options):  # type: ignore[no-untyped-def]
        pending.try_reserve = tried  # type: ignore[method-assign]
        (other, _) = tried(key, SIZE)
        assert other is not None
        answer = tried(*given, **options)
        pending.offer((other, None))
        return answer

    pending.try_reserve = met  # type: ignore[method-assign]
    assert place.write(key).status is Status.OK
    assert place.layered.metrics.get("layered.write_dropped.full") == 0
