from __future__ import annotations

import json

import pytest
from cli_place import DRAFT, GRID, POOL, page_hash, run_json, run_text, soon

from hicache_store.cli import ls_command, output
from hicache_store.cli.output import age_span_text
from hicache_store.layout.format import ObjectFormat
from hicache_store.layout.grid import Grid
from hicache_store.layout.names import manifest_key, marker_key
from hicache_store.layout.records import first_slot, frame

SIZE = ObjectFormat.of(POOL, GRID.chunks(16)[0]).object_bytes


def test_ls_lists_every_object(place, capsys):
    made = place.add_namespace(pages=3)
    found = run_json(capsys, "ls", place.url)
    assert {one["key"] for one in found["objects"]} == set(place.keys)
    assert (found["count"], found["bytes"]) == (6, 6 * SIZE)
    one = next(one for one in found["objects"] if one["page"] == page_hash(1) and one["heads"] == [2, 4])
    assert one["namespace"] == made.digest
    assert (one["pool"], one["layers"], one["bytes"]) == ("kv", [0, 4], SIZE)
    text, err = run_text(capsys, "ls", place.url)
    assert err == ""
    lines = text.splitlines()
    assert len(lines) == 7
    assert [line.split()[-2:] for line in lines[1:]] == [key.split("/")[3:] for key in sorted(place.keys)]
    assert lines[0].split() == ["size", "used", "namespace", "page", "object"]
    assert {tuple(line.split()[-3:]) for line in lines[1:]} == {
        (made.digest[:12], key.split("/")[3], key.split("/")[4]) for key in place.keys
    }


def test_ls_of_pages_and_of_one_namespace(place, capsys):
    first, second = place.add_namespace("a", pages=2), place.add_namespace("b", pages=1)
    found = run_json(capsys, "ls", place.url, "--pages")
    assert found["count"] == 3
    assert [one["objects"] for one in found["pages"]] == [2, 2, 2]
    one = run_json(capsys, "ls", place.url, "--pages", "--namespace", second.digest[:10])
    assert [(one["namespace"], one["page"], one["bytes"]) for one in one["pages"]] == [
        (second.digest, page_hash(0), 2 * SIZE)
    ]
    text, _ = run_text(capsys, "ls", place.url, "--namespace", first.digest)
    assert len(text.splitlines()) == 5
    assert second.digest[:12] not in text


def test_an_empty_store_is_an_empty_list(place, capsys):
    assert run_json(capsys, "ls", place.url) == {"url": place.url, "objects": [], "count": 0, "bytes": 0}
    assert run_text(capsys, "ls", place.url) == ("", "hicache: 0 objects\n")
    assert run_text(capsys, "ls", place.url, "--pages") == ("", "hicache: 0 objects\n")
    assert run_json(capsys, "stat", place.url)["namespaces"] == []


def test_a_directory_that_is_no_store_is_told(tmp_path, capsys):
    layered = f"layered:?fast=file://{tmp_path}&slow=file://{tmp_path}"
    for command in ("ls", "stat", "verify"):
        for url, count in ((f"file://{tmp_path}", 1), (layered, 2)):
            _, err = run_text(capsys, command, url)
            assert (
                err.count(f"{tmp_path} is no store: it has no directory 'objects'; check the path") == count
            )
    assert list(tmp_path.iterdir()) == []


def test_more_objects_than_fit_in_memory_follow_as_they_come(place, capsys, monkeypatch):
    monkeypatch.setattr(ls_command, "LISTING_PAGES_MAX", 3)
    place.add_namespace(pages=4)
    text, err = run_text(capsys, "ls", place.url)
    keys = [tuple(line.split()[-2:]) for line in text.splitlines()[1:]]
    assert keys[:3] == sorted(keys[:3])
    assert sorted(keys) == sorted(tuple(key.split("/")[3:]) for key in place.keys)
    assert "more than 3 objects: these follow in the storage's own order" in err


def test_a_table_longer_than_is_held_back_goes_on(place, capsys, monkeypatch):
    monkeypatch.setattr(output, "LISTING_ROWS_MAX", 4)
    place.add_namespace(pages=5)
    text, _ = run_text(capsys, "ls", place.url)
    lines = text.splitlines()
    assert len(lines) == 11
    assert len({line.rindex("kv.") for line in lines[1:]}) == 1  # one width for all


