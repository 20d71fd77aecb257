"""The three ways of publishing, forced by system calls that do not work, and O_DIRECT."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from local_faults import (
    MODES,
    Call,
    FaultyIO,
    Gate,
    failing,
    files_below,
    get,
    is_tmpfile,
    later,
    open_at,
    path_of,
    put,
    without_better_than,
)

from hicache_store.connectors.base import BufferSource, Connector, Read, Status, Write
from hicache_store.connectors.local_io import PosixIO
from hicache_store.connectors.local_publish import METHODS, Method, Publisher, probe_method
from hicache_store.connectors.local_transfer import ALIGNMENT, Scratch
from hicache_store.limits import IO_PIECE_BYTES, KIB, MIB
from hicache_store.testing.connector_contract import Connect, RaceContract, WriteContract
from hicache_store.testing.probes import ProbeTarget, content, write_of

KEY = "v1/ns/aa/0001/kv.H000-008.L000-061"
META = "meta/v1/ns/grid-00"
DATA = content(KEY, 50_000)
CREATING = os.O_CREAT | os.O_EXCL


def method_of(store: Connector) -> Method:
    return store._root.publisher().method  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("method", METHODS[1:], scope="class")
class TestLesserFileSystems(WriteContract, RaceContract):
    """The contract of writes where files cannot be made without a name, or not be linked."""

    @pytest.fixture
    def connect(self, tmp_path: Path, method: Method) -> Connect:
        return lambda: open_at(tmp_path / "store", without_better_than(method), "threads=2&quota=1GiB")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_each_way_publishes_and_leaves_nothing_else(
    tmp_path: Path, method: Method, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The best way that works is taken; objects, metadata and replacements all go by it."""
    with caplog.at_level(logging.WARNING, "hicache_store.connectors.local_attach"):
        store = open_at(tmp_path, without_better_than(method), f"io={mode}&quota=1GiB")
    assert method_of(store) == method
    assert store.capabilities.create_only == (method != "rename")
    assert any("hard links" in record.getMessage() for record in caplog.records) == (method == "rename")
    assert put(store, KEY, DATA).status is Status.OK
    assert put(store, META, DATA).status is Status.OK
    assert put(store, KEY, DATA[::-1]).status is Status.EXISTS
    assert put(store, KEY, DATA[:-1]).status is Status.CONFLICT
    version = next(store.scan(KEY)).version
    assert put(store, KEY, DATA[::-1], replace="0-0").status is Status.CONFLICT
    assert get(store, KEY, 50_000)[1] == DATA
    assert put(store, KEY, DATA[::-1], replace=version).status is Status.OK
    assert get(store, KEY, 50_000)[1] == DATA[::-1]
    assert get(store, META, 50_000)[1] == DATA
    expected = [str(path_of(tmp_path, key)) for key in (KEY, META)]
    assert files_below(tmp_path) == sorted(expected)
    assert all(os.stat(path).st_nlink == 1 for path in expected)
    store.close()
    assert [path.name for path in tmp_path.rglob("~*")] == []


@pytest.mark.parametrize("method", METHODS[:2])
@pytest.mark.parametrize("code", [errno.EIO, errno.EEXIST, errno.ETIMEDOUT])
def test_a_link_that_happened_though_its_failure_was_reported_is_a_success(
    tmp_path: Path, method: Method, code: int
) -> None:
    """The answer of a server was lost, and the repeated call found the name taken by our own file."""
    io = without_better_than(method)
    store = open_at(tmp_path, io, "quota=1GiB")

    def lying(real: Callable[..., None], *args: object, **kwargs: object) -> None:
        real(*args, **kwargs)
        raise OSError(code, os.strerror(code))

    io.hooks["link"] = io.hooks["link_fd"] = lying
    assert put(store, KEY, DATA).status is Status.OK
    assert get(store, KEY, 50_000)[1] == DATA
    assert files_below(tmp_path) == [str(path_of(tmp_path, KEY))]
    store.close()


@pytest.mark.parametrize("method", METHODS[:2])
def test_a_link_that_failed_is_a_failure(tmp_path: Path, method: Method) -> None:
    io = without_better_than(method)
    store = open_at(tmp_path, io, "quota=1GiB")
    io.hooks["link"] = io.hooks["link_fd"] = failing(errno.EIO)
    assert put(store, KEY, DATA).status is Status.FAILED
    assert files_below(tmp_path) == []
    io.hooks["link"] = io.hooks["link_fd"] = failing(errno.EEXIST)
    assert put(store, KEY, DATA).status is Status.FAILED
    store.close()


