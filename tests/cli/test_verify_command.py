from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cli_place import CONFIG, DRAFT, GRID, PAGE_SIZE, POOL, page_hash, run_json, run_text, sealed, soon

from hicache_store.cli.scrub import Fault, Scrub
from hicache_store.connectors.base import BufferSource, Write
from hicache_store.layout.box import Box
from hicache_store.layout.dtypes import DType
from hicache_store.layout.format import TAIL, ObjectFormat
from hicache_store.layout.model import KVPart, ModelKV, Pool
from hicache_store.layout.names import ObjectName, manifest_key, marker_key
from hicache_store.layout.namespace import namespace
from hicache_store.layout.records import first_slot, frame
from hicache_store.layout.weights import WeightsIdentity
from hicache_store.limits import KIB
from hicache_store.metrics import Metrics
from hicache_store.store import manifest

BOX = GRID.chunks(PAGE_SIZE)[0]


def faults_of(found: dict) -> dict[str, str]:
    return {one["key"]: one["fault"] for one in found["faults"]}


def later_version(key: str, pool: Pool, box: Box) -> bytes:
    """As a later release would leave it: another version, and sums of its own kind."""
    data = bytearray(sealed(key, pool, box))
    at = len(data) - TAIL.size
    data[at + 8 : at + 12] = (2).to_bytes(4, "little")
    data[at - 1] ^= 0x5A
    return bytes(data)


def test_a_sound_store_is_good(place, capsys):
    made = place.add_namespace(pages=4)
    for page in range(2):
        place.put(made, page, DRAFT.page_box, DRAFT)
    found = run_json(capsys, "verify", place.url)
    assert found["faults"] == []
    assert (found["objects"], found["good"], found["records"], found["gone"]) == (10, 10, 2, 0)
    text, err = run_text(capsys, "verify", place.url)
    assert "10 objects" in text
    assert "10 good, 0 corrupt" in text
    assert err == ""


def test_every_kind_of_fault_is_told_and_only_proven_ones_go(place, capsys):
    made = place.add_namespace(pages=8)
    keys = sorted(place.keys)
    flipped, cut, longer, foreign, later, zero, *good = keys
    data = place.read(flipped)
    data[random.Random(0).randrange(len(data))] ^= 1
    place.write(flipped, bytes(data))
    place.write(cut, bytes(place.read(cut)[:-1]))
    place.write(longer, bytes(place.read(longer)) + b"x")
    other = str(replace(ObjectName.parse(foreign), page_hash=page_hash(99)))
    place.write(foreign, sealed(other, POOL, BOX))
    place.write(later, later_version(later, POOL, BOX))
    place.write(zero, bytes(len(place.read(zero))))
    marker = marker_key(made.digest, first_slot(GRID))
    place.write(marker, bytes(4096))
    place.write("v1/notes.txt", b"somebody's")
    place.write("other/thing", b"somebody else's")
    place.write("meta/v1/strange", bytes(4096))
    expected = {
        flipped: "corrupt", cut: "corrupt", longer: "corrupt", zero: "corrupt", foreign: "foreign",
        later: "unknown_version", marker: "damaged_record",
        "v1/notes.txt": "stray", "other/thing": "stray", "meta/v1/strange": "stray",
    }  # fmt: skip
    found = run_json(capsys, "verify", place.url, code=1)
    assert faults_of(found) == expected
    assert (found["good"], found["corrupt"], found["stray"]) == (len(good), 4, 3)
    assert place.stored() >= set(expected)
    text, _ = run_text(capsys, "verify", place.url, code=1)
    assert all(key in text for key in expected)
    found = run_json(capsys, "verify", place.url, "--repair", code=1)
    assert found["removed"] == 5
    gone = {flipped, cut, longer, zero, foreign}
    assert {one["key"] for one in found["faults"] if one["repair"] == "removed"} == gone
    assert place.stored() & set(expected) == set(expected) - gone
    assert faults_of(run_json(capsys, "verify", place.url, code=1)) == {
        key: fault for key, fault in expected.items() if key not in gone
    }


def test_strays_alone_are_no_fault(place, capsys):
    place.add_namespace()
    place.write("v1/notes.txt", b"somebody's")
    assert run_json(capsys, "verify", place.url)["stray"] == 1


