"""Sweeps of a file store: expiry, leftovers, strays, unreadable directories, and when they run."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from account_place import NANO, SIZE, START_S, Place, keys, later

from hicache_store.clock import Deadline
from hicache_store.connectors.local_names import file_name, temporary_name
from hicache_store.connectors.local_sweep import Maintenance, SweepReport, Victim, Victims
from hicache_store.errors import HandleError
from hicache_store.limits import TEMPORARY_GRACE_S
from hicache_store.metrics import Metrics


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "root")
    yield place
    place.close()


class TestExpiry:
    """E10: what is not used for its time to live goes; a use extends it."""

    def test_only_what_is_older_than_its_time_to_live_goes(self, place: Place) -> None:
        account = place.open(ttl_s=60.0)
        place.write(account, keys("old", 3), age_s=62)
        place.write(account, keys("young", 2), age_s=58)
        meta = place.path / "meta" / file_name("meta/manifest")
        meta.parent.mkdir()
        meta.write_bytes(b"kept")
        os.utime(meta, ns=(0, 0))
        report = account.sweep(later())
        assert (report.expired_objects, report.expired_bytes) == (3, 3 * SIZE)
        assert (report.objects, report.bytes, report.used_bytes) == (2, 2 * SIZE, 2 * SIZE)
        assert place.stored() == {"young.0", "young.1"}
        assert meta.read_bytes() == b"kept"

    def test_age_is_judged_by_the_clock_of_the_storage(self, place: Place) -> None:
        account = place.open(ttl_s=60.0)
        place.write(account, ["page"])
        assert account.sweep(later()).expired_objects == 0
        place.offset_s = 59.0
        assert account.sweep(later()).expired_objects == 0
        place.offset_s = 62.0
        assert account.sweep(later()).expired_objects == 1

    def test_a_use_extends_the_time(self, place: Place) -> None:
        account = place.open(ttl_s=60.0)
        place.write(account, keys("page", 2))
        place.offset_s = 62.0
        used_ns = (START_S + 50) * NANO
        os.utime(place.file("page.1"), ns=(used_ns, used_ns))
        assert account.sweep(later()).expired_objects == 1
        assert place.stored() == {"page.1"}

    def test_an_object_from_the_future_is_neither_expired_nor_an_error(self, place: Place) -> None:
        place.put("page", age_s=-(10**6))
        assert place.open(ttl_s=60.0).sweep(later()).objects == 1

    def test_what_cannot_be_removed_stays_counted(self, place: Place) -> None:
        place.put("page", age_s=100)
        place.io.fail_unlink = lambda name: errno.EPERM
        report = place.open(ttl_s=60.0).sweep(later())
        assert (report.expired_objects, report.failures, report.used_bytes) == (0, 1, SIZE)


class TestLeftovers:
    def leave(self, place: Place, age_s: float = 0.0) -> Path:
        leaf = place.put("page").parent
        path = leaf / temporary_name()
        path.write_bytes(b"\0" * SIZE)
        os.utime(path, (START_S - age_s, START_S - age_s))
        return path

    def test_what_a_dead_writer_left_is_removed_and_what_a_live_one_holds_is_not(self, place: Place) -> None:
        dead, live = self.leave(place), self.leave(place)
        fd = os.open(live, os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        report = place.open().sweep(later())
        assert (report.temp_files_removed, report.objects, report.used_bytes) == (1, 1, SIZE)
        assert not dead.exists()
        assert live.exists()
        os.close(fd)
        assert place.open().sweep(later()).temp_files_removed == 1
        assert place.stored() == {"page"}

    def test_a_second_name_of_a_published_object_goes_alone(self, place: Place) -> None:
        """A writer killed between giving the final name and taking the temporary one away."""
        temporary = self.leave(place)
        temporary.unlink()
        os.link(place.file("page"), temporary)
        assert place.open().sweep(later()).used_bytes == SIZE
        assert place.stored() == {"page"}

    def test_without_locks_age_tells(self, place: Place) -> None:
        place.io.flock_errno = errno.EOPNOTSUPP
        old, young = self.leave(place, age_s=TEMPORARY_GRACE_S + 1), self.leave(place)
        assert place.open().sweep(later()).temp_files_removed == 1
        assert not old.exists()
        assert young.exists()
        place.offset_s = TEMPORARY_GRACE_S + 1
        assert place.open().sweep(later()).temp_files_removed == 1

    def test_one_that_cannot_be_removed_is_counted_as_stored(self, place: Place) -> None:
        self.leave(place)
        place.io.fail_unlink = lambda name: errno.EBUSY
        report = place.open().sweep(later())
        assert (report.failures, report.used_bytes) == (1, 2 * SIZE)


class TestStrays:
    def test_nothing_foreign_is_followed_counted_or_removed(self, place: Place, tmp_path: Path) -> None:
        """E06: links out of the root, directories, pipes, foreign names, misplaced objects."""
        outside = tmp_path / "outside"
        kept = place.put("page", age_s=1000)
        leaf = kept.parent
        there = outside.joinpath(*kept.relative_to(place.path).parts[2:])
        there.parent.mkdir(parents=True)
        there.write_bytes(b"not yours")
        kept.unlink()
        leaf.rmdir()
        leaf.symlink_to(there.parent)
        (place.path / "objects" / "aa").mkdir()
        (place.path / "objects" / "README").write_bytes(b"text")
        leaf = place.put("other", age_s=1000).parent
        (leaf / "directory.0").mkdir()
        (leaf / "link").symlink_to(there)
        (leaf / "~link").symlink_to(there)
        (leaf / ".nfs01").write_bytes(b"silly")
        (leaf / "with space").write_bytes(b"foreign")
        os.mkfifo(leaf / "pipe")
        misplaced = next(key for key in keys("misplaced", 100) if place.file(key).parent != leaf)
        (leaf / misplaced).write_bytes(b"foreign")
        before = sorted(path for path in place.path.rglob("*") if "account" not in path.parts)

        account = place.open(quota=SIZE, ttl_s=10.0)
        report = account.sweep(later())
        assert (report.expired_objects, report.objects, report.used_bytes) == (1, 0, 0)
        assert report.is_complete
        assert report.failures == 0
        assert report.strays == 10
        assert account.reserve([SIZE], later()).granted == 1
        after = sorted(path for path in place.path.rglob("*") if "account" not in path.parts)
        assert [path for path in before if path not in after] == [place.file("other")]
        assert there.read_bytes() == b"not yours"

    def test_a_leaf_that_became_a_link_is_not_followed_by_an_eviction(
        self, place: Place, tmp_path: Path
    ) -> None:
        account = place.open(quota=4 * SIZE)
        for age, key in enumerate(keys("page", 4)):
            place.write(account, [key], age_s=100 - age)
        place.write(account, ["more"])
        victim = place.file("page.1")
        outside = tmp_path / "outside"
        victim.parent.rename(outside)
        victim.parent.symlink_to(outside)
        assert place.write(account, ["again"]) == 1
        assert (outside / "page.1").exists()


class TestUnreadable:
    def test_a_directory_that_cannot_be_read_leaves_the_count_as_it_was(self, place: Place) -> None:
        account = place.open()
        place.write(account, keys("page", 5))
        hidden = place.file("page.0").parent.name
        place.io.fail_open = lambda name, flags: (
            errno.EIO if flags & os.O_DIRECTORY and name == hidden else None
        )
        report = account.sweep(later())
        assert not report.is_complete
        assert "Input/output error" in report.reason
        assert report.failures >= 1
        assert report.used_bytes == 5 * SIZE
        place.io.fail_open = lambda name, flags: None
        assert account.sweep(later()).is_complete

    def test_a_store_that_was_never_counted_refuses_until_it_can_be(self, place: Place) -> None:
        place.put("page")
        account = place.open()
        place.io.fail_open = lambda name, flags: errno.EIO if name == "." else None
        reservation = account.reserve([SIZE], later())
        assert reservation.granted == 0
        assert "not been counted" in reservation.reason
        place.io.fail_open = lambda name, flags: None
        assert account.reserve([SIZE], later()).granted == 1

    def test_a_walk_ends_at_its_deadline_without_a_count(self, place: Place) -> None:
        account = place.open(ttl_s=10.0)
        for key in keys("page", 50):
            place.put(key, age_s=100)
        report = account.sweep(Deadline.after(0.0))
        assert (report.is_complete, report.reason) == (False, "the deadline has passed")
        assert account.used_bytes() == 0
        turns = 0
        while account.sweep(Deadline.after(0.0)).expired_objects >= 0 and place.stored():
            turns += 1
            assert turns < 5000
        assert account.sweep(later()).is_complete

    def test_closing_leaves_a_hanging_sweep_its_descriptors(self, place: Place) -> None:
        """Their numbers would come to mean other directories, in which it would remove files."""
        before = sorted(os.listdir("/proc/self/fd"))
        account = place.open(ttl_s=10.0)
        place.write(account, keys("page", 3), age_s=100)
        entered, leave = threading.Event(), threading.Event()

        def hang(name: str) -> None:
            entered.set()
            assert leave.wait(60)

        place.io.before_unlink = hang
        reports: list[SweepReport] = []
        thread = threading.Thread(target=lambda: reports.append(account.sweep(later())))
        thread.start()
        assert entered.wait(60)
        account.close()
        assert len(os.listdir("/proc/self/fd")) > len(before)
        leave.set()
        thread.join()
        assert reports[0].expired_objects == 3
        assert sorted(os.listdir("/proc/self/fd")) == before

    def test_another_sweep_is_waited_for_until_the_deadline(self, place: Place) -> None:
        account = place.open()
        fd = os.open(place.path / "account" / "sweep.lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert account.sweep(Deadline.after(0.03)).reason == "another sweep is running"
        os.close(fd)
        assert account.sweep(later()).is_complete


class TestVictims:
    def test_it_keeps_the_oldest_in_order_within_its_bound(self) -> None:
        victims = Victims(limit=10)
        times = [(index * 7919) % 1009 for index in range(1000)]
        for time_ns in times:
            victims.add(Victim(time_ns, f"n{time_ns}", "0/0", 1))
            assert len(victims) < 20
        victims.seal()
        popped = [victims.pop() for _ in range(11)]
        assert [victim and victim.mtime_ns for victim in popped] == [*sorted(times)[:10], None]

    def test_a_chain_of_equal_age_across_the_bound_is_not_lost(self) -> None:
        victims = Victims(limit=4)
        for index in range(20):
            victims.add(Victim(5, f"n{index:02d}", "0/0", 1))
        victims.seal()
        assert [victim.name for victim in iter(victims.pop, None)] == ["n00", "n01", "n02", "n03"]


class Swept:
    """Stands in for an account: counts its calls, may fail, may walk until it is stopped."""

    def __init__(self) -> None:
        self.calls = threading.Semaphore(0)
        self.stopped = threading.Event()
        self.errors: list[Exception] = []
        self.walks = False

    def maintain(
        self, interval_s: float, deadline: Deadline, is_stopped: Callable[[], bool]
    ) -> SweepReport | None:
        self.calls.release()
        if self.errors:
            raise self.errors.pop()
        while self.walks and not is_stopped():
            pass
        self.stopped.set()
        return None


class TestMaintenance:
    def test_it_sweeps_again_and_again_also_after_a_failure(self) -> None:
        swept, metrics = Swept(), Metrics()
        swept.errors = [OSError(errno.EIO, "no")]
        maintenance = Maintenance(swept, 0.001, metrics)
        for _ in range(3):
            assert swept.calls.acquire(timeout=60)
        assert maintenance.close()
        assert maintenance.close()
        assert metrics.get("file.sweep_failures") == 1

    def test_closing_stops_it_in_the_middle_of_a_walk(self) -> None:
        swept = Swept()
        swept.walks = True
        maintenance = Maintenance(swept, 0.001, Metrics())
        assert swept.calls.acquire(timeout=60)
        assert maintenance.close(timeout_s=60)
        assert swept.stopped.is_set()

    def test_it_ends_with_the_account(self) -> None:
        swept = Swept()
        swept.errors = [HandleError("closed")]
        maintenance = Maintenance(swept, 0.001, Metrics())
        assert swept.calls.acquire(timeout=60)
        maintenance._thread.join(60)
        assert not maintenance._thread.is_alive()
        assert not swept.calls.acquire(blocking=False)

    def test_it_does_nothing_before_its_time(self) -> None:
        swept = Swept()
        maintenance = Maintenance(swept, 300.0, Metrics())
        assert maintenance.close()
        assert not swept.calls.acquire(blocking=False)

    def test_of_many_processes_one_sweeps_in_an_interval(self, place: Place) -> None:
        accounts = [place.open(), place.open(), place.open()]
        now_s = os.stat(place.path / "account" / "counter").st_mtime
        place.offset_s = now_s - START_S
        reports = [account.maintain(300.0, later(), lambda: False) for account in accounts]
        assert [report is not None for report in reports] == [False, False, False]
        os.utime(place.path / "account" / "sweep.lock", (now_s - 1000, now_s - 1000))
        reports = [account.maintain(300.0, later(), lambda: False) for account in accounts]
        assert [report is not None for report in reports] == [True, False, False]

    def test_a_store_that_was_never_counted_is_swept_at_once(self, place: Place) -> None:
        place.put("page")
        account = place.open()
        place.offset_s = os.stat(place.path / "account" / "counter").st_mtime - START_S
        assert account.maintain(300.0, later(), lambda: False) is not None
        assert account.used_bytes() == SIZE
        assert account.maintain(300.0, later(), lambda: False) is None

    def test_it_yields_to_a_running_sweep(self, place: Place) -> None:
        account = place.open()
        fd = os.open(place.path / "account" / "sweep.lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert account.maintain(0.0, later(), lambda: False) is None
        os.close(fd)
        assert account.maintain(0.0, later(), lambda: False) is not None

    def test_a_stopped_walk_changes_no_count(self, place: Place) -> None:
        account = place.open()
        place.write(account, keys("page", 5))
        report = account.maintain(0.0, later(), lambda: True)
        assert report is not None
        assert (report.is_complete, report.reason) == (False, "stopped")
        assert account.used_bytes() == 5 * SIZE
