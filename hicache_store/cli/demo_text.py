"""A demo's report in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from hicache_store.cli.output import count_text, printable, size_text

if TYPE_CHECKING:
    from hicache_store.demo.report import DemoReport

_LABEL: Final = 11
"""Columns of a label and the blank after it."""
_CONTROL: Final = "control: stored bytes altered, verification off: a garbled answer is the expected result"


def report_lines(report: DemoReport, width: int) -> Iterator[str]:
    """What was seen, in lines of at most ``width`` columns where texts can be wrapped."""
    if report.is_control:
        yield _CONTROL
    yield _heading(report)
    yield from _said("prompt", report.prompt_head + (" ..." if report.prompt_tail else ""), width)
    if report.prompt_tail:
        yield from _said("", f"... {report.prompt_tail}", width)
    yield from _stored(report, width)
    yield from _restored(report, width)
    if report.is_control:
        yield from _control(report, width)
        return
    yield from _ttft(report, width)
    yield from _said("answer", report.continuation, width)
    yield from _said("", _limits_of_the_answer(report), width)
    yield from _equality(report, width)


def _heading(report: DemoReport) -> str:
    writes = f"{report.writer} writes"
    before = f"stored before by an earlier run of {report.writer}"
    if report.pages and report.pages_present == report.pages:
        writes = before
    elif report.pages_present:
        writes += f" ({report.pages_present} of {report.pages} pages {before})"
    return f"{report.model}: {writes}, {report.reader} reads, by {report.store}"


def _stored(report: DemoReport, width: int) -> Iterator[str]:
    yield from _said(
        "stored",
        f"{count_text(report.objects, 'object')}, {size_text(report.bytes)}, for "
        f"{count_text(report.pages, 'page')} of {report.page_size} tokens; this run wrote "
        f"{count_text(report.objects_written, 'object')}, {size_text(report.bytes_written)}",
        width,
    )
    if report.backup_detail:
        yield from _said("", f"NOT ALL WAS STORED: {report.backup_detail}", width)


def _restored(report: DemoReport, width: int) -> Iterator[str]:
    read = f"{count_text(report.read_objects, 'object')}, {size_text(report.read_bytes)}"
    text = f"{report.restored_tokens:,} of {report.prompt_tokens:,} prompt tokens"
    if report.restored_tokens:
        text += f", from {read}, in {report.restore_s:.3f} s"
    yield from _said("restored", text, width)
    if report.restore_end:
        yield from _said("", f"ended early: {report.restore_end}", width)
    elif report.prompt_tokens % report.page_size:
        yield from _said("", "(the rest is no full page, and only full pages are stored)", width)
    else:
        why = "(the last page is always computed: the output of its last token chooses the first new one)"
        yield from _said("", why, width)


def _ttft(report: DemoReport, width: int) -> Iterator[str]:
    cold = f"{report.ttft_cold_s:.3f} s without the store"
    if not report.restored_tokens:
        yield from _said("ttft", f"{cold}; nothing was restored that could save any", width)
        return
    ratio = report.ttft_cold_s / report.ttft_warm_s
    gain = f"{ratio:.1f} times faster" if ratio >= 1.05 else "no faster"
    yield from _said("ttft", f"{cold}, {report.ttft_warm_s:.3f} s with it: {gain}", width)
    left = report.prompt_tokens - report.restored_tokens
    rest_s = max(0.0, report.ttft_warm_s - report.restore_s)
    yield from _said(
        "",
        f"(of it {report.restore_s:.3f} s restore, {rest_s:.3f} s computing the last "
        f"{count_text(left, 'token')})",
        width,
    )


def _limits_of_the_answer(report: DemoReport) -> str:
    text = f"(cut at {count_text(report.compared_tokens, 'token')}, the demo's limit"
    if report.has_random_weights:
        text += f"; the weights of {report.model} are random, so its text means nothing"
    return f"{text})"


def _equality(report: DemoReport, width: int) -> Iterator[str]:
    verdict = "equal" if report.tokens_equal else "NOT EQUAL"
    yield from _said(
        "tokens",
        f"{verdict} to the answer without the store: {count_text(report.compared_tokens, 'token')}, "
        "chosen greedily",
        width,
    )
    yield from _said(
        "",
        f"(in the closest choice the best logit led the second by {report.min_logit_margin:.3g}; between the "
        f"two answers a logit differs by {report.max_logit_difference:.2g} at most)",
        width,
    )


def _control(report: DemoReport, width: int) -> Iterator[str]:
    yield from _said("unverified", report.continuation, width)
    yield from _said("verified", report.verified_continuation or "", width)
    yield from _said("", _limits_of_the_answer(report), width)
    taken = report.verified_restored_tokens
    changed = "the altered bytes changed the answer that was not verified"
    refused = "verification took none of them"
    same = "the verified answer equals the one without the store"
    faults = [
        *([] if report.restored_tokens else ["nothing was stored that could be altered"]),
        *([f"NOT {changed}"] if report.tokens_equal and report.restored_tokens else []),
        *([f"NOT {refused}, but those of {taken} tokens"] if taken else []),
        *([] if report.verified_tokens_equal else [f"NOT {same}"]),
    ]
    verdict = f"FAILED: {'; '.join(faults)}" if faults else f"as expected: {changed}; {refused}; {same}"
    yield from _said("control", verdict, width)
    yield from _said("", "(what this control stored is removed again)", width)


def _said(label: str, text: str, width: int) -> Iterator[str]:
    """``text`` beside its label, wrapped."""
    clean = printable(" ".join(text.split()))
    lines = textwrap.wrap(clean, max(20, width - _LABEL), break_on_hyphens=False) or [""]
    for index, line in enumerate(lines):
        yield f"{label if index == 0 else '':<{_LABEL}}{line}".rstrip()
