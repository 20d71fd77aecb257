"""Failures that any storage may meet, on every connector: files, S3 by two clients, Redis, layers."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from hicache_store.connectors.base import Connector, Status
from hicache_store.connectors.layered import LayeredConnector
from hicache_store.connectors.registry import open_connector
from hicache_store.errors import HandleError
from hicache_store.limits import MIB
from hicache_store.testing.contract_base import (
    PATIENCE_S,
    assert_absent,
    assert_holds,
    page_key,
    run_together,
    soon,
    store,
)
from hicache_store.testing.probes import content, read_of, write_of
from hicache_store.testing.s3_server import S3Server

SIZE = 5_000
STORAGES = ("file", "file_bounce", "s3", "s3_boto3", "redis", "layered")


@pytest.fixture
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], str]]:
    """From the name of a storage to the URL of a place of its own."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
    servers: list[S3Server] = []

    def of(storage: str) -> str:
        unique = uuid.uuid4().hex[:12]
        match storage:
            case "file" | "file_bounce":
                mode = "bounce" if storage == "file_bounce" else "direct"
                return f"file://{tmp_path}/{unique}?quota=1GiB&sweep=0&threads=4&io={mode}"
            case "s3" | "s3_boto3":
                servers.append(S3Server())
                client = "boto3" if storage == "s3_boto3" else "obstore"
                return f"s3://bucket/{unique}?endpoint={servers[-1].endpoint}&client={client}"
            case "redis":
                return f"redis://{request.getfixturevalue('redis_single').address}?prefix={unique}:"
            case "layered":
                fast, slow = (quote(each, safe="") for each in (f"memory://{unique}", of("s3")))
                return f"layered:?fast={fast}&slow={slow}"
        raise AssertionError(storage)

    yield of
    for server in servers:
        server.close()


@pytest.fixture(params=STORAGES)
def opened(url: Callable[[str], str], request: pytest.FixtureRequest) -> Iterator[Callable[[], Connector]]:
    """Opens another handle on one place."""
    where, handles = url(request.param), []

    def another() -> Connector:
        handles.append(open_connector(where))
        return handles[-1]

    yield another
    for handle in handles:
        handle.close()


def objects_of(count: int, label: str = "every", size: int = SIZE) -> dict[str, bytes]:
    keys = [page_key(f"{label} {index}") for index in range(count)]
    return {key: content(key, size) for key in keys}


def test_d12_what_went_after_the_look_up_is_a_miss(opened: Callable[[], Connector]) -> None:
    """A look-up promises nothing: an object evicted since ends as a miss, of itself only, and can be
    stored again."""
    reader, other = opened(), opened()
    objects = objects_of(6)
    store(other, objects)
    keys = list(objects)
    assert reader.sizes(keys, soon()) == [SIZE] * 6
    assert all(one.is_ok for one in other.delete(keys[2:4], soon()))
    pairs = [read_of(key, SIZE) for key in keys]
    outcomes = reader.read_into([read for read, _ in pairs], soon())
    assert [one.status is Status.ABSENT for one in outcomes] == [key in keys[2:4] for key in keys]
    assert all(target.is_untouched for _, target in pairs[2:4])
    assert [size is None for size in reader.sizes(keys, soon())] == [key in keys[2:4] for key in keys]
    store(other, {key: objects[key] for key in keys[2:4]})
    assert_holds(reader, objects)


def test_d21_objects_that_are_there_fail_no_batch(opened: Callable[[], Connector]) -> None:
    """Storing again what another stored is a success that moves nothing; the others of the batch go on."""
    connector, other = opened(), opened()
    objects = objects_of(16)
    keys = list(objects)
    store(other, {keys[index]: objects[keys[index]] for index in (3, 7)})
    outcomes = connector.write_from([write_of(key, data) for key, data in objects.items()], soon())
    assert [index for index, one in enumerate(outcomes) if one.status is Status.EXISTS] == [3, 7]
    assert all(one.is_ok for one in outcomes)
    assert_holds(connector, objects)


def test_e09_what_was_removed_is_gone_for_every_handle(opened: Callable[[], Connector]) -> None:
    """While others read: a read ends with its own bytes or as a miss, and afterwards nobody hits."""
    connector, other = opened(), opened()
    doomed, kept = objects_of(40, "doomed"), objects_of(5, "kept")
    store(connector, doomed | kept)
    bad: list[str] = []
    is_gone = threading.Event()

    def read() -> None:
        while not is_gone.is_set() and not bad:
            pairs = [read_of(key, SIZE) for key in itertools.islice(doomed, 10)]
            outcomes = other.read_into([one for one, _ in pairs], soon())
            for (key, data), outcome, (_, target) in zip(doomed.items(), outcomes, pairs, strict=False):
                if outcome.is_ok and target.delivered() != data:
                    bad.append(f"wrong bytes of {key}")
                if not outcome.is_ok and outcome.status is not Status.ABSENT:
                    bad.append(f"{outcome}")

    def remove() -> None:
        try:
            outcomes = connector.delete(list(doomed), soon())
            assert all(one.is_ok for one in outcomes), outcomes
        finally:
            is_gone.set()

    run_together(read, remove)
    assert bad == []
    if isinstance(other, LayeredConnector):  # copies of before, on their way from another handle
        assert other.flush(soon())
        assert all(one.is_ok for one in connector.delete(list(doomed), soon()))
    for handle in (connector, opened()):
        assert_absent(handle, list(doomed)[:10], SIZE)
        assert_holds(handle, kept)


