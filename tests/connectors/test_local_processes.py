"""Several processes on one root: races, readers beside a slow writer, and killed writers."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_faults import MODES, files_below, get, later, open_at, path_of, put, without_better_than

from hicache_store.connectors.base import Status
from hicache_store.connectors.local_publish import METHODS, Method
from hicache_store.limits import KIB, MIB
from hicache_store.testing.probes import content, read_of, variant_of, write_of

KEYS = [f"v1/ns/aa/{index:04d}/kv.H000-008.L000-061" for index in range(24)]
QUERY = "threads=2&quota=1GiB"


class Child:
    """A forked process that runs ``function`` with the writing end of a pipe."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self.told, telling = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self.told)
                function(telling)
                code = 0
            finally:
                os._exit(code)
        os.close(telling)

    def hear(self, count: int = 1) -> bytes:
        """The next bytes that the child tells, none when it has ended."""
        return os.read(self.told, count)

    def rest(self) -> bytes:
        """Everything else it tells until it ends well."""
        data = b""
        while block := os.read(self.told, 65_536):
            data += block
        os.close(self.told)
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0
        return data

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.told)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS[:2])
def test_of_two_processes_creating_one_name_the_first_stays(
    tmp_path: Path, method: Method, mode: str
) -> None:
    """Both succeed, one stored, and what is there is whole and that one's."""
    start, starting = os.pipe()

    def create(variant: int) -> Callable[[int], None]:
        def run(telling: int) -> None:
            store = open_at(tmp_path, without_better_than(method), f"{QUERY}&io={mode}")
            os.write(telling, b"r")
            os.read(start, 1)
            order = random.Random(variant).sample(KEYS, len(KEYS)) if variant else KEYS
            writes = [write_of(key, content(key, 200_000, variant)) for key in order]
            outcomes = dict(zip(order, store.write_from(writes, later()), strict=True))
            store.close()
            os.write(telling, bytes({Status.OK: 1, Status.EXISTS: 2}[outcomes[key].status] for key in KEYS))

        return run

    children = [Child(create(variant)) for variant in (0, 1)]
    assert [child.hear() for child in children] == [b"r", b"r"]
    os.write(starting, b"gg")
    first, second = (child.rest() for child in children)
    store = open_at(tmp_path, query=QUERY)
    for key, mine, yours in zip(KEYS, first, second, strict=True):
        assert sorted((mine, yours)) == [1, 2]
        assert variant_of(key, get(store, key, 200_000)[1]) == (0 if mine == 1 else 1)
    assert files_below(tmp_path) == sorted(str(path_of(tmp_path, key)) for key in KEYS)
    assert store._account is not None
    assert store._account.used_bytes() == len(KEYS) * 200_000
    store.close()
    os.close(start)
    os.close(starting)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_a21_readers_beside_a_slow_writer_see_all_or_nothing(
    tmp_path: Path, method: Method, mode: str
) -> None:
    """The writer pauses after every 64 KiB; readers in this process poll sizes and bytes meanwhile."""
    size, key = MIB // 2, KEYS[0]
    data = content(key, size)
    open_at(tmp_path, query=QUERY).close()

    def write(telling: int) -> None:
        io = without_better_than(method)

        def slow(real: Callable[..., int], fd: int, views: list[memoryview], offset: int) -> int:
            if views[0].nbytes > 64:
                os.write(telling, b".")
                time.sleep(0.01)
            return real(fd, [views[0][: 64 * KIB]], offset)

        store = open_at(tmp_path, io, f"{QUERY}&io={mode}")
        io.hooks["pwritev"] = slow
        assert put(store, key, data).status is Status.OK
        store.close()

    writer = Child(write)
    assert writer.hear() == b"."
    store = open_at(tmp_path, query=f"{QUERY}&io={mode}")
    seen = {Status.ABSENT: 0, Status.OK: 0}
    while not seen[Status.OK]:
        assert store.sizes([key], later())[0] in (None, size)
        pairs = [read_of(key, size) for _ in range(4)]
        outcomes = store.read_into([read for read, _ in pairs], later())
        for outcome, (_, target) in zip(outcomes, pairs, strict=True):
            seen[outcome.status] += 1
            assert target.is_untouched if outcome.status is Status.ABSENT else target.delivered() == data
    assert seen[Status.ABSENT] > 0
    assert len(writer.rest()) >= size // (64 * KIB) - 1
    store.close()


KILLS: dict[str, Callable[..., bool]] = {
    "pwritev": lambda fd, views, offset: offset > 0,
    "utime_fd": lambda *_: True,
    "link": lambda *_, **__: True,
    "link_fd": lambda *_, **__: True,
    "rename": lambda *_, **__: True,
    "unlink": lambda *_, **__: True,
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("call", KILLS)
def test_a_writer_killed_at_any_step_leaves_no_half_object(
    tmp_path: Path, method: Method, replaces: bool, call: str
) -> None:
    """Before, in or after any call: the object is the old one, absent, or whole; a sweep cleans up."""
    size, key = 2 * MIB + 5, KEYS[0]
    old, new = content(key, size, 1), content(key, size, 2)
    store = open_at(tmp_path, query=QUERY)
    version = None
    if replaces:
        assert put(store, key, old).is_ok
        version = next(store.scan(key)).version

    def write(telling: int) -> None:
        io = without_better_than(method)
        mine = open_at(tmp_path, io, QUERY)

        def dying(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            if KILLS[call](*args, **kwargs):
                os.write(telling, b"x")
                time.sleep(60)
            return result

        io.hooks[call] = dying
        put(mine, key, new, replace=version)
        io.hooks.clear()
        mine.close()

    child = Child(write)
    was_reached = child.hear() == b"x"
    child.kill()
    outcome, data = get(store, key, size)
    if outcome.status is Status.OK:
        assert data in (old, new)
        assert data == new or replaces
    else:
        assert outcome.status is Status.ABSENT
        assert not replaces
    report = store.sweep(later())
    there = [str(path_of(tmp_path, key))] * (outcome.status is Status.OK)
    assert files_below(tmp_path) == there
    assert report.is_complete
    assert report.used_bytes == report.bytes == size * len(there)
    assert put(store, key, new).status in (Status.OK, Status.EXISTS)
    assert variant_of(key, get(store, key, size)[1]) is not None
    store.close()
    needed = {"tmpfile": {"link_fd"}, "link": {"link", "unlink"}, "rename": {"rename"}}[method]
    if replaces:
        needed = {"tmpfile": {"link_fd", "rename"}, "link": {"rename"}, "rename": {"rename"}}[method]
    assert was_reached or call not in needed | {"pwritev", "utime_fd"}
