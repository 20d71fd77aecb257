from __future__ import annotations

import contextlib
import os
import pty

import pytest
from cli_place import GRID, PAGE_SIZE, StorePlace, page_hash, run_json, run_text, soon

from hicache_store.cli.main import main
from hicache_store.connectors.base import META_PREFIX, Outcome, Status, Touch
from hicache_store.connectors.registry import open_connector
from hicache_store.layout.names import manifest_key, marker_key
from hicache_store.layout.records import first_slot
from hicache_store.testing.s3_server import Reply, Request, S3Server


def aged(place, keys, seconds):
    """Make objects look unused for a while."""
    if place.url.startswith("memory:"):
        table = place.connector._table._objects
        for key in table.keys() & set(keys):
            table[key].used_wall_s -= seconds
        return
    root = place.url.removeprefix("file://")
    for folder, _, names in os.walk(root):
        for name in names:
            if name.replace("+", "/") in keys:
                path = os.path.join(folder, name)
                found = os.stat(path)
                os.utime(path, (found.st_atime, found.st_mtime - seconds))


def drained(controller):
    """All that was written to a terminal whose other side is closed."""
    text = b""
    with open(controller, "rb", buffering=0) as stream, contextlib.suppress(OSError):
        while more := stream.read(4096):
            text += more
    return text.decode()


def test_a_whole_namespace_goes_with_its_records(place, capsys):
    first, second = place.add_namespace("a"), place.add_namespace("b")
    kept = {key for key in place.stored() if second.digest in key}
    found = run_json(capsys, "rm", place.url, "--namespace", first.digest[:20], "--yes")
    assert found["removed"]["objects"] == 6
    assert found["removed"]["records"] == 2
    assert place.stored() == kept


def test_a_page_leaves_the_records(place, capsys):
    made = place.add_namespace(pages=3)
    found = run_json(capsys, "rm", place.url, "--page", page_hash(1)[:16], "--yes")
    assert (found["removed"]["objects"], found["removed"]["records"]) == (2, 0)
    assert not any(page_hash(1) in key for key in place.stored())
    assert place.stored() == {key for key in place.keys if page_hash(1) not in key} | {
        manifest_key(made.digest), marker_key(made.digest, first_slot(GRID)),
    }  # fmt: skip


def test_conditions_must_all_hold(place, capsys):
    first, second = place.add_namespace("a"), place.add_namespace("b")
    run_json(capsys, "rm", place.url, "--page", page_hash(0), "--namespace", first.digest, "--yes")
    left = {key for key in place.stored() if page_hash(0) in key}
    assert left
    assert all(second.digest in key for key in left)


def test_by_age_only_what_was_not_used(place, capsys):
    made = place.add_namespace(pages=3)
    old = [key for key in place.keys if page_hash(2) not in key]
    aged(place, old, 7_200)
    found = run_json(capsys, "rm", place.url, "--older-than", "1h", "--yes", "--namespace", made.digest)
    assert found["removed"]["objects"] == 4
    assert {key for key in place.stored() if not key.startswith(META_PREFIX)} == set(place.keys) - set(old)
    # All of it old: still no whole namespace was asked for, so its records stay.
    aged(place, place.keys, 7_200)
    run_json(capsys, "rm", place.url, "--older-than", "1h", "--yes", "--namespace", made.digest)
    assert place.stored() == {manifest_key(made.digest), marker_key(made.digest, first_slot(GRID))}


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_what_is_used_meanwhile_stays(place, capsys, monkeypatch):
    """By age, removal goes by version: a use between listing and removing saves the object (in memory a
    use leaves the version as it is)."""
    place.add_namespace(pages=2)
    aged(place, place.keys, 7_200)
    kind = type(place.connector)
    delete = kind.delete
    used = place.keys[0]

    def racing(self, keys, deadline, versions=None):
        assert place.connector.touch([Touch(used)], soon())[0].is_ok
        return delete(self, keys, deadline, versions)

    monkeypatch.setattr(kind, "delete", racing)
    found = run_json(capsys, "rm", place.url, "--older-than", "1h", "--yes")
    assert found["kept"] == {"conflict": 1}
    assert used in place.stored()


def test_a_dry_run_removes_nothing(place, capsys):
    made = place.add_namespace()
    before = place.stored()
    found = run_json(capsys, "rm", place.url, "--namespace", made.digest, "--dry-run")
    assert (found["objects"], found["records"]) == (6, 2)
    text, _ = run_text(capsys, "rm", place.url, "--namespace", made.digest, "--dry-run")
    assert text.startswith("would remove 6 objects")
    assert "2 records" in text
    assert place.stored() == before


def test_nobody_is_asked_in_a_pipe(place, capsys):
    place.add_namespace()
    before = place.stored()
    out, err = run_text(capsys, "rm", place.url, "--older-than", "0s", code=2)
    assert out == ""
    assert "give --yes" in err
    assert place.stored() == before


