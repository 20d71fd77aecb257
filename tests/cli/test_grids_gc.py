from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_place import GRID, StorePlace, page_hash, run_json, run_text

from hicache_store.config import parse_url
from hicache_store.connectors import local
from hicache_store.connectors.local_sweep import SweepReport
from hicache_store.layout.grid import Grid
from hicache_store.layout.names import marker_key
from hicache_store.layout.records import first_slot

OTHER = Grid("kv", (0, 4), (0, 2, 4))


def test_grids_of_each_namespace(place, capsys):
    first, second = place.add_namespace("a"), place.add_namespace("b")
    place.announce(second, OTHER)
    found = run_json(capsys, "grids", place.url)["grids"]
    assert [(one["namespace"], one["slot"]) for one in found] == sorted(
        [
            (first.digest, first_slot(GRID)),
            (second.digest, first_slot(GRID)),
            (second.digest, first_slot(OTHER)),
        ]
    )
    assert run_json(capsys, "grids", place.url, "--namespace", first.digest[:8])["grids"] == [
        {
            "namespace": first.digest,
            "slot": first_slot(GRID),
            "pool": "kv",
            "head_cuts": [0, 2, 4],
            "layer_cuts": [0, 4],
            "objects": 2,
        }
    ]
    text, _ = run_text(capsys, "grids", place.url)
    assert "0,2,4" in text
    assert len(text.splitlines()) == 4


def test_a_retired_slot_is_free_and_may_be_taken_again(place, capsys):
    made = place.add_namespace()
    slot = str(first_slot(GRID))
    _, err = run_text(capsys, "grids", place.url, "--retire", slot, code=2)
    assert "do not find the objects of this grid until one of its writers announces it again" in err
    assert "give --yes" in err
    assert marker_key(made.digest, int(slot)) in place.stored()
    found = run_json(capsys, "grids", place.url, "--retire", slot, "--yes")
    assert found == {"namespace": made.digest, "slot": int(slot), "retired": True}
    assert marker_key(made.digest, int(slot)) not in place.stored()
    assert len(place.stored()) == 7  # the manifest and every object
    place.announce(made, GRID)
    assert len(run_json(capsys, "grids", place.url)["grids"]) == 1


def test_a_damaged_marker_is_listed_and_can_be_retired(place, capsys):
    made = place.add_namespace()
    slot = first_slot(GRID)
    place.write(marker_key(made.digest, slot), b"short")
    (found,) = run_json(capsys, "grids", place.url)["grids"]
    assert found == {"namespace": made.digest, "slot": slot, "fault": "damaged"}
    run_json(capsys, "grids", place.url, "--retire", str(slot), "--yes")
    assert run_json(capsys, "grids", place.url)["grids"] == []


def test_what_cannot_be_retired(place, capsys):
    first = place.add_namespace("a")
    free = str((first_slot(GRID) + 1) % 64)
    for argv, word in (([free], "holds no marker"), (["64"], "outside 0..63")):
        _, err = run_text(capsys, "grids", place.url, "--retire", *argv, "--yes", code=2)
        assert word in err
    place.add_namespace("b")
    _, err = run_text(capsys, "grids", place.url, "--retire", str(first_slot(GRID)), "--yes", code=2)
    assert "2 namespaces; give --namespace" in err
    run_json(
        capsys, "grids", place.url, "--retire", str(first_slot(GRID)), "--yes", "--namespace", first.digest
    )


@pytest.fixture
def root(tmp_path):
    """A file store of 6 objects, the last written handle closed."""
    url = f"file://{tmp_path}/store"
    connector = local.connect(parse_url(f"{url}?sweep=0&quota=1GiB"))
    place = StorePlace(url, connector)
    place.add_namespace()
    yield place
    connector.close()


def test_gc_evicts_down_to_the_quota_of_the_url(root, capsys):
    size = len(root.read(root.keys[0]))
    found = run_json(capsys, "gc", f"{root.url}?quota={3 * size + 10}B")
    assert found["swept"] is True
    assert found["is_complete"] is True
    assert found["evicted_objects"] >= 3
    left = [key for key in root.stored() if not key.startswith("meta/")]
    assert found["objects"] == len(left) == 6 - found["evicted_objects"]
    assert len(root.stored()) - len(left) == 2


def test_gc_expires_and_removes_what_dead_writers_left(root, capsys, tmp_path):
    for path in Path(root.url.removeprefix("file://")).rglob("*"):
        if page_hash(0) in path.name:
            found = path.stat()
            os.utime(path, (found.st_atime, found.st_mtime - 7_200))
    text, err = run_text(capsys, "gc", f"{root.url}?ttl=1h&quota=1GiB")
    assert "expired    2 objects" in text
    assert "left       4 objects" in text
    assert err == ""
    assert not any(page_hash(0) in key for key in root.stored())


def test_gc_without_a_quota_says_which_one_holds(root, capsys):
    text, err = run_text(capsys, "gc", root.url)
    assert "left       6 objects" in text
    assert err.count("quota was given") == len(err.splitlines()) == 1


def test_gc_of_a_store_that_was_never_counted_says_which_quota_holds(root, capsys):
    """The default one is a share of what is free and stored, so it is known only after the sweep's count."""
    (Path(root.url.removeprefix("file://")) / "account" / "counter").unlink()
    text, err = run_text(capsys, "gc", root.url)
    assert "left       6 objects" in text
    assert err.count("quota was given") == len(err.splitlines()) == 1


def test_gc_that_cannot_finish_is_code_1(root, capsys, monkeypatch):
    report = SweepReport(objects=3, reason="objects/3/f cannot be read: Input/output error")
    monkeypatch.setattr(local.LocalConnector, "sweep", lambda self, deadline: report)
    text, err = run_text(capsys, "gc", f"{root.url}?quota=1GiB", code=1)
    assert "left       3 objects" in text
    assert err == "hicache: the sweep is incomplete: objects/3/f cannot be read: Input/output error\n"


def test_gc_of_storage_that_hangs_is_an_error(root, capsys):
    _, err = run_text(capsys, "gc", f"{root.url}?quota=1GiB", "--timeout", "1e-9s", code=2)
    assert "did not end in time" in err


def test_gc_of_a_store_that_can_only_be_read_counts_nothing(root, capsys):
    text, err = run_text(capsys, "gc", f"{root.url}?quota=1GiB&readonly=1", code=1)
    assert "left" not in text
    assert "the store can only be read, so that nothing was removed; use an account that may write" in err
