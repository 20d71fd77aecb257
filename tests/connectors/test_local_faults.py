"""System calls that fail or fall short, and files that are not what they should be."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from local_faults import (
    MODES,
    Call,
    FaultyIO,
    SmallDisk,
    failing,
    files_below,
    get,
    later,
    open_at,
    path_of,
    put,
)

from hicache_store.connectors.base import BufferSource, Read, Status, Touch, Write
from hicache_store.connectors.local import LocalConnector
from hicache_store.connectors.local_io import IOV_MAX
from hicache_store.limits import IO_PIECE_BYTES, KIB, MIB
from hicache_store.testing.probes import ProbeTarget, content, read_of, write_of

KEYS = [f"v1/ns/aa/{index:04d}/kv.H000-008.L000-061" for index in range(8)]
SIZE = 100_003
DATA = {key: content(key, SIZE) for key in KEYS}


@pytest.fixture
def io() -> FaultyIO:
    return FaultyIO()


@pytest.fixture(params=MODES)
def store(request: pytest.FixtureRequest, tmp_path: Path, io: FaultyIO) -> Iterator[LocalConnector]:
    store = open_at(tmp_path, io, f"io={request.param}&threads=2&quota=1GiB")
    yield store
    store.close()


def fill(store: LocalConnector) -> None:
    writes = [write_of(key, data, depth) for depth, (key, data) in enumerate(DATA.items())]
    assert {outcome.status for outcome in store.write_from(writes, later())} == {Status.OK}


def read_all(store: LocalConnector) -> list[Status]:
    """The outcomes of reading KEYS; what is delivered must be right."""
    pairs = [read_of(key, SIZE) for key in KEYS]
    outcomes = store.read_into([read for read, _ in pairs], later())
    for outcome, key, (_, target) in zip(outcomes, KEYS, pairs, strict=True):
        if outcome.status is Status.OK:
            assert target.delivered() == DATA[key]
        assert target.events.count("parts") == target.events.count("release") <= 1
    return [outcome.status for outcome in outcomes]


def only(index: int, value: Status, others: Status = Status.OK) -> list[Status]:
    return [value if at == index else others for at in range(len(KEYS))]


def used_bytes(store: LocalConnector) -> int | None:
    assert store._account is not None
    return store._account.used_bytes()


# -- writes that fail ----------------------------------------------------------------------


def test_a04_a_short_write_goes_on_where_it_ended(store: LocalConnector, io: FaultyIO) -> None:
    """The kernel takes one byte less, then single bytes: the object is whole all the same."""
    turns = iter([SIZE - 3, 1, 1, 1])

    def short(real: object, fd: int, views: list[memoryview], offset: int) -> int:
        taken = next(turns) if views[0].nbytes > 64 or offset > 1000 else views[0].nbytes
        return os.pwritev(fd, [views[0][:taken]], offset)

    io.hooks["pwritev"] = short
    assert put(store, KEYS[0], DATA[KEYS[0]]).status is Status.OK
    assert get(store, KEYS[0], SIZE)[1] == DATA[KEYS[0]]
    assert next(turns, None) is None


def test_a04_a_write_without_progress_is_a_failure(
    store: LocalConnector, io: FaultyIO, tmp_path: Path
) -> None:
    """Zero bytes written, again and again, is neither success nor an endless loop."""
    io.hooks["pwritev"] = lambda real, fd, views, offset: (
        0 if views[0].nbytes > 64 else real(fd, views, offset)
    )
    outcome = put(store, KEYS[0], DATA[KEYS[0]])
    assert outcome.status is Status.FAILED
    assert f"0 of {SIZE} bytes" in outcome.detail
    assert store.metrics.get("file.write_short") == 1
    assert files_below(tmp_path) == []
    assert store.sizes([KEYS[0]], later()) == [None]
    assert used_bytes(store) == 0


def test_a04_a_full_disk_fails_what_does_not_fit_and_later_works_again(
    store: LocalConnector, io: FaultyIO, tmp_path: Path
) -> None:
    """16 MiB of disk and 4 MiB pages: a write is whole or it failed and left nothing."""
    disk = SmallDisk(io, 16 * MIB - 1)
    keys = [f"v1/ns/full/{index:04d}/kv" for index in range(8)]
    page = {key: content(key, 4 * MIB) for key in keys}
    outcomes = [put(store, key, page[key]) for key in keys]
    assert [outcome.status for outcome in outcomes] == [Status.OK] * 3 + [Status.FAILED] * 5
    assert "No space left" in outcomes[-1].detail
    assert store.metrics.get("file.no_space") == 5
    assert store.sizes(keys, later()) == [4 * MIB] * 3 + [None] * 5
    assert files_below(tmp_path) == sorted(str(path_of(tmp_path, key)) for key in keys[:3])
    assert all(get(store, key, 4 * MIB)[1] == page[key] for key in keys[:3])
    assert store.delete(keys[:1], later())[0].is_ok
    disk.free_bytes += 4 * MIB
    assert put(store, keys[5], page[keys[5]]).status is Status.OK
    assert get(store, keys[5], 4 * MIB)[1] == page[keys[5]]
    assert used_bytes(store) == 12 * MIB


def test_a01_failed_stores_are_invisible_and_reported_exactly(
    store: LocalConnector, io: FaultyIO, tmp_path: Path
) -> None:
    """One store in twenty dies at 60 % of its bytes, in 400 stores of four threads."""
    size, failed = 50 * KIB, set(range(0, 400, 20))
    keys = [f"v1/ns/many/{index:04d}/kv" for index in range(400)]
    data = {key: content(key, size) for key in keys}
    poisoned = {data[keys[index]][12:28] for index in failed}

    def dying(real: object, fd: int, views: list[memoryview], offset: int) -> int:
        if views[0].nbytes > 64 and bytes(views[0][12:28]) in poisoned:
            os.pwritev(fd, [views[0][: size * 6 // 10]], offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pwritev(fd, views, offset)

    io.hooks["pwritev"] = dying
    calls = [
        Call(lambda part=keys[at::4]: store.write_from([write_of(key, data[key]) for key in part], later()))  # type: ignore[misc]
        for at in range(4)
    ]
    outcomes = {
        key: outcome for at in range(4) for key, outcome in zip(keys[at::4], calls[at].result(), strict=True)
    }
    assert {keys.index(key) for key, outcome in outcomes.items() if outcome.status is Status.FAILED} == failed
    assert store.sizes(keys, later()) == [None if index in failed else size for index in range(400)]
    assert files_below(tmp_path) == sorted(
        str(path_of(tmp_path, key)) for index, key in enumerate(keys) if index not in failed
    )
    assert used_bytes(store) == 380 * size
    io.hooks.clear()
    again = store.write_from([write_of(key, data[key]) for key in keys], later())
    assert {keys[i] for i, outcome in enumerate(again) if outcome.status is Status.OK} == {
        keys[i] for i in failed
    }


WRITE_CALLS = {
    "open": lambda name, *_, **__: name == ".",
    "pwritev": lambda fd, views, offset: views[0].nbytes > 64,
    "utime_fd": lambda *_: True,
    "fstat": lambda fd: os.fstat(fd).st_nlink == 0,
    "link_fd": lambda *_, **__: True,
    "stat": lambda name, **__: name.startswith("v1+"),
}


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOSPC])
@pytest.mark.parametrize("call", WRITE_CALLS)
def test_any_failing_call_of_a_write_fails_one_item_and_leaves_nothing(
    store: LocalConnector, io: FaultyIO, tmp_path: Path, call: str, code: int
) -> None:
    """The others are stored; the failed one is absent, unaccounted, and stored by the next try."""
    fill(store)
    assert store.delete(KEYS, later())[0].is_ok
    lock = threading.Lock()
    turns = iter([False, False, False, True])

    def matches(*args: object, **kwargs: object) -> bool:
        with lock:
            return bool(WRITE_CALLS[call](*args, **kwargs)) and next(turns, False)

    io.hooks[call] = failing(code, matches)
    outcomes = store.write_from([write_of(key, data) for key, data in DATA.items()], later())
    io.hooks.clear()
    statuses = [outcome.status for outcome in outcomes]
    assert statuses.count(Status.FAILED) == 1
    assert statuses.count(Status.OK) == 7
    lost = statuses.index(Status.FAILED)
    assert os.strerror(code) in outcomes[lost].detail
    assert store.sizes(KEYS, later()) == [None if at == lost else SIZE for at in range(8)]
    assert len(files_below(tmp_path)) == 7
    assert used_bytes(store) == 7 * SIZE
    assert put(store, KEYS[lost], DATA[KEYS[lost]]).status is Status.OK
    assert read_all(store) == [Status.OK] * 8


def test_a_source_is_given_back_when_its_file_cannot_be_opened(store: LocalConnector, io: FaultyIO) -> None:
    """Every source that was asked for its bytes is released, whatever fails around it."""
    io.hooks["open"] = failing(errno.EMFILE, lambda name, *_, **__: name == ".")
    writes = [write_of(key, data) for key, data in DATA.items()]
    assert {outcome.status for outcome in store.write_from(writes, later())} == {Status.FAILED}
    for write in writes:
        events = write.source.events  # type: ignore[attr-defined]
        assert events in ([], ["buffers", "release"])


# -- reads that fail -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, SIZE - 1, SIZE + 1, 2 * SIZE])
def test_a14_a_file_of_the_wrong_size_is_a_miss_of_one_item(
    store: LocalConnector, tmp_path: Path, size: int
) -> None:
    """Truncated, empty or grown files: told apart before a byte moves, and replaceable by version."""
    fill(store)
    os.truncate(path_of(tmp_path, KEYS[3]), size)
    assert read_all(store) == only(3, Status.WRONG_SIZE)
    read, target = read_of(KEYS[3], SIZE)
    outcome = store.read_into([read], later())[0]
    assert target.events == []
    assert target.is_untouched
    assert put(store, KEYS[3], DATA[KEYS[3]]).status is Status.CONFLICT
    assert put(store, KEYS[3], DATA[KEYS[3]], replace=outcome.version).status is Status.OK
    assert read_all(store) == [Status.OK] * 8
    used = used_bytes(store)
    assert used is not None
    assert used >= 8 * SIZE
    assert store.sweep(later()).is_complete
    assert used_bytes(store) == 8 * SIZE


@pytest.mark.parametrize("kind", ["directory", "fifo", "socket", "symlink", "broken symlink"])
def test_a14_what_is_not_a_file_is_neither_read_nor_followed_nor_removed(
    store: LocalConnector, tmp_path: Path, kind: str
) -> None:
    """A stray of any kind in place of an object is one item's failure in every operation."""
    fill(store)
    place = path_of(tmp_path, KEYS[3])
    secret = tmp_path / "secret"
    secret.write_bytes(DATA[KEYS[3]])
    place.unlink()
    if kind == "directory":
        place.mkdir()
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "socket":
        os.mknod(place, 0o140600)
    else:
        place.symlink_to(secret if kind == "symlink" else tmp_path / "nowhere")
    assert read_all(store) == only(3, Status.FAILED)
    assert store.sizes(KEYS, later()) == [None if at == 3 else SIZE for at in range(8)]
    assert put(store, KEYS[3], DATA[KEYS[3]]).status is Status.FAILED
    assert put(store, KEYS[3], DATA[KEYS[3]], replace="1-1").status is Status.FAILED
    assert [o.status for o in store.touch([Touch(key) for key in KEYS], later())] == only(3, Status.FAILED)
    assert store.delete([KEYS[3]], later())[0].status is Status.FAILED
    assert sorted(entry.key for entry in store.scan()) == [key for key in KEYS if key != KEYS[3]]
    assert os.path.lexists(place)
    assert secret.read_bytes() == DATA[KEYS[3]]
    assert not (tmp_path / "nowhere").exists()
    assert store.metrics.get("file.read_failed") == 1


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
def test_a14_any_failing_call_of_a_read_fails_one_item(
    store: LocalConnector, io: FaultyIO, call: str, code: int
) -> None:
    """The others of the batch are hits, and the next batch works."""
    fill(store)
    lock = threading.Lock()
    turns = iter([False, False, False, True])

    def matches(*args: object, **_: object) -> bool:
        with lock:
            return (call != "open" or str(args[0]).startswith("v1+")) and next(turns, False)

    io.hooks[call] = failing(code, matches)
    statuses = read_all(store)
    assert statuses.count(Status.FAILED) == 1
    assert statuses.count(Status.OK) == 7
    assert store.metrics.get("file.read_failed") == 1
    assert read_all(store) == [Status.OK] * 8


