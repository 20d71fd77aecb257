"""``hicache verify`` on layered stores: every copy is looked at, and one layer repairs the other."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from cli_place import GRID, MODEL, StorePlace, page_hash, run_json, run_text, sealed, soon

from hicache_store.cli.repair import Repair, Repairer
from hicache_store.cli.scrub import Fault, Finding, Scrub
from hicache_store.config import parse_url
from hicache_store.connectors import local, memory
from hicache_store.connectors.base import BufferSource, Connector, Write
from hicache_store.connectors.memory import MemoryConnector
from hicache_store.connectors.registry import open_connector
from hicache_store.layout.box import Box
from hicache_store.layout.names import marker_key
from hicache_store.layout.records import first_slot
from hicache_store.testing.fault_plans import Fail, Plan, TimeOut, on_keys
from hicache_store.testing.faults import FaultyConnector
from hicache_store.testing.redis_servers import RedisServer
from hicache_store.testing.servers import S3Endpoint


class Layers:
    """A memory layer before files; ``keys`` lie in both, sound and equal."""

    def __init__(self, tmp_path: Path) -> None:
        fast_url, slow_url = f"memory://{tmp_path}", f"file://{tmp_path}/slow?sweep=0&quota=1GiB"
        self.fast = StorePlace(fast_url, memory.connect(parse_url(fast_url)))
        self.slow = StorePlace(slow_url, local.connect(parse_url(slow_url)))
        self.url = f"layered:?fast={quote(fast_url, safe='')}&slow={quote(slow_url, safe='')}"
        self.made = self.slow.add_namespace(pages=4)
        self.keys = list(self.slow.keys)
        for key in self.keys:
            self.fast.write(key, bytes(self.slow.read(key)))

    def close(self) -> None:
        self.fast.connector.close()
        self.slow.connector.close()


@pytest.fixture
def layers(tmp_path: Path) -> Iterator[Layers]:
    made = Layers(tmp_path)
    yield made
    made.close()


def flip(place: StorePlace, key: str) -> None:
    data = place.read(key)
    data[len(data) // 3] ^= 4
    place.write(key, bytes(data))


def repairs_of(found: dict) -> dict[tuple[str, str], str | None]:
    return {(one["layer"], one["key"]): one["repair"] for one in found["faults"]}


def test_every_copy_is_looked_at_and_none_is_changed(layers: Layers, capsys) -> None:
    """A read of both layers together would show the good copy alone."""
    flip(layers.fast, layers.keys[0])
    flip(layers.slow, layers.keys[1])
    found = run_json(capsys, "verify", layers.url, code=1)
    assert repairs_of(found) == {("fast", layers.keys[0]): None, ("slow", layers.keys[1]): None}
    assert (found["objects"], found["good"], found["corrupt"], found["records"]) == (16, 14, 2, 2)
    assert [(one["layer"], one["good"]) for one in found["layers"]] == [("fast", 7), ("slow", 7)]
    text, _ = run_text(capsys, "verify", layers.url, code=1)
    assert "fast: 8 objects" in text
    assert "slow: 8 objects" in text
    assert run_json(capsys, "verify", layers.url, code=1)["corrupt"] == 2


def test_one_layer_repairs_the_other(layers: Layers, capsys) -> None:
    sound = {key: bytes(layers.slow.read(key)) for key in layers.keys}
    in_fast, in_slow, in_both, cut, *_ = layers.keys
    flip(layers.fast, in_fast)
    flip(layers.slow, in_slow)
    flip(layers.fast, in_both)
    flip(layers.slow, in_both)
    layers.slow.write(cut, sound[cut][:-5])
    found = run_json(capsys, "verify", layers.url, "--repair", code=1)
    assert repairs_of(found) == {
        ("fast", in_fast): "restored",
        ("fast", in_both): "removed",
        ("slow", in_slow): "restored",
        ("slow", in_both): "removed",
        ("slow", cut): "restored",
    }
    assert (found["restored"], found["removed"], found["changed"], found["failed"]) == (3, 2, 0, 0)
    for place in (layers.fast, layers.slow):
        left = {key: bytes(place.read(key)) for key in place.stored() if not key.startswith("meta/")}
        assert left == {key: data for key, data in sound.items() if key != in_both}
    assert run_json(capsys, "verify", layers.url)["good"] == 14


def test_a_fast_layer_without_manifests_is_judged_by_those_of_the_slow_one(layers: Layers, capsys) -> None:
    """An object that is sound in itself, but not of the namespace's page size."""
    wide = MODEL.pool(32)
    key = layers.keys[0]
    box = GRID.chunks(16)[0]
    layers.fast.write(key, sealed(key, wide, Box(box.heads, box.layers, range(32))))
    found = run_json(capsys, "verify", layers.url, "--repair", code=1)
    assert repairs_of(found) == {("fast", key): "restored"}
    assert layers.fast.read(key) == layers.slow.read(key)


