"""Attaching to a bucket: one clear error or a store that knows what its server does; never a secret told."""

from __future__ import annotations

import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_places import CLIENTS, open_s3_at

from hicache_store.clock import Deadline
from hicache_store.config import parse_url
from hicache_store.connectors.base import Status, Write
from hicache_store.connectors.s3 import connect, open_s3
from hicache_store.connectors.s3_boto import BotoSession, Keys
from hicache_store.connectors.s3_plane import PlaneFault, fault_of_error_body
from hicache_store.connectors.s3_settings import object_key, read_settings
from hicache_store.errors import ConfigurationError, NameFormatError
from hicache_store.testing.certificates import Certificates
from hicache_store.testing.probes import content, read_of, write_of
from hicache_store.testing.s3_server import Broken, Request, S3Server, error_reply, on_operations

SECRET, TOKEN = "SECRET-that-nobody-may-see", "TOKEN-that-nobody-may-see"
VARIABLES = (
    "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION",
    "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE",
)  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


def soon() -> Deadline:
    return Deadline.after(60.0)


def assert_round_trip(connector, key: str = "v1/aa/kv") -> None:
    data = content(key, 3_000)
    outcome = connector.write_from([write_of(key, data)], soon())[0]
    assert outcome.is_ok, outcome
    read, target = read_of(key, 3_000)
    assert connector.read_into([read], soon())[0].status is Status.OK
    assert target.delivered() == data


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


