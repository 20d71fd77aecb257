"""What importing the package costs an engine: nothing it did not ask for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

HEAVY = (
    "torch", "cupy", "boto3", "botocore", "aiobotocore", "obstore", "redis", "rich",
    "pytest", "hypothesis", "hicache_store.testing",
)  # fmt: skip

SDK = ("hicache_store.connectors.s3",)
"""Modules that load a client library, and are themselves loaded when their scheme is opened."""

PROBE = """
import importlib, json, os, pkgutil, sys, threading
for name in {modules!r}:
    module = importlib.import_module(name)
    if {walks!r} and hasattr(module, "__path__"):
        for found in pkgutil.walk_packages(module.__path__, name + "."):
            if not found.name.startswith({sdk!r}):
                importlib.import_module(found.name)
if {uses!r}:
    import hicache_store
    for name in dir(hicache_store):
        getattr(hicache_store, name)
print(json.dumps({{
    "modules": sorted(sys.modules),
    "python_threads": threading.active_count(),
    "threads": len(os.listdir("/proc/self/task")),
}}))
"""


def probe(*modules: str, walks: bool = False, uses: bool = False) -> dict:
    """What a fresh interpreter looks like after importing ``modules``."""
    code = PROBE.format(sdk=SDK, modules=modules, walks=walks, uses=uses)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, timeout=120
    )
    return json.loads(done.stdout)


def heavy(seen: dict) -> list[str]:
    return [name for name in HEAVY if name in seen["modules"]]


@pytest.mark.parametrize("module", ["hicache_store", "hicache_store.connectors", "hicache_store.layout"])
def test_c21_importing_starts_no_thread_and_loads_nothing_heavy(module):
    """Libraries that start a pool of threads at import slow the process that hosts them."""
    seen = probe(module)
    assert heavy(seen) == []
    assert "numpy" not in seen["modules"]
    assert seen["threads"] == seen["python_threads"] == 1


@pytest.mark.parametrize("package", ["connectors", "layout", "store"])
def test_no_module_of_the_run_time_loads_anything_heavy(package):
    """Every module of the package, and no thread beyond those that numpy starts by itself."""
    seen = probe(f"hicache_store.{package}", walks=True)
    assert heavy(seen) == []
    assert seen["python_threads"] == 1
    assert seen["threads"] <= probe("numpy")["threads"]


def test_the_public_names_load_nothing_heavy():
    seen = probe("hicache_store", uses=True)
    assert "hicache_store.connectors.registry" in seen["modules"]
    assert heavy(seen) == []
    assert seen["python_threads"] == 1


def test_the_probe_sees_what_is_heavy():
    seen = probe("hicache_store.testing.connector_contract")
    assert {"pytest", "hicache_store.testing"} <= set(heavy(seen))
