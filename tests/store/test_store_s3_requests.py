"""What a store on S3 asks of the server: requests of attaching, announcing and looking up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from store_rig import RankRig, attach_rank, chain, tiny

from hicache_store.connectors.base import Connector
from hicache_store.connectors.registry import open_connector
from hicache_store.layout.parallel import Rank
from hicache_store.limits import LOOKUP_FIRST_PAGES
from hicache_store.store import EndReason
from hicache_store.testing.contract_base import run_together
from hicache_store.testing.s3_server import Reply, S3Server, error_reply, etag, on_operations

POOL = tiny(2, 2, 1, "int8").pool(1)


@pytest.fixture(scope="module", autouse=True)
def client() -> Iterator[None]:
    """Keys, and the client's own runtime, which stays for the life of the process."""
    with pytest.MonkeyPatch.context() as patch, S3Server() as server:
        patch.setenv("AWS_ACCESS_KEY_ID", "AK")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
        open_connector(f"s3://bucket/kv?endpoint={server.endpoint}").close()
        yield


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@dataclasses.dataclass
class S3Place:
    """A place of the store's rig behind a URL."""

    url: str

    def open(self) -> Connector:
        return open_connector(self.url)


def test_c18_d15_attaching_and_announcing_cost_few_requests(server: S3Server) -> None:
    """Markers are found by one list below their own prefix: 64 slots are not 64 requests."""
    place = S3Place(f"s3://bucket/kv?endpoint={server.endpoint}")
    for number, spec in enumerate(("tp1pp1", "tp1pp2", "tp2pp1")):
        server.forget_requests()
        rig = attach_rank(place, POOL, spec, Rank())
        counts = server.counts()
        assert counts["LIST"] == 1
        (listed,) = [request for request in server.requests if request.operation == "LIST"]
        assert listed.query["prefix"] == f"kv/meta/v1/{rig.store._context.namespace}/grid-"
        # The manifest, and the markers that are there.
        assert counts["GET"] <= 2 + number
        assert counts.total() <= 10 + number
        server.forget_requests()
        rig.fill(range(1))
        assert rig.backup([f"{number:064x}"]).objects > 0
        counts = server.counts()
        assert counts["LIST"] == 1
        assert counts["GET"] <= 1 + number, "what is there, and the new one read back"
        assert len(rig.store._context.directory.grids) == number + 1
        rig.store.close()
    server.forget_requests()
    with attach_rank(place, POOL, "tp1pp1", Rank()) as reader:
        assert len(reader.store._context.directory.grids) == 3
        assert reader.store.contains(chain(512)).pages == 0
        assert server.count("HEAD") <= LOOKUP_FIRST_PAGES + 8


@pytest.mark.parametrize("written", [0, 5, 40, 100])
@pytest.mark.parametrize("spec", ["tp1pp1", "tp2pp2"])
def test_a_tail_that_is_not_there_costs_no_request_a_page(server: S3Server, spec: str, written: int) -> None:
    """A restore that nobody looked up first asks ahead by what it has found, in the cut that it has found."""
    place = S3Place(f"s3://bucket/kv?endpoint={server.endpoint}")
    hashes = chain(256)
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=256) as writer:
        writer.fill(range(written))
        writer.backup(hashes[:written])
    with attach_rank(place, POOL, spec, Rank(), pages=256) as reader:
        server.forget_requests()
        report = reader.restore(hashes)
        assert report.pages == written
        assert report.end is not None
        assert (report.end.page, report.end.reason) == (written, EndReason.ABSENT)
        counts = server.counts()
        assert counts["GET"] <= 2 * written + 2 * LOOKUP_FIRST_PAGES
        # Where the reader's own cut is not the writer's, it asks after the other for the slices that end.
        assert counts["HEAD"] <= written + LOOKUP_FIRST_PAGES
        server.forget_requests()
        assert reader.store.contains(hashes).pages == written
        server.forget_requests()
        assert reader.restore(hashes[:written]).pages == written
        assert server.count("GET") == written, "what was found stored is read in one go, and nothing else"


