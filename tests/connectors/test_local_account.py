"""Quota, floor and eviction of a file store: what is granted, what goes first, what cannot go."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from account_place import NANO, SIZE, START_S, Place, keys, later

from hicache_store.clock import Deadline
from hicache_store.config import size_text
from hicache_store.connectors.local_account import Account
from hicache_store.errors import HandleError
from hicache_store.limits import EVICTION_RETRY_S, FREE_FLOOR_MAX_BYTES, GIB


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "root")
    yield place
    place.close()


def known(account: Account) -> int:
    used = account.used_bytes()
    assert used is not None
    return used


class TestReservations:
    def test_a_new_store_starts_at_zero_and_counts_what_is_settled(self, place: Place) -> None:
        account = place.open()
        assert account.used_bytes() == 0
        reservation = account.reserve([SIZE, 2 * SIZE], later())
        assert (reservation.granted, reservation.reserved_bytes, reservation.reason) == (2, 3 * SIZE, "")
        assert account.used_bytes() == 3 * SIZE
        account.settle(reservation, SIZE)
        assert account.used_bytes() == SIZE

    def test_settling_twice_takes_off_once(self, place: Place) -> None:
        account = place.open()
        kept = account.reserve([SIZE], later())
        reservation = account.reserve([SIZE], later())
        account.settle(reservation, 0)
        account.settle(reservation, 0)
        assert account.used_bytes() == kept.reserved_bytes

    def test_released_bytes_make_room(self, place: Place) -> None:
        account = place.open(quota=2 * SIZE)
        place.write(account, keys("a", 2))
        mark = account.mark()
        place.file("a.0").unlink()
        account.released(SIZE, mark)
        assert account.used_bytes() == SIZE
        assert place.write(account, ["b"]) == 1
        assert place.metrics.get("file.walks") == 0

    def test_an_empty_batch_reserves_nothing(self, place: Place) -> None:
        assert place.open().reserve([], later()).granted == 0

    def test_a_batch_larger_than_the_quota_is_granted_what_the_quota_holds(self, place: Place) -> None:
        account = place.open(quota=4 * SIZE)
        place.write(account, keys("old", 3), age_s=100)
        reservation = account.reserve([SIZE] * 6, later())
        assert reservation.granted == 4
        assert size_text(4 * SIZE) in reservation.reason
        assert size_text(6 * SIZE) in reservation.reason
        assert place.bytes_on_disk() == 0
        assert place.metrics.get("file.quota_refused") == 2

    def test_an_item_larger_than_the_quota_is_refused_and_evicts_nothing(self, place: Place) -> None:
        account = place.open(quota=4 * SIZE)
        place.write(account, keys("old", 3))
        assert account.reserve([5 * SIZE, SIZE], later()).granted == 0
        assert len(place.stored()) == 3

    def test_what_others_have_reserved_is_not_granted_again(self, place: Place) -> None:
        first, second = place.open(quota=10 * SIZE), place.open(quota=10 * SIZE)
        held = first.reserve([SIZE] * 7, later())
        reservation = second.reserve([SIZE] * 5, later())
        assert reservation.granted == 3
        assert "quota" in reservation.reason
        first.settle(held, 0)
        assert second.reserve([SIZE] * 5, later()).granted == 5

    def test_threads_of_two_accounts_add_up(self, place: Place) -> None:
        accounts = [place.open(quota=GIB), place.open(quota=GIB)]

        def work(account: Account) -> None:
            for _ in range(50):
                reservation = account.reserve([10, 10], later())
                assert reservation.granted == 2
                account.settle(reservation, 10)

        threads = [threading.Thread(target=work, args=(accounts[i % 2],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert accounts[0].used_bytes() == accounts[1].used_bytes() == 4 * 50 * 10

    def test_after_close_nothing_is_granted_and_late_settling_is_harmless(self, place: Place) -> None:
        account = place.open()
        reservation = account.reserve([SIZE], later())
        account.close()
        account.close()
        account.settle(reservation, SIZE)
        account.released(SIZE)
        with pytest.raises(HandleError, match="closed"):
            account.reserve([SIZE], later())


class TestEviction:
    def test_the_oldest_go_first_and_the_tail_of_a_chain_before_its_head(self, place: Place) -> None:
        account = place.open(quota=10 * SIZE)
        place.write(account, keys("newer", 4), age_s=10)
        place.write(account, keys("older", 6), age_s=20)
        gone: list[str] = []
        place.io.before_unlink = gone.append
        assert place.write(account, keys("now", 8)) == 8
        assert gone == [f"older.{i}" for i in (5, 4, 3, 2, 1, 0)] + ["newer.3", "newer.2"]
        assert known(account) == place.bytes_on_disk() == 10 * SIZE

    def test_one_walk_serves_many_writes(self, place: Place) -> None:
        account = place.open(quota=200 * SIZE)
        for batch in range(20):
            place.write(account, keys(f"old{batch}", 10), age_s=100 - batch)
        for batch in range(15):
            assert place.write(account, keys(f"new{batch}", 10)) == 10
            assert known(account) <= 200 * SIZE
        assert place.metrics.get("file.walks") == 1
        assert place.metrics.get("file.evicted_objects") >= 150
        assert known(account) == place.bytes_on_disk()

    def test_eviction_stops_at_the_low_watermark(self, place: Place) -> None:
        account = place.open(quota=100 * SIZE)
        for batch in range(10):
            place.write(account, keys(f"old{batch}", 10), age_s=100 - batch)
        place.write(account, ["one"])
        assert len(place.stored()) == 96

    def test_what_was_used_since_the_walk_is_spared(self, place: Place) -> None:
        account = place.open(quota=20 * SIZE)
        for i in range(20):
            place.write(account, [f"old.{i}"], age_s=100 - i)
        place.write(account, ["new.0"])
        assert "old.0" not in place.stored()
        now_ns = START_S * NANO
        for name in ("old.1", "old.3"):
            os.utime(place.file(name), ns=(now_ns, now_ns))
        place.write(account, ["new.1", "new.2", "new.3"])
        assert {"old.1", "old.3"} <= place.stored()
        assert not {"old.2", "old.4", "old.5"} & place.stored()
        assert place.metrics.get("file.walks") == 1
        assert place.metrics.get("file.eviction_spared") == 2

    def test_a_victim_that_vanished_is_no_failure_and_not_taken_off_twice(self, place: Place) -> None:
        account = place.open(quota=10 * SIZE)
        place.write(account, keys("old", 10), age_s=50)

        def vanish(name: str) -> None:
            if name == "old.9":
                place.io.before_unlink = lambda name: None
                place.file("old.9").unlink()

        place.io.before_unlink = vanish
        assert place.write(account, ["new"]) == 1
        assert place.metrics.get("file.eviction_failures") == 0
        assert known(account) >= place.bytes_on_disk()
        assert account.sweep(later()).used_bytes == place.bytes_on_disk()

    def test_waiting_for_another_eviction_ends_at_the_deadline(self, place: Place) -> None:
        account, other = place.open(quota=2 * SIZE), place.open(quota=2 * SIZE)
        place.write(account, keys("old", 2), age_s=50)
        entered, leave = threading.Event(), threading.Event()

        def hang(name: str) -> None:
            entered.set()
            assert leave.wait(60)

        place.io.before_unlink = hang
        thread = threading.Thread(target=place.write, args=(account, ["new"]))
        thread.start()
        assert entered.wait(60)
        assert other.reserve([SIZE], Deadline.after(0.05)).granted == 0
        leave.set()
        thread.join()
        assert other.reserve([SIZE], later()).granted == 1

    @pytest.mark.parametrize(("is_shared", "has_locks"), [(False, True), (True, True), (True, False)])
    def test_two_writers_evict_for_one_another_without_refusals(
        self, place: Place, is_shared: bool, has_locks: bool
    ) -> None:
        place.io.flock_errno = None if has_locks else errno.ENOLCK
        first = place.open(quota=40 * SIZE)
        accounts = [first, first if is_shared else place.open(quota=40 * SIZE)]
        granted = [0, 0]
        inside: list[str] = []
        most = [0]

        def enter(name: str) -> None:
            inside.append(name)
            most[0] = max(most[0], len(inside))
            time.sleep(0.0002)
            inside.remove(name)

        place.io.before_unlink = enter

        def work(mine: int) -> None:
            for batch in range(30):
                granted[mine] += place.write(accounts[mine], keys(f"w{mine}b{batch}", 4), age_s=100 - batch)

        threads = [threading.Thread(target=work, args=(mine,)) for mine in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert granted == [120, 120]
        assert most == [1]
        assert place.bytes_on_disk() <= known(accounts[0]) <= 40 * SIZE
        assert accounts[1].sweep(later()).used_bytes == place.bytes_on_disk()


class TestUndeletable:
    """D03: one object that cannot be removed must not stop eviction for good."""

    @pytest.mark.parametrize("code", [errno.EPERM, errno.EBUSY, errno.EROFS, errno.EIO])
    def test_d03_the_oldest_object_cannot_be_removed(
        self, place: Place, code: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        account = place.open(quota=10 * SIZE)
        place.io.fail_unlink = lambda name: code if name == "page.0" else None
        for page in range(40):
            assert place.write(account, [f"page.{page}"], age_s=100 - page) == 1
            assert place.bytes_on_disk() <= 10 * SIZE
        assert "page.0" in place.stored()
        assert place.metrics.get("file.eviction_failures") >= 1
        assert [record.getMessage() for record in caplog.records if "page.0" in record.getMessage()] != []
        assert len(caplog.records) == 1

    def test_d03_nothing_can_be_removed(self, place: Place) -> None:
        account = place.open(quota=10 * SIZE)
        place.write(account, keys("page", 10), age_s=50)
        place.io.fail_unlink = lambda name: errno.EPERM
        place.io.calls.clear()
        for _ in range(50):
            reservation = account.reserve([SIZE], later())
            assert reservation.granted == 0
            assert "quota" in reservation.reason
        assert place.io.calls["unlink"] == 10
        assert place.metrics.get("file.walks") == 1

        place.io.fail_unlink = lambda name: None
        place.clock.advance(EVICTION_RETRY_S + 1)
        assert account.reserve([SIZE], later()).granted == 1

    def test_d03_a_batch_gets_what_fits_beside_the_undeletable(self, place: Place) -> None:
        account = place.open(quota=10 * SIZE)
        place.write(account, keys("stuck", 6), age_s=50)
        place.write(account, keys("free", 4), age_s=10)
        place.io.fail_unlink = lambda name: errno.EBUSY if name.startswith("stuck") else None
        assert account.reserve([SIZE] * 8, later()).granted == 4


class TestFreeSpaceFloor:
    """D04: the disk below the store never fills up."""

    def test_writes_stop_above_the_floor_and_old_objects_make_room(self, place: Place) -> None:
        disk = 20 * SIZE
        place.io.free_bytes = lambda: disk - place.bytes_on_disk()
        account = place.open(quota=GIB, min_free=5 * SIZE)
        for page in range(40):
            assert place.write(account, [f"page.{page}"], age_s=100 - page) == 1
            assert place.io.free_bytes() >= 5 * SIZE
        assert place.stored() == {f"page.{page}" for page in range(25, 40)}

    def test_a_reservation_counts_as_written(self, place: Place) -> None:
        place.io.free_bytes = lambda: 20 * SIZE
        first, second = place.open(quota=GIB, min_free=5 * SIZE), place.open(quota=GIB, min_free=5 * SIZE)
        assert first.reserve([SIZE] * 10, later()).granted == 10
        reservation = second.reserve([SIZE] * 10, later())
        assert reservation.granted == 5
        assert size_text(5 * SIZE) in reservation.reason

    def test_a_neighbour_fills_the_disk_and_the_store_yields(self, place: Place) -> None:
        free = [50 * SIZE]
        place.io.free_bytes = lambda: free[0] - place.bytes_on_disk()
        account = place.open(quota=GIB, min_free=5 * SIZE)
        place.write(account, keys("page", 20), age_s=10)
        free[0] = 15 * SIZE
        report = account.sweep(later())
        assert report.evicted_objects == 10
        assert place.io.free_bytes() >= 5 * SIZE

    def test_space_that_is_freed_late_does_not_empty_the_store(self, place: Place) -> None:
        place.io.free_bytes = lambda: 5 * SIZE
        account = place.open(quota=GIB, min_free=0)
        place.write(account, keys("page", 100), age_s=10)
        tight = place.open(quota=GIB, min_free=5 * SIZE)
        for _ in range(20):
            assert tight.reserve([SIZE], later()).granted == 0
        assert len(place.stored()) >= 99

    def test_a_file_system_without_sizes_has_no_floor(self, place: Place) -> None:
        place.io.free_bytes, place.io.size_bytes = (lambda: 0), 0
        assert place.open(quota=10 * SIZE, min_free=SIZE).reserve([SIZE], later()).granted == 1


class TestDefaults:
    def test_d04_without_a_quota_there_is_one_and_it_is_logged_once(
        self, place: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        place.io.free_bytes, place.io.size_bytes = (lambda: 100 * SIZE - place.bytes_on_disk()), 200 * SIZE
        account = place.open(quota=None, min_free=None)
        assert account.quota_bytes == 50 * SIZE
        assert account.min_free_bytes == 10 * SIZE
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "using 48.83 KiB, half of the " in caplog.text
        for page in range(8):
            assert place.write(account, keys(f"p{page}", 10), age_s=100 - page) == 10
        assert place.bytes_on_disk() <= 50 * SIZE
        assert len(caplog.records) == 1

    def test_the_default_quota_is_the_same_for_whoever_comes_later(self, place: Place) -> None:
        place.io.free_bytes = lambda: 100 * SIZE - place.bytes_on_disk()
        account = place.open(quota=None)
        place.write(account, keys("page", 30))
        assert place.open(quota=None).quota_bytes == account.quota_bytes == 50 * SIZE

    def test_the_default_quota_waits_for_the_first_count(self, place: Place) -> None:
        place.io.free_bytes = lambda: 100 * SIZE - place.bytes_on_disk()
        for key in keys("page", 30):
            place.put(key)
        account = place.open(quota=None)
        assert account.quota_bytes is None
        assert account.reserve([SIZE], later()).granted == 1
        assert account.quota_bytes == 50 * SIZE

    def test_the_default_floor_is_bounded(self, place: Place) -> None:
        place.io.free_bytes, place.io.size_bytes = (lambda: 900 * GIB), 1000 * GIB
        assert place.open(min_free=None).min_free_bytes == FREE_FLOOR_MAX_BYTES

    def test_a_file_system_without_sizes_still_gets_a_quota(self, place: Place) -> None:
        place.io.free_bytes, place.io.size_bytes = (lambda: 0), 0
        assert place.open(quota=None, min_free=None).quota_bytes == 10 * GIB
