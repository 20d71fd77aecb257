"""The shared byte counter: never too low whatever is interrupted, exact again after one quiet walk."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from account_place import SIZE, FaultyIO, Place, fork, keys, later, wait_for, writer_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_store.connectors.local_counter import (
    Counter,
    Recount,
    decode_counter,
    decode_outstanding,
    encode_counter,
    encode_outstanding,
)
from hicache_store.connectors.local_io import PosixIO
from hicache_store.connectors.local_ledger import Ledger


class TestRecord:
    @given(st.builds(Counter, *[st.integers(0, 2**64 - 2)] * 5))
    def test_it_reads_back(self, counter: Counter) -> None:
        assert decode_counter(encode_counter(counter)) == counter

    def test_an_unknown_total_reads_back(self) -> None:
        assert decode_counter(encode_counter(Counter(7, None, 1, 2, 3))) == Counter(7, None, 1, 2, 3)

    def test_every_flipped_bit_and_every_length_is_noticed(self) -> None:
        good = encode_counter(Counter(7, 1000, 10, 20, 30))
        for bit in range(8 * len(good)):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << (bit % 8)
            assert decode_counter(bytes(bad)) is None
        for length in range(len(good)):
            assert decode_counter(good[:length]) is None
        assert decode_counter(good + b"\0") is None
        assert decode_outstanding(encode_outstanding(123)) == 123
        assert decode_outstanding(b"") == 0


class TestRecount:
    def test_a_quiet_walk_is_believed_both_ways(self) -> None:
        for total in (None, 10, 500, 9000):
            counter = Counter(1, total)
            assert Recount(1, 0, 0, 0).apply(counter, 500)
            assert counter.total_bytes == 500
            assert counter.epoch != 1

    def test_what_was_reserved_before_or_since_may_have_been_missed(self) -> None:
        counter = Counter(1, None, 0, gross_reserved_bytes=130)
        Recount(1, 7, 100, 0).apply(counter, 500)
        assert counter.total_bytes == 500 + 7 + 30

    def test_what_was_stored_meanwhile_is_not_counted_twice_while_the_counter_is_sound(self) -> None:
        counter = Counter(1, 530, 0, gross_reserved_bytes=130)
        Recount(1, 7, 100, 0).apply(counter, 525)
        assert counter.total_bytes == 530

    def test_what_was_removed_meanwhile_does_not_hide_what_was_written(self) -> None:
        """100 bytes written into a directory the walk had passed, 100 others removed from one it had
        not reached: the walk saw neither."""
        counter = Counter(1, 600, 0, gross_reserved_bytes=100, gross_released_bytes=100)
        Recount(1, 0, 0, 0).apply(counter, 500)
        assert counter.total_bytes == 600

    def test_another_recount_between_wins(self) -> None:
        counter = Counter(2, 600)
        assert not Recount(1, 0, 0, 0).apply(counter, 500)
        assert counter.total_bytes == 600


class Process:
    """A writer of the model: its ledger, its reservations (bytes, published) and its removals."""

    def __init__(self, root_fd: int) -> None:
        self.ledger = Ledger(root_fd, PosixIO(), lambda: False, lambda: 0.0)
        self.reservations: list[list[int]] = []
        self.removed: list[tuple[int, int]] = []


class Model:
    """Processes, a disk of three directories, and at most one walk."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.root_fd = os.open(root, os.O_RDONLY)
        self.leaves: list[list[int]] = [[], [], []]
        self.processes = [Process(self.root_fd) for _ in range(3)]
        self.walk: tuple[Recount, Process, list[int]] | None = None
        with self.processes[0].ledger.locked(later()) as counter:
            counter.total_bytes = 0

    def step(self, action: str, who: int, size: int) -> None:
        getattr(self, action)(self.processes[who], size)
        total = self.total()
        assert total is None or total >= self.truth()

    def total(self) -> int | None:
        counter = self.processes[0].ledger.peek()
        return None if counter is None else counter.total_bytes

    def truth(self) -> int:
        pending = sum(n - done for process in self.processes for n, done in process.reservations)
        return self.stored() + pending

    def stored(self) -> int:
        return sum(map(sum, self.leaves))

    def reserve(self, process: Process, size: int) -> None:
        with process.ledger.locked(later()) as counter:
            process.ledger.reserve(counter, size)
        process.reservations.append([size, 0])

    def publish(self, process: Process, size: int) -> None:
        if process.reservations:
            reservation = process.reservations[-1]
            n_bytes = min(size, reservation[0] - reservation[1])
            reservation[1] += n_bytes
            self.leaves[size % len(self.leaves)].append(n_bytes)

    def settle(self, process: Process, size: int) -> None:
        if process.reservations:
            n_bytes, done = process.reservations.pop(size % len(process.reservations))
            process.ledger.settle(n_bytes, done)

    def unlink(self, process: Process, size: int) -> None:
        leaf = self.leaves[size % len(self.leaves)]
        if leaf:
            mark = process.ledger.epoch()
            process.removed.append((leaf.pop(size % len(leaf)), mark))

    def release(self, process: Process, size: int) -> None:
        if process.removed:
            process.ledger.release(*process.removed.pop(size % len(process.removed)))

    def kill(self, process: Process, size: int) -> None:
        process.ledger.close_fds()
        if self.walk is not None and self.walk[1] is process:
            self.walk = None
        self.processes[self.processes.index(process)] = Process(self.root_fd)

    def damage(self, process: Process, size: int) -> None:
        Path(self.root, "account", "counter").write_bytes(b"x" * size)

    def begin(self, process: Process, size: int) -> None:
        if self.walk is None:
            with process.ledger.locked(later()) as counter:
                self.walk = process.ledger.begin_recount(counter), process, []

    def visit(self, process: Process, size: int) -> None:
        if self.walk is not None and len(self.walk[2]) < len(self.leaves):
            self.walk[2].append(sum(self.leaves[len(self.walk[2])]))

    def end(self, process: Process, size: int) -> None:
        if self.walk is not None and len(self.walk[2]) == len(self.leaves):
            recount, owner, seen = self.walk
            with owner.ledger.locked(later()) as counter:
                recount.apply(counter, sum(seen))
            self.walk = None

    def finish(self) -> None:
        """Everybody ends what was begun; then one walk runs alone."""
        for process in self.processes:
            while process.reservations:
                self.settle(process, 0)
            while process.removed:
                self.release(process, 0)
        self.walk = None
        owner = self.processes[0]
        for action in ("begin", "visit", "visit", "visit", "end"):
            getattr(self, action)(owner, 0)
        assert self.total() == self.stored()

    def close(self) -> None:
        for process in self.processes:
            process.ledger.close()
        os.close(self.root_fd)


