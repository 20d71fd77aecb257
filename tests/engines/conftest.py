"""The adapters against the real classes of the engines, which only `make test-engines` installs."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HAS_SGLANG = importlib.util.find_spec("sglang") is not None

if HAS_SGLANG:
    sys.path.insert(0, str(Path(__file__).parent))
    import placeholders

    placeholders.install()
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
elif os.environ.get("HICACHE_ENGINES") == "1":
    raise RuntimeError("sglang is not installed, and HICACHE_ENGINES=1 asks for it: run `make test-engines`")
else:
    collect_ignore_glob = ["test_sglang_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what this run left out: tests that are not collected count as nothing, not even as skips."""
    if not HAS_SGLANG:
        terminalreporter.write_line(
            "NOT RUN: tests/engines/test_sglang_*, which need sglang; `make test-engines` runs them",
            yellow=True,
        )