def test_an_object_is_published_although_its_temporary_name_stays(tmp_path: Path) -> None:
    """The name that cannot be removed is counted and left to a sweep, which takes it by its lock."""
    io = without_better_than("link")
    store = open_at(tmp_path, io, "quota=1GiB")
    io.hooks["unlink"] = failing(errno.EIO)
    assert put(store, KEY, DATA).status is Status.OK
    assert put(store, META, DATA).status is Status.OK
    assert store.metrics.get("file.discard_failed") == 2
    assert len(files_below(tmp_path)) == 4
    io.hooks.pop("unlink")
    assert store.sweep(later()).temp_files_removed == 2
    assert files_below(tmp_path) == sorted(str(path_of(tmp_path, key)) for key in (KEY, META))
    assert get(store, KEY, 50_000)[1] == DATA
    store.close()


@pytest.mark.parametrize("key", [KEY, META])
def test_a_file_that_is_being_written_survives_a_sweep(tmp_path: Path, key: str) -> None:
    """The temporary file of a live writer is locked; another process's sweep leaves it alone."""
    io = without_better_than("link")
    store, other = open_at(tmp_path, io, "quota=1GiB"), open_at(tmp_path, query="quota=1GiB")
    gate = io.hooks["utime_fd"] = Gate()
    writing = Call(lambda: put(store, key, DATA))
    gate.wait_for()
    assert len(files_below(tmp_path)) == 1
    assert other.sweep(later()).temp_files_removed == 0
    gate.opened.set()
    assert writing.result().status is Status.OK
    assert get(other, key, 50_000)[1] == DATA
    store.close()
    other.close()


def test_a_draft_that_a_sweep_took_before_it_was_locked_is_made_again(tmp_path: Path) -> None:
    """Between opening and locking a temporary file looks like one left behind."""
    io = without_better_than("link")
    store, other = open_at(tmp_path, io, "quota=1GiB"), open_at(tmp_path, query="quota=1GiB")
    swept: list[int] = []

    def late(real: Callable[[int], None], fd: int) -> None:
        if len(swept) < 2 and "~" in os.readlink(f"/proc/self/fd/{fd}"):
            swept.append(other.sweep(later()).temp_files_removed)
        real(fd)

    io.hooks["flock"] = late
    assert put(store, KEY, DATA).status is Status.OK
    assert swept == [1, 1]
    assert get(store, KEY, 50_000)[1] == DATA
    assert files_below(tmp_path) == [str(path_of(tmp_path, KEY))]
    store.close()
    other.close()


def test_drafts_work_without_locks(tmp_path: Path) -> None:
    """On a file system without locks temporary files are told by age."""
    io = without_better_than("link")
    io.hooks["flock"] = failing(errno.ENOLCK)
    store = open_at(tmp_path, io, "quota=1GiB")
    assert put(store, KEY, DATA).status is Status.OK
    assert files_below(tmp_path) == [str(path_of(tmp_path, KEY))]
    store.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_trying_out_tells_what_proves_nothing_from_what_does_not_work(tmp_path: Path, code: int) -> None:
    """A full or broken disk does not make hard links look missing."""
    io = FaultyIO()
    io.hooks["open"] = failing(code, is_tmpfile)
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match=os.strerror(code)):
        probe_method(io, fd)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    assert probe_method(PosixIO(), fd) == "tmpfile"
    assert list(tmp_path.iterdir()) == []
    os.close(fd)


def test_a_link_that_only_seems_to_work_is_not_trusted(tmp_path: Path) -> None:
    """Some file systems copy where they should link: then the next way is taken."""
    io = FaultyIO()

    def copying(real: object, fd: int, name: str, *, dir_fd: int) -> None:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=dir_fd))

    io.hooks["link_fd"] = copying
    fd = os.open(tmp_path, os.O_RDONLY)
    assert probe_method(io, fd) == "link"  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    os.close(fd)


def test_replacing_takes_no_more_than_the_named_version(tmp_path: Path) -> None:
    """The version is looked at again when the bytes are there, right before the name is given."""
    io = FaultyIO()
    store, other = open_at(tmp_path, io, "quota=1GiB"), open_at(tmp_path, query="quota=1GiB")
    assert put(store, KEY, DATA).is_ok
    version = next(store.scan(KEY)).version
    gate = io.hooks["utime_fd"] = Gate()
    replacing = Call(lambda: put(store, KEY, DATA[::-1], replace=version))
    gate.wait_for()
    newer = bytes(50_000)
    assert put(other, KEY, newer, replace=version).status is Status.OK
    gate.opened.set()
    outcome = replacing.result()
    assert outcome.status is Status.CONFLICT
    assert outcome.version == next(other.scan(KEY)).version
    assert get(store, KEY, 50_000)[1] == newer
    assert other.delete([KEY], later(), [version])[0].status is Status.CONFLICT
    assert other.delete([KEY], later(), [outcome.version])[0].status is Status.OK
    assert put(store, KEY, DATA, replace=outcome.version).status is Status.CONFLICT
    assert files_below(tmp_path) == []
    store.close()
    other.close()