# -- what a URL says ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "not the name of a bucket"),
        ("s3://a", "not the name of a bucket"),
        ("s3://bucket/a//b", "not made of parts"),
        ("s3://bucket/../b", "not made of parts"),
        ("s3://bucket/a b", "not made of parts"),
        ("s3://bucket/" + "x" * 600, "at most 512"),
        ("s3://bucket/kv/v1", "has a part 'v1'"),
        ("s3://bucket/meta/kv", "has a part 'meta'"),
        ("s3://bucket?client=awscli", "one of obstore, boto3, aiobotocore"),
        ("s3://bucket?endpoint=localhost:9000", "is not like http"),
        ("s3://bucket?endpoint=http://host/path", "is not like http"),
        ("s3://bucket?concurrency=0", "a whole number from 1"),
        ("s3://bucket?secret_access_key=" + SECRET, "unknown option"),
        (f"s3://AK:{SECRET}@bucket/prefix", "do not belong into the URL"),
        (f"s3://bucket?endpoint=http://AK:{SECRET}@host:9000", "do not belong into the endpoint"),
        (f"s3://bucket?endpoint=http:AK:{SECRET}@host:9000", "is not like http"),
        (f"s3://bucket?region=x&probe=AK:{SECRET}@host", "give 1 or 0"),
    ],
)
def test_urls_that_cannot_work_are_refused_without_telling_secrets(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        connect(parse_url(url))
    assert SECRET not in str(caught.value)


def test_d02_keys_are_bounded_and_of_one_grammar() -> None:
    """Names of any length from users never reach the bucket; what is too long is told before a request."""
    assert object_key("store/", "v1/aa/kv") == "store/v1/aa/kv"
    for bad in (
        "",
        "/a",
        "a/",
        "a//b",
        "a/../b",
        "a b",
        "\u00e9",
        "a\0",
        "x" * 256,
        "/".join(["y" * 200] * 6),
    ):
        with pytest.raises(NameFormatError):
            object_key("store/", bad)


def test_text_forms_show_no_secret() -> None:
    keys = Keys("AK", SECRET, TOKEN)
    assert SECRET not in f"{keys!r}{keys!s}"
    assert TOKEN not in f"{keys!r}{keys!s}"


# -- where it leads ----------------------------------------------------------------------------


@pytest.mark.parametrize("client", CLIENTS)
def test_the_environment_and_the_url_name_the_endpoint(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    """The standard variables lead the way; an option of the URL overrides them, for every client."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    connector = connect(parse_url(f"s3://bucket/by-variable?client={client}"))
    assert_round_trip(connector)
    connector.close()
    assert "by-variable/v1/aa/kv" in server.objects
    nowhere = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", nowhere)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", nowhere)
    connector = open_s3_at(server.endpoint, client)
    assert_round_trip(connector)
    connector.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_profiles_give_endpoint_region_and_keys(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, client: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(
        f"[profile kv]\nregion = eu-west-1\nendpoint_url = {server.endpoint}\n"
        f"aws_access_key_id = PROFILE\naws_secret_access_key = {SECRET}\n"
    )
    connector = connect(parse_url(f"s3://bucket/store?client={client}&profile=kv"))
    assert_round_trip(connector)
    connector.close()
    signed = {
        request.headers["authorization"].split("Credential=")[1].split("/s3/")[0]
        for request in server.requests
    }
    assert {(one.split("/")[0], one.split("/")[2]) for one in signed} == {("PROFILE", "eu-west-1")}


def test_an_unknown_profile_is_told(server: S3Server) -> None:
    with pytest.raises(ConfigurationError, match="nobody"):
        open_s3_at(server.endpoint, profile="nobody")


@pytest.mark.parametrize(
    ("query", "endpoint", "is_virtual"),
    [
        ("", "https://s3.amazonaws.com", True),
        ("region=eu-west-1", "https://s3.eu-west-1.amazonaws.com", True),
        ("region=eu-west-1&addressing=path", "https://s3.eu-west-1.amazonaws.com", False),
        ("endpoint=http://minio:9000", "http://minio:9000", False),
        ("endpoint=http://minio:9000&addressing=virtual", "http://minio:9000", True),
    ],
)
def test_d09_addressing_fits_the_server(query: str, endpoint: str, is_virtual: bool) -> None:
    """Own servers rarely resolve a host name a bucket; AWS wants it."""
    session = BotoSession(read_settings(parse_url(f"s3://bucket?{query}".rstrip("?"))))
    assert (session.access.endpoint, session.access.is_virtual) == (endpoint, is_virtual)
    session.close()


def test_a_bucket_with_a_dot_is_reached_by_path_over_https() -> None:
    """No wildcard certificate covers a host name with one more dot."""
    session = BotoSession(read_settings(parse_url("s3://a.bucket")))
    assert not session.access.is_virtual
    session.close()


# -- what the server does ----------------------------------------------------------------------


@pytest.mark.parametrize("client", CLIENTS)
def test_d13_plain_requests_suit_old_servers(server: S3Server, client: str) -> None:
    """No trailers, no checksum headers, no waiting for 100 Continue; DeleteObjects one by one if need be."""
    server.is_strict = True
    server.refuses_bulk_without_md5 = True
    connector = open_s3_at(server.endpoint, client)
    assert connector.capabilities.create_only
    assert_round_trip(connector)
    keys = [f"v1/bb/{index}" for index in range(5)]
    connector.write_from([write_of(key, b"x" * 50) for key in keys], soon())
    assert {outcome.status for outcome in connector.delete(keys, soon())} == {Status.OK}
    assert connector.sizes(keys, soon()) == [None] * 5
    assert {outcome.status for outcome in connector.delete(keys, soon())} == {Status.OK}
    connector.close()
    puts = [request for request in server.requests if request.operation == "PUT"]
    assert all(request.headers["content-length"] == str(len(request.body)) for request in puts)
    assert server.count("BULK") == 1, "a server that refuses it is not asked again"


def test_bulk_deletes_carry_content_md5(server: S3Server) -> None:
    """Servers of the older kind take them then."""
    server.refuses_bulk_without_md5 = True
    for client in CLIENTS[1:]:
        connector = open_s3_at(server.endpoint, client)
        server.objects.update({f"store/v1/{index}": b"x" for index in range(1_200)})
        outcomes = connector.delete([f"v1/{index}" for index in range(1_200)], soon())
        assert {outcome.status for outcome in outcomes} == {Status.OK}
        assert [key for key in server.objects if "v1/" in key] == []
        assert (server.count("BULK"), server.count("DELETE")) == (2, 0)
        server.forget_requests()
        connector.close()


def test_a_server_that_ignores_conditions_is_found_out_and_warned_of(
    server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.ignores_conditions = True
    connector = open_s3_at(server.endpoint)
    assert not connector.capabilities.create_only
    assert "ignores If-None-Match" in caplog.text
    assert_round_trip(connector)
    server.forget_requests()
    assert connector.write_from([write_of("v1/aa/kv", b"x" * 3_000)], soon())[0].status is Status.EXISTS
    assert server.counts() == {"HEAD": 1}, "it is looked for before it is sent"
    connector.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_bucket_elsewhere_tells_its_region(server: S3Server, client: str) -> None:
    """Even a refused look at it does."""
    server.plan = on_operations(
        error_reply(301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-1"}), "BUCKET"
    )
    connector = open_s3_at(server.endpoint, client)
    assert connector.facts.region == "eu-west-1"
    assert server.count("BUCKET") == 1, "a redirection is an answer"
    connector.close()


@pytest.mark.parametrize("code", ["NotImplemented", "MethodNotAllowed"])
def test_a_server_that_refuses_conditions_is_used_without(server: S3Server, code: str) -> None:
    def refuse(request: Request):
        has_condition = {"if-none-match", "if-match"} & set(request.headers)
        return error_reply(501, code) if has_condition else None

    server.plan = refuse
    connector = open_s3_at(server.endpoint)
    assert not connector.capabilities.create_only
    assert_round_trip(connector)
    version = connector.read_into([read_of("v1/aa/kv", 3_000)[0]], soon())[0].version
    repair = write_of("v1/aa/kv", content("other", 3_000), replace=version)
    assert connector.write_from([repair], soon())[0].status is Status.OK
    connector.close()


def test_d15_attaching_lists_nothing_and_scans_stay_below_the_prefix(server: S3Server) -> None:
    """A list of millions takes a server minutes: only tools list, page by page, and can stop."""
    server.objects.update({f"store/v1/{index:05d}": b"x" for index in range(3_500)})
    server.objects.update({f"other/v1/{index:05d}": b"x" for index in range(50)})
    connector = open_s3_at(server.endpoint)
    assert server.counts() == {"BUCKET": 1, "PUT": 2}
    connector.close()
    server.forget_requests()
    connector = open_s3_at(server.endpoint)
    assert server.counts() == {"BUCKET": 1, "PUT": 1}, "the probe stays: the next attach needs one request"
    assert_round_trip(connector, "v1/zz/kv")
    assert server.count("LIST") == 0
    entries = connector.scan("v1/")
    assert next(entries).key == "v1/00000"
    assert server.count("LIST") == 1
    assert len(list(connector.scan())) == 3_501
    prefixes = {request.query["prefix"] for request in server.requests if request.operation == "LIST"}
    assert prefixes == {"store/v1/", "store/"}
    connector.close()


def test_a_key_that_may_not_write_reads(server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    server.objects["store/v1/aa/kv"] = content("v1/aa/kv", 3_000)
    server.plan = on_operations(error_reply(403, "AccessDenied"), "PUT", "BULK", "DELETE")
    connector = open_s3_at(server.endpoint)
    assert connector.capabilities.is_read_only
    assert "can only be read" in caplog.text
    assert connector.read_into([read_of("v1/aa/kv", 3_000)[0]], soon())[0].status is Status.OK
    assert connector.write_from([write_of("v1/bb", b"x" * 20)], soon())[0].status is Status.REFUSED
    connector.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_expiry_is_a_rule_beside_the_rules_of_others(server: S3Server, client: str) -> None:
    """It covers objects, never manifests and markers, and leaves every other rule alone."""
    theirs = (
        "<Rule><ID>theirs</ID><Filter><Prefix>logs/</Prefix></Filter><Status>Enabled</Status>"
        "<Expiration><Days>9</Days></Expiration></Rule>"
    )
    server.lifecycle = f"<LifecycleConfiguration>{theirs}</LifecycleConfiguration>".encode()
    connector = open_s3_at(server.endpoint, client)
    connector.set_expiry(7, soon())
    connector.set_expiry(5, soon())
    text = server.lifecycle.decode()
    assert text.count("<Rule>") == 2
    assert "<Prefix>logs/</Prefix>" in text
    assert "<Prefix>store/v1/</Prefix>" in text
    assert "<Days>5</Days>" in text
    connector.set_expiry(None, soon())
    text = server.lifecycle.decode()
    assert text.count("<Rule>") == 1
    assert "theirs" in text
    connector.close()


# -- what cannot work --------------------------------------------------------------------------

REFUSALS = {
    "missing bucket": (error_reply(404, "NoSuchBucket"), "no such bucket.*create it first"),
    "wrong secret": (error_reply(403, "SignatureDoesNotMatch"), "no valid credentials.*AWS_ACCESS_KEY_ID"),
    "nothing allowed": (error_reply(403, "AccessDenied"), "access denied.*grant s3:GetObject"),
    "another region": (error_reply(301, "PermanentRedirect"), "redirected|lies elsewhere"),
    "broken": (error_reply(500, "InternalError"), "server failed"),
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", REFUSALS)
def test_d09_attaching_where_it_cannot_work_says_why(server: S3Server, name: str, client: str) -> None:
    """One error that names place, cause and way out; afterwards the same URL attaches."""
    fault, words = REFUSALS[name]
    server.plan = on_operations(fault, "GET", "HEAD", "PUT", "BUCKET", "LIST")
    with pytest.raises(ConfigurationError, match=words) as caught:
        open_s3_at(server.endpoint, client)
    assert "s3://bucket/store/" in str(caught.value)
    assert server.endpoint in str(caught.value)
    server.plan = None
    connector = open_s3_at(server.endpoint, client)
    assert_round_trip(connector)
    connector.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_d09_nobody_there(client: str, tmp_path: Path) -> None:
    for endpoint in (f"http://127.0.0.1:{free_port()}", "http://nobody.invalid:9000"):
        with pytest.raises(ConfigurationError, match=r"connection failed.*check the endpoint") as caught:
            open_s3_at(endpoint, client)
        assert endpoint in str(caught.value)


@pytest.mark.parametrize("client", CLIENTS)
def test_d09_tls_where_there_is_none(server: S3Server, client: str) -> None:
    with pytest.raises(ConfigurationError, match=r"TLS failed|no answer in time|connection failed"):
        open_s3_at(server.endpoint.replace("http://", "https://"), client)


def test_d09_a_silent_server_ends_in_time(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_store.connectors.s3_attach.S3_ATTACH_TIMEOUT_S", 0.5)
    server.plan = on_operations(Broken(before_headers=True, ending="stall"), "BUCKET")
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match="no answer"):
        open_s3_at(server.endpoint)
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize("client", CLIENTS)
def test_tls_with_an_authority_of_ones_own(certificates: Certificates, client: str) -> None:
    """Refused unless the authority is named or verification is switched off."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    with S3Server(tls=context) as server:
        endpoint = server.endpoint.replace("127.0.0.1", "localhost")
        with pytest.raises(ConfigurationError, match=r"TLS failed.*ca_file"):
            open_s3_at(endpoint, client)
        for option in ({"ca_file": certificates.authority}, {"tls_verify": 0}):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                connector = open_s3_at(endpoint, client, **option)
                assert_round_trip(connector)
                connector.close()


# -- credentials -------------------------------------------------------------------------------


@pytest.mark.parametrize("client", CLIENTS)
def test_no_credentials_at_all(server: S3Server, monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(ConfigurationError, match=r"no valid credentials.*AWS_ACCESS_KEY_ID"):
        open_s3_at(server.endpoint, client)


@pytest.mark.parametrize("client", CLIENTS)
def test_d16_expired_credentials_are_read_anew_once(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, client: str
) -> None:
    """A refused token costs one renewal and one more request; the next object hits without a restart."""
    monkeypatch.setattr("hicache_store.connectors.s3_engine.S3_RENEW_INTERVAL_S", 0.5)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)

    def put_keys(access_key: str) -> None:
        text = f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {SECRET}\n"
        (tmp_path / "credentials").write_text(text)

    valid = ["OLD"]

    def check(request: Request):
        return None if request.access_key in valid else error_reply(403, "ExpiredToken")

    put_keys("OLD")
    server.plan = check
    connector = open_s3_at(server.endpoint, client)
    assert_round_trip(connector)
    valid[:] = ["NEW"]
    outcome = connector.read_into([read_of("v1/aa/kv", 3_000)[0]], soon())[0]
    assert outcome.status is Status.FAILED, "the file still holds the old key"
    assert "credentials" in outcome.detail
    assert outcome.is_transient
    put_keys("NEW")
    end = time.monotonic() + 60.0
    while time.monotonic() < end:  # a renewal is tried once in a while, not for every request
        read, target = read_of("v1/aa/kv", 3_000)
        if connector.read_into([read], soon())[0].is_ok:
            break
        time.sleep(0.2)
    assert target.delivered() == content("v1/aa/kv", 3_000)
    assert connector.write_from([write_of("v1/bb/kv", b"x" * 30)], soon())[0].status is Status.OK
    connector.close()


def test_d16_a_failing_provider_is_asked_again(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails once is not remembered: reads are failures meanwhile, and hits afterwards."""
    connector = open_s3_at(server.endpoint)
    assert_round_trip(connector)
    failures = [2]
    healthy = BotoSession.keys

    def keys(self: BotoSession) -> Keys | None:
        if failures[0]:
            failures[0] -= 1
            raise TimeoutError("the provider did not answer")
        return healthy(self)

    monkeypatch.setattr(BotoSession, "keys", keys)
    connector._engine.plane._store = connector._engine.plane._open()  # nothing cached
    statuses = []
    end = time.monotonic() + 60.0
    while time.monotonic() < end and Status.OK not in statuses:
        statuses.append(connector.read_into([read_of("v1/aa/kv", 3_000)[0]], soon())[0].status)
        time.sleep(0.05)
    assert statuses[0] is Status.FAILED
    assert statuses[-1] is Status.OK
    connector.close()


def test_secrets_reach_no_log_and_no_message(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Servers echo tokens in their errors; what we tell of them is code and message."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    caplog.set_level(logging.DEBUG, logger="hicache_store")
    echo = f"<Error><Code>InvalidToken</Code><Message>bad token</Message><Token-0>{TOKEN}</Token-0></Error>"
    told: list[str] = [str(fault_of_error_body(403, echo))]
    for client in CLIENTS:
        server.plan = None
        connector = open_s3_at(server.endpoint, client)
        told.append(f"{connector!r} {connector.settings!r} {connector.facts!r} {vars(connector)!r}")
        reply = error_reply(403, "InvalidToken")
        server.plan = on_operations(
            type(reply)(403, echo.encode(), reply.headers), "GET", "PUT", "HEAD", "BUCKET"
        )
        told.append(repr(connector.read_into([read_of("v1/aa/kv", 30)[0]], soon())))
        told.append(repr(connector.write_from([write_of("v1/aa/kv", b"x" * 30)], soon())))
        connector.close()
        with pytest.raises(ConfigurationError) as caught:
            open_s3_at(server.endpoint, client)
        told.append(str(caught.value))
    assert "bad token" in "".join(told)
    for text in (*told, caplog.text):
        assert SECRET not in text
        assert TOKEN not in text


# -- processes ---------------------------------------------------------------------------------

AT_EXIT = """
import sys, threading, time
sys.path.insert(0, {tests!r})
from s3_places import open_s3_at
from hicache_store.clock import Deadline
from hicache_store.testing.probes import read_of, write_of
connector = open_s3_at({endpoint!r}, {client!r})
connector.write_from([write_of("v1/aa/kv", b"x" * 1000)], Deadline.after(30))
def read_for_ever():
    while True:
        connector.read_into([read_of("v1/aa/kv", 1000)[0] for _ in range(8)], Deadline.after(30))
for _ in range(4):
    threading.Thread(target=read_for_ever, daemon=True).start()
time.sleep(0.2)
print("leaving")
"""


@pytest.mark.parametrize(
    "client", ["obstore", *(pytest.param(name, marks=pytest.mark.soak) for name in CLIENTS[1:])]
)
@pytest.mark.parametrize("is_stuck", [False, True], ids=["busy", "stuck"])
def test_e07_a_process_ends_whatever_runs(server: S3Server, client: str, is_stuck: bool) -> None:
    """Requests in flight, or hung: no thread keeps the process, and no native thread brings it down."""
    if is_stuck:
        server.plan = on_operations(Broken(before_headers=True, ending="stall"), "GET")
    code = AT_EXIT.format(tests=str(Path(__file__).parent), endpoint=server.endpoint, client=client)
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, timeout=120, text=True
    )
    assert done.stdout == "leaving\n"
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("client", CLIENTS)
def test_e07_close_with_writes_queued_before_a_stuck_server(server: S3Server, client: str) -> None:
    """Closing stops the intake, leaves what hangs, and gives sources back."""
    connector = open_s3_at(server.endpoint, client)
    server.plan = on_operations(Broken(before_headers=True, ending="stall"), "PUT")
    writes = [write_of(f"v1/{index}", content(str(index), 2_000)) for index in range(500)]
    outcomes: list[object] = []
    caller = threading.Thread(
        target=lambda: outcomes.extend(connector.write_from(writes, soon())), daemon=True
    )
    caller.start()
    end = time.monotonic() + 60.0
    while server.count("PUT") < 8 and time.monotonic() < end:
        time.sleep(0.01)
    connector.close()
    connector.close()
    caller.join(60.0)
    assert not caller.is_alive()
    assert len(outcomes) == 500
    for write in writes:
        events = write.source.events
        assert events.count("buffers") == events.count("release")


@pytest.mark.parametrize("client", CLIENTS)
def test_a_forked_child_opens_its_own_store_or_is_told(server: S3Server, client: str) -> None:
    """After a fork a native client would hang: the error says what to do instead."""
    connector = open_s3_at(server.endpoint, client)
    assert_round_trip(connector)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                own = open_s3_at(server.endpoint, client)
                read, target = read_of("v1/aa/kv", 3_000)
                own.read_into([read], soon())
                code = 2 if target.delivered() == content("v1/aa/kv", 3_000) else 3
                own.close()
            except ConfigurationError as error:
                code = 4 if "forked" in str(error) and "client=boto3" in str(error) else 5
        finally:
            os._exit(code)
    end = time.monotonic() + 60.0
    status = None
    while status is None and time.monotonic() < end:
        pid, seen = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(seen) if pid == child else None
        time.sleep(0.01)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert status == (4 if client == "obstore" else 2)
    assert_round_trip(connector)
    connector.close()


def test_attach_cycles_leave_nothing(server: S3Server) -> None:
    """Descriptors and threads are back where they were."""

    def cycle() -> None:
        connector = open_s3_at(server.endpoint)
        assert_round_trip(connector)
        connector.close()

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    cycle()
    before = held()
    for _ in range(50 if os.environ.get("HICACHE_SOAK") == "1" else 10):
        cycle()
    end = time.monotonic() + 10.0
    while time.monotonic() < end and (held()[0] > before[0] or held()[1] > before[1]):
        time.sleep(0.02)
    assert held()[0] <= before[0]
    assert held()[1] <= before[1]


def test_settings_open_without_a_url(server: S3Server) -> None:
    connector = open_s3(read_settings(parse_url(f"s3://bucket?endpoint={server.endpoint}&readonly=1")))
    assert connector.capabilities.is_read_only
    with pytest.raises(ConfigurationError, match="readonly=1"):
        connector.set_expiry(7, soon())
    assert server.count("PUT") == 0
    connector.close()


def test_objects_beyond_one_put_are_refused(server: S3Server) -> None:
    """More than a single PUT takes is told, and its source is not asked."""
    connector = open_s3_at(server.endpoint)
    write = write_of("v1/aa/kv", b"x" * 20)
    outcome = connector.write_from([Write(write.key, 6 << 30, write.source)], soon())[0]
    assert outcome.status is Status.REFUSED
    assert write.source.events == []
    connector.close()


def test_directories_of_a_gateway_are_no_objects(server: S3Server) -> None:
    server.objects.update({"store/v1/": b"", "store/v1/aa/": b"", "store/v1/aa/kv": b"x"})
    connector = open_s3_at(server.endpoint)
    assert [entry.key for entry in connector.scan()] == ["v1/aa/kv"]
    connector.close()


def test_listing_that_fails_raises(server: S3Server) -> None:
    """A tool must not take half a list for the whole."""
    connector = open_s3_at(server.endpoint)
    server.plan = on_operations(error_reply(500, "InternalError"), "LIST")
    with pytest.raises(PlaneFault, match="server failed"):
        list(connector.scan())
    connector.close()
