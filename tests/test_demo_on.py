"""``make demo STORE=...``: a server that is there for the run and gone after it, and the main job on it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hicache_store.clock import Deadline
from hicache_store.connectors.base import BufferSource, Write
from hicache_store.connectors.registry import open_connector
from hicache_store.testing.redis_servers import RedisServer

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--model", "random8", "--writer", "tp2pp1", "--reader", "tp1pp1", "--prompt-tokens", "262"]


@pytest.fixture(scope="module")
def demo_on() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_on", ROOT / "tools" / "demo_on.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_on"] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("kind", "installed"), [("s3", "seaweedfs_endpoint"), ("redis", "redis_single")])
def test_a_place_is_an_empty_store_while_it_lasts(
    demo_on: ModuleType,
    kind: str,
    installed: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    request.getfixturevalue(installed)  # or this test is skipped
    with demo_on.PLACES[kind]() as place:
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
        connector = open_connector(place.url)
        assert list(connector.scan()) == []
        write = Write("v1/one", 4, BufferSource.of(b"four"))
        assert connector.write_from([write], Deadline.after(60.0))[0].is_ok
        assert [entry.key for entry in connector.scan()] == ["v1/one"]
        connector.close()
        assert place.daemon.is_running
    assert not place.daemon.is_running
    assert not place.daemon.directory.exists()


def test_the_main_job_runs_on_a_server_of_its_own(
    demo_on: ModuleType, redis_single: RedisServer, capfd
) -> None:
    assert demo_on.main(["redis", *SMALL]) == 0
    out, err = capfd.readouterr()
    assert "by redis://127.0.0.1:" in out
    assert "tokens     equal" in out
    pid = int(err.partition("runs as process ")[2].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_code_of_the_demo_is_passed_on(demo_on: ModuleType, redis_single: RedisServer, capfd) -> None:
    assert demo_on.main(["redis", "--model", "no-such-model"]) == 2
    assert "invalid choice: 'no-such-model'" in capfd.readouterr().err
    assert demo_on.main(["ftp"]) == 2
    assert "give one of s3, redis" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("store", "command"),
    [("file", "hicache demo"), ("s3", "tools/demo_on.py s3"), ("redis", "tools/demo_on.py redis")],
)
def test_make_knows_each_store(store: str, command: str) -> None:
    made = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "demo", f"STORE={store}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.splitlines()[-1].rstrip().endswith(command)


def test_make_refuses_other_stores() -> None:
    made = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "demo", "STORE=ftp"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 2
    assert "STORE=ftp is not one of file, s3, redis" in made.stderr