BUSY = st.sampled_from(["reserve", "publish", "settle", "unlink", "release", "kill", "damage"])
PASS = st.sampled_from(["reserve", "publish", "publish", "settle", "unlink", "unlink", "release", "release"])
NUMBERS = st.tuples(st.integers(0, 2), st.integers(1, 40))


def _walk(gaps: list[list[str]]) -> list[str]:
    """One walk, with the actions of each gap before its next step."""
    steps = ["begin", "visit", "visit", "visit", "end"]
    return [action for gap, step in zip(gaps, steps, strict=True) for action in [*gap, step]]


GAPS = st.tuples(*[st.lists(PASS, max_size=5) | st.lists(BUSY, max_size=5)] * 5).map(list)
STEPS = st.lists(GAPS.map(_walk), min_size=1, max_size=3).flatmap(
    lambda walks: st.tuples(*[st.tuples(st.just(action), NUMBERS) for walk in walks for action in walk])
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_in_any_order_of_events_the_counter_is_never_too_low(
    steps: tuple[tuple[str, tuple[int, int]], ...],
) -> None:
    """Three processes reserve, publish, settle, remove and die around walks that see directory after
    directory; the counter may be damaged at any time."""
    with tempfile.TemporaryDirectory() as root:
        model = Model(root)
        try:
            for action, (who, size) in steps:
                model.step(action, who, size)
            model.finish()
        finally:
            model.close()


def _interleavings(scripts: tuple[tuple[str, ...], ...]) -> Iterator[list[tuple[int, str]]]:
    """Every order of the scripts' actions that keeps the order within each script."""
    if not any(scripts):
        yield []
    for who, script in enumerate(scripts):
        if script:
            rest = (*scripts[:who], script[1:], *scripts[who + 1 :])
            for tail in _interleavings(rest):
                yield [(who, script[0]), *tail]


def test_in_every_order_of_a_write_a_removal_and_a_walk_the_counter_is_never_too_low(tmp_path: Path) -> None:
    """A write to the directory that the walk sees first, a removal from the one it sees last."""
    walk, write = ("begin", "visit", "visit", "end"), ("reserve", "publish", "settle")
    removal = ("unlink", "release")
    model = Model(str(tmp_path))
    count = 0
    try:
        for order in _interleavings((walk, write, removal)):
            model.leaves = [[], [2]]
            with model.processes[0].ledger.locked(later()) as counter:
                counter.total_bytes = 2
            for who, action in order:
                model.step(action, who, 1 if action == "unlink" else 2)
            count += 1
    finally:
        model.close()
    assert count == 1260


class KillingIO(FaultyIO):
    """Kills its process at the ``at``-th call that changes something, before or after it happens."""

    def __init__(self, at: int, is_after: bool) -> None:
        super().__init__()
        self.at = at
        self.is_after = is_after

    def _die(self, is_after: bool) -> None:
        if is_after == self.is_after:
            self.at -= 1
            if self.at == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def pwritev(self, fd: int, views: object, offset: int) -> int:
        self._die(False)
        done = super().pwritev(fd, views, offset)  # type: ignore[arg-type]
        self._die(True)
        return done

    def unlink(self, name: str, *, dir_fd: int) -> None:
        self._die(False)
        super().unlink(name, dir_fd=dir_fd)
        self._die(True)

    def open(self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        self._die(False)
        fd = super().open(name, flags, mode, dir_fd=dir_fd)
        self._die(True)
        return fd

    def flock(self, fd: int) -> None:
        self._die(False)
        super().flock(fd)
        self._die(True)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._die(False)
        super().truncate(fd, size_bytes)
        self._die(True)


@pytest.mark.parametrize("is_after", [False, True])
def test_killed_at_every_system_call(tmp_path: Path, is_after: bool) -> None:
    """A writer's whole life (join, write, evict, release, leave) cut off at each of its calls."""
    at = 0
    status = -signal.SIGKILL
    while status == -signal.SIGKILL:
        at += 1
        place = Place(tmp_path / f"{at}")
        place.write(place.open(quota=4 * SIZE), keys("old", 3), age_s=50)
        place.close()
        if at % 2:
            (place.path / "account" / "counter").write_bytes(b"torn")
        place.io = KillingIO(at, is_after)

        def life(place: Place = place) -> None:
            account = place.open(quota=4 * SIZE)
            place.write(account, keys("new", 3))
            mark = account.mark()
            place.file("new.0").unlink()
            account.released(SIZE, mark)
            account.close()

        status = wait_for(fork(life))
        place.io = FaultyIO()
        account = place.open(quota=4 * SIZE)
        used = account.used_bytes()
        assert used is None or used >= place.bytes_on_disk()
        assert place.bytes_on_disk() <= 4 * SIZE
        assert account.sweep(later()).used_bytes == place.bytes_on_disk()
        assert writer_files(place) == []
        place.close()
    assert status == 0
    assert at > 20