def test_accounting_is_net_of_what_is_there_lost_or_replaced(tmp_path: Path) -> None:
    """Only bytes really added stay reserved; metadata never counts."""
    io = FaultyIO()
    store = open_at(tmp_path, io, "quota=1GiB&min_free=0")
    account = store._account
    assert account is not None
    keys = [f"{KEY}{index}" for index in range(5)]
    assert put(store, keys[0], DATA[:1000]).is_ok
    assert put(store, META, DATA).is_ok
    assert account.used_bytes() == 1000
    version = next(store.scan(keys[0])).version
    io.hooks["pwritev"] = failing(errno.EIO, lambda fd, views, _: views[0].nbytes == 777)
    writes = [
        write_of(keys[0], DATA, replace=version),
        write_of(keys[1], DATA),
        write_of(keys[1], DATA),
        write_of(keys[2], DATA[:777]),
        write_of("not a key", DATA),
        write_of(META, DATA),
        write_of(keys[3], DATA, replace="1-1"),
    ]
    statuses = [outcome.status for outcome in store.write_from(writes, later())]
    ok, exists, conflict, failed = Status.OK, Status.EXISTS, Status.CONFLICT, Status.FAILED
    assert statuses[0] is ok
    assert sorted(statuses[1:3]) == sorted([ok, exists])
    assert statuses[3:] == [failed, failed, exists, conflict]
    assert account.used_bytes() == 2 * 50_000
    assert store.delete([keys[1], META], later())[0].is_ok
    assert account.used_bytes() == 50_000
    report = store.sweep(later())
    assert (report.bytes, report.used_bytes) == (50_000, 50_000)
    store.close()


def test_what_has_no_room_is_refused_and_says_why(tmp_path: Path) -> None:
    """An item larger than the whole quota does not stand in the way of the others."""
    store = open_at(tmp_path, query="quota=300000B&min_free=0")
    writes = [write_of(KEY + "0", bytes(300_001)), write_of(KEY + "1", DATA), write_of(META, bytes(400_000))]
    outcomes = store.write_from(writes, later())
    assert [outcome.status for outcome in outcomes] == [Status.REFUSED, Status.OK, Status.OK]
    assert "300001" in outcomes[0].detail
    assert "300000" in outcomes[0].detail
    many = [write_of(f"{KEY}m{index}", DATA) for index in range(8)]
    statuses = [outcome.status for outcome in store.write_from(many, later())]
    assert statuses == [Status.OK] * 6 + [Status.REFUSED] * 2
    store.close()
    store = open_at(tmp_path, query="min_free=1000TiB&quota=1TiB")
    outcome = put(store, KEY + "9", DATA)
    assert outcome.status is Status.REFUSED
    assert "free" in outcome.detail
    store.close()


# -- O_DIRECT ------------------------------------------------------------------------------

SIZES = [1, 132 * 64, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, 300 * KIB, IO_PIECE_BYTES, 2 * MIB + 12_345]


class DirectIO(FaultyIO):
    """Checks what a strict file system asks of O_DIRECT, whatever the one below asks."""

    def __init__(self) -> None:
        super().__init__()
        self.direct: set[int] = set()
        self.in_place = 0
        self.hooks["open"] = self._open
        self.hooks["close"] = self._close
        self.hooks["preadv"] = self.hooks["pwritev"] = self._move

    def _open(self, real: Callable[..., int], name: str, flags: int, *args: int, **kwargs: int) -> int:
        fd = real(name, flags & ~os.O_DIRECT, *args, **kwargs)
        if flags & os.O_DIRECT:
            self.direct.add(fd)
        return fd

    def _close(self, real: Callable[[int], None], fd: int) -> None:
        self.direct.discard(fd)
        real(fd)

    def _move(self, real: Callable[..., int], fd: int, views: list[memoryview], offset: int) -> int:
        if fd in self.direct:
            for view in views:
                address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
                if address % ALIGNMENT or view.nbytes % ALIGNMENT or offset % ALIGNMENT:
                    raise OSError(errno.EINVAL, "not aligned")
            self.in_place += 1
        return real(fd, views, offset)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
