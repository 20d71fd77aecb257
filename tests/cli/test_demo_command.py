"""The words around the demo; what it does is tested where it lives."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest
from cli_place import run_json, run_text

from hicache_store.cli.demo_text import report_lines
from hicache_store.demo.report import DemoReport
from hicache_store.demo.weights import model_named
from hicache_store.errors import ConfigurationError

FIELDS = {
    "model": "random8", "has_random_weights": False, "namespace": "a1" * 32,
    "writer": "tp4pp2", "reader": "tp2pp1", "store": "file:///x", "page_size": 64,
    "prompt_tokens": 640, "prompt_head": "Once upon\na time ", "prompt_tail": " and then",
    "continuation": "the\x1b[2J end",
    "compared_tokens": 32, "tokens_equal": True, "min_logit_margin": 0.25, "max_logit_difference": 0.001,
    "restored_tokens": 576, "restore_end": "", "ttft_cold_s": 6.0, "ttft_warm_s": 0.5, "restore_s": 0.1,
    "read_objects": 36, "read_bytes": 9 << 20, "objects": 80, "bytes": 10 << 20, "objects_written": 80,
    "bytes_written": 10 << 20, "backup_detail": "", "pages": 10, "pages_present": 0,
    "writer_restored_tokens": 0, "is_control": False, "verified_restored_tokens": None,
    "verified_tokens_equal": None, "verified_continuation": None,
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
    out, err = run_text(capsys, "demo", "--model", "random8", "--store", "redis://:pw@h/0")
    for words in (
        "random8: tp4pp2 writes, tp2pp1 reads, by file:///x\n",
        "prompt     Once upon a time ...\n           ... and then\n",
        "stored     80 objects, 10.00 MiB, for 10 pages of 64 tokens; this run wrote 80 objects, 10.00 MiB",
        "restored   576 of 640 prompt tokens, from 36 objects, 9.00 MiB, in 0.100 s\n"
        "           (the last page is always computed: ",
        "6.000 s without the store, 0.500 s with it: 12.0 times faster\n"
        "           (of it 0.100 s restore, 0.400 s computing the last 64 tokens)\n",
        "answer     the\ufffd[2J end\n           (cut at 32 tokens, the demo's limit)\n",
        "tokens     equal to the answer without the store: 32 tokens, chosen greedily\n"
        "           (in the closest choice the best logit led the second by 0.25; between",
        "-m hicache_store.cli.main stat 'redis://:***@h/0'\n",
        "-m hicache_store.cli.main rm 'redis://:***@h/0' --namespace a1a1a1a1a1a1a1a1\n",
    ):
        assert words in out
    assert re.fullmatch(r"hicache: +\d+ s  writer: computing\n", err)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"pages_present": 10}, "random8: stored before by an earlier run of tp4pp2, tp2pp1 reads, by"),
        (
            {"pages_present": 4},
            "tp4pp2 writes (4 of 10 pages stored before by an earlier run of tp4pp2)",
        ),
        ({"prompt_tokens": 600}, "(the rest is no full page, and only full pages are stored)"),
        ({"prompt_tail": ""}, "prompt     Once upon a time\nstored "),
        ({"has_random_weights": True}, "the weights of random8 are random, so its text means nothing"),
        ({"ttft_cold_s": 0.5}, "0.500 s with it: no faster"),
    ],
)
def test_what_was_otherwise_is_said(demo, capsys, changed, words):
    demo["report"].update(changed)
    out, _ = run_text(capsys, "demo", "--model", "random8")
    assert " ".join(words.split()) in " ".join(out.split())


def test_a_store_that_took_nothing_is_code_1_with_the_reason(demo, capsys):
    demo["report"].update(
        objects=0, bytes=0, objects_written=0, bytes_written=0, restored_tokens=0, read_objects=0,
        read_bytes=0, restore_end="page 0: absent", backup_detail="the store is read-only",
    )  # fmt: skip
    out, _ = run_text(capsys, "demo", "--model", "random8", code=1)
    assert "NOT ALL WAS STORED: the store is read-only\nrestored   0 of 640 prompt tokens\n" in out
    assert "ended early: page 0: absent\n" in out
    assert "6.000 s without the store; nothing was restored" in out
    assert "faster" not in out


def test_a_store_that_ends_with_the_run_needs_no_next_step(demo, capsys):
    assert "next  " not in run_text(capsys, "demo", "--model", "random8", "--store-ends")[0]


def test_lines_keep_to_a_narrow_terminal():
    report = DemoReport(**FIELDS | {"continuation": "word " * 60})
    lines = list(report_lines(report, 60))[1:]
    assert max(map(len, lines)) <= 60


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


CONTROL = {
    "is_control": True, "tokens_equal": False, "verified_restored_tokens": 0, "verified_tokens_equal": True,
    "verified_continuation": "Ilse Marrow",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({}, 0, "as expected: the altered bytes changed the answer that was not verified; verification took"),
        ({"tokens_equal": True}, 1, "FAILED: NOT the altered bytes changed"),
        (
            {"verified_restored_tokens": 64},
            1,
            "FAILED: NOT verification took none of them, but",
        ),
        ({"verified_tokens_equal": False}, 1, "FAILED: NOT the verified answer equals"),
        (
            {"restored_tokens": 0, "tokens_equal": True},
            1,
            "FAILED: nothing was stored that could be al",
        ),
    ],
)
def test_a_control_must_change_the_answer_and_be_refused_when_verified(demo, capsys, changed, code, words):
    demo["report"].update(CONTROL | changed)
    out, _ = run_text(capsys, "demo", "--model", "random8", "--control", code=code)
    assert demo["is_control"] is True
    assert out.startswith("control: stored bytes altered, verification off: a garbled answer is the ")
    assert "unverified the\ufffd[2J end\nverified   Ilse Marrow\n" in out
    assert words in " ".join(out.split())
    assert "faster" not in out
    assert "next  " not in out


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
