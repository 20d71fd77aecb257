"""The vLLM adapter in the real engine, which only `make test-engines` installs."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None

if HAS_VLLM:
    sys.path.insert(0, str(Path(__file__).parent))
elif os.environ.get("HICACHE_ENGINES") == "1":
    raise RuntimeError("vllm is not installed, and HICACHE_ENGINES=1 asks for it: run `make test-engines`")
else:
    collect_ignore_glob = ["test_vllm_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what this run left out: tests that are not collected count as nothing, not even as skips."""
    if not HAS_VLLM:
        terminalreporter.write_line(
            "NOT RUN: tests/vllm_engine/test_vllm_*, which need vllm; `make test-engines` runs them",
            yellow=True,
        )
