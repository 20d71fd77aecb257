"""The command as a process: exit codes, streams, pipes, signals, and life without rich."""

from __future__ import annotations

import builtins
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from importlib import metadata

import pytest
from cli_place import StorePlace, run_json, run_text

from hicache_store import __version__
from hicache_store.cli import main as command
from hicache_store.cli import output
from hicache_store.cli.main import main
from hicache_store.cli.output import Column, Output, age_text, count_text, size_text
from hicache_store.config import parse_url
from hicache_store.connectors import local

HICACHE = [sys.executable, "-m", "hicache_store.cli.main"]
PATIENCE_S = 120


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A file store of 400 objects whose writer is gone."""
    url = f"file://{tmp_path_factory.mktemp('cli')}/store"
    connector = local.connect(parse_url(f"{url}?sweep=0&quota=1GiB"))
    place = StorePlace(url, connector)
    place.add_namespace(pages=200)
    connector.close()
    return place


def run(*argv):
    return subprocess.run([*HICACHE, *argv], check=False, capture_output=True, text=True, timeout=PATIENCE_S)


def test_the_entry_point_is_this_main():
    (point,) = metadata.entry_points(group="console_scripts", name="hicache")
    assert point.load() is main


def test_a_process_prints_one_json_document(store):
    done = run("ls", store.url, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert {one["key"] for one in json.loads(done.stdout)["objects"]} == set(store.keys)
    assert run("verify", store.url).returncode == 0


def test_errors_are_one_line_on_stderr_and_code_2(store, capsys, tmp_path):
    for argv, words in (
        (["ls", f"file://{tmp_path}/nowhere"], "/nowhere cannot be opened"),
        (["ls", "tape://x"], "no connector for scheme 'tape'"),
        (["ls", f"{store.url}?qouta=1GiB"], "did you mean quota"),
        (["rm", store.url, "--older-than", "0s"], "--yes"),
    ):
        out, err = run_text(capsys, *argv, "--json", code=2)
        assert (out, err.count("\n")) == ("", 1)
        assert words in err
    done = run("plan", "--layers", "4", "--writer", "tp1", "--reader", "tp1", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hicache: give --kv-heads and --head-dim")


def test_a_store_is_not_made_by_looking(tmp_path, capsys):
    url = f"file://{tmp_path}/none"
    for command_name in ("ls", "stat", "verify", "grids", "gc"):
        run_text(capsys, command_name, url, code=2)
    run_text(capsys, "rm", url, "--older-than", "1s", "--yes", code=2)
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage_is_code_2(capsys):
    for argv in ([], ["frobnicate"], ["ls"], ["gc", "file:///x", "--timeout", "soon"], ["plan"]):
        with pytest.raises(SystemExit) as left:
            main(argv)
        assert left.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "usage: hicache" in captured.err


def test_version_and_help(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"hicache {__version__}\n"
    commands = ("demo", "plan", "ls", "stat", "verify", "rm", "gc", "grids")
    for argv in (["--help"], *([name, "--help"] for name in commands)):
        with pytest.raises(SystemExit) as left:
            main(argv)
        assert left.value.code == 0
        assert "--json" in capsys.readouterr().out or argv == ["--help"]


def test_a_reader_that_goes_away_is_no_error(store):
    """``hicache ls URL | head -1``: no traceback, and no wait for the rest."""
    for argv in (["ls", store.url], ["ls", store.url, "--json"], ["verify", store.url]):
        reader, writer = os.pipe()
        process = subprocess.Popen([*HICACHE, *argv], stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        os.close(reader)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, err) == (command.EXIT_BROKEN_PIPE, "")


def test_ctrl_c_ends_a_hanging_walk_cleanly(tmp_path):
    """The storage hangs in the middle of a listing; the user gives up."""
    program = (
        "import signal, sys, threading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "from hicache_store.connectors.memory import MemoryConnector\n"
        "def scan(self, prefix=''):\n"
        "    print('hangs', flush=True)\n"
        "    threading.Event().wait()\n"
        "    yield\n"
        "MemoryConnector.scan = scan\n"
        "from hicache_store.cli.main import main\n"
        "sys.exit(main(['ls', 'memory://x']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert err == "hicache: interrupted\n"


def test_light_commands_import_nothing_heavy():
    program = (
        "import sys, contextlib\n"
        "from hicache_store.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(['--version'])\n"
        "bad = {'numpy', 'torch', 'rich', 'xxhash'} & set(sys.modules)\n"
        "sys.exit(','.join(sorted(bad)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=PATIENCE_S)
    assert done.returncode == 0


def on_a_terminal(*argv, env=None) -> str:
    """What a command shows on a terminal of 120 columns; nothing else is connected to it."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm-256color", **(env or {})}
    process = subprocess.Popen(
        [*HICACHE, *argv], stdin=terminal, stdout=terminal, stderr=terminal, env=environment, close_fds=True
    )
    os.close(terminal)
    shown = bytearray()

    def drain():
        with open(controller, "rb", buffering=0) as stream:
            try:
                while more := stream.read(4096):
                    shown.extend(more)
            except OSError:  # the other side is closed
                return

    reader = threading.Thread(target=drain)
    reader.start()
    assert process.wait(PATIENCE_S) == 0
    reader.join(PATIENCE_S)
    return shown.decode()