def test_a_file_truncated_while_it_is_read_is_a_failure(store: LocalConnector, io: FaultyIO) -> None:
    """The size was right when it was looked at; the read that meets the end is not a hit."""
    fill(store)

    def ending(real: object, fd: int, views: list[memoryview], offset: int) -> int:
        return os.preadv(fd, [views[0][:1000]], offset) if offset == 0 else 0

    io.hooks["preadv"] = ending
    read, target = read_of(KEYS[0], SIZE)
    outcome = store.read_into([read], later())[0]
    assert outcome.status is Status.FAILED
    assert "byte 1000" in outcome.detail
    assert "check" not in target.events
    assert store.metrics.get("file.read_short") == 1


def test_short_and_interrupted_transfers_go_on(store: LocalConnector, io: FaultyIO) -> None:
    """Reads and writes of seven bytes at a time, every third one interrupted, move everything."""
    size = 2_000
    counts = {"preadv": 0, "pwritev": 0}

    def slow(name: str) -> object:
        def call(real: object, fd: int, views: list[memoryview], offset: int) -> int:
            counts[name] += 1
            if counts[name] % 3 == 0:
                raise InterruptedError
            return int(getattr(os, name)(fd, [views[0][:7]], offset))

        return call

    io.hooks["preadv"], io.hooks["pwritev"] = slow("preadv"), slow("pwritev")  # type: ignore[assignment]
    data = content(KEYS[0], size)
    assert put(store, "meta/v1/slow", data).status is Status.OK
    outcome, read = get(store, "meta/v1/slow", size)
    assert (outcome.status, read) == (Status.OK, data)
    assert min(counts.values()) >= size // 7


