"""Stores over servers in other processes: what is left after they close, forks, and memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from store_rig import RankRig, attach_rank, chain, tiny

from hicache_store.connectors.base import Connector
from hicache_store.connectors.registry import open_connector
from hicache_store.errors import ConfigurationError, HandleError
from hicache_store.layout.parallel import Rank
from hicache_store.testing.contract_base import exit_code_of

POOL = tiny(2, 2, 2).pool(4)
PATIENCE_S = 60.0
SERVE = """
from hicache_store.testing.s3_server import S3Server
server = S3Server()
print(server.port, flush=True)
input()
"""


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    """A server in a process of its own, and the client's runtime, which lasts as long as this process."""
    command = [sys.executable, "-c", SERVE]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline())
            patch.setenv("AWS_ACCESS_KEY_ID", "AK")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
            open_connector(f"s3://bucket/kv?endpoint=http://127.0.0.1:{port}").close()
            yield port
        finally:
            server.kill()


@pytest.fixture(scope="module", autouse=True)
def _servers(s3_port: int, redis_single: object) -> None:
    """Both run before the first test: their files do not count as a test's."""


@dataclass
class UrlPlace:
    """A place of the store's rig behind a URL."""

    url: str

    def open(self) -> Connector:
        return open_connector(self.url)


@pytest.fixture
def place(request: pytest.FixtureRequest, s3_port: int) -> UrlPlace:
    """The storage that a test names, at a place of its own."""
    return UrlPlace(url_of(request.param, request, s3_port))


def url_of(storage: str, request: pytest.FixtureRequest, s3_port: int) -> str:
    unique = uuid.uuid4().hex[:12]
    match storage:
        case "s3" | "s3_boto3" | "s3_aiobotocore":
            client = storage.partition("_")[2] or "obstore"
            return f"s3://bucket/{unique}?endpoint=http://127.0.0.1:{s3_port}&client={client}"
        case "redis":
            return f"redis://{request.getfixturevalue('redis_single').address}?prefix={unique}:"
        case "layered":
            slow = quote(url_of("redis", request, s3_port), safe="")
            return f"layered:?fast={quote('memory:?quota=1MiB', safe='')}&slow={slow}"
    raise AssertionError(storage)


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.parametrize(
    ("place", "cycles"),
    [("s3", 50), ("redis", 50), ("layered", 50), ("s3_boto3", 10), ("s3_aiobotocore", 10)],
    indirect=["place"],
)
def test_d10_fifty_stores_leave_nothing_behind(place: UrlPlace, cycles: int) -> None:
    """Attached, used and closed again and again: descriptors and threads are back where they were."""

    def cycle(index: int) -> None:
        with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2) as rig:
            rig.fill(range(2))
            rig.backup(chain(2, 4, b"%032d" % index))
            assert rig.store.contains(chain(2, 4, b"%032d" % index)).pages == 2
            ticket = rig.store.submit_restore(chain(2, 4, b"%032d" % index), rig.placements[:2])
            assert ticket.wait(PATIENCE_S).pages == 2

    cycle(0)
    before = held()
    for index in range(1, cycles + 1):
        cycle(index)
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and (held()[0] > before[0] or held()[1] > before[1]):
        time.sleep(0.02)
    now = held()
    assert now[0] <= before[0]
    assert now[1] <= before[1]


@pytest.mark.parametrize("place", ["s3", "s3_boto3", "redis", "layered"], indirect=True)
def test_a_forked_child_attaches_anew_or_is_told_what_to_do(
    place: UrlPlace, request: pytest.FixtureRequest
) -> None:
    """The inherited store says that it was; a new one works, but for a client whose native threads a
    child does not have, which says so; and the parent goes on."""
    hashes = chain(2, 4)
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=2) as rig:
        rig.fill(range(2))
        rig.backup(hashes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
            child = os.fork()
        if child == 0:
            code = 1
            try:
                code = in_child(rig, place, hashes)
            finally:
                os._exit(code)
        is_native = request.node.callspec.params["place"] == "s3"
        assert exit_code_of(child) == (3 if is_native else 2)
        assert rig.restore(hashes).pages == 2
        rig.assert_holds(range(2))


def in_child(rig: RankRig, place: UrlPlace, hashes: list[str]) -> int:
    """2 when a new store restored everything, 3 when it was refused with the way out."""
    try:
        rig.store.contains(hashes)
        return 10
    except HandleError as error:
        if "attach again" not in str(error):
            return 11
    with contextlib.suppress(HandleError):
        rig.store.close()
    try:
        own = attach_rank(place, POOL, "tp1pp1", Rank(), pages=2)
    except ConfigurationError as error:
        return 3 if "forked" in str(error) and "client=boto3" in str(error) else 12
    if own.restore(hashes).pages != 2:
        return 13
    own.assert_holds(range(2))
    own.store.close()
    return 2


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("place", ["s3", "redis"], indirect=True)
def test_memory_stays_flat_over_hundreds_of_megabytes(place: UrlPlace) -> None:
    """Restored again and again, backed up again and again: the process holds what the first rounds took."""
    pool = tiny(8, 8, 64).pool(64)
    pages, rounds = 16, 14
    hashes = chain(pages, 64)
    with attach_rank(place, pool, "tp1pp1", Rank(), pages=pages) as rig:
        rig.fill([0] * pages)
        report = rig.backup(hashes)
        assert report.written_bytes >= pages << 20
        after_first = 0
        for turn in range(rounds):
            assert rig.store.restore(hashes, rig.placements[:pages]).pages == pages
            if turn % 4 == 3:
                fresh = chain(pages, 64, b"%032d" % turn)
                assert rig.backup(fresh).objects == report.objects
            if turn == 4:
                after_first = resident()
        rig.assert_holds([0] * pages)
        assert resident() - after_first < 24 << 20
