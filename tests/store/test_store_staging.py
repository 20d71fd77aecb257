"""Staging memory is bounded, comes back on every path, and never makes a circle of waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from store_rig import (
    PATIENCE_S,
    FilePlace,
    Place,
    attach_rank,
    chain,
    distinct_ranks,
    read_pages,
    tiny,
    write_pages,
)

from hicache_store.clock import Deadline
from hicache_store.errors import ConfigurationError, DeadlineExceededError
from hicache_store.layout.parallel import Rank
from hicache_store.limits import KIB
from hicache_store.store import EndReason, FixedGrid, PageState, Store
from hicache_store.store.staging import StagingPool
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.faults import Attempt, Fail, FaultyConnector, FlipBit, TimeOut, Truncate, seeded

UNIT = 64 * KIB
POOL = tiny(2, 4, 32).pool(64)
"""A page of 64 KiB in one object of that and a trailer: staged in two units."""
OBJECT_BYTES = 64 * KIB + 64 + 8 * 2


def soon() -> Deadline:
    return Deadline.after(PATIENCE_S)


def in_threads(*actions: Callable[[], object]) -> None:
    """Run all at once; raises what any raised, and when one hangs."""
    errors: list[BaseException] = []

    def run(action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


def test_a_block_has_the_length_asked_for_and_is_used_again() -> None:
    staging = StagingPool(4 * UNIT)
    block = staging.acquire(100, soon())
    assert len(block.view) == 100
    block.view[:] = b"x" * 100
    staging.release(block)
    assert staging.acquire(UNIT, soon()).memory is block.memory
    assert staging.allocated_bytes == UNIT


def test_blocks_of_one_size_make_way_for_another() -> None:
    staging = StagingPool(4 * UNIT)
    for block in [staging.acquire(UNIT, soon()) for _ in range(4)]:
        staging.release(block)
    assert staging.allocated_bytes == 4 * UNIT
    assert len(staging.acquire(4 * UNIT, soon()).view) == 4 * UNIT
    assert staging.allocated_bytes == 4 * UNIT


@pytest.mark.parametrize("capacity", [UNIT + 1, UNIT + 1000, 2 * UNIT - 1, 3 * UNIT + 5, 100])
def test_what_fits_the_capacity_can_be_had(capacity: int) -> None:
    """Whatever the rounding of blocks: a capacity that an attach accepts is one that works."""
    staging = StagingPool(capacity)
    for size in (capacity, capacity - 1, 1, capacity):
        block = staging.acquire(size, soon())
        assert len(block.view) == size
        assert staging.allocated_bytes <= capacity
        staging.release(block)


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigurationError, match=f"needs {UNIT + 1} bytes of staging, the store has {UNIT}"):
        StagingPool(UNIT).acquire(UNIT + 1, soon())


def test_waiting_ends_at_the_deadline() -> None:
    clock = FakeClock()
    staging = StagingPool(UNIT)
    block = staging.acquire(1, soon())
    with pytest.raises(DeadlineExceededError, match="staging memory"):
        staging.acquire(1, Deadline.after(0.0, clock))
    with pytest.raises(DeadlineExceededError, match="staging memory"):
        staging.acquire(1, Deadline.after(0.01))
    staging.release(block)
    assert staging.acquire(1, Deadline.after(0.0, clock)).view is not None, "what is free needs no time"


def test_room_for_the_second_in_the_line_is_not_wasted_on_the_first() -> None:
    """The first waits for all memory, the second for a little; a little comes free: the second goes on."""
    staging = StagingPool(4 * UNIT)
    small, large = staging.acquire(UNIT, soon()), staging.acquire(3 * UNIT, soon())
    first_waits, second_done = threading.Event(), threading.Event()
    waits = threading.Semaphore(0)
    inner = staging._changed.wait

    def wait(timeout: float | None = None) -> bool:
        waits.release()
        first_waits.set()
        return inner(timeout)

    staging._changed.wait = wait

    def take_all() -> None:
        staging.release(staging.acquire(4 * UNIT, soon()))

    def take_little() -> None:
        first_waits.wait(PATIENCE_S)
        staging.release(staging.acquire(UNIT, soon()))
        second_done.set()

    def let_go() -> None:
        for _ in range(2):
            assert waits.acquire(timeout=PATIENCE_S)
        staging.release(small)
        try:
            assert second_done.wait(PATIENCE_S / 2), "there is room, and nobody was told"
        finally:
            staging.release(large)

    in_threads(take_all, take_little, let_go)


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("capacity", [OBJECT_BYTES, 2 * UNIT, 5 * UNIT])
def test_many_threads_share_little_staging(is_file: bool, capacity: int, tmp_path) -> None:
    """Eight threads restore and back up at once through room for one object: all finish, all right,
    and never more memory than given."""
    place = FilePlace(tmp_path, "&threads=4") if is_file else Place()
    hashes = chain(16, 64)
    pages = {number: hashes[2 * number : 2 * number + 2] for number in range(8)}
    write_pages(place, POOL, "tp1pp1", hashes[:8])
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=16, staging_bytes=capacity) as rank:
        assert (
            not rank.store._bindings["kv"]
            .table.piece_plan(rank.store._bindings["kv"].write_chunks[0], rank.box)
            .is_direct(rank.placements[0])
        ), "the test is about staging"
        rank.arrays.poison()
        highest: list[int] = []
        rank.fill(range(16))

        def work(number: int) -> Callable[[], None]:
            where = rank.placements[2 * number : 2 * number + 2]

            def action() -> None:
                for _ in range(3):
                    if number < 4:
                        assert rank.store.restore(pages[number], where).pages == 2
                    else:
                        assert rank.store.backup(pages[number], where, first_page=2 * number).pages == 2
                    highest.append(rank.store._context.staging.allocated_bytes)

            return action

        in_threads(*(work(number) for number in range(8)))
        assert max(highest) <= capacity
        rank.assert_holds(range(16))
        assert_all_returned(rank.store)
    assert read_pages(place, POOL, "tp1pp1", hashes) == 1


def assert_all_returned(store: Store) -> None:
    """All of the staging memory can be had at once, so no block is out."""
    staging = store._context.staging
    staging.release(staging.acquire(staging.capacity_bytes, Deadline.after(0.0, FakeClock())))


@pytest.mark.parametrize("form", ["layer_first", "canonical"])
def test_every_block_comes_back_whatever_goes_wrong(form: str) -> None:
    """Random faults of every kind in reads and writes, straight and through staging."""
    kinds = [Fail(), Fail(share=0.0), FlipBit(3), TimeOut(), Truncate(5)]
    plan = seeded(3, [(operation, 0.1, kind) for kind in kinds for operation in ("read", "write")])

    def objects_only(attempt: Attempt):
        return plan(attempt) if attempt.key.startswith("v1/") else None

    place, hashes = Place(), chain(24, 64)
    place.wrap = lambda connector: FaultyConnector(connector, objects_only)
    ends = set()
    for rank in distinct_ranks(POOL, "tp2pp2"):
        with attach_rank(place, POOL, "tp2pp2", rank, pages=24, form=form, staging_bytes=4 * UNIT) as rig:
            for _ in range(3):
                rig.fill(range(24))
                rig.backup(hashes)
                report = rig.restore(hashes)
                rig.assert_holds(range(report.pages))
                ends.add(None if report.end is None else report.end.reason)
                assert_all_returned(rig.store)
    assert len(ends) > 1


def test_an_object_of_another_grid_that_does_not_fit_fails_its_page_and_says_what_to_do() -> None:
    place, hashes = Place(), chain(2, 64)
    write_pages(place, POOL, "tp1pp1", hashes)
    grid = FixedGrid(1, 1)
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2, grid=grid, staging_bytes=UNIT) as reader:
        report = reader.restore(hashes)
        assert (report.pages, report.end.reason) == (0, EndReason.FAILED)
        assert f"needs {OBJECT_BYTES} bytes of staging, the store has {UNIT}; raise" in report.end.detail
        assert_all_returned(reader.store)


def test_the_attach_knows_the_least_staging_that_works() -> None:
    place, hashes = Place(), chain(2, 64)
    with pytest.raises(
        ConfigurationError, match=f"{OBJECT_BYTES - 1} cannot .* give at least {OBJECT_BYTES}"
    ):
        attach_rank(place, POOL, "tp1pp1", Rank(), staging_bytes=OBJECT_BYTES - 1)
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2, staging_bytes=OBJECT_BYTES) as rank:
        rank.fill(range(2))
        assert rank.backup(hashes).states == (PageState.STORED, PageState.STORED)
        assert rank.restore(hashes).pages == 2
        rank.assert_holds(range(2))
