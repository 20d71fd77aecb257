"""Why a prefix misses, told from what lies in the store."""

from __future__ import annotations

import io
import json
import uuid
from urllib.parse import quote

import pytest
from cli_place import CONFIG, DRAFT, GRID, PAGE_SIZE, StorePlace, page_hash, run_json, run_text, soon

from hicache_store.cli import explain, output
from hicache_store.cli.main import main
from hicache_store.config import parse_url
from hicache_store.connectors import local, memory
from hicache_store.connectors.registry import open_connector
from hicache_store.layout.grid import Grid
from hicache_store.layout.model import ModelKV
from hicache_store.layout.names import ObjectName, manifest_key
from hicache_store.layout.namespace import namespace
from hicache_store.layout.weights import WeightsIdentity
from hicache_store.metrics import Metrics
from hicache_store.store import manifest
from hicache_store.testing.redis_servers import RedisServer
from hicache_store.testing.servers import S3Endpoint

PAGES = [page_hash(number) for number in range(4)]
FP8 = ModelKV.dense(num_layers=4, num_kv_heads=4, head_dim=8, dtype="float8_e4m3fn")
FP8_SERVER = namespace(CONFIG, WeightsIdentity.operator("w2"), FP8.facts(PAGE_SIZE, scales="weights"), "t")
"""Another server of the same model: its own KV dtype, and weights of another tag."""


@pytest.fixture(params=["memory", "file", "redis"])
def place(request, tmp_path):
    """An empty store, as elsewhere, and on a Redis server too."""
    if request.param == "memory":
        url = f"memory://{tmp_path}"
        connector = memory.connect(parse_url(url))
    elif request.param == "file":
        url = f"file://{tmp_path}/store"
        connector = local.connect(parse_url(f"{url}?sweep=0&quota=1GiB"))
    else:
        server: RedisServer = request.getfixturevalue("redis_single")
        url = f"redis://{server.address}/0?prefix={uuid.uuid4().hex}:"
        connector = open_connector(url)
    yield StorePlace(url, connector)
    connector.close()


def _states(found: dict, page: str) -> dict[str, str]:
    (one,) = (one for one in found["pages"] if one["page"] == page)
    return {held["namespace"]: held["state"] for held in one["namespaces"]}


def test_a_prefix_that_another_namespace_holds_is_told_by_the_fields_that_differ(place, capsys) -> None:
    made = place.add_namespace(pages=3)
    manifest.ensure(place.connector, FP8_SERVER, soon(), Metrics())
    found = run_json(capsys, "explain", place.url, "--like", FP8_SERVER.digest[:20], "--page", *PAGES)
    assert found["like"] == FP8_SERVER.digest
    assert _states(found, PAGES[0]) == {FP8_SERVER.digest: "absent", made.digest: "whole"}
    assert _states(found, PAGES[3]) == {FP8_SERVER.digest: "absent"}
    assert found["leading_pages"] == {FP8_SERVER.digest: 0, made.digest: 3}
    (pair,) = found["differences"]
    assert (pair["namespace"], pair["other"], pair["fault"]) == (FP8_SERVER.digest, made.digest, None)
    values = {one["field"]: (one.get("value"), one["other"]) for one in pair["fields"]}
    assert values["kv.dtype"] == ("float8_e4m3fn", "bfloat16")
    assert values["weights.value"] == ("w2", "w")
    assert {name.partition(".")[0] for name in values} <= {"kv", "weights", "model"}
    assert "kv.page_size" not in values
    assert "tenant" not in values

    text, err = run_text(capsys, "explain", place.url, "--like", FP8_SERVER.digest, "--page", *PAGES)
    assert err == ""
    assert "kv.dtype" in text
    assert '"float8_e4m3fn"' in text
    assert "another namespace holds it" in text
    assert "no object of this page" in text
    assert f"{made.digest}: 3 of 4 pages before the first that is not whole" in text


def test_without_a_namespace_all_are_compared_with_the_one_that_holds_most(place, capsys) -> None:
    made = place.add_namespace("mine", pages=2)
    other = place.add_namespace("theirs", pages=0)
    found = run_json(capsys, "explain", place.url, "--page", PAGES[0])
    assert _states(found, PAGES[0]) == {made.digest: "whole"}
    (pair,) = found["differences"]
    assert (pair["namespace"], pair["other"]) == (other.digest, made.digest)
    assert pair["fields"] == [{"field": "tenant", "value": "theirs", "other": "mine"}]


def test_a_manifest_from_a_file_stands_for_a_server_that_stored_nothing(place, capsys, tmp_path) -> None:
    made = place.add_namespace(pages=1)
    file = tmp_path / "manifest.json"
    for text in (json.dumps(FP8_SERVER.record), json.dumps({"manifest": FP8_SERVER.record, "objects": 0})):
        file.write_text(text)
        found = run_json(capsys, "explain", place.url, "--like", str(file), "--page", PAGES[0])
        assert found["like"] == FP8_SERVER.digest
        assert _states(found, PAGES[0]) == {FP8_SERVER.digest: "absent", made.digest: "whole"}
        assert "kv.dtype" in {one["field"] for one in found["differences"][0]["fields"]}
    file.write_text(json.dumps(made.record))
    found = run_json(capsys, "explain", place.url, "--like", str(file), "--page", PAGES[0])
    assert found["like"] == made.digest
    assert found["differences"] == []


