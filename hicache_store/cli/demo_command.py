"""``hicache demo``: a real model's KV through the store, from one topology to another."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from hicache_store.cli.demo_text import report_lines
from hicache_store.cli.invocation import invocation
from hicache_store.cli.masking import masked
from hicache_store.cli.output import DIGEST_DIGITS, Output
from hicache_store.errors import ConfigurationError
from hicache_store.layout.parallel import ParallelSpec


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
_WIDTH_MAX: Final = 110


def run(args: Namespace, out: Output) -> int:
    """Run it; exit code 1 when less was restored than possible, or the answer is not the one that was due."""
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
        progress=_timed(out),
    )
    out.document(report.to_json())
    for line in report_lines(report, min(out.width, _WIDTH_MAX)):
        out.line(line)
    if not (report.is_control or args.store_ends):
        url, digest = masked(args.store or default_store()), report.namespace[:DIGEST_DIGITS]
        out.line(f"next       {invocation('stat', url)}")
        out.line(f"           {invocation('rm', url, '--namespace', digest)}")
    return 0 if report.is_as_due else 1


def _timed(out: Output) -> Callable[[str], None]:
    """Say each step with the seconds since the run began: the distance to the next tells how long it took."""
    begun = time.monotonic()
    return lambda text: out.note(f"{time.monotonic() - begun:4.0f} s  {text}")


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