def test_looking_changes_nothing(place, capsys):
    place.add_namespace()
    before = {(entry.key, entry.version, entry.last_used_s) for entry in place.connector.scan()}
    for command in (["ls"], ["ls", "--pages"], ["stat"], ["verify"], ["grids"]):
        run_json(capsys, command[0], place.url, *command[1:])
    assert {(entry.key, entry.version, entry.last_used_s) for entry in place.connector.scan()} == before


def test_stat_tells_what_a_namespace_is_and_holds(place, capsys):
    made = place.add_namespace("team", pages=3)
    place.put(made, 0, DRAFT.page_box, DRAFT)
    found = run_json(capsys, "stat", place.url)
    (one,) = found["namespaces"]
    assert one["namespace"] == made.digest
    assert one["manifest"] == json.loads(made.encoded)
    assert one["manifest_fault"] is None
    assert (one["objects"], one["pages"], one["pages_are_exact"]) == (7, 3, True)
    draft_bytes = ObjectFormat.of(DRAFT, DRAFT.page_box).object_bytes
    assert [(pool["pool"], pool["objects"], pool["bytes"]) for pool in one["pools"]] == [
        (DRAFT.key_name, 1, draft_bytes), ("kv", 6, 6 * SIZE),
    ]  # fmt: skip
    assert one["grids"] == [
        {"slot": first_slot(GRID), "pool": "kv", "head_cuts": [0, 2, 4], "layer_cuts": [0, 4]}
    ]
    assert found["total"]["bytes"] == one["bytes"] == 6 * SIZE + draft_bytes
    assert 0 <= one["newest_use_s"] <= one["oldest_use_s"] < 3_600
    text, err = run_text(capsys, "stat", place.url)
    assert err == ""
    for words in (
        "model     llama, tenant 'team'",
        "weights   operator w",
        "4 layers x 4 heads x (k 8 + v 8) bfloat16, pages of 16 tokens",
        "stored    3 pages, 7 objects",
        "kv: heads cut at 0,2,4, layers at 0,4",
        "the URL gives no quota and no ttl",
    ):
        assert words in text


def test_stat_of_a_namespace_whose_records_are_bad(place, capsys):
    made = place.add_namespace()
    slot = first_slot(GRID)
    place.write(manifest_key(made.digest), bytes(4096))
    place.write(marker_key(made.digest, slot), bytes(4096))
    (one,) = run_json(capsys, "stat", place.url)["namespaces"]
    assert one["manifest"] is None
    assert "damaged" in one["manifest_fault"]
    assert one["grids"] == []
    text, _ = run_text(capsys, "stat", place.url)
    assert "manifest  damaged" in text
    assert f"grid {slot:<4} damaged" in text
    place.connector.delete([manifest_key(made.digest)], soon())
    (one,) = run_json(capsys, "stat", place.url)["namespaces"]
    assert one["manifest_fault"] == "absent"


def test_a_manifest_of_another_namespace_is_none(place, capsys):
    """Sound as a record, but not what the digest was made of."""
    made = place.add_namespace("a")
    other = place.add_namespace("b")
    key = manifest_key(made.digest)
    place.write(key, frame(key, other.encoded))
    found = {one["namespace"]: one for one in run_json(capsys, "stat", place.url)["namespaces"]}
    assert found[made.digest]["manifest"] is None
    assert found[made.digest]["manifest_fault"] == "it is the manifest of another namespace"
    assert found[other.digest]["manifest_fault"] is None


def test_stat_shows_the_options_of_the_url(place, capsys):
    text, _ = run_text(capsys, "stat", f"{place.url}?quota=1GiB")
    assert "; quota 1GiB" in text


def test_further_grids_are_listed(place, capsys):
    made = place.add_namespace()
    place.announce(made, Grid("kv", (0, 4), (0, 2, 4)))
    found = run_json(capsys, "grids", place.url)["grids"]
    assert {(one["slot"], one["objects"]) for one in found} == {
        (first_slot(GRID), 2), (first_slot(Grid("kv", (0, 4), (0, 2, 4))), 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("newest", "oldest", "text"),
    [
        (115, 132, "1.9m to 2.2m"),
        (0, 119, "0s to 119s"),
        (130, 131, "2.2m"),
        (7_199, 7_300, "2.0h"),
        (12, 121, "0.2m to 2.0m"),
        (11, 200, "0.2m to 3.3m"),
        (3, 121, "3s to 2.0m"),
        (300, 5 * 86_400, "5.0m to 5.0d"),
        (86_400, 5 * 86_400, "1.0d to 5.0d"),
    ],
)
def test_two_ages_are_told_in_one_unit(newest, oldest, text):
    assert age_span_text(1e9 - newest, 1e9 - oldest, 1e9) == text
