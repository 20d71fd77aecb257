"""The main job on every storage: one topology writes, others read, bit for bit, on real servers."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from store_rig import attach_rank, chain, read_pages, tiny, write_pages

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Connector
from hicache_store.connectors.registry import open_connector
from hicache_store.layout.parallel import Rank
from hicache_store.testing.servers import given_s3

STORAGES = (
    "memory",
    "file",
    "file_bounce",
    "moto",
    "moto_boto3",
    "seaweedfs",
    "juicefs",
    "redis",
    "redis_unix",
    "redis_cluster",
    "layered_files_before_redis",
    "layered_memory_before_s3",
    *(["given"] if given_s3() else []),
)
PAIRS = (("tp4pp2", "tp2pp1"), ("tp1pp1", "tp4pp2"), ("tp8pp1", "tp1pp2"))
PAGES = 3


@pytest.fixture(scope="module", autouse=True)
def _servers(
    request: pytest.FixtureRequest,
    seaweedfs_endpoint: object,
    juicefs_endpoint: object,
    redis_single: object,
    redis_three: object,
) -> None:
    """All servers run before the first test, and the S3 client's own runtime, which lasts as long as the
    process: their files do not count as a test's."""
    endpoint = request.getfixturevalue("moto_endpoint")
    endpoint.make_bucket("warm-up")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in endpoint.environment.items():
            environment.setenv(name, value)
        open_connector("s3://warm-up").close()


@dataclass
class UrlPlace:
    """Any storage by its URL; ``keeper`` holds what lives only as long as a handle."""

    url: str

    def open(self) -> Connector:
        return open_connector(self.url)


def s3_url(request: pytest.FixtureRequest, fixture: str, options: str = "") -> str:
    endpoint = request.getfixturevalue(fixture)
    monkeypatch = request.getfixturevalue("monkeypatch")
    for name, value in endpoint.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"store-{uuid.uuid4().hex[:12]}"
    endpoint.make_bucket(bucket)
    return f"s3://{bucket}/some/prefix{options}"


def url_of(storage: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    unique = uuid.uuid4().hex[:12]
    if storage.startswith("layered"):
        fast = "memory" if "memory" in storage else "file"
        slow = "moto" if "s3" in storage else "redis"
        inner = [quote(url_of(kind, request, tmp_path), safe="") for kind in (fast, slow)]
        return f"layered:?fast={inner[0]}&slow={inner[1]}"
    match storage:
        case "memory":
            return f"memory://{unique}"
        case "file":
            return f"file://{tmp_path}/store?quota=1GiB&sweep=0"
        case "file_bounce":
            return f"file://{tmp_path}/store?quota=1GiB&sweep=0&io=bounce"
        case "moto" | "moto_boto3":
            client = "?client=boto3" if storage == "moto_boto3" else ""
            return s3_url(request, "moto_endpoint", client)
        case "seaweedfs" | "juicefs":
            return s3_url(request, f"{storage}_endpoint")
        case "given":
            given = given_s3()
            assert given is not None
            endpoint, bucket = given
            for name, value in endpoint.environment.items():
                request.getfixturevalue("monkeypatch").setenv(name, value)
            return f"s3://{bucket}/{uuid.uuid4().hex}"
        case "redis":
            return f"redis://{request.getfixturevalue('redis_single').address}/0?prefix={unique}"
        case "redis_unix":
            return f"unix://{request.getfixturevalue('redis_single').socket_path}?prefix={unique}"
        case "redis_cluster":
            return f"redis+cluster://{request.getfixturevalue('redis_three').addresses}?prefix={unique}"
    raise AssertionError(storage)


@pytest.mark.parametrize("storage", STORAGES)
def test_any_topology_reads_what_another_wrote(
    storage: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    place = UrlPlace(url_of(storage, request, tmp_path))
    keeper = place.open()
    try:
        # moto answers a few hundred requests a second: one pair there, all of them elsewhere.
        pairs = PAIRS[:1] if "moto" in storage or "s3" in storage else PAIRS
        for number, (writer, reader) in enumerate(pairs):
            pool = tiny(heads=4, layers=4).pool(16)
            hashes = chain(PAGES * (number + 1), 16)[-PAGES:]
            write_pages(place, pool, writer, hashes, form="layer_first")
            assert read_pages(place, pool, reader, hashes, form="page_first")
    finally:
        keeper.close()


@pytest.mark.parametrize("storage", [storage for storage in STORAGES if not storage.startswith("layered")])
def test_a_lost_object_ends_the_prefix_until_it_is_stored_again(
    storage: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    place = UrlPlace(url_of(storage, request, tmp_path))
    keeper = place.open()
    try:
        pool = tiny(heads=2, layers=2).pool(16)
        hashes = chain(4, 16)
        write_pages(place, pool, "tp1", hashes)
        (key,) = [entry.key for entry in keeper.scan("v1/") if hashes[2] in entry.key]
        assert keeper.delete([key], Deadline.after(30))[0].is_ok
        with attach_rank(place, pool, "tp1", Rank(), pages=4) as rig:
            assert rig.store.contains(hashes).pages == 2
            report = rig.restore(hashes)
            assert (report.pages, report.end.reason.value) == (2, "absent")
            rig.assert_holds(range(2))
        write_pages(place, pool, "tp1", hashes)
        assert read_pages(place, pool, "tp1", hashes)
    finally:
        keeper.close()
