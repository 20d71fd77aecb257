"""Opening a store: options, safety of the root, what the file system can do, and giving it back."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from pathlib import Path

import pytest
from local_faults import MODES, FaultyIO, eventually, failing, files_below, get, later, open_at, path_of, put

from hicache_store.clock import SYSTEM_CLOCK
from hicache_store.config import parse_url
from hicache_store.connectors.base import Status, Touch
from hicache_store.connectors.local_attach import read_settings
from hicache_store.connectors.local_names import directory_of
from hicache_store.connectors.registry import open_connector
from hicache_store.errors import ConfigurationError, HandleError
from hicache_store.limits import KIB, LOCAL_THREADS_MAX
from hicache_store.testing.probes import content

KEY = "v1/ns/aa/0001/kv.H000-008.L000-061"
META = "meta/v1/ns/manifest"
DATA = content(KEY, 5_000)


@pytest.fixture
def io() -> FaultyIO:
    return FaultyIO()


# -- options -------------------------------------------------------------------------------


def test_e15_the_documented_examples_open(tmp_path: Path) -> None:
    """A bare URL works, and so does one with every option set."""
    every = (
        "quota=10GiB&min_free=1GiB&ttl=7d&threads=4&io=bounce&direct_io=0&fsync=1&readonly=0"
        "&request_cost=128KiB&sweep=10m"
    )
    for query in ("", "?" + every):
        store = open_connector(f"file://{tmp_path}/store{query}")
        assert put(store, KEY, DATA).is_ok  # type: ignore[arg-type]
        assert get(store, KEY, 5_000)[1] == DATA  # type: ignore[arg-type]
        store.close()
    assert store.capabilities.concurrency == 4
    assert store.capabilities.request_cost_bytes == 128 * KIB
    assert store.capabilities.stop == "abandons"


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("quota=lots", ("quota", "lots", "512MiB")),
        ("quota=0", ("quota", "0", "at least 1")),
        ("quota=-5", ("quota", "-5", "size")),
        ("min_free=-1", ("min_free", "-1", "size")),
        ("ttl=soon", ("ttl", "soon", "12h")),
        ("ttl=0", ("ttl", "0", "at least 1")),
        ("threads=0", ("threads", "0", "from 1 to 64")),
        ("threads=65", ("threads", "65", "from 1 to 64")),
        ("threads=two", ("threads", "two", "from 1 to 64")),
        ("io=mmap", ("io", "mmap", "auto, direct, bounce")),
        ("direct_io=maybe", ("direct_io", "maybe", "1 or 0")),
        ("fsync=2", ("fsync", "2", "1 or 0")),
        ("readonly=x", ("readonly", "x", "1 or 0")),
        ("request_cost=1parsec", ("request_cost", "1parsec", "size")),
        ("sweep=-1", ("sweep", "-1", "time")),
        ("quota=1GiB&quota=2GiB", ("quota", "twice")),
        ("quotas=1GiB", ("quotas", "did you mean quota")),
        ("thread=2", ("thread", "did you mean threads")),
    ],
)
def test_e15_a_wrong_option_is_named_with_what_is_accepted(
    tmp_path: Path, query: str, named: tuple[str, ...]
) -> None:
    """Missing, wrong, negative and unknown options: the message says which, what and what instead."""
    with pytest.raises(ConfigurationError) as raised:
        open_connector(f"file://{tmp_path}/store?{query}")
    assert all(word in str(raised.value) for word in named), raised.value
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "url", ["file://relative/path", "file:relative", "file://", "file:///", "file:///a/..", "file:///a%00b"]
)
def test_a_root_must_be_an_absolute_path_below_the_root_directory(url: str) -> None:
    with pytest.raises(ConfigurationError, match="absolute path"):
        open_connector(url)


@pytest.mark.parametrize("path", ["//", "//.", "/%2F", "//%2e", "/%2F%2F", "///..", "/a/../%2F"])
def test_no_way_of_writing_the_root_directory_is_taken(path: str) -> None:
    with pytest.raises(ConfigurationError, match="absolute path"):
        open_connector(f"file://{path}?readonly=1")


def test_a_way_to_the_root_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    for path in (tmp_path / "link", Path("/proc/self/root")):
        with pytest.raises(ConfigurationError, match="is the root of the file system"):
            open_connector(f"file://{path}?readonly=1")


def test_further_slashes_before_a_path_mean_nothing(tmp_path: Path) -> None:
    first, second = open_at(tmp_path / "store"), open_connector(f"file:///%2F{tmp_path}/store?sweep=0")
    assert put(first, KEY, DATA).is_ok
    assert get(second, KEY, len(DATA))[1] == DATA
    assert read_settings(parse_url(f"file:////{tmp_path}")).path == str(tmp_path)
    first.close()
    second.close()


def test_a_login_in_the_place_of_a_path_is_not_told() -> None:
    with pytest.raises(ConfigurationError, match="absolute path") as refused:
        open_connector("file://me:hunter2@host/path")
    assert "hunter2" not in str(refused.value)


def test_c07_a_process_that_may_use_one_processor_has_one_thread(tmp_path: Path) -> None:
    """In a container of two processors on a machine of two hundred, eight threads only stand in line."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert open_at(tmp_path).capabilities.concurrency == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_defaults_follow_the_machine_and_the_file_system(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    assert store.capabilities.stop == "bounded"
    assert store.capabilities.concurrency == min(len(os.sched_getaffinity(0)), LOCAL_THREADS_MAX)
    assert store.capabilities.request_cost_bytes == 64 * KIB
    assert store.capabilities.create_only
    assert store.capabilities.orders_eviction
    assert not store.capabilities.is_read_only
    assert store.capabilities.alignment_bytes == 1
    store.close()


