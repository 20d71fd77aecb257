"""Writers and readers of one root, killed at random instants: no wrong byte, no byte over the quota,
nothing lost from the account, nothing left behind."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from pathlib import Path

import kill9_worker as worker
import pytest

from hicache_store.clock import Deadline
from hicache_store.connectors.base import BufferSource, Status, Write
from hicache_store.connectors.local_counter import decode_counter
from hicache_store.connectors.local_io import PosixIO

WRITERS = READERS = 4
BATCH_BYTES = worker.BATCH * worker.SIZE


class Crowd:
    """The workers of one root. A worker that ends by itself is a failure."""

    def __init__(self, root: Path, io: PosixIO, seed: int) -> None:
        self.root = root
        self.io = io
        self.rng = random.Random(seed)
        self.roles = [True] * WRITERS + [False] * READERS
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.tallies = memoryview(self.memory).cast("Q")
        self.pids = [0] * len(self.roles)
        self.killed = 0
        for index in range(len(self.roles)):
            self.start(index)

    def start(self, index: int) -> None:
        seed = self.rng.getrandbits(32)
        pid = os.fork()
        if pid == 0:
            tally = self.tallies[3 * index : 3 * index + 3]
            worker.run(str(self.root), self.io, self.roles[index], seed, tally)
        self.pids[index] = pid

    def totals(self) -> tuple[int, int, int]:
        """Objects written, read and refused so far."""
        written, read, refused = (sum(self.tallies[kind : 3 * len(self.roles) : 3]) for kind in range(3))
        return written, read, refused

    def kill(self, index: int) -> None:
        os.kill(self.pids[index], signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pids[index], 0)[1])
        self.pids[index] = 0
        assert status == -signal.SIGKILL, f"a worker had ended by itself with {status}"
        self.killed += 1

    def kill_one(self) -> None:
        """Two writers for one reader, a new one in its place."""
        index = self.rng.choice([*range(WRITERS), *range(WRITERS), *range(WRITERS + READERS)])
        self.kill(index)
        self.start(index)

    def stop_the_world(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in self.pids:
            status = os.waitpid(pid, os.WUNTRACED)[1]
            assert os.WIFSTOPPED(status), f"a worker ended by itself: {os.waitstatus_to_exitcode(status)}"

    def go_on(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        for index, pid in enumerate(self.pids):
            if pid:
                self.kill(index)
        self.tallies.release()
        self.memory.close()


def files_of(root: Path) -> dict[str, int]:
    """Path and size of every file below ``objects``, by a walk of its own."""
    found = {}
    for where, _, names in os.walk(root / "objects"):
        for name in names:
            path = os.path.join(where, name)
            found[path] = os.stat(path).st_size
    return found


def check_stopped_world(root: Path) -> int:
    """With every process stopped, at whatever instant: the bytes on the disk, which keep the bounds."""
    files = files_of(root)
    n_bytes = sum(files.values())
    assert n_bytes <= worker.QUOTA + WRITERS * BATCH_BYTES
    objects = {path: size for path, size in files.items() if not os.path.basename(path).startswith("~")}
    assert sum(objects.values()) <= worker.QUOTA
    counter = decode_counter((root / "account" / "counter").read_bytes())
    assert counter is not None
    assert counter.total_bytes is not None
    assert counter.total_bytes >= sum(objects.values())
    return n_bytes


def empty_one(root: Path, rng: random.Random) -> None:
    """What a power cut leaves: a file of its final name without its bytes."""
    path = rng.choice(sorted(files_of(root)) or [""])
    if path and not os.path.basename(path).startswith("~"):
        os.truncate(path, 0)


def check_after_the_end(root: Path, io: PosixIO) -> None:
    connector = worker.connect(str(root), io)
    report = connector.sweep(Deadline.after(60))
    assert report.is_complete
    files = files_of(root)
    assert [path for path in files if os.path.basename(path).startswith("~")] == []
    assert report.used_bytes == report.bytes == sum(files.values())
    assert os.listdir(root / "account" / "writers") == []
    by_name = {
        worker.key_of(chain, depth): 0 for chain in range(worker.CHAINS) for depth in range(worker.BATCH)
    }
    for path, size in files.items():
        key = os.path.basename(path).replace("+", "/")
        assert key in by_name
        if size:
            assert worker.is_genuine(key, Path(path).read_bytes())
    rng = random.Random(0)
    for _ in range(50):
        worker.write_some(connector, rng)
        worker.read_some(connector, rng)
    fresh = Write("v1/fresh", worker.SIZE, BufferSource.of(b"f" * worker.SIZE))
    assert connector.write_from([fresh], Deadline.after(60))[0].status is Status.OK
    connector.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


def siege(root: Path, io: PosixIO, kills: int, seed: int) -> None:
    worker.connect(str(root), io).close()
    crowd = Crowd(root, io, seed)
    most = 0

    def has_worked() -> bool:
        """Whether the quota was reached many times over, and there were hits."""
        written, read, _ = crowd.totals()
        return written * worker.SIZE > 4 * worker.QUOTA and read > 0

    try:
        while crowd.killed < kills or not has_worked():
            time.sleep(crowd.rng.uniform(0, 0.02))
            crowd.kill_one()
            if crowd.killed % 2 == 0:
                crowd.stop_the_world()
                try:
                    most = max(most, check_stopped_world(root))
                    if crowd.killed % 4 == 0:
                        empty_one(root, crowd.rng)
                finally:
                    crowd.go_on()
        written, read, refused = crowd.totals()
    finally:
        crowd.close()
    print(f"{crowd.killed} killed, {written} written, {read} read, {refused} refused, {most} bytes at most")
    check_after_the_end(root, io)


@pytest.mark.parametrize("io", [PosixIO(), worker.NamedDraftsIO()], ids=["tmpfile", "link"])
def test_d07_writers_and_readers_are_killed_at_any_instant(root: Path, io: PosixIO) -> None:
    """25 kills each where unfinished files have no name and where they have one."""
    siege(root, io, kills=25, seed=int.from_bytes(os.urandom(4), "little"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("io", [PosixIO(), worker.NamedDraftsIO()], ids=["tmpfile", "link"])
def test_d07_a_thousand_kills(root: Path, io: PosixIO) -> None:
    siege(root, io, kills=500, seed=int.from_bytes(os.urandom(4), "little"))
