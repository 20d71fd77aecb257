"""The words around the demo; what it does is tested where it lives."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from cli_place import run_json, run_text

from hicache_store.demo.report import DemoReport
from hicache_store.demo.weights import model_named
from hicache_store.errors import ConfigurationError

FIELDS = {
    "model": "random8", "writer": "tp4pp2", "reader": "tp2pp1", "store": "file:///x", "page_size": 64,
    "prompt_tokens": 640, "prompt_head": "Once upon\na time ", "prompt_tail": " and then",
    "continuation": "the\x1b[2J end",
    "compared_tokens": 32, "tokens_equal": True, "min_logit_margin": 0.25, "max_logit_difference": 0.001,
    "restored_tokens": 576, "restore_end": "", "ttft_cold_s": 6.0, "ttft_warm_s": 0.5, "restore_s": 0.1,
    "read_objects": 36, "read_bytes": 9 << 20, "objects": 80, "bytes": 10 << 20, "objects_written": 80,
    "bytes_written": 10 << 20, "backup_detail": "", "pages": 10, "pages_present": 0,
    "writer_restored_tokens": 0, "is_control": False, "verified_restored_tokens": None,
    "verified_tokens_equal": None,
}  # fmt: skip


@pytest.fixture
def demo(monkeypatch):
    """The arguments of the last run; its report is ``FIELDS`` and what a test changes of them."""
    calls: dict = {"report": dict(FIELDS)}

    def run_demo(source, writer, reader, prompt_tokens, store_url, *, is_control, progress):
        calls.update(source=source, writer=writer, reader=reader, prompt_tokens=prompt_tokens)
        calls.update(store=store_url, is_control=is_control)
        progress("writer: computing")
        return DemoReport(**calls["report"])

    module = ModuleType("hicache_store.demo.run")
    module.run_demo = run_demo
    monkeypatch.setitem(sys.modules, "hicache_store.demo.run", module)
    return calls


def test_the_report_in_words(demo, capsys):
    out, err = run_text(capsys, "demo", "--model", "random8")
    for words in (
        "random8: tp4pp2 writes, tp2pp1 reads, by file:///x",
        "prompt     Once upon a time ... and then",
        "stored     80 objects, 10.00 MiB, for 10 pages of 64 tokens; this run wrote 80 objects, 10.00 MiB",
        "restored   576 of 640 prompt tokens, from 36 objects, 9.00 MiB, in 0.100 s",
        "6.000 s without the store, 0.500 s with it: 12.0 times faster",
        "answer     the\ufffd[2J end",
        "tokens     equal to the answer without the store, 32 greedy ones",
    ):
        assert words in out
    assert err == "hicache: writer: computing\n"


def test_the_report_as_json(demo, capsys):
    assert run_json(capsys, "demo", "--model", "random8") == FIELDS


def test_defaults_and_arguments(demo, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    run_json(capsys, "demo", "--model", "random8")
    assert (demo["writer"].label, demo["reader"].label) == ("tp4pp2", "tp2pp1")
    assert demo["store"] == "file:///cache/hicache-demo?quota=4GiB"
    assert demo["is_control"] is False
    run_json(
        capsys, "demo", "--model", "random8", "--writer", "tp1", "--reader", "tp4pp2",
        "--prompt-tokens", "99", "--store", "file:///y",
    )  # fmt: skip
    assert (demo["writer"].label, demo["reader"].label) == ("tp1pp1", "tp4pp2")
    assert (demo["prompt_tokens"], demo["store"]) == (99, "file:///y")
    assert demo["source"] == model_named("random8")


def test_unequal_tokens_are_code_1(demo, capsys):
    demo["report"]["tokens_equal"] = False
    out, _ = run_text(capsys, "demo", "--model", "random8", code=1)
    assert "tokens     NOT EQUAL" in out


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"tokens_equal": False, "verified_restored_tokens": 0, "verified_tokens_equal": True}, 0),
        ({"tokens_equal": True, "verified_restored_tokens": 0, "verified_tokens_equal": True}, 1),
        ({"tokens_equal": False, "verified_restored_tokens": 64, "verified_tokens_equal": True}, 1),
        ({"tokens_equal": False, "verified_restored_tokens": 0, "verified_tokens_equal": False}, 1),
    ],
)
def test_a_control_must_change_the_answer_and_be_refused_when_verified(demo, capsys, changed, code):
    demo["report"].update(changed, is_control=True)
    out, _ = run_text(capsys, "demo", "--model", "random8", "--control", code=code)
    assert demo["is_control"] is True
    assert ("changed the answer" in out) is not changed["tokens_equal"]


def test_what_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "hicache_store.demo.run", raising=False)
    monkeypatch.delitem(sys.modules, "hicache_store.demo.tokenizer", raising=False)
    monkeypatch.setitem(sys.modules, "regex", None)
    _, err = run_text(capsys, "demo", code=2)
    assert "the demo needs 'regex', which is not installed; install 'hicache-store[demo]'" in err


def test_refusals_of_the_demo_are_one_line(demo, capsys, monkeypatch):
    def refusing(*args, **kwargs):
        raise ConfigurationError("give at most 8160 prompt tokens")

    monkeypatch.setattr(sys.modules["hicache_store.demo.run"], "run_demo", refusing)
    assert run_text(capsys, "demo", "--model", "random8", code=2) == (
        "",
        "hicache: give at most 8160 prompt tokens\n",
    )
