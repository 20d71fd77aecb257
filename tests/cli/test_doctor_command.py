"""``hicache doctor`` and ``hicache bench``: what they find, what they leave, what they never print."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from hicache_store.cli import bench_command, opening
from hicache_store.cli.doctor_checks import Examination, Finding, way_out_of
from hicache_store.cli.main import main
from hicache_store.cli.masking import masked
from hicache_store.connectors.base import Connector
from hicache_store.connectors.memory import MemoryConnector
from hicache_store.connectors.registry import open_connector
from hicache_store.testing.fault_plans import Fail, FlipBit, Plan, TimeOut, Truncate, Vanish, on_keys
from hicache_store.testing.faults import FaultyConnector
from hicache_store.testing.overwriting import OverwritingConnector


def examine(connector: Connector) -> dict[str, Finding]:
    return {finding.name: finding for finding in Examination(connector, 30.0).run()}


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    url = f"file://{tmp_path}/store?sweep=0"
    open_connector(url).close()
    return url


def test_a_sound_store_passes_and_nothing_is_left(file_url: str, capsys) -> None:
    assert main(["doctor", file_url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sound"] is True
    grades = {one["name"]: one["grade"] for one in report["findings"]}
    assert {name for name, grade in grades.items() if grade == "ok"} >= {
        "look-up", "write and read", "create-only", "clock", "latency", "throughput", "removal"
    }  # fmt: skip
    connector = open_connector(file_url)
    assert list(connector.scan()) == []
    connector.close()
    assert main(["doctor", file_url]) == 0
    assert "ok    removal" in capsys.readouterr().out


FAULTS: dict[str, tuple[Plan, str]] = {
    "reads time out": (on_keys(lambda _: True, TimeOut(), ("read",)), "look-up"),
    "writes fail": (on_keys(lambda _: True, Fail("403 access denied"), ("write",)), "write and read"),
    "writes are lost": (on_keys(lambda _: True, Vanish(), ("write",)), "write and read"),
    "writes are cut": (on_keys(lambda _: True, Truncate(100), ("write",)), "write and read"),
    "a bit flips": (on_keys(lambda key: "object" in key, FlipBit(77), ("read",)), "write and read"),
    "large reads are wrong": (on_keys(lambda key: "large-3" in key, FlipBit(99), ("read",)), "throughput"),
    "large writes time out": (on_keys(lambda key: "large" in key, TimeOut(), ("write",)), "throughput"),
    "nothing can be removed": (on_keys(lambda _: True, Fail("denied"), ("delete",)), "removal"),
    "removals are lost": (on_keys(lambda _: True, Vanish(), ("delete",)), "removal"),
}


@pytest.mark.parametrize(("plan", "name"), FAULTS.values(), ids=FAULTS.keys())
def test_each_fault_is_found_with_a_way_out(plan: Plan, name: str) -> None:
    inner = MemoryConnector()
    found = examine(FaultyConnector(inner, plan))
    faults = [finding for finding in found.values() if finding.grade == "fault"]
    assert [fault.name for fault in faults] == [name]
    assert faults[0].way_out
    assert name == "removal" or list(inner.scan()) == []


def test_a_promise_that_is_not_kept_is_a_fault() -> None:
    """The storage says that the first object stays, and overwrites it."""

    class Lying(OverwritingConnector):
        capabilities = MemoryConnector().capabilities  # type: ignore[assignment]

    assert examine(Lying(MemoryConnector()))["create-only"].grade == "fault"
    assert examine(OverwritingConnector(MemoryConnector()))["create-only"].grade == "warning"


def test_a_clock_that_is_off_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = MemoryConnector()
    scan = connector.scan
    monkeypatch.setattr(
        connector,
        "scan",
        lambda prefix: (one.__class__(one.key, 1, one.last_used_s - 90.0) for one in scan(prefix)),
    )
    finding = examine(connector)["clock"]
    assert (finding.grade, finding.text[:34]) == ("warning", "the storage's clock is -90.0 s fro")


def test_a_store_that_cannot_be_opened_is_a_fault(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    for url in (
        f"file://{tmp_path}/nowhere?readonly=1",
        f"file://{tmp_path}/file/x",
        f"file://{tmp_path}/file",
    ):
        assert main(["doctor", url]) == 1
        text = capsys.readouterr().out
        assert "FAULT open" in text
        assert "-> check the path" in text
    assert not (tmp_path / "nowhere").exists(), "looking never makes a store"


def test_a_store_that_will_be_created_is_examined_beside_its_place(tmp_path: Path, capsys) -> None:
    place = tmp_path / "later" / "kv"
    assert main(["doctor", f"file://{place}?quota=1GiB"]) == 0
    text = capsys.readouterr().out
    assert f"{place} is not there yet; it will be created below {tmp_path} by the first that attaches" in text
    assert "ok    write and read" in text
    assert ".hicache-doctor" not in text
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_can_only_be_read_does_not_work_unless_that_was_asked_for() -> None:
    class ReadOnly(MemoryConnector):
        capabilities = replace(MemoryConnector().capabilities, is_read_only=True)  # type: ignore[assignment]

    connector = ReadOnly()
    found = {one.name: one for one in Examination(connector, 30.0).run()}
    assert (found["write"].grade, found["write"].text) == ("fault", "the store can only be read")
    assert "readonly=1" in found["write"].way_out
    found = {one.name: one for one in Examination(connector, 30.0, may_be_read_only=True).run()}
    assert found["write"].grade == "note"


def test_an_examination_that_nobody_reads_to_its_end_leaves_nothing() -> None:
    """``hicache doctor URL | head -1``."""
    connector = MemoryConnector()
    findings = Examination(connector, 30.0).run()
    while next(findings).name != "write and read":
        pass
    assert list(connector.scan("meta/"))
    findings.close()
    assert list(connector.scan("meta/")) == []


def test_a_clock_within_the_grain_of_a_second_is_told_as_that() -> None:
    assert examine(MemoryConnector())["clock"].text == "the storage's clock is within 1 s of this machine's"


def test_a_read_only_handle_is_looked_at_and_not_written_to(file_url: str, capsys) -> None:
    assert main(["doctor", f"{file_url}&readonly=1"]) == 0
    assert "nothing was written" in capsys.readouterr().out


def test_both_layers_are_examined(file_url: str, tmp_path: Path, capsys) -> None:
    fast, slow = quote("memory:", safe=""), quote(f"file://{tmp_path}/nowhere?readonly=1", safe="")
    good = quote(file_url, safe="")
    assert main(["doctor", f"layered:?fast={fast}&slow={good}"]) == 0
    text = capsys.readouterr().out
    assert "fast: removal" in text
    assert "slow: removal" in text
    assert main(["doctor", f"layered:?fast={fast}&slow={slow}"]) == 1


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:hunter2@h:1/0?ttl=1h", "redis://:***@h:1/0?ttl=1h"),
        ("redis://me:hunter2@h", "redis://me:***@h"),
        ("unix:///run/r.sock?db=1", "unix:///run/r.sock?db=1"),
        ("s3://b/p?secret_access_key=hunter2&region=x", "s3://b/p?secret_access_key=***&region=x"),
        ("s3://b?endpoint=http://me:hunter2@h:9000", "s3://b?endpoint=http://me:***@h:9000"),
        ("redis://h?password_env=NAME", "redis://h?password_env=NAME"),
        (
            "layered:?fast=" + quote("redis://:hunter2@h", safe="") + "&slow=memory%3A",
            "layered:?fast=redis://:***@h&slow=memory:",
        ),
    ],
)
def test_secrets_are_masked_everywhere(url: str, shown: str, capsys) -> None:
    assert masked(url) == shown
    main(["doctor", url.replace("//h", "//127.0.0.1:1").replace("@h", "@127.0.0.1"), "--timeout", "100ms"])
    captured = capsys.readouterr()
    assert "hunter2" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("text", "word"),
    [("403 Forbidden", "let this account"),
     ("403 Forbidden", "wrong credentials"), ("NOAUTH required", "credentials"), ("timed_out", "--timeout"),
     ("Connection refused", "server runs"), ("odd", "log of the storage")],
)  # fmt: skip
def test_a_way_out_fits_its_failure(text: str, word: str) -> None:
    assert word in way_out_of(text)


def test_bench_measures_advises_and_removes(file_url: str, capsys) -> None:
    argv = ["bench", file_url, "--pages", "8", "--size", "64KiB", "--rounds", "2", "--json"]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["work"] for one in report["measured"]] == ["put", "get", "get 4096 B", "contains"]
    assert all(one["p99_ms"] >= one["p50_ms"] > 0 for one in report["measured"])
    assert report["measured"][1]["mb_per_s"] > 0
    assert report["request_cost_in_use"] == 64 * 1024
    connector = open_connector(file_url)
    assert list(connector.scan()) == []
    connector.close()
    assert main([*argv[:-1]]) == 0
    text = capsys.readouterr().out
    assert "CPU-s/GB" in text
    assert "16 reads are too few to tell what a request costs" in text
    assert report["request_cost_bytes"] is None


@pytest.mark.parametrize(
    ("cost", "in_use", "words"),
    [
        (100_000, 64, "as about 128KiB; in use is 64KiB"),
        (300_000, 64, "as about 256KiB; in use is 64KiB: give request_cost=256KiB"),
        (1, 64, "as about 4KiB; in use is 64KiB: give request_cost=4KiB"),
        (None, 64, "lost in the noise"),
    ],
)
def test_the_measured_cost_and_the_advice_agree(cost: int | None, in_use: int, words: str) -> None:
    assert words in bench_command._advice(cost, in_use * 1024, 1_000)


def test_bench_says_what_failed(file_url: str, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    opens: Callable[[str], Connector] = opening.open_connector
    plan = on_keys(lambda key: "bench" in key, FlipBit(5), ("read",))
    monkeypatch.setattr(opening, "open_connector", lambda url: FaultyConnector(opens(url), plan))
    assert main(["bench", file_url, "--pages", "4", "--size", "8KiB", "--rounds", "1"]) == 1
    assert "4 x wrong bytes" in capsys.readouterr().err


def test_bench_refuses_what_does_not_fit(file_url: str, capsys) -> None:
    assert main(["bench", file_url, "--pages", "100000"]) == 2
    assert "give fewer --pages" in capsys.readouterr().err
    assert main(["bench", f"{file_url}&readonly=1"]) == 2


def test_the_cost_of_a_request_is_told_from_that_of_its_bytes() -> None:
    """Ten requests: 1 ms each and 1 us a KiB make 1,000 KiB."""

    def batch(n_bytes: int) -> bench_command.Measured:
        return bench_command.Measured("get", 10, n_bytes, [10 * (1e-3 + n_bytes / 1024 * 1e-6)] * 3, 0.0)

    cost = bench_command.request_cost(batch(1024 * 1024), batch(4096))
    assert cost is not None
    assert abs(cost - 1_024_000) < 10
    assert bench_command.request_cost(batch(4096), batch(4096)) is None
    assert masked("memory:") == "memory:"


def test_gc_sweeps_what_is_wrapped(file_url: str, capsys) -> None:
    """Options that wrap a connector hide nothing of it from the tools."""
    assert main(["gc", f"{file_url}&quota=1GiB&retries=2&breaker=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["swept"] is True


def test_looking_at_layers_makes_none_of_them(file_url: str, tmp_path: Path, capsys) -> None:
    """A tool that only looks opens the layers as it opens stores: read-only, and only what is there."""
    good = quote(file_url, safe="")
    assert main(["ls", f"layered:?fast=memory%3A&slow={good}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["objects"] == []
    nowhere = quote(f"file://{tmp_path}/nowhere", safe="")
    assert main(["ls", f"layered:?fast={nowhere}&slow={good}"]) == 2
    assert not (tmp_path / "nowhere").exists()