def test_a_terminal_gets_rich_tables_and_drawings(store):
    shown = on_a_terminal("ls", store.url, "--pages")
    assert "\x1b[1m" in shown
    assert "─" in shown
    full = store.keys[0].split("/")[3]
    assert full[: output.DIGEST_DIGITS] in shown
    assert full not in shown
    plan = [
        "plan",
        "--layers",
        "8",
        "--kv-heads",
        "2",
        "--head-dim",
        "64",
        "--writer",
        "tp2",
        "--reader",
        "tp1",
    ]
    assert "┌" in on_a_terminal(*plan)


@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal_folds_no_name_and_no_number(columns):
    plan = ("plan", "--layers", "30", "--kv-heads", "3", "--head-dim", "64", "--writer", "tp3pp2")
    shown = on_a_terminal(*plan, "--reader", "tp1", env={"COLUMNS": str(columns)})
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith("objects of tp3pp2"))
    assert max(map(len, lines[begin:])) <= columns
    for number in range(6):
        name = f"kv.H00{number % 3}-00{number % 3 + 1}.L0{'15-030' if number > 2 else '00-015'}"
        assert any(name in line and "245,7" in line for line in lines)
    assert any("1,474,560" in line and line.rstrip().endswith("0.0 %") for line in lines)


def test_a_terminal_shows_progress(store):
    assert "verifying" in on_a_terminal("verify", store.url)


def test_without_rich_a_terminal_gets_plain_text(store, tmp_path):
    """A stand-in that shadows rich and fails to load would show if anything imported it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'rich' else find(name, package)\n"
    )
    shown = on_a_terminal("ls", store.url, "--pages", env={"PYTHONPATH": str(tmp_path)})
    assert "\x1b[" not in shown
    assert "objects" in shown
    shown = on_a_terminal("verify", store.url, env={"PYTHONPATH": str(tmp_path)})
    assert "400 good" in shown
    assert "verifying" not in shown


def test_rich_is_imported_by_nothing_in_a_pipe(store, capsys, monkeypatch):
    def refusing(name, *args, **kwargs):
        assert not name.startswith("rich"), name
        return genuine(name, *args, **kwargs)

    genuine = builtins.__import__
    for name in [
        name for name in sys.modules if name.split(".")[0] == "rich" or name.endswith("rich_output")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refusing)
    run_text(capsys, "ls", store.url)
    run_text(capsys, "verify", store.url)
    run_json(capsys, "stat", store.url)


def test_parts_that_cannot_be_read_are_told(store, capsys, monkeypatch):
    """A listing that had to leave a directory out must not look complete, and verify must not pass."""
    genuine = local.LocalConnector.scan

    def failing(self, prefix=""):
        yield from genuine(self, prefix)
        self.metrics.add("file.scan_failed")

    monkeypatch.setattr(local.LocalConnector, "scan", failing)
    out, err = run_text(capsys, "ls", store.url)
    assert len(out.splitlines()) == 401
    assert "the result is incomplete: file.scan_failed 1" in err
    found = run_json(capsys, "verify", store.url, code=1)
    assert found["storage_faults"] == {"file.scan_failed": 1}


def test_an_unknown_option_is_answered_with_the_one_that_was_meant(capsys):
    for argv, hint in (
        (["ls", "file:///x", "--jsno"], "--jsno is not an argument of ls; did you mean --json?"),
        (["rm", "file:///x", "--olderthan", "5d"], "did you mean --older-than?"),
        (["demo", "--zzz"], "--zzz is not an argument of demo; see hicache demo --help"),
    ):
        with pytest.raises(SystemExit) as left:
            main(argv)
        assert left.value.code == 2
        assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "way_out"),
    [
        (["rm", "file:///x", "--older-than", "5"], "give a unit, 5d, or 5s if you mean seconds"),
        (["bench", "file:///x", "--size", "64"], "give a unit, 64GiB, or 64B if you mean bytes"),
        (["ls", "file:///x", "--timeout", "0"], "more than 0"),
        (["ls", "file:///x", "--timeout", "366d"], "at most 365d"),
    ],
)
def test_numbers_that_may_mean_anything_are_refused(capsys, argv, way_out):
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2
    assert way_out in capsys.readouterr().err


def test_tables_align_and_lists_stream(capsys):
    out = Output(as_json=False)
    with out.table([Column("n", is_number=True), Column("word")], "title") as row:
        row(1, "one")
        row(100, "a\x1b[2Jhundred")
    assert capsys.readouterr().out == "title\n  n  word\n  1  one\n100  a\ufffd[2Jhundred\n"
    out = Output(as_json=True)
    for count in range(3):
        with out.array({"url": "u"}, "items") as items:
            for number in range(count):
                items.add({"n": number, "text": 'quo"te'})
            items.tail = {"count": count}
        found = json.loads(capsys.readouterr().out)
        expected = [{"n": number, "text": 'quo"te'} for number in range(count)]
        assert found == {"url": "u", "items": expected, "count": count}
    with out.array({}, "items") as items:
        items.add(1)
    assert json.loads(capsys.readouterr().out) == {"items": [1]}


def test_words_for_sizes_ages_and_counts():
    assert [size_text(n) for n in (0, 1023, 1024, 1_966_080, 5 << 40)] == [
        "0 B", "1023 B", "1.00 KiB", "1.88 MiB", "5.00 TiB",
    ]  # fmt: skip
    assert [age_text(1_000.0 - s, 1_000.0) for s in (-5, 0, 119, 600, 7_200.0 * 3, 86_400 * 9)] == [
        "0s", "0s", "119s", "10.0m", "6.0h", "9.0d",
    ]  # fmt: skip
    assert count_text(1, "object") == "1 object"
    assert count_text(12_345, "entry", "entries") == "12,345 entries"
