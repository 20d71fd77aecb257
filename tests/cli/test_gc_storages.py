"""``hicache gc`` on every storage: it cleans up, sets the server's rule, or says who does it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from cli_place import StorePlace, run_json, run_text

from hicache_store.connectors import memory
from hicache_store.connectors.registry import open_connector
from hicache_store.testing.redis_servers import RedisServer, redis_server
from hicache_store.testing.s3_server import S3Server, error_reply
from hicache_store.testing.servers import S3Endpoint, given_s3


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with S3Server() as server:
        yield server


# -- S3: a rule of the bucket ------------------------------------------------------------------


def rules_of(endpoint: S3Endpoint, bucket: str, prefix: str) -> dict[str, int]:
    """Days by prefix of the rules in force below ``prefix``."""
    client: Any = endpoint.client()
    try:
        rules = client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    except client.exceptions.ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchLifecycleConfiguration":
            raise
        return {}
    mine = [rule for rule in rules if rule["Filter"].get("Prefix", "").startswith(prefix)]
    assert all(rule["Status"] == "Enabled" for rule in mine)
    return {rule["Filter"]["Prefix"]: rule["Expiration"]["Days"] for rule in mine}


def place_on(server: str, request: pytest.FixtureRequest) -> tuple[S3Endpoint, str]:
    if server == "given":
        given = given_s3()
        assert given is not None
        return given
    endpoint: S3Endpoint = request.getfixturevalue(f"{server}_endpoint")
    bucket = f"gc-{uuid.uuid4().hex[:12]}"
    endpoint.make_bucket(bucket)
    return endpoint, bucket


@pytest.mark.parametrize("server", ["moto", "seaweedfs", *(["given"] if given_s3() else [])])
def test_a_rule_covers_objects_and_never_metadata(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    endpoint, bucket = place_on(server, request)
    for name, value in endpoint.environment.items():
        monkeypatch.setenv(name, value)
    team = uuid.uuid4().hex
    url = f"s3://{bucket}/{team}/kv"
    connector = open_connector(url)
    StorePlace("", connector).add_namespace(pages=1)
    assert run_json(capsys, "gc", url, "--lifecycle", "30d") == {"url": url, "lifecycle_days": 30}
    assert rules_of(endpoint, bucket, team) == {f"{team}/kv/v1/": 30}
    text, _ = run_text(capsys, "gc", url, "--lifecycle", "48h")
    assert f"{url}: the server removes objects 2 days after they were written" in text
    (prefix,) = (rules := rules_of(endpoint, bucket, team))
    assert rules == {f"{team}/kv/v1/": 2}
    keys = [row["Key"] for row in endpoint.client().list_objects_v2(Bucket=bucket, Prefix=team)["Contents"]]
    covered = {key for key in keys if key.startswith(prefix)}
    assert covered == {f"{team}/kv/{entry.key}" for entry in connector.scan("v1/")}
    assert len(covered) == 2
    assert {key.rpartition("/")[2][:4] for key in set(keys) - covered} >= {"mani", "grid"}
    assert run_json(capsys, "gc", url, "--lifecycle", "off") == {"url": url, "lifecycle_days": None}
    assert rules_of(endpoint, bucket, team) == {}
    connector.close()


def test_a_server_without_rules_says_so(scripted: S3Server, capsys) -> None:
    """And the permission that is missing is named."""
    url = f"s3://bucket/kv?endpoint={scripted.endpoint}"
    for status, code in ((501, "NotImplemented"), (403, "AccessDenied")):
        reply = error_reply(status, code)
        scripted.plan = lambda request, reply=reply: reply if "lifecycle" in request.query else None
        _, err = run_text(capsys, "gc", url, "--lifecycle", "7d", code=2)
        assert f"the lifecycle rule of {url} was not changed" in err
        assert code in err
    assert "s3:PutLifecycleConfiguration" in err
    assert scripted.lifecycle == b""


def test_a_handle_that_only_reads_sets_no_rule(scripted: S3Server, capsys) -> None:
    url = f"s3://bucket/kv?endpoint={scripted.endpoint}&readonly=1"
    _, err = run_text(capsys, "gc", url, "--lifecycle", "7d", code=2)
    assert "can only be read" in err
    assert scripted.lifecycle == b""


def test_s3_without_the_option_is_not_changed(scripted: S3Server, capsys) -> None:
    text, _ = run_text(capsys, "gc", f"s3://bucket/kv?endpoint={scripted.endpoint}")
    assert "only by a lifecycle rule of its bucket; --lifecycle 30d sets one" in text
    assert not any("lifecycle" in request.query for request in scripted.requests)


@pytest.mark.parametrize("scheme", ["memory", "file", "layered", "redis"])
def test_what_has_no_rules_refuses(
    scheme: str, tmp_path: Path, request: pytest.FixtureRequest, capsys
) -> None:
    url = f"file://{tmp_path}/store?quota=1GiB"
    open_connector(url).close()
    if scheme == "redis":
        url = f"redis://{request.getfixturevalue('redis_single').address}"
    elif scheme != "file":
        url = f"layered:?fast=memory%3A&slow={quote(url, safe='')}" if scheme == "layered" else "memory:"
    _, err = run_text(capsys, "gc", url, "--lifecycle", "7d", code=2)
    assert f"{scheme if scheme != 'layered' else 'memory and file'} storage has no lifecycle rules" in err


@pytest.mark.parametrize("text", ["0", "12h", "36h", "-1d", "soon", "1e9999d"])
def test_a_lifecycle_is_whole_days(text: str, capsys) -> None:
    with pytest.raises(SystemExit):
        run_text(capsys, "gc", "s3://bucket", f"--lifecycle={text}")
    assert "give whole days such as 30d, or off" in capsys.readouterr().err


# -- layers ------------------------------------------------------------------------------------


def test_each_layer_is_cleaned_by_itself(scripted: S3Server, tmp_path: Path, capsys) -> None:
    fast = f"file://{tmp_path}/fast?quota=1GiB&sweep=0"
    connector = open_connector(fast)
    place = StorePlace(fast, connector)
    place.add_namespace(pages=3)
    size = len(place.read(place.keys[0]))
    tight = fast.replace("1GiB", f"{2 * size + 10}B")
    slow = f"s3://bucket/kv?endpoint={scripted.endpoint}"
    url = f"layered:?fast={quote(tight, safe='')}&slow={quote(slow, safe='')}"
    found = run_json(capsys, "gc", url)["layers"]
    assert [(one["layer"], one["swept"]) for one in found] == [("fast", True), ("slow", False)]
    assert found[0]["objects"] == len(list(connector.scan("v1/"))) <= 2
    assert "lifecycle rule" in found[1]["upkeep"]
    text, _ = run_text(capsys, "gc", url)
    assert "fast: file://" in text
    assert "slow: s3://" in text
    changed = run_json(capsys, "gc", url, "--lifecycle", "9d")["layers"]
    assert ["lifecycle_days" in one for one in changed] == [False, True]
    assert b"<Days>9</Days>" in scripted.lifecycle
    assert b"<Prefix>kv/v1/</Prefix>" in scripted.lifecycle
    connector.close()


# -- who does it -------------------------------------------------------------------------------


def test_memory_keeps_itself_within_its_bounds(capsys) -> None:
    found = run_json(capsys, "gc", "memory:")
    assert found["swept"] is False
    assert "keeps to quota and ttl as it is used" in found["upkeep"]


def test_redis_does_it_itself_and_gc_says_by_what(redis_single: RedisServer, capsys) -> None:
    url = f"redis://{redis_single.address}/0?prefix=gc:"
    assert "none by age (the URL gives no ttl)" in run_json(capsys, "gc", url)["upkeep"]
    text, err = run_text(capsys, "gc", f"{url}&ttl=7d")
    assert "objects not used for 7d" in text
    assert "maxmemory-policy" in text
    assert "has no memory limit" in err


def test_doctor_and_gc_tell_what_a_server_warns_of(capsys) -> None:
    """What a running engine logs at attach, an operator sees too: here, a server that will refuse writes."""
    limits = {"maxmemory": "64mb", "maxmemory-policy": "noeviction"}
    with redis_server(settings=limits) as server:
        url = f"redis://{server.address}"
        found = run_json(capsys, "doctor", url)
        attach = [one for one in found["findings"] if one["name"] == "attach"]
        assert [one["grade"] for one in attach] == ["warning"]
        assert "evicts nothing (maxmemory-policy noeviction)" in attach[0]["text"]
        assert found["sound"] is True
        _, err = run_text(capsys, "gc", url)
        assert "evicts nothing (maxmemory-policy noeviction)" in err
        layered = f"layered:?fast=memory%3A&slow={quote(url, safe='')}"
        names = [
            one["name"] for one in run_json(capsys, "doctor", layered)["findings"] if "attach" in one["name"]
        ]
        assert names == ["slow: attach"]


def test_doctor_tells_what_the_settings_resolve_to(scripted: S3Server, capsys) -> None:
    url = f"s3://bucket/kv?endpoint={scripted.endpoint}&concurrency=7"
    found = {one["name"]: one["text"] for one in run_json(capsys, "doctor", url)["findings"]}
    assert (
        f"bucket bucket, prefix kv/, endpoint {scripted.endpoint}, addressing auto, client obstore"
        in (found["resolved"])
    )
    assert "concurrency 7" in found["resolved"]
    assert found["resolved"].endswith("left to the environment: region, profile, ca file")


def test_doctor_shows_no_secret_of_anybody(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector of another distribution may have settings of any kind."""

    @dataclass
    class Settings:
        place: str = "somewhere"
        access_token: str = "hunter2"

    monkeypatch.setattr(memory.MemoryConnector, "settings", Settings(), raising=False)
    found = run_json(capsys, "doctor", "memory:")
    assert {"name": "resolved", "grade": "note", "text": "place somewhere", "way_out": ""} in found[
        "findings"
    ]
    assert "hunter2" not in str(found)


def test_storage_of_others_is_named(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector of another distribution, under its own scheme."""
    capabilities = replace(memory.MemoryConnector().capabilities, scheme="nfs")
    monkeypatch.setattr(memory.MemoryConnector, "capabilities", capabilities)
    assert run_json(capsys, "gc", "memory:")["upkeep"] == (
        "nfs storage has no upkeep that could be done from here"
    )
