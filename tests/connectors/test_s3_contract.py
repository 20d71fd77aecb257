"""The shipped contract on ``s3://``, for every client and both faces.

What all clients and servers share, the engine and its landing threads, is tested once in full, on a fast
server; other clients and servers run by default what depends on them, and everything in the long runs.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

import pytest
from s3_places import AsyncAdapter, soak

from hicache_store.config import parse_url
from hicache_store.connectors.registry import open_connector
from hicache_store.connectors.s3 import connect
from hicache_store.testing.connector_contract import Connect, ConnectorContract
from hicache_store.testing.s3_server import S3Server
from hicache_store.testing.servers import S3Endpoint

OPENERS = {
    "obstore": lambda url: connect(parse_url(url)),
    "boto3": lambda url: connect(parse_url(f"{url}&client=boto3")),
    "aiobotocore": lambda url: connect(parse_url(f"{url}&client=aiobotocore")),
    "async": AsyncAdapter,
}

THE_CLIENT = (
    "test_parts_land_where_they_belong",
    "test_reading_no_bytes_still_checks",
    "test_wrong_size_delivers_nothing",
    "test_outcomes_keep_the_order_of_the_items",
    "test_an_object_that_changes_under_a_read",
    "test_large_objects_round_trip",
    "test_past_deadline_reads_nothing",
    "test_deadline_that_passes_midway",
    "test_sources_are_used_once_and_copied",
    "test_the_first_complete_object_stays",
    "test_an_object_of_another_size_is_a_conflict",
    "test_replacing_a_named_version",
    "test_replacing_what_is_not_there",
    "test_a_repair_that_loses_its_race",
    "test_write_deadline_that_passes_midway",
    "test_delete_removes_exactly_the_named",
    "test_delete_of_a_named_version",
    "test_scan_yields_what_lies_below_a_prefix",
    "test_close_while_calls_run",
    "test_closing_twice_and_using_after",
    "test_use_after_fork_works_or_raises",
)
THE_SERVER = (
    "test_parts_land_where_they_belong",
    "test_wrong_size_delivers_nothing",
    "test_outcomes_keep_the_order_of_the_items",
    "test_the_first_complete_object_stays",
    "test_an_object_of_another_size_is_a_conflict",
    "test_replacing_a_named_version",
    "test_replacing_what_is_not_there",
    "test_delete_of_a_named_version",
    "test_delete_removes_exactly_the_named",
    "test_scan_yields_what_lies_below_a_prefix",
    "test_names_of_the_real_form_never_meet",
    "test_sixteen_writers_of_one_key",
)
GIVEN = os.environ.get("HICACHE_TEST_S3_ENDPOINT")
"""A server of the user's own, with HICACHE_TEST_S3_BUCKET, _ACCESS_KEY and _SECRET_KEY, and maybe _REGION."""


@pytest.fixture
def open_at(monkeypatch: pytest.MonkeyPatch) -> Connect:
    """Opens a client at an endpoint, below a prefix of the test's own."""
    prefix = uuid.uuid4().hex

    def open_client(client: str, url: str) -> object:
        return OPENERS[client](f"s3://contract/{prefix}?endpoint={url}")

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return open_client


@pytest.fixture(scope="module")
def moto(moto_endpoint: S3Endpoint) -> S3Endpoint:
    moto_endpoint.make_bucket("contract")
    return moto_endpoint


@soak("but", *THE_CLIENT)
class TestMoto(ConnectorContract):
    @pytest.fixture
    def connect(self, moto: S3Endpoint, open_at) -> Connect:
        return lambda: open_at("obstore", moto.url)


@soak("but", *THE_SERVER, "test_large_objects_round_trip", "test_use_after_fork_works_or_raises")
@pytest.mark.parametrize("client", ["boto3", "async", pytest.param("aiobotocore", marks=pytest.mark.soak)])
class TestMotoByOtherClients(ConnectorContract):
    @pytest.fixture
    def connect(self, moto: S3Endpoint, open_at, client: str) -> Connect:
        return lambda: open_at(client, moto.url)


@soak("but", *THE_SERVER)
@pytest.mark.parametrize("server", ["seaweedfs", "juicefs", *(["given"] if GIVEN else [])])
class TestServers(ConnectorContract):
    """Servers as people run them."""

    @pytest.fixture
    def connect(
        self, server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> Connect:
        bucket = "contract"
        if server == "given":
            assert GIVEN
            values = {name: os.environ[f"HICACHE_TEST_S3_{name}"] for name in ("ACCESS_KEY", "SECRET_KEY")}
            endpoint = S3Endpoint("given", GIVEN, values["ACCESS_KEY"], values["SECRET_KEY"])
            bucket = os.environ["HICACHE_TEST_S3_BUCKET"]
        else:
            endpoint = request.getfixturevalue(f"{server}_endpoint")
            with contextlib.suppress(endpoint.client().exceptions.BucketAlreadyOwnedByYou):
                endpoint.make_bucket(bucket)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", endpoint.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", endpoint.secret_key)
        region = os.environ.get("HICACHE_TEST_S3_REGION", endpoint.region)
        url = f"s3://{bucket}/{uuid.uuid4().hex}?endpoint={endpoint.url}&region={region}"
        # With retries, as in use: a gateway fails writers of one key that meet.
        return lambda: open_connector(url)


@pytest.mark.parametrize(
    "client", ["obstore", *(pytest.param(name, marks=pytest.mark.soak) for name in ("boto3", "async"))]
)
class TestFastServer(ConnectorContract):
    """A server that answers quickly."""

    @pytest.fixture
    def server(self) -> Iterator[S3Server]:
        with S3Server() as running:
            yield running

    @pytest.fixture
    def connect(self, server: S3Server, open_at, client: str) -> Connect:
        return lambda: open_at(client, server.endpoint)


@soak("but", *THE_SERVER)
class TestWithoutConditions(ConnectorContract):
    """An older server that ignores If-None-Match and If-Match."""

    @pytest.fixture
    def connect(self, open_at) -> Iterator[Connect]:
        with S3Server() as running:
            running.ignores_conditions = True
            yield lambda: open_at("obstore", running.endpoint)