def test_a_fast_layer_that_must_not_change_does_not(layers: Layers, tmp_path: Path, capsys) -> None:
    fast = f"file://{tmp_path}/fast?sweep=0&quota=1GiB"
    connector = local.connect(parse_url(fast))
    place = StorePlace(fast, connector)
    key = layers.keys[0]
    place.write(key, bytes(layers.slow.read(key)))
    flip(place, key)
    slow = quote(layers.slow.url, safe="")
    url = f"layered:?fast={quote(fast, safe='')}&slow={slow}&mode=read-only-fast"
    found = run_json(capsys, "verify", url, "--repair", code=1)
    assert repairs_of(found) == {("fast", key): "failed"}
    assert run_json(capsys, "verify", url, code=1)["corrupt"] == 1
    connector.close()


def test_records_are_never_repaired(layers: Layers, capsys) -> None:
    key = marker_key(layers.made.digest, first_slot(GRID))
    layers.slow.write(key, bytes(4096))
    found = run_json(capsys, "verify", layers.url, "--repair", code=1)
    assert repairs_of(found) == {("slow", key): None}
    assert layers.slow.read(key) == bytes(4096)


def test_a_layered_store_is_opened_as_one_before_its_layers(layers: Layers, capsys) -> None:
    """What the layers by themselves do not show: a wrong option, or a layer that is not given."""
    for url in (f"{layers.url}&mode=sideways", "layered:?slow=memory%3A"):
        _, err = run_text(capsys, "verify", url, code=2)
        assert "layered" in err


# -- the repair by itself ----------------------------------------------------------------------


def broken(place: StorePlace, key: str) -> Finding:
    (entry,) = place.connector.scan(key)
    return Finding(key, Fault.CORRUPT, entry.size_bytes, "", entry.version)


def repaired(connector: Connector, others: list[Connector], findings: list[Finding]) -> list[Repair | None]:
    scrubs = [Scrub(other, 60.0) for other in others]
    return [repair for _, repair in Repairer(connector, scrubs, 60.0).settle(iter(findings))]


@pytest.mark.parametrize(
    ("plan", "repair"),
    [
        (on_keys(lambda _: True, Fail("quota"), ("write",)), Repair.REMOVED),
        (on_keys(lambda _: True, TimeOut(), ("write",)), Repair.REMOVED),
        (on_keys(lambda _: True, Fail("denied"), ("write", "delete")), Repair.FAILED),
    ],
    ids=["no room", "no answer", "no right"],
)
def test_what_cannot_be_restored_is_removed(layers: Layers, plan: Plan, repair: Repair) -> None:
    key = layers.keys[0]
    flip(layers.fast, key)
    bad = broken(layers.fast, key)
    faulty = FaultyConnector(layers.fast.connector, plan)
    assert repaired(faulty, [layers.slow.connector], [bad]) == [repair]
    assert (key in layers.fast.stored()) is (repair is Repair.FAILED)


def test_a_source_that_does_not_answer_costs_the_copy_only(layers: Layers) -> None:
    key = layers.keys[0]
    flip(layers.fast, key)
    hung = FaultyConnector(layers.slow.connector, on_keys(lambda _: True, TimeOut(), ("sizes", "read")))
    assert repaired(layers.fast.connector, [hung], [broken(layers.fast, key)]) == [Repair.REMOVED]
    assert key in layers.slow.stored()