def test_missing_and_damaged_boxes_are_named(place, capsys) -> None:
    made = place.add_namespace(pages=3)
    first, second = GRID.chunks(PAGE_SIZE)
    keys = [str(ObjectName(made.digest, PAGES[n], "kv", first.heads, first.layers)) for n in (0, 1)]
    place.connector.delete([keys[0]], soon())
    data = place.read(keys[1])
    data[5] ^= 1
    place.replace(keys[1], bytes(data))
    found = run_json(capsys, "explain", place.url, "--page", *PAGES[:3], code=1)
    assert [_states(found, page)[made.digest] for page in PAGES[:3]] == ["partial", "damaged", "whole"]
    assert found["leading_pages"] == {made.digest: 0}
    assert found["pages"][0]["namespaces"][0]["missing"] == [{"heads": [0, 2], "layers": [0, 4]}]
    (fault,) = found["pages"][1]["namespaces"][0]["faults"]
    assert (fault["key"], fault["fault"]) == (keys[1], "corrupt")
    text, _ = run_text(capsys, "explain", place.url, "--page", *PAGES[:3], code=1)
    assert "no object of heads 0-2 x layers 0-4" in text
    assert "corrupt kv.H000-002.L000-004; `hicache verify --repair` removes it" in text
    assert second.heads.start == 2


def test_a_whole_page_beside_a_damaged_object_is_whole_and_the_damage_is_told(place, capsys) -> None:
    made = place.add_namespace(pages=1)
    whole = Grid("kv", (0, 4), (0, 4))
    place.announce(made, whole)
    (box,) = whole.chunks(PAGE_SIZE)
    key = place.put(made, 0, box)
    place.replace(key, bytes(len(place.read(key))))
    found = run_json(capsys, "explain", place.url, "--page", PAGES[0], code=1)
    assert _states(found, PAGES[0]) == {made.digest: "whole"}
    assert [one["key"] for one in found["pages"][0]["namespaces"][0]["faults"]] == [key]


def test_objects_of_a_grid_that_nobody_announces(place, capsys) -> None:
    """A reader that is cut otherwise does not know that they exist."""
    made = place.add_namespace(pages=0)
    for box in Grid("kv", (0, 1, 4), (0, 4)).chunks(PAGE_SIZE):
        place.put(made, 0, box)
    found = run_json(capsys, "explain", place.url, "--page", PAGES[0])
    assert _states(found, PAGES[0]) == {made.digest: "unannounced"}
    assert found["pages"][0]["namespaces"][0]["missing"] == []
    text, _ = run_text(capsys, "explain", place.url, "--page", PAGES[0])
    assert "no marker tells of the grid of kv.H000-001.L000-004, kv.H001-004.L000-004" in text


def test_two_grids_that_fill_a_page_together_are_a_whole_page(place, capsys) -> None:
    made = place.add_namespace(pages=0)
    place.announce(made, Grid("kv", (0, 4), (0, 2)))
    (upper,) = Grid("kv", (0, 4), (0, 2)).chunks(PAGE_SIZE)
    place.put(made, 0, upper)
    lower = Grid("kv", (0, 2, 4), (2, 4))
    place.announce(made, lower)
    for box in lower.chunks(PAGE_SIZE):
        place.put(made, 0, box)
    found = run_json(capsys, "explain", place.url, "--page", PAGES[0])
    assert _states(found, PAGES[0]) == {made.digest: "whole"}


def test_a_namespace_without_its_manifest_cannot_be_judged_or_compared(place, capsys) -> None:
    made = place.add_namespace("mine", pages=1)
    other = place.add_namespace("theirs", pages=0)
    place.connector.delete([manifest_key(made.digest)], soon())
    found = run_json(capsys, "explain", place.url, "--page", PAGES[0])
    assert _states(found, PAGES[0]) == {made.digest: "unjudged"}
    (pair,) = found["differences"]
    assert pair["namespace"] == other.digest
    assert pair["fault"] == f"the manifest of {made.digest} is absent"


def test_sidecar_pools_are_named_and_make_no_page(place, capsys) -> None:
    made = place.add_namespace(pages=0)
    place.put(made, 0, DRAFT.page_box, DRAFT)
    found = run_json(capsys, "explain", place.url, "--page", PAGES[0])
    assert _states(found, PAGES[0]) == {made.digest: "absent"}
    assert found["pages"][0]["namespaces"][0]["other_pools"] == [DRAFT.key_name]


def test_a_page_that_is_nowhere(place, capsys) -> None:
    place.add_namespace(pages=1)
    found = run_json(capsys, "explain", place.url, "--page", PAGES[3])
    assert found["pages"] == [{"page": PAGES[3], "namespaces": []}]
    assert found["differences"] == []
    text, _ = run_text(capsys, "explain", place.url, "--page", PAGES[3])
    assert "no object of this page in 1 namespace" in text