def test_one_namespace_only(place, capsys):
    first, second = place.add_namespace("a", pages=2), place.add_namespace("b", pages=2)
    bad = next(key for key in place.keys if second.digest in key)
    place.write(bad, bytes(len(place.read(bad))))
    place.write(marker_key(second.digest, first_slot(GRID)), bytes(4096))
    assert run_json(capsys, "verify", place.url, "--namespace", first.digest)["objects"] == 4
    found = run_json(capsys, "verify", place.url, "--namespace", second.digest[:16], code=1)
    assert found["objects"] == 4
    assert set(faults_of(found).values()) == {"corrupt", "damaged_record"}


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("pool", [POOL, DRAFT], ids=["main", "draft"])
def test_any_flipped_bit_is_found_with_or_without_a_manifest(place, capsys, pool, has_manifest):
    """Sampled over payload and trailer; a pool the manifest does not tell is checked all the same."""
    made = place.add_namespace(pages=0)
    if not has_manifest:
        place.connector.delete([manifest_key(made.digest)], soon())
    key = place.put(made, 0, pool.page_box, pool)
    assert run_json(capsys, "verify", place.url)["good"] == 1
    sound = bytes(place.read(key))
    rng = random.Random(pool.name)
    trailer = ObjectFormat.of(pool, pool.page_box).trailer_bytes
    places = [rng.randrange(len(sound)) for _ in range(6)]
    places += [len(sound) - 1 - rng.randrange(trailer) for _ in range(14)]
    for at in places:
        data = bytearray(sound)
        data[at] ^= 1 << rng.randrange(8)
        place.write(key, bytes(data))
        assert faults_of(run_json(capsys, "verify", place.url, code=1)) == {key: "corrupt"}
    place.write(key, sound)
    assert run_json(capsys, "verify", place.url)["good"] == 1


BIG = Pool("big", 12, 3, (KVPart("k", 40 * KIB), KVPart("v", 24 * KIB)), DType.of("int8"), 1)
"""64 KiB a layer, cells of two layers, an object of 2.3 MiB."""