def test_pieces_are_bounded_in_bytes_and_buffers(tmp_path: Path, io: FaultyIO) -> None:
    """No system call moves more than a piece or takes more buffers than the kernel does."""
    seen: list[tuple[int, int]] = []

    def watching(real: object, fd: int, views: list[memoryview], offset: int) -> int:
        seen.append((sum(view.nbytes for view in views), len(views)))
        return real(fd, views, offset)  # type: ignore[operator,no-any-return]

    store = open_at(tmp_path, io, "io=direct")
    io.hooks["preadv"] = io.hooks["pwritev"] = watching
    for size, views in ((5 * MIB + 1, 1), (3 * MIB, 3 * IOV_MAX + 5), (IOV_MAX + 1, IOV_MAX + 1)):
        key = f"v1/ns/pieces/{size}"
        data = content(key, size)
        cuts = [len(data) * at // views for at in range(views + 1)]
        parts = [memoryview(data)[start:stop] for start, stop in pairwise(cuts)]
        assert store.write_from([Write(key, size, BufferSource(parts))], later())[0].is_ok
        target = ProbeTarget([(0, [len(part) for part in parts])])
        assert store.read_into([Read(key, size, target)], later())[0].is_ok
        assert target.delivered() == data
    assert max(size for size, _ in seen) == IO_PIECE_BYTES
    assert max(count for _, count in seen) == IOV_MAX
    store.close()


# -- things that vanish --------------------------------------------------------------------


def test_objects_that_vanish_are_misses(store: LocalConnector, tmp_path: Path) -> None:
    """Removed behind our back, one file or the whole tree: absent, and writing makes it anew."""
    fill(store)
    path_of(tmp_path, KEYS[3]).unlink()
    assert read_all(store) == only(3, Status.ABSENT)
    assert store.touch([Touch(KEYS[3])], later())[0].status is Status.ABSENT
    assert store.delete([KEYS[3]], later())[0].status is Status.ABSENT
    for directory, _, names in os.walk(tmp_path / "objects", topdown=False):
        for name in names:
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
    assert read_all(store) == [Status.ABSENT] * 8
    assert store.sizes(KEYS, later()) == [None] * 8
    assert list(store.scan()) == []
    fill(store)
    assert read_all(store) == [Status.OK] * 8
    assert (tmp_path / "objects").stat().st_mode & 0o7777 == 0o700


def test_a_tree_made_anew_by_another_process_is_seen(store: LocalConnector, tmp_path: Path) -> None:
    """Kept descriptors of removed directories do not hide what is in the new ones."""
    fill(store)
    os.rename(tmp_path / "objects", tmp_path / "aside")
    for directory, _, names in os.walk(tmp_path / "aside", topdown=False):
        for name in names:
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
    other = open_at(tmp_path)
    fill(other)
    other.close()
    assert read_all(store) == [Status.OK] * 8


def test_an_object_that_vanishes_between_the_steps_of_a_write(store: LocalConnector, io: FaultyIO) -> None:
    """The name was taken when it was linked and free when it was looked at: tried again."""
    fill(store)
    turns = iter([True])

    def taken(real: object, fd: int, name: str, **kwargs: int) -> None:
        if next(turns, False):
            raise FileExistsError(errno.EEXIST, "File exists")
        real(fd, name, **kwargs)  # type: ignore[operator]

    assert store.delete([KEYS[0]], later())[0].is_ok
    io.hooks["link_fd"] = taken
    assert put(store, KEYS[0], DATA[KEYS[0]]).status is Status.OK
    assert read_all(store) == [Status.OK] * 8


def test_foreign_files_and_directories_harm_nobody(store: LocalConnector, tmp_path: Path) -> None:
    """Whatever else lies in the tree is not listed, not read, not removed by use."""
    fill(store)
    leaf = path_of(tmp_path, KEYS[0]).parent
    strays = [
        leaf / "README.txt",
        leaf / "~left.behind",
        leaf / "with space",
        leaf / "v1+misplaced+kv",
        tmp_path / "objects" / "note",
        tmp_path / "objects" / "0" / "file",
        tmp_path / "unrelated",
    ]
    for stray in strays:
        stray.write_bytes(b"stray")
    (leaf / "sub").mkdir()
    (tmp_path / "objects" / "zz").mkdir()
    listed = sorted(entry.key for entry in store.scan())
    assert listed == sorted([*KEYS, "README.txt"]) if path_is_right(leaf, tmp_path) else listed == KEYS
    assert read_all(store) == [Status.OK] * 8
    assert all(stray.read_bytes() == b"stray" for stray in strays)


def path_is_right(leaf: Path, root: Path) -> bool:
    """Whether the file README.txt, a possible key, lies where that key belongs."""
    return path_of(root, "README.txt").parent == leaf