def test_what_another_writer_replaced_stays(layers: Layers) -> None:
    key = layers.keys[0]
    sound = bytes(layers.fast.read(key))
    flip(layers.fast, key)
    bad = broken(layers.fast, key)
    layers.fast.replace(key, sound)
    (newer,) = layers.fast.connector.scan(key)
    assert repaired(layers.fast.connector, [layers.slow.connector], [bad]) == [Repair.CHANGED]
    assert list(layers.fast.connector.scan(key)) == [newer]


def test_an_object_without_a_version_is_made_anew(layers: Layers) -> None:
    key = layers.keys[0]
    flip(layers.fast, key)
    bad = Finding(key, Fault.CORRUPT, 100)
    assert repaired(layers.fast.connector, [layers.slow.connector], [bad]) == [Repair.RESTORED]
    assert layers.fast.read(key) == layers.slow.read(key)


def test_copies_are_read_in_runs_that_fit(tmp_path: Path) -> None:
    """The memory of a repair is that of a scrub, however much is bad; what is longer is passed over."""
    place = StorePlace("", MemoryConnector())
    place.add_namespace(pages=5)
    size = len(place.read(place.keys[0]))
    scrub = Scrub(place.connector, 60.0, batch_bytes=3 * size + 1)
    absent = place.keys[0].replace(page_hash(0), page_hash(77)).replace(page_hash(0)[:2], page_hash(77)[:2])
    flip(place, place.keys[4])
    runs = [{key: bytes(view) for key, view in run.items()} for run in scrub.sound([*place.keys, absent])]
    assert [len(run) for run in runs] == [3, 2, 3, 1]
    good = [key for key in place.keys if key != place.keys[4]]
    assert {key: data for run in runs for key, data in run.items()} == {
        key: bytes(place.read(key)) for key in good
    }
    assert len(scrub._memory) <= 3 * size
    assert list(Scrub(place.connector, 60.0, batch_bytes=size - 1).sound(place.keys)) == []


def test_findings_keep_their_order_and_only_proven_ones_are_touched() -> None:
    place = StorePlace("", MemoryConnector())
    place.connector.write_from([Write("v1/notes", 1, BufferSource.of(b"x"))], soon())
    findings = [Finding("v1/notes", Fault.STRAY, 1), Finding("v1/later", Fault.UNKNOWN_VERSION, 1)]
    repairer = Repairer(place.connector, [], 60.0)
    assert list(repairer.settle(iter(findings))) == [(one, None) for one in findings]
    assert place.stored() == {"v1/notes"}


def test_redis_before_s3(
    redis_single: RedisServer, seaweedfs_endpoint: S3Endpoint, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """On servers as people run them, damaged behind the store's back."""
    for name, value in seaweedfs_endpoint.environment.items():
        monkeypatch.setenv(name, value)
    unique = uuid.uuid4().hex[:12]
    bucket = f"verify-{unique}"
    seaweedfs_endpoint.make_bucket(bucket)
    urls = (f"redis://{redis_single.address}/0?prefix={unique}:", f"s3://{bucket}/kv")
    fast, slow = (StorePlace(url, open_connector(url)) for url in urls)
    slow.add_namespace(pages=2)
    sound = {key: bytes(slow.read(key)) for key in slow.keys}
    for key, data in sound.items():
        fast.write(key, data)
    in_fast, in_slow, in_both, _ = slow.keys
    for key in (in_fast, in_both):
        redis_single.ask("SETRANGE", f"{unique}:{key}", 7, "damage")
    for key in (in_slow, in_both):
        seaweedfs_endpoint.client().put_object(Bucket=bucket, Key=f"kv/{key}", Body=b"x" * len(sound[key]))
    url = "layered:?fast={}&slow={}".format(*(quote(one, safe="") for one in urls))
    found = run_json(capsys, "verify", url, "--repair", code=1)
    assert repairs_of(found) == {
        ("fast", in_fast): "restored",
        ("fast", in_both): "removed",
        ("slow", in_slow): "restored",
        ("slow", in_both): "removed",
    }
    del sound[in_both]
    for place in (fast, slow):
        left = {key for key in place.stored() if not key.startswith("meta/")}
        assert {key: bytes(place.read(key)) for key in left} == sound
        place.connector.close()
    assert run_json(capsys, "verify", url)["good"] == 6
