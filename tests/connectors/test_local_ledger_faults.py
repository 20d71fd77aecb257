"""The shared byte counter under faults: damage, stopped processes, forks, read-only and full disks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from account_place import SIZE, Place, fork, keys, later, wait_for, writer_files
from local_faults import eventually

from hicache_store.clock import Deadline
from hicache_store.connectors import local_ledger
from hicache_store.connectors.local_account import Account
from hicache_store.errors import HandleError
from hicache_store.limits import GIB


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "root")
    yield place
    place.close()


class TestDamage:
    @pytest.mark.parametrize("content", [b"", b"\0" * 52, b"garbage", b"x" * 5000])
    def test_a_damaged_counter_is_rebuilt_by_the_first_write(self, place: Place, content: bytes) -> None:
        place.write(place.open(), keys("old", 3))
        (place.path / "account" / "counter").write_bytes(content)
        account = place.open()
        assert account.used_bytes() is None
        assert account.reserve([SIZE], later()).granted == 1
        assert account.used_bytes() == 4 * SIZE

    def test_a_lost_counter_is_rebuilt_while_the_store_is_open(self, place: Place) -> None:
        first, second = place.open(), place.open()
        place.write(first, keys("old", 3))
        held = second.reserve([SIZE], later())
        (place.path / "account" / "counter").unlink()
        assert first.sweep(later()).used_bytes == 4 * SIZE
        second.settle(held, 0)
        assert first.used_bytes() == second.used_bytes() == 3 * SIZE

    def test_a_file_system_that_tells_another_inode_at_every_look_is_no_trap(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        account = place.open()
        monkeypatch.setattr(local_ledger.Ledger, "_id_of", lambda self, path: (0, 0))
        assert place.write(account, keys("page", 3)) == 3
        assert account.used_bytes() == 3 * SIZE

    def test_a_lost_account_is_rebuilt_while_the_store_is_open(self, place: Place) -> None:
        first, second = place.open(), place.open()
        place.write(first, keys("old", 3))
        held = first.reserve([SIZE], later())
        shutil.rmtree(place.path / "account")
        assert first.sweep(later()).used_bytes == 4 * SIZE
        assert second.used_bytes() == 4 * SIZE
        first.settle(held, 0)
        assert second.reserve([SIZE] * 7, later()).granted == 7

    def test_an_emptied_root_starts_at_zero_again(self, place: Place) -> None:
        account = place.open()
        place.write(account, keys("old", 3))
        for child in place.path.iterdir():
            shutil.rmtree(child)
        (place.path / "objects").mkdir()
        fresh = place.open()
        assert fresh.used_bytes() == 0
        assert account.reserve([SIZE], later()).granted == 1
        assert fresh.used_bytes() == SIZE

    def test_objects_brought_in_by_hand_are_found_by_the_next_sweep(self, place: Place) -> None:
        account = place.open()
        for key in keys("copied", 5):
            place.put(key)
        assert account.used_bytes() == 0
        assert account.sweep(later()).used_bytes == 5 * SIZE

    def test_attaching_looks_at_no_object(self, place: Place) -> None:
        """D15: a store of any size attaches at once, whether its counter is there or not."""
        for key in keys("old", 300):
            place.put(key)
        for content in (None, b""):
            if content is not None:
                (place.path / "account" / "counter").write_bytes(content)
            place.io.calls.clear()
            place.open()
            assert place.io.calls["stat"] <= 2


class TestLocks:
    def test_a_stopped_process_holds_the_counter(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local_ledger, "ACCOUNT_LOCK_WAIT_S", 0.01)
        account = place.open()
        reservation = account.reserve([3 * SIZE], later())
        place.write(account, ["gone"])
        fd = os.open(place.path / "account" / "counter", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        refused = account.reserve([SIZE], Deadline.after(0.02))
        assert refused.granted == 0
        assert "held by another process" in refused.reason
        mark = account.mark()
        place.file("gone").unlink()
        account.settle(reservation, SIZE)
        account.released(SIZE, mark)
        assert account.used_bytes() == 4 * SIZE
        os.close(fd)
        assert account.reserve([SIZE], later()).granted == 1
        assert account.used_bytes() == 2 * SIZE

    def test_bytes_removed_before_a_recount_and_released_after_it_are_not_taken_off_twice(
        self, place: Place
    ) -> None:
        account, sweeper = place.open(), place.open()
        place.write(account, keys("page", 3))
        mark = account.mark()
        place.file("page.0").unlink()
        assert sweeper.sweep(later()).used_bytes == 2 * SIZE
        account.released(SIZE, mark)
        assert account.used_bytes() == 2 * SIZE

    def test_without_locks_it_works_and_says_once_what_is_lost(
        self, place: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        place.io.flock_errno = errno.ENOLCK
        first, second = place.open(quota=4 * SIZE), place.open(quota=4 * SIZE)
        for batch in range(4):
            assert place.write(first, keys(f"a{batch}", 2), age_s=50 - batch) == 2
        assert place.write(second, keys("b", 2)) == 2
        assert place.bytes_on_disk() == second.used_bytes() == 4 * SIZE
        assert len([record for record in caplog.records if "no file locks" in record.getMessage()]) == 2

    def test_processes_that_join_at_once_share_one_counter(self, place: Place) -> None:
        shutil.rmtree(place.path / "objects")
        (place.path / "objects").mkdir()
        read_end, write_end = os.pipe()

        def life() -> None:
            os.close(write_end)
            os.read(read_end, 1)
            account = place.open(quota=GIB)
            for _ in range(20):
                reservation = account.reserve([10, 10], later())
                assert reservation.granted == 2
                account.settle(reservation, 10)
            account.close()

        pids = [fork(life) for _ in range(6)]
        os.close(write_end)
        assert [wait_for(pid) for pid in pids] == [0] * 6
        os.close(read_end)
        assert place.open().used_bytes() == 6 * 20 * 10


class TestFork:
    def test_a_child_must_join_by_itself(self, place: Place) -> None:
        account = place.open()
        reservation = account.reserve([SIZE], later())

        def child() -> None:
            for call in (account.mark, account.used_bytes, lambda: account.reserve([SIZE], later())):
                with pytest.raises(HandleError, match="fork"):
                    call()
            account.settle(reservation, 0)
            account.close()
            assert place.open().reserve([SIZE], later()).granted == 1
            os._exit(0)

        assert wait_for(fork(child)) == 0
        assert account.reserve([SIZE], later()).granted == 1

    def test_the_reservation_of_a_killed_process_dies_with_it_and_not_with_its_children(
        self, place: Place
    ) -> None:
        read_end, write_end = os.pipe()
        pids_read, pids_write = os.pipe()

        def life() -> None:
            place.open().reserve([5 * SIZE], later())
            child = os.fork()
            if child == 0:
                os.close(write_end)
                os.read(read_end, 1)
                os._exit(0)
            os.write(pids_write, b"%d" % child)
            signal.pause()

        pid = fork(life)
        try:
            assert os.read(pids_read, 20)
            os.kill(pid, signal.SIGKILL)
            wait_for(pid)
            account = place.open()
            assert account.used_bytes() == 5 * SIZE
            # The child gives the inherited lock up when it first runs, which may be after the kill.
            eventually(lambda: account.sweep(later()).used_bytes == 0)
            assert writer_files(place) == []
        finally:
            for fd in (write_end, read_end, pids_read, pids_write):
                os.close(fd)

    def test_a_live_reservation_survives_the_sweep_of_another_process(self, place: Place) -> None:
        account, other = place.open(), place.open()
        held = account.reserve([3 * SIZE], later())
        assert other.sweep(later()).used_bytes == 3 * SIZE
        account.settle(held, 0)
        assert other.used_bytes() == 0


class TestReadOnly:
    @pytest.fixture
    def frozen(self, place: Place) -> Account:
        first = place.open(ttl_s=10.0)
        place.write(first, keys("page", 3), age_s=100)
        first.close()
        place.io.fail_open = lambda name, flags: errno.EROFS if flags & (os.O_RDWR | os.O_CREAT) else None
        return place.open(ttl_s=10.0)

    def test_nothing_is_granted_and_nothing_removed(self, place: Place, frozen: Account) -> None:
        assert frozen.is_read_only
        assert frozen.used_bytes() == 3 * SIZE
        reservation = frozen.reserve([SIZE], later())
        assert reservation.granted == 0
        assert "read-only" in reservation.reason
        report = frozen.sweep(later())
        assert (report.objects, report.bytes, report.expired_objects) == (3, 3 * SIZE, 0)
        assert len(place.stored()) == 3
        frozen.released(SIZE)
        assert frozen.used_bytes() == 3 * SIZE

    def test_a_root_that_was_never_written(self, place: Place) -> None:
        place.io.fail_open = lambda name, flags: errno.EROFS if flags & (os.O_RDWR | os.O_CREAT) else None
        account = place.open(quota=None, min_free=None)
        assert account.is_read_only
        assert account.used_bytes() is None
        assert account.quota_bytes is None


def test_a_full_disk_does_not_hinder_joining(place: Place) -> None:
    place.io.fail_open = lambda name, flags: errno.ENOSPC if flags & os.O_CREAT else None
    account = place.open()
    reservation = account.reserve([SIZE], later())
    assert reservation.granted == 0
    assert "No space left" in reservation.reason
    place.io.fail_open = lambda name, flags: None
    assert account.reserve([SIZE], later()).granted == 1


def test_files_and_directories_are_for_the_owner_only(place: Place) -> None:
    """E10: whatever the umask."""
    old = os.umask(0)
    try:
        place.write(place.open(), ["page"])
        account = place.open()
        account.reserve([SIZE], later())
        account.sweep(later())
    finally:
        os.umask(old)
    found = [place.path / "account", *(place.path / "account").rglob("*")]
    assert len(found) == 6
    for path in found:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_closing_gives_back_every_descriptor(place: Place) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(20):
        account = place.open()
        place.write(account, keys("page", 12))
        account.sweep(later())
        account.close()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert writer_files(place) == []