def test_a57_any_size_and_any_part_moves_past_the_page_cache(tmp_path: Path, size: int, mode: str) -> None:
    """Unaligned lengths, addresses and offsets go through aligned memory; no padding is ever seen."""
    io = DirectIO()
    store = open_at(tmp_path, io, f"io={mode}&direct_io=1&quota=1GiB&threads=2")
    assert store.capabilities.alignment_bytes == ALIGNMENT
    data = content(KEY, max(size, 12))[:size]
    assert put(store, KEY, data).status is Status.OK
    assert path_of(tmp_path, KEY).read_bytes() == data
    parts = [
        [(0, [size])],
        [(size // 3, [size - size // 3])],
        [(0, [size // 2]), (size // 2, [size - size // 2])],
        [(size - 1, [1]), (0, [1])],
        [(min(4_000, size - 1), [min(200, size - min(4_000, size - 1))])],
    ]
    targets = [ProbeTarget(part) for part in parts]
    outcomes = store.read_into([Read(KEY, size, target) for target in targets], later())
    assert [outcome.status for outcome in outcomes] == [Status.OK] * 5
    assert all(target.delivered() == target.wanted(data) and target.guards_hold for target in targets)
    store.close()


def test_a57_aligned_memory_is_read_and_written_in_place(tmp_path: Path) -> None:
    """One system call a piece, straight from and into the caller's pages."""
    io = DirectIO()
    store = open_at(tmp_path, io, "io=direct&direct_io=1&quota=1GiB&threads=1")
    memory = Scratch().take(2 * MIB + ALIGNMENT)
    memory[:] = content(KEY, 2 * MIB + ALIGNMENT)
    data = bytes(memory)
    before = io.in_place
    views = [memory[: 2 * MIB], memory[2 * MIB :]]
    assert store.write_from([Write(KEY, len(data), BufferSource(views))], later())[0].is_ok
    assert io.in_place - before == 3
    memory[:] = bytes(len(memory))

    class Target:
        def parts(self) -> list[tuple[int, list[memoryview]]]:
            return [(0, views)]

        def check(self) -> None:
            return None

        def release(self) -> None:
            return None

    assert store.read_into([Read(KEY, len(data), Target())], later())[0].is_ok
    assert io.in_place - before == 6
    assert bytes(memory) == data
    store.close()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("call", ["open", "pwritev"])
def test_a57_where_o_direct_is_refused_the_page_cache_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str, code: int
) -> None:
    """Found out at the start: one warning, one count, and everything works."""
    io = FaultyIO()
    direct: set[int] = set()

    def refusing_open(real: Callable[..., int], name: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT and call == "open":
            raise OSError(code, os.strerror(code))
        fd = real(name, flags & ~os.O_DIRECT, *args, **kwargs)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    io.hooks["open"] = refusing_open
    io.hooks["pwritev"] = failing(code, lambda fd, views, offset: fd in direct)
    io.hooks["close"] = lambda real, fd: (direct.discard(fd), real(fd))
    with caplog.at_level(logging.WARNING, "hicache_store.connectors.local_attach"):
        store = open_at(tmp_path, io, "direct_io=1&quota=1GiB")
        for size in SIZES:
            data = content(KEY, max(size, 12))[:size]
            assert put(store, f"{KEY}{size}", data).is_ok
            assert get(store, f"{KEY}{size}", size)[1] == data
    assert store.metrics.get("file.direct_io_refused") == 1
    assert [("direct_io=1" in record.getMessage()) for record in caplog.records] == [True]
    assert store.capabilities.alignment_bytes == 1
    store.close()


def test_a57_truncated_and_stopped_direct_transfers_are_told(tmp_path: Path) -> None:
    """The end of the file in the middle of a piece is a failure, in place or not."""
    io = DirectIO()
    store = open_at(tmp_path, io, "io=direct&direct_io=1&quota=1GiB&threads=1")
    data = content(KEY, 100_000)
    assert put(store, KEY, data).is_ok
    io.hooks["preadv"] = lambda real, fd, views, offset: min(real(fd, views, offset), max(0, 50_000 - offset))
    outcome, _ = get(store, KEY, 100_000)
    assert outcome.status is Status.FAILED
    assert "byte 50000" in outcome.detail
    io.hooks["pwritev"] = lambda real, fd, views, offset: (
        real(fd, [views[0][:4096]], offset) if not offset else 0
    )
    assert put(store, KEY + "2", data).status is Status.FAILED
    assert files_below(tmp_path) == [str(path_of(tmp_path, KEY))]
    store.close()


def test_a_publisher_of_any_kind_discards_an_unpublished_draft(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    for method in METHODS:
        publisher = Publisher(PosixIO(), method)
        draft = publisher.draft(fd)
        assert os.fstat(draft.fd).st_mode & 0o777 == 0o600
        publisher.discard(draft)
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []
    os.close(fd)