@pytest.mark.parametrize(
    ("kind", "query", "stop"),
    [
        (0xEF53, "", "bounded"),
        (0x01021994, "", "bounded"),
        (0x9123683E, "", "bounded"),
        (0x6969, "", "abandons"),  # NFS
        (0xFF534D42, "", "abandons"),  # CIFS
        (0x65735546, "", "abandons"),  # FUSE
        (0x12345678, "", "abandons"),
        (0x6969, "io=direct", "bounded"),
        (0xEF53, "io=bounce", "abandons"),
    ],
)
def test_the_way_of_stopping_follows_the_file_system(
    tmp_path: Path, io: FaultyIO, kind: int, query: str, stop: str
) -> None:
    """Whatever may hang with a server is abandoned; only what is known to be local is waited for."""
    io.hooks["filesystem_type"] = lambda real, fd: kind
    store = open_at(tmp_path, io, query)
    assert store.capabilities.stop == stop
    assert put(store, KEY, DATA).is_ok
    store.close()


@pytest.mark.parametrize(
    ("kind", "query", "synced"), [(0xEF53, "", 0), (0x6969, "", 1), (0xEF53, "fsync=1", 2)]
)
def test_data_is_flushed_before_it_is_published_where_errors_come_late(
    tmp_path: Path, io: FaultyIO, kind: int, query: str, synced: int
) -> None:
    """A network file system tells of a full server only then; fsync=1 also syncs the directory."""
    io.hooks["filesystem_type"] = lambda real, fd: kind
    store = open_at(tmp_path, io, query)
    assert put(store, KEY, DATA).is_ok  # makes the directories
    before = io.calls["fsync"]
    assert put(store, KEY.replace("0001", "0002"), DATA).is_ok
    made = directory_of(KEY) != directory_of(KEY.replace("0001", "0002")) and synced == 2
    assert io.calls["fsync"] - before >= synced
    assert made or io.calls["fsync"] - before == synced
    io.hooks["fsync"] = failing(errno.EDQUOT)
    if synced:
        assert put(store, KEY.replace("0001", "0003"), DATA).status is Status.FAILED
        assert len(files_below(tmp_path)) == 2
    store.close()


# -- safety --------------------------------------------------------------------------------