def test_c16_an_unfinished_listing_holds_up_nobody(opened: Callable[[], Connector]) -> None:
    """Tools walk a store for minutes; look-ups, reads and writes do not wait for them."""
    connector, other = opened(), opened()
    objects = objects_of(30, "listed")
    store(connector, objects)
    listing = connector.scan()
    seen = [next(listing).key]

    def use() -> None:
        for handle in (connector, other):
            assert handle.sizes(list(objects), soon()) == [SIZE] * 30
            assert_holds(handle, dict(itertools.islice(objects.items(), 4)))
        store(connector, objects_of(3, "beside"))

    run_together(use)
    seen += [entry.key for entry in listing]
    assert set(objects) <= set(seen)


def test_e07_closing_over_a_queue_of_writes(opened: Callable[[], Connector]) -> None:
    """Intake stops, what was taken ends, sources are given back, and closing again does nothing."""
    connector, other = opened(), opened()
    writes = [write_of(key, data) for key, data in objects_of(500, "queued", 2_000).items()]
    outcomes: list[object] = []
    begun = threading.Event()
    writes[0].source.on_buffers = begun.set

    def write() -> None:
        try:
            outcomes.extend(connector.write_from(writes, soon()))
        except HandleError:
            outcomes.extend([None] * len(writes))

    def close() -> None:
        assert begun.wait(PATIENCE_S)
        connector.close()
        connector.close()

    run_together(write, close)
    assert len(outcomes) == 500
    for write_, outcome in zip(writes, outcomes, strict=True):
        events = write_.source.events
        assert events.count("buffers") == events.count("release") <= 3
        if getattr(outcome, "is_ok", False) and connector.capabilities.scheme != "layered":
            assert_holds(other, {write_.key: content(write_.key, 2_000)})
    with pytest.raises(HandleError):
        connector.write_from(writes[:1], soon())


@pytest.mark.parametrize("storage", ["file", "redis"])
def test_c08_another_thread_keeps_running(storage: str, url: Callable[[str], str]) -> None:
    """While batches move, a thread that wants to run every millisecond gets to do so."""
    connector = open_connector(url(storage))
    objects = {page_key(f"large {index}"): bytes(MIB) for index in range(16)}
    store(connector, objects)
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    rounds, end = 0, time.monotonic() + PATIENCE_S
    while ticks[0] < 200 and time.monotonic() < end:
        assert all(one.is_ok for one in connector.read_into([read_of(k, MIB)[0] for k in objects], soon()))
        rounds += 1
    stop.set()
    thread.join()
    connector.close()
    assert ticks[0] >= rounds


SCARCE = """
import os, resource, sys, threading, time
from hicache_store.clock import Deadline
from hicache_store.connectors.base import Status
from hicache_store.connectors.registry import open_connector
from hicache_store.testing.probes import content, read_of, write_of

def soon():
    return Deadline.after(60.0)

def move(connector, names):
    writes = [write_of(name, content(name, 3_000)) for name in names]
    outcomes = connector.write_from(writes, soon())
    pairs = [read_of(name, 3_000) for name in names]
    outcomes += connector.read_into([read for read, _ in pairs], soon())
    for name, outcome, (_, target) in zip(names, outcomes[len(names):], pairs):
        assert not outcome.is_ok or target.delivered() == content(name, 3_000), name
    for write in writes:
        assert write.source.events.count("buffers") == write.source.events.count("release")
    return outcomes

def held():
    return len(os.listdir("/proc/self/fd"))

connector = open_connector(sys.argv[1])
names = [f"v1/{'ab' * 32}/00/{index:064x}/kv.H000-001.L000-001" for index in range(400)]
assert all(outcome.is_ok for outcome in move(connector, names[:4]))
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (held() + int(sys.argv[2]), hard))
errors = []

def work(start):
    try:
        for at in range(start, 384, 16):
            move(connector, names[at : at + 2])
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=work, args=(start,)) for start in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert errors == [], errors
before, taken = held(), []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    pass
for turn in range(3):
    fresh = [f"v1/{'cd' * 32}/00/{turn * 9 + index:064x}/kv.H000-001.L000-001" for index in range(9)]
    move(connector, fresh)
    connector.sizes(fresh, soon())
    connector.delete(fresh, soon())
for fd in taken:
    os.close(fd)
end = time.monotonic() + 60.0
while not all(outcome.is_ok for outcome in move(connector, names[390:])) and time.monotonic() < end:
    time.sleep(0.1)
assert all(outcome.is_ok for outcome in move(connector, names[390:]))
connector.close()
end = time.monotonic() + 10.0
while held() > before and time.monotonic() < end:
    time.sleep(0.02)
assert held() <= before + 2, (held(), before)
print("well")
"""


@pytest.mark.parametrize(
    "storage", [pytest.param(each, marks=pytest.mark.soak) if "boto3" in each else each for each in STORAGES]
)
def test_d10_without_descriptors_it_misses_and_recovers(storage: str, url: Callable[[str], str]) -> None:
    """When the process has no descriptors left, its own fault or not, reads miss and writes fail; nothing
    is raised or lost, and with descriptors everything works again."""
    done = subprocess.run(
        [sys.executable, "-c", SCARCE, url(storage), "40"],
        check=False,
        capture_output=True,
        timeout=180,
        text=True,
    )
    assert done.stdout == "well\n", done.stderr[-3_000:]
    assert done.returncode == 0
