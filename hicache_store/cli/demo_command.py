"""``hicache demo``: a real model's KV through the store, from one topology to another."""

from __future__ import annotations

import os
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hicache_store.cli.output import Output, count_text, printable, size_text
from hicache_store.errors import ConfigurationError
from hicache_store.layout.parallel import ParallelSpec

if TYPE_CHECKING:
    from hicache_store.demo.report import DemoReport


@dataclass(frozen=True, slots=True)
class _Defaults:
    writer: str
    reader: str
    prompt_tokens: int


_DEFAULTS: Final = {
    "smollm2": _Defaults("tp3pp2", "tp1pp1", 2048),
    "random8": _Defaults("tp4pp2", "tp2pp1", 2048),
}
_STORE_QUOTA: Final = "4GiB"


def run(args: Namespace, out: Output) -> int:
    """Run it; exit code 1 when the answer is not the one that was due."""
    demo = _load("hicache_store.demo.run")
    weights = _load("hicache_store.demo.weights")
    defaults = _DEFAULTS[args.model]
    report = demo.run_demo(
        weights.model_named(args.model),
        ParallelSpec.parse(args.writer or defaults.writer),
        ParallelSpec.parse(args.reader or defaults.reader),
        args.prompt_tokens or defaults.prompt_tokens,
        args.store or default_store(),
        is_control=args.control,
        progress=out.note,
    )
    out.document(report.to_json())
    for line in _lines(report, min(out.width, 110)):
        out.line(line)
    return 0 if is_as_due(report) else 1


def is_as_due(report: DemoReport) -> bool:
    """Whether the tokens are equal; of a control, whether altered bytes changed them unverified, and a
    verifying reader took none of them."""
    if not report.is_control:
        return report.tokens_equal
    is_refused = report.verified_restored_tokens == 0 and report.verified_tokens_equal is True
    return is_refused and not report.tokens_equal


def default_store() -> str:
    """A directory of the user's cache, so that a second run finds what the first one stored."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return f"file://{cache}/hicache-demo?quota={_STORE_QUOTA}"


def _load(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hicache_store"):
            raise
        raise ConfigurationError(
            f"the demo needs {error.name!r}, which is not installed; install 'hicache-store[demo]'"
        ) from error


def _lines(report: DemoReport, width: int) -> Iterator[str]:
    yield f"{report.model}: {report.writer} writes, {report.reader} reads, by {report.store}"
    yield from _quoted("prompt", f"{report.prompt_head} ... {report.prompt_tail}", width)
    yield (
        f"stored     {count_text(report.objects, 'object')}, {size_text(report.bytes)}, for "
        f"{count_text(report.pages, 'page')} of {report.page_size} tokens; this run wrote "
        f"{count_text(report.objects_written, 'object')}, {size_text(report.bytes_written)}"
    )
    read = f"{count_text(report.read_objects, 'object')}, {size_text(report.read_bytes)}"
    yield (
        f"restored   {report.restored_tokens:,} of {report.prompt_tokens:,} prompt tokens, from {read}, "
        f"in {report.restore_s:.3f} s"
    )
    if report.restore_end:
        yield f"           ended early: {report.restore_end}"
    ratio = report.ttft_cold_s / report.ttft_warm_s
    yield (
        f"ttft       {report.ttft_cold_s:.3f} s without the store, {report.ttft_warm_s:.3f} s with it: "
        f"{ratio:.1f} times faster"
    )
    yield from _quoted("answer", report.continuation, width)
    yield from (_control_lines if report.is_control else _equality_lines)(report)


def _equality_lines(report: DemoReport) -> Iterator[str]:
    verdict = "equal" if report.tokens_equal else "NOT EQUAL"
    yield f"tokens     {verdict} to the answer without the store, {report.compared_tokens} greedy ones"
    yield (
        f"           least margin of a choice {report.min_logit_margin:.3g}, largest difference of a logit "
        f"{report.max_logit_difference:.2g}"
    )


def _control_lines(report: DemoReport) -> Iterator[str]:
    changed = "changed the answer" if not report.tokens_equal else "DID NOT CHANGE the answer"
    yield f"control    altered bytes, read without verification, {changed}"
    same = "equal" if report.verified_tokens_equal else "NOT EQUAL"
    yield (
        f"           with verification {report.verified_restored_tokens} of their tokens were taken, and the "
        f"answer is {same} to that without the store"
    )


def _quoted(label: str, text: str, width: int) -> Iterator[str]:
    wrapped = textwrap.wrap(
        printable(" ".join(text.split())), width - 11, max_lines=6, placeholder=" ..."
    ) or [""]
    yield f"{label:<10} {wrapped[0]}"
    yield from (" " * 11 + line for line in wrapped[1:])