@pytest.mark.parametrize("query", ["", "io=bounce"])
def test_e10_modes_are_private_whatever_the_umask(tmp_path: Path, io: FaultyIO, query: str) -> None:
    """0700 and 0600 for all that is made: directories, objects, metadata, and files being written."""
    while_written: list[int] = []

    def watching(real: object, fd: int, views: list[memoryview], offset: int) -> int:
        while_written.append(os.fstat(fd).st_mode)
        return os.pwritev(fd, views, offset)

    io.hooks["pwritev"] = watching
    for index, umask in enumerate((0o000, 0o022, 0o277)):
        root = tmp_path / f"deep-{index}" / "store"
        before = os.umask(umask)
        try:
            store = open_at(root, io, query)
            assert put(store, KEY, DATA).is_ok
            assert put(store, META, DATA).is_ok
            store.close()
        finally:
            os.umask(before)
        for directory, names, files in os.walk(root.parent):
            for name in names:
                assert stat.S_IMODE(os.stat(os.path.join(directory, name)).st_mode) == 0o700
            for name in files:
                found = os.stat(os.path.join(directory, name))
                assert stat.S_IMODE(found.st_mode) & 0o177 == 0, name
        for key in (KEY, META):
            assert stat.S_IMODE(path_of(root, key).stat().st_mode) == 0o600
    assert all(stat.S_IMODE(mode) & 0o077 == 0 for mode in while_written)


def test_e10_a_root_open_to_others_is_refused_or_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where everybody may replace files nothing is stored; a writable group or a sticky bit is told."""
    for mode, expected in (
        (0o777, "refused"),
        (0o1777, "warned"),
        (0o770, "warned"),
        (0o755, ""),
        (0o700, ""),
    ):
        root = tmp_path / f"{mode:o}"
        root.mkdir()
        root.chmod(mode)
        caplog.clear()
        if expected == "refused":
            with pytest.raises(ConfigurationError, match="chmod o-w"):
                open_at(root)
            assert list(root.iterdir()) == []
            continue
        with caplog.at_level(logging.WARNING, "hicache_store.connectors.local_attach"):
            open_at(root, query="quota=1GiB").close()
        assert [f"{mode:o}" in record.getMessage() for record in caplog.records] == [True] * bool(expected)
        assert stat.S_IMODE(root.stat().st_mode) == mode


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", ["objects", "first", "leaf", "meta"])
def test_e06_a_symlinked_directory_is_never_followed(tmp_path: Path, mode: str, level: str) -> None:
    """A link in place of any directory of the tree: nothing outside is read, made or removed."""
    root, outside = tmp_path / "store", tmp_path / "outside"
    store = open_at(root, query=f"io={mode}")
    key = META if level == "meta" else KEY
    assert put(store, key, DATA).is_ok
    store.close()
    leaf = path_of(root, key).parent
    moved = {"objects": root / "objects", "first": leaf.parent, "leaf": leaf, "meta": root / "meta"}[level]
    moved.rename(outside)
    moved.symlink_to(outside)
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in outside.rglob("*"))
    if level == "objects":
        with pytest.raises(ConfigurationError):
            open_at(root, query=f"io={mode}")
    else:
        store = open_at(root, query=f"io={mode}")
        assert get(store, key, 5_000)[0].status is Status.FAILED
        assert store.sizes([key], later()) == [None]
        assert put(store, key, DATA).status is Status.FAILED
        assert put(store, key[:-1] + "Z", DATA).status in (Status.OK, Status.FAILED)
        assert store.touch([Touch(key)], later())[0].status is Status.FAILED
        assert store.delete([key], later())[0].status is Status.FAILED
        assert key not in [entry.key for entry in store.scan()]
        assert store.metrics.get("file.read_failed") == 1
        store.close()
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in outside.rglob("*")) == before


def test_a_root_that_is_a_symlink_of_the_operator_is_fine(tmp_path: Path) -> None:
    """What leads to the root is the operator's choice."""
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = open_at(tmp_path / "link")
    assert put(store, KEY, DATA).is_ok
    store.close()
    assert path_of(tmp_path / "real", KEY).read_bytes() == DATA