def test_a_hash_that_begins_like_a_stored_one_is_another_page(place, capsys) -> None:
    place.add_namespace(pages=1)
    like = PAGES[0][:-1] + ("0" if PAGES[0][-1] != "0" else "1")
    assert run_json(capsys, "explain", place.url, "--page", like)["pages"][0]["namespaces"] == []


def test_a_field_that_is_null_differs_from_one_that_is_not_there() -> None:
    (found,) = explain.differences({"model": {"a": None, "b": 1}}, {"model": {"b": 1}})
    assert (found.field, found.one, found.other) == ("model.a", (None,), ())


def test_hashes_come_from_stdin_and_may_be_shortened(place, capsys, monkeypatch) -> None:
    made = place.add_namespace(pages=2)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PAGES[0][:16].upper()}\n{PAGES[1]}\n{PAGES[1]}\n"))
    found = run_json(capsys, "explain", place.url)
    assert [one["page"] for one in found["pages"]] == [PAGES[0][:16], PAGES[1]]
    assert found["leading_pages"] == {made.digest: 2}


def test_a_walk_that_ends_early_says_so(place, capsys) -> None:
    place.add_namespace(pages=3)
    text, err = run_text(capsys, "explain", place.url, "--limit", "5", "--page", PAGES[3], code=1)
    assert "no object of this page" in text
    assert "the walk ended after 5 objects" in err
    assert "may be there" in err
    assert run_json(capsys, "explain", place.url, "--limit", "6", "--page", PAGES[3])["stopped"] is None


def test_objects_kept_are_bounded(place, capsys, monkeypatch) -> None:
    monkeypatch.setattr(explain, "EXPLAIN_ENTRIES_MAX", 3)
    place.add_namespace(pages=2)
    found = run_json(capsys, "explain", place.url, "--page", *PAGES[:2], code=1)
    assert found["stopped"] == "3 objects of these pages were looked at, and there are more"


def test_a_storage_that_lists_by_prefix_is_not_walked(
    moto_endpoint: S3Endpoint, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    for name, value in moto_endpoint.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"explain-{uuid.uuid4().hex[:12]}"
    moto_endpoint.make_bucket(bucket)
    url = f"s3://{bucket}/kv"
    place = StorePlace(url, open_connector(url))
    made, other = place.add_namespace("mine", pages=4), place.add_namespace("theirs", pages=0)
    found = run_json(capsys, "explain", url, "--like", other.digest, "--page", *PAGES[:2])
    assert found["leading_pages"] == {made.digest: 2, other.digest: 0}
    assert found["objects_looked_at"] == 4
    walked = run_json(capsys, "explain", url, "--page", PAGES[0][:20])  # a start may be of any prefix
    assert walked["objects_looked_at"] == 8
    place.connector.close()


def test_layers_are_looked_through_together(tmp_path, capsys) -> None:
    """One object of the page lies in each layer, as after an eviction from either."""
    urls = [f"file://{tmp_path}/{name}?sweep=0&quota=1GiB" for name in ("fast", "slow")]
    fast, slow = (StorePlace(url, open_connector(url)) for url in urls)
    made = slow.add_namespace(pages=1)
    moved = slow.keys[0]
    fast.write(moved, bytes(slow.read(moved)))
    slow.connector.delete([moved], soon())
    url = "layered:?fast={}&slow={}".format(*(quote(one, safe="") for one in urls))
    found = run_json(capsys, "explain", url, "--page", PAGES[0])
    assert _states(found, PAGES[0]) == {made.digest: "whole"}
    assert found["pages"][0]["namespaces"][0]["objects"] == 2
    assert _states(run_json(capsys, "explain", urls[1], "--page", PAGES[0]), PAGES[0]) == {
        made.digest: "partial"
    }
    for one in (fast, slow):
        one.connector.close()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--page", "abc"], "is no page hash"),
        (["--page", "z" * 64], "is no page hash"),
        (["--page", PAGES[0], "--like", "no/such.json"], "is no file and no digest"),
        (["--page", PAGES[0], "--like", "ffff"], "no namespace starts with ffff"),
    ],
)
def test_what_cannot_be_explained_is_refused(tmp_path, capsys, argv: list[str], says: str) -> None:
    url = f"file://{tmp_path}"
    assert main(["explain", url, *argv]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"kv": {}}', '{"kv": 1, "model": NaN, "tenant": 1, "weights": 1}']
)
def test_files_that_hold_no_manifest_are_refused(tmp_path, capsys, text: str) -> None:
    (tmp_path / "m.json").write_text(text)
    argv = ["explain", f"file://{tmp_path}", "--like", str(tmp_path / "m.json"), "--page", PAGES[0]]
    assert main(argv) == 2
    assert "m.json is " in capsys.readouterr().err


def test_a_terminal_gets_short_digests(place, capsys, monkeypatch) -> None:
    made = place.add_namespace(pages=1)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    text, _ = run_text(capsys, "explain", place.url, "--page", PAGES[0])
    assert made.digest[: output.DIGEST_DIGITS] in text
    assert made.digest not in text
