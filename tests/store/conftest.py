from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

_LEAK_PATIENCE_S = 5.0


def _open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    """Every thread and file that a test's stores open is gone after it."""
    threads, files = set(threading.enumerate()), _open_files()
    yield
    patience = time.monotonic() + _LEAK_PATIENCE_S
    while (new := set(threading.enumerate()) - threads) and time.monotonic() < patience:
        time.sleep(0.001)
    assert not new, f"threads outlive the test: {new}"
    # The listing itself has one file open, the same number each time at most one apart.
    assert len(_open_files()) <= len(files) + 1, "files outlive the test"