@pytest.mark.parametrize(("answer", "goes"), [("y", True), ("yes", True), ("n", False), ("", False)])
def test_a_terminal_is_asked(place, capsys, monkeypatch, answer, goes):
    place.add_namespace()
    before = place.stored()
    aged(place, place.keys, 10)
    controller, terminal = pty.openpty()
    with open(terminal) as stdin, open(os.dup(terminal), "w") as stderr:
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("sys.stderr", stderr)
        os.write(controller, f"{answer}\n".encode())
        code = main(["rm", place.url, "--older-than", "5s"])
        monkeypatch.undo()
    asked = drained(controller)
    assert "Remove 6 objects" in asked
    assert "[y/N]" in asked
    assert code == (0 if goes else 1)
    left = {key for key in place.stored() if not key.startswith(META_PREFIX)}
    assert left == (set() if goes else {key for key in before if not key.startswith(META_PREFIX)})


def test_records_stay_when_an_object_appears_meanwhile(place, capsys, monkeypatch):
    made = place.add_namespace()
    kind = type(place.connector)
    delete = kind.delete

    def racing(self, keys, deadline, versions=None):
        outcomes = delete(self, keys, deadline, versions)
        monkeypatch.setattr(kind, "delete", delete)
        place.put(made, 77, GRID.chunks(PAGE_SIZE)[0])
        return outcomes

    monkeypatch.setattr(kind, "delete", racing)
    found = run_json(capsys, "rm", place.url, "--namespace", made.digest, "--yes", code=1)
    assert found["removed"]["records"] == 0
    assert found["kept"] == {"records_of_what_is_left": 2}
    assert manifest_key(made.digest) in place.stored()


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "give --namespace, --page or --older-than"),
        (["--page", "abc"], "16 to 64 hex digits"),
        (["--page", "x" * 20], "16 to 64 hex digits"),
        (["--namespace", "0123"], "no namespace starts with 0123"),
    ],
)
def test_unclear_choices_are_refused(place, capsys, argv, word):
    place.add_namespace()
    _, err = run_text(capsys, "rm", place.url, *argv, "--yes", code=2)
    assert word in err
    assert len(place.stored()) == 8


def test_nothing_to_remove(place, capsys):
    place.add_namespace()
    text, _ = run_text(capsys, "rm", place.url, "--older-than", "7d", "--yes")
    assert text == "nothing to remove\n"


def test_e09_what_was_not_removed_is_told_and_is_no_success(capsys, monkeypatch):
    """A server that refuses three deletions of a hundred, inside an answer that says 200: the three are
    counted, manifest and markers stay with them, another namespace is not touched, and the code is 1."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with S3Server() as server:
        url = f"s3://bucket/kv?endpoint={server.endpoint}"
        connector = open_connector(url)
        place = StorePlace(url, connector)
        other = place.add_namespace("b", pages=1)
        made = place.add_namespace("a", pages=50)
        chosen = sorted(f"kv/{key}" for key in place.keys if made.digest in key)
        stuck = chosen[::40]

        def refuse(request: Request) -> Reply | None:
            if request.operation != "BULK":
                return None
            for key in set(chosen) - set(stuck):
                server.objects.pop(key, None)
            rows = "".join(f"<Error><Key>{key}</Key><Code>AccessDenied</Code></Error>" for key in stuck)
            body = f'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{rows}</DeleteResult>'
            return Reply(200, body.encode(), {"content-type": "application/xml"})

        server.plan = refuse
        found = run_json(capsys, "rm", url, "--namespace", made.digest, "--yes", code=1)
        assert found["removed"] == {"objects": 97, "bytes": found["removed"]["bytes"], "records": 0}
        assert found["kept"]["failed"] + found["kept"].get("refused", 0) == 3
        left = {entry.key for entry in connector.scan()}
        assert {f"kv/{key}" for key in left if made.digest in key and key.startswith("v1/")} == set(stuck)
        assert len([key for key in left if key.startswith(f"meta/v1/{made.digest}/")]) == 2
        assert len([key for key in left if other.digest in key]) == 4
        server.plan = None
        found = run_json(capsys, "rm", url, "--namespace", made.digest, "--yes")
        assert (found["removed"]["objects"], found["removed"]["records"], found["kept"]) == (3, 2, {})
        connector.close()


def test_a_refusal_is_told_with_its_reason(place, capsys, monkeypatch):
    made = place.add_namespace()
    refusal = Outcome(Status.REFUSED, detail="the disk went read-only")
    monkeypatch.setattr(type(place.connector), "delete", lambda self, keys, *_: [refusal for _ in keys])
    _, err = run_text(capsys, "rm", place.url, "--namespace", made.digest, "--yes", code=1)
    assert "6 refused (the disk went read-only)" in err