@pytest.mark.parametrize("batch_bytes", [128 * KIB, 200 * KIB, 700 * KIB, 8 << 20])
def test_long_objects_are_read_in_runs_of_cells(place, batch_bytes):
    made = place.add_namespace(pages=1)
    key = place.put(made, 0, BIG.page_box, BIG)
    scrub = Scrub(place.connector, 60.0, batch_bytes)
    assert list(scrub.run(place.connector.scan())) == []
    assert (scrub.tally.good, scrub.tally.objects) == (3, 3)
    assert len(scrub._memory) <= batch_bytes
    sound = bytes(place.read(key))
    shape = ObjectFormat.of(BIG, BIG.page_box)
    for at in (0, shape.payload_bytes // 2, shape.payload_bytes - 1, shape.payload_bytes, len(sound) - 1):
        data = bytearray(sound)
        data[at] ^= 8
        place.write(key, bytes(data))
        (found,) = Scrub(place.connector, 60.0, batch_bytes).run(place.connector.scan())
        assert (found.key, found.fault) == (key, Fault.CORRUPT)
        assert found.version is not None


def test_what_cannot_be_held_is_not_called_bad(place):
    """A cell larger than the memory of a scrub: not proven good, and not removable."""
    made = place.add_namespace(pages=0)
    key = place.put(made, 0, BIG.page_box, BIG)
    (found,) = Scrub(place.connector, 60.0, batch_bytes=100 * KIB).run(place.connector.scan())
    assert (found.key, found.fault, found.is_removable) == (key, Fault.UNREADABLE, False)
    assert "131072 bytes" in found.detail


def test_a_batch_is_bounded(place, monkeypatch):
    place.add_namespace(pages=10)
    batches = []
    read_into = place.connector.read_into

    def watched(reads, deadline):
        batches.append(sum(read.size_bytes for read in reads))
        return read_into(reads, deadline)

    monkeypatch.setattr(place.connector, "read_into", watched, raising=False)
    bound = 3 * ObjectFormat.of(POOL, BOX).object_bytes + 100
    scrub = Scrub(place.connector, 60.0, bound)
    assert list(scrub.run(place.connector.scan("v1/"))) == []
    assert scrub.tally.good == 20
    assert max(batches) <= max(bound, 4096)
    assert len(batches) >= 7


class Interfering:
    """A connector under which something happens between listing and reading."""

    def __init__(self, connector, act):
        self._connector = connector
        self._act = act

    def __getattr__(self, name):
        return getattr(self._connector, name)

    def read_into(self, reads, deadline):
        self._act([read.key for read in reads])
        return self._connector.read_into(reads, deadline)


def test_what_goes_meanwhile_is_no_fault(place):
    place.add_namespace(pages=4)
    victim, shortened = place.keys[:2]

    def act(keys):
        if victim in keys:
            place.connector.delete([victim], soon())
            place.write(shortened, b"x" * 17)

    scrub = Scrub(Interfering(place.connector, act), 60.0)
    assert list(scrub.run(place.connector.scan("v1/"))) == []
    assert (scrub.tally.objects, scrub.tally.good, scrub.tally.gone) == (8, 6, 2)


def test_a_bad_object_replaced_before_its_removal_stays(place, capsys, monkeypatch):
    """By version: between finding and removing, a writer may have stored the right bytes."""
    place.add_namespace(pages=2)
    bad = place.keys[0]
    sound = bytes(place.read(bad))
    place.write(bad, bytes(len(sound)))
    kind = type(place.connector)
    delete = kind.delete

    def racing(self, keys, deadline, versions=None):
        monkeypatch.setattr(kind, "delete", delete)
        place.replace(bad, sound)
        return self.delete(keys, deadline, versions)

    monkeypatch.setattr(kind, "delete", racing)
    found = run_json(capsys, "verify", place.url, "--repair", code=1)
    assert [(one["key"], one["repair"]) for one in found["faults"]] == [(bad, "changed since")]
    assert bytes(place.read(bad)) == sound


def test_storage_that_does_not_answer_in_time_is_unreadable_not_bad(place, capsys):
    place.add_namespace(pages=2)
    found = run_json(capsys, "verify", place.url, "--repair", "--timeout", "1e-9s", code=1)
    assert set(faults_of(found).values()) <= {"unreadable", "damaged_record"}
    assert (found["removed"], found["unreadable"]) == (0, 4)
    assert run_json(capsys, "verify", place.url)["good"] == 4


def test_objects_of_unlike_namespaces_are_each_checked_by_their_own_facts(place, capsys):
    """Two models of one shape but different page sizes: each object against its own manifest."""
    place.add_namespace(pages=1)
    model = ModelKV.dense(num_layers=4, num_kv_heads=4, head_dim=8, dtype="float16")
    made = namespace(CONFIG, WeightsIdentity.operator("w"), model.facts(32), "t")
    manifest.ensure(place.connector, made, soon(), Metrics())
    key = place.put(made, 0, model.pool(32).page_box, model.pool(32))
    assert run_json(capsys, "verify", place.url)["good"] == 3
    # Sound in itself, but of 16 tokens where the manifest says 32: no reader would take it.
    place.write(key, sealed(key, model.pool(16), model.pool(16).page_box))
    found = run_json(capsys, "verify", place.url, code=1)
    assert faults_of(found) == {key: "corrupt"}
    assert "its box has" in found["faults"][0]["detail"]


def test_a_marker_that_is_no_grid_is_a_damaged_record(place, capsys):
    made = place.add_namespace()
    key = marker_key(made.digest, 63)
    record = frame(key, b'{"head_cuts":[2,1],"layer_cuts":[0,1],"pool":"kv"}')
    place.connector.write_from([Write(key, len(record), BufferSource.of(record))], soon())
    assert faults_of(run_json(capsys, "verify", place.url, code=1)) == {key: "damaged_record"}


def test_a_name_that_claims_more_than_any_memory(place, capsys):
    """A hostile name must not make the tool allocate or search by what it claims."""
    made = place.add_namespace(pages=0)
    key = f"v1/{made.digest}/{page_hash(0)[:2]}/{page_hash(0)}/draft_00000000.H000-99999999.L000-99999999"
    place.write(key, bytes(1000))
    assert faults_of(run_json(capsys, "verify", place.url, code=1)) == {key: "corrupt"}