def test_markers_are_read_where_the_server_does_not_list(server: S3Server) -> None:
    """A denied, truncated or failing list costs the requests it would have saved, and no grid."""
    place = S3Place(f"s3://bucket/kv?endpoint={server.endpoint}")
    with attach_rank(place, POOL, "tp1pp2", Rank()) as writer:
        writer.fill(range(1))
        assert writer.backup(["a" * 64]).objects > 0
    server.plan = on_operations(error_reply(403, "AccessDenied"), "LIST")
    with attach_rank(place, POOL, "tp1pp1", Rank()) as reader:
        assert len(reader.store._context.directory.grids) == 1
    server.plan = None
    server.page_keys = 1
    digest = reader.store._context.namespace
    server.objects[f"kv/meta/v1/{digest}/grid--"] = b"of another release"
    with attach_rank(place, POOL, "tp1pp1", Rank()) as reader:
        assert len(reader.store._context.directory.grids) == 1


def test_a_list_behind_the_times_announces_nothing_twice(server: S3Server) -> None:
    """A list that hides a marker is found out when the marker is put there and read back."""
    place = S3Place(f"s3://bucket/kv?endpoint={server.endpoint}")
    with attach_rank(place, POOL, "tp1pp2", Rank()) as writer:
        writer.fill(range(1))
        assert writer.backup(["a" * 64]).objects > 0
    before = {key for key in server.objects if "/grid-" in key}
    for spec, new in (("tp1pp2", 0), ("tp1pp1", 1)):
        with attach_rank(place, POOL, spec, Rank()) as writer:
            writer.store._context.connector.inner.inner.listing = lambda _prefix, _deadline: []
            writer.fill(range(1))
            assert writer.backup([f"{new + 7:064x}"]).objects > 0
        after = {key for key in server.objects if "/grid-" in key}
        assert len(after) == len(before) + new
        assert before <= after


@pytest.mark.parametrize("ignores_conditions", [False, True])
def test_announcers_that_race_lose_no_grid(server: S3Server, ignores_conditions: bool) -> None:
    """All list at once, none sees the others' markers, and yet each finds its own in place at the end."""
    server.ignores_conditions = ignores_conditions
    place = S3Place(f"s3://bucket/kv?endpoint={server.endpoint}")
    ranks = [
        (spec, rank) for spec in ("tp1pp1", "tp2pp1", "tp1pp2", "tp2pp2") for rank in (Rank(), Rank(pp=1))
    ]
    rigs = [attach_rank(place, POOL, spec, rank) for spec, rank in ranks if "pp2" in spec or rank == Rank()]
    try:
        for rig in rigs:
            rig.fill(range(1))

        def announce(rig: RankRig, number: int) -> None:
            for _ in range(3):  # where conditions are ignored a marker may be overwritten, and comes back
                rig.store._context.directory._confirmed.clear()
                rig.backup([f"{number:064x}"])

        run_together(*[lambda rig=rig, n=n: announce(rig, n) for n, rig in enumerate(rigs)])
        announce(rigs[0], 0)
        wanted = {rig.store._bindings["kv"].grid for rig in rigs}
        with attach_rank(place, POOL, "tp1pp1", Rank()) as reader:
            assert set(reader.store._context.directory.grids) == wanted
        assert sum("/grid-" in key for key in server.objects) == len(wanted)
    finally:
        for rig in rigs:
            rig.store.close()


def test_the_wrong_object_of_the_right_length_is_a_miss_and_harms_nothing(server: S3Server) -> None:
    """A cache on the way serves page 1 for page 0: told by its sums, never placed, never deleted."""
    place = S3Place(f"s3://bucket/kv?endpoint={server.endpoint}")
    hashes = chain(3)
    with attach_rank(place, POOL, "tp1pp1", Rank(), pages=3) as rig:
        rig.fill(range(3))
        assert rig.backup(hashes).objects == 3
        keys = [key for page in hashes for key in server.objects if f"/{page}/" in key]
        stolen = server.objects[keys[1]]
        reply = Reply(200, stolen, {"etag": etag(stolen), "last-modified": "Mon, 02 Feb 2026 00:00:00 GMT"})
        server.plan = on_operations(reply, "GET", key=hashes[0])
        report = rig.restore(hashes)
        assert report.pages == 0
        assert report.end is not None
        assert report.end.reason in (EndReason.FOREIGN, EndReason.CORRUPT)
        assert rig.store.metrics.get(f"object.{report.end.reason.value}") >= 1
        server.plan = None
        assert set(keys) <= set(server.objects)
        assert rig.restore(hashes).pages == 3
        rig.assert_holds(range(3))