def test_a_root_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match="Not a directory"):
            open_at(path)


# -- roots that cannot be written ----------------------------------------------------------


def test_a_read_only_root_reads_and_refuses_everything_else(tmp_path: Path) -> None:
    store = open_at(tmp_path / "store")
    assert put(store, KEY, DATA).is_ok
    store.close()
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    store = open_at(tmp_path / "store", query="readonly=1")
    assert store.capabilities.is_read_only
    assert get(store, KEY, 5_000)[1] == DATA
    assert [entry.key for entry in store.scan()] == [KEY]
    assert put(store, KEY + "2", DATA).status is Status.REFUSED
    assert store.delete([KEY], later())[0].status is Status.REFUSED
    assert store.touch([Touch(KEY)], later())[0].status is Status.REFUSED
    assert "read" in store.sweep(later()).reason
    store.close()
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_missing_root_is_not_made_by_a_reader(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        open_at(tmp_path / "store", query="readonly=1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_root_that_turns_out_to_be_read_only_is_read(
    tmp_path: Path, io: FaultyIO, caplog: pytest.LogCaptureFixture, code: int, is_new: bool
) -> None:
    """Without being told: attaching works, reads work, writes are refused, and the log says why."""
    if not is_new:
        store = open_at(tmp_path)
        assert put(store, KEY, DATA).is_ok
        store.close()
    io.hooks["mkdir"] = failing(code)
    io.hooks["open"] = failing(code, lambda name, flags, *_, **__: bool(flags & (os.O_CREAT | os.O_RDWR)))
    io.hooks["rename"] = io.hooks["link"] = io.hooks["link_fd"] = failing(code)
    with caplog.at_level(logging.WARNING):
        store = open_at(tmp_path, io)
    assert any("can only be read" in record.getMessage() for record in caplog.records)
    assert store.capabilities.is_read_only
    assert put(store, KEY + "2", DATA).status is Status.REFUSED
    assert get(store, KEY, 5_000)[0].status is (Status.ABSENT if is_new else Status.OK)
    store.close()


def test_a_full_disk_at_the_start_is_no_reason_to_fail(tmp_path: Path, io: FaultyIO) -> None:
    """An existing store attaches, reads, fails to write, and writes when there is room again."""
    store = open_at(tmp_path)
    assert put(store, KEY, DATA).is_ok
    store.close()
    io.hooks["open"] = failing(errno.ENOSPC, lambda name, *_, **__: name == "." or name.startswith("~"))
    store = open_at(tmp_path, io)
    assert get(store, KEY, 5_000)[1] == DATA
    assert put(store, KEY + "2", DATA).status is Status.FAILED
    assert store.metrics.get("file.no_space") == 1
    io.hooks.clear()
    assert put(store, KEY + "2", DATA).status is Status.OK
    store.close()


# -- time ----------------------------------------------------------------------------------


class ShiftedClock:
    """A clock that can run ahead of the machine's."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic()

    def time(self) -> float:
        return SYSTEM_CLOCK.time() + self.ahead_s


@pytest.mark.parametrize("mode", MODES)
def test_e10_objects_expire_and_use_extends(tmp_path: Path, mode: str) -> None:
    """Unused for longer than its time to live an object is absent, then gone; metadata stays."""
    clock = ShiftedClock()
    store = open_at(tmp_path, query=f"io={mode}&ttl=60s&quota=1GiB", clock=clock)
    used, unused = KEY + "1", KEY + "2"
    assert all(put(store, key, DATA).is_ok for key in (used, unused, META))
    clock.ahead_s = 40.0
    assert store.sizes([used, unused, META], later()) == [5_000] * 3
    assert store.touch([Touch(used)], later())[0].is_ok
    clock.ahead_s = 80.0
    assert store.sizes([used, unused, META], later()) == [5_000, None, 5_000]
    assert get(store, unused, 5_000)[0].status is Status.ABSENT
    assert store.touch([Touch(unused)], later())[0].status is Status.ABSENT
    assert unused not in [entry.key for entry in store.scan()]
    report = store.sweep(later())
    assert (report.expired_objects, report.objects) == (1, 1)
    assert files_below(tmp_path) == sorted(str(path_of(tmp_path, key)) for key in (used, META))
    assert get(store, used, 5_000)[1] == DATA
    store.close()


def test_writing_an_expired_object_again_revives_it(tmp_path: Path) -> None:
    """Its bytes are as good as new ones: nothing is written, and it counts as used now."""
    clock = ShiftedClock()
    store = open_at(tmp_path, query="ttl=60s&quota=1GiB", clock=clock)
    assert put(store, KEY, DATA).status is Status.OK
    clock.ahead_s = 100.0
    assert store.sizes([KEY], later()) == [None]
    assert put(store, KEY, DATA).status is Status.EXISTS
    assert store.sizes([KEY], later()) == [5_000]
    clock.ahead_s = 150.0
    assert get(store, KEY, 5_000)[1] == DATA
    store.close()


def test_age_is_judged_by_the_clock_of_the_storage(tmp_path: Path, io: FaultyIO) -> None:
    """A machine whose clock is a day ahead expires nothing that the storage calls fresh."""
    clock = ShiftedClock()
    clock.ahead_s = 86_400.0
    store = open_at(tmp_path, query="ttl=60s&quota=1GiB", clock=clock)
    assert put(store, KEY, DATA).is_ok
    assert store.sizes([KEY], later()) == [5_000]
    assert abs(path_of(tmp_path, KEY).stat().st_mtime - SYSTEM_CLOCK.time()) < 60
    assert store.sweep(later()).expired_objects == 0
    store.close()


def test_the_time_of_an_object_orders_a_chain_within_its_second(tmp_path: Path) -> None:
    """Deeper pages are older, in a write, a repeated write and a touch alike; entries tell the second."""
    store = open_at(tmp_path)
    keys = [f"{KEY}{depth}" for depth in range(5)]
    rounds: list[list[int]] = []
    for turn in range(3):
        if turn < 2:
            assert all(put(store, key, DATA, depth=depth).is_ok for depth, key in enumerate(keys))
        else:
            touches = [Touch(key, depth) for depth, key in enumerate(keys)]
            assert all(outcome.is_ok for outcome in store.touch(touches, later()))
        times = [path_of(tmp_path, key).stat().st_mtime_ns for key in keys]
        assert [time % 10**9 for time in times] == [999_999_999 - depth for depth in range(5)]
        rounds.append(times)
        seconds = {entry.key: entry.last_used_s for entry in store.scan()}
        assert seconds == {key: time // 10**9 for key, time in zip(keys, times, strict=True)}
    assert len({time // 10**9 for time in rounds[-1]}) == 1, "one call has one second"
    assert put(store, KEY + "9", DATA, depth=2**40).is_ok
    assert path_of(tmp_path, KEY + "9").stat().st_mtime_ns % 10**9 == 0
    store.close()


def test_a_file_system_of_whole_seconds_does_not_claim_to_order(tmp_path: Path, io: FaultyIO) -> None:
    def coarse(real: object, fd: int, mtime_ns: int | None) -> None:
        os.utime(fd, ns=None if mtime_ns is None else (mtime_ns // 10**9 * 10**9,) * 2)  # type: ignore[arg-type]

    io.hooks["utime_fd"] = lambda real, fd, ns: real(fd, None) if ns is None else coarse(real, fd, ns)
    store = open_at(tmp_path, io)
    assert not store.capabilities.orders_eviction
    store.close()


# -- the tree ------------------------------------------------------------------------------


def test_d15_attaching_lists_nothing_of_a_filled_store(tmp_path: Path, io: FaultyIO) -> None:
    """The cost of attaching does not depend on what is stored."""
    costs = []
    for count in (1, 400):
        store = open_at(tmp_path, query="quota=1GiB")
        for index in range(count):
            assert put(store, f"{KEY}{index}", b"x").is_ok
        store.close()
        watched = FaultyIO()
        open_at(tmp_path, watched, "quota=1GiB").close()
        assert watched.calls["listdir"] <= 1
        costs.append(sum(watched.calls.values()))
    assert costs[1] <= costs[0] + 2


def test_d15_objects_spread_evenly_without_a_directory_a_page(tmp_path: Path) -> None:
    """256 directories for any number of pages, and about as many files in each."""
    leaves: dict[tuple[str, ...], int] = {}
    for index in range(25_600):
        leaf = directory_of(f"v1/{'ab' * 32}/{index % 256:02x}/{index:064x}/kv.H000-008.L000-061")
        leaves[leaf] = leaves.get(leaf, 0) + 1
    assert len(leaves) == 256
    assert max(leaves.values()) < 160
    store = open_at(tmp_path)
    assert all(put(store, f"{KEY}{index}", b"x").is_ok for index in range(600))
    directories = [path for path in (tmp_path / "objects").rglob("*") if path.is_dir()]
    assert len(directories) <= 16 + 256
    store.close()


@pytest.mark.parametrize("mode", MODES)
def test_fifty_cycles_leave_no_descriptor_and_no_thread(tmp_path: Path, mode: str) -> None:
    def cycle(index: int) -> None:
        store = open_at(tmp_path, query=f"io={mode}&threads=2&sweep=1h")
        assert all(put(store, f"{KEY}{index}.{at}", DATA).is_ok for at in range(3))
        assert get(store, f"{KEY}{index}.0", 5_000)[1] == DATA
        store.close()
        store.close()

    cycle(0)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for index in range(1, 51):
        cycle(index)
    eventually(lambda: threading.active_count() <= threads)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_an_open_store_holds_a_bounded_number_of_descriptors(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = open_at(tmp_path)
    for index in range(1_500):
        put(store, f"{KEY}{index}", b"x")
    assert len(os.listdir("/proc/self/fd")) - before <= 256 + 16
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("mode", MODES)
def test_a_forked_child_is_told_to_open_its_own(tmp_path: Path, mode: str) -> None:
    """Every call of an inherited handle raises; a new one in the child works; the parent's goes on."""
    query = f"io={mode}&threads=2&sweep=1h&quota=1GiB"
    store = open_at(tmp_path, query=query)
    assert all(put(store, f"{KEY}{index}", DATA).is_ok for index in range(4))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            calls = (
                lambda: store.sizes([KEY], later()),
                lambda: get(store, KEY, 5_000),
                lambda: put(store, KEY, DATA),
                lambda: store.delete([KEY], later()),
                lambda: store.touch([Touch(KEY)], later()),
                lambda: list(store.scan()),
                lambda: store.sweep(later()),
            )
            refused = 0
            for call in calls:
                try:
                    call()
                except HandleError as error:
                    refused += "open the store again in the child" in str(error)
            store.close()
            own = open_at(tmp_path, query=query)
            good = put(own, KEY, DATA).is_ok and get(own, f"{KEY}1", 5_000)[1] == DATA
            own.close()
            code = 0 if good and refused == len(calls) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert get(store, KEY, 5_000)[1] == DATA
    assert put(store, f"{KEY}5", DATA).is_ok
    store.close()


def test_the_background_sweep_removes_what_expired(tmp_path: Path) -> None:
    """A store looks after itself, and closing it ends the thread."""
    store = open_at(tmp_path, query="ttl=60s&quota=1GiB")
    assert put(store, KEY, DATA).is_ok
    store.close()
    os.utime(path_of(tmp_path, KEY), (1_000_000.0, 1_000_000.0))
    store = open_at(tmp_path, query="ttl=60s&quota=1GiB&sweep=50ms")
    eventually(lambda: files_below(tmp_path) == [])
    store.close()
    assert not any(thread.name == "hicache-maintenance" for thread in threading.enumerate())
