"""What all tests share: hypothesis profiles, the choice of long runs, and counts that are printed."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["hicache_store.testing.server_fixtures"]

IS_SOAK = os.environ.get("HICACHE_SOAK") == "1"
IS_CI = os.environ.get("CI", "").lower() in ("1", "true")

# The suite draws the same examples on every machine, so that a red run is never luck; soak runs
# draw new ones each time and are where new faults are found.
settings.register_profile(
    "ci", max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "soak", max_examples=5_000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("soak" if IS_SOAK else "ci")

_COUNTS = pytest.StashKey[Counter[str]]()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[_COUNTS] = Counter()
    if config.pluginmanager.hasplugin("dsession"):
        config.pluginmanager.register(CollectsCounts())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long runs need HICACHE_SOAK=1 or an expression that asks for them by name."""
    if IS_SOAK or config.getoption("markexpr"):
        return
    long_runs = [item for item in items if item.get_closest_marker("soak")]
    if long_runs:
        config.hook.pytest_deselected(items=long_runs)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    counts = config.stash[_COUNTS]
    if counts:
        terminalreporter.section("what was counted")
        for name, value in counts.items():
            terminalreporter.line(f"{value:>10,}  {name}")

    skipped = _skipped(config)
    if IS_CI and skipped:
        terminalreporter.section("skipped, which fails the run where CI is set", red=True)
        for line in skipped:
            terminalreporter.line(line)


def _skipped(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter is not None else []
    return [f"{report.nodeid}: {report.longrepr[-1]}" for report in reports]


class CollectsCounts:
    """Adds up what the worker processes of a parallel run counted."""

    @pytest.hookimpl
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        counted = getattr(node, "workeroutput", {}).get("counts", {})
        node.config.stash[_COUNTS].update(counted)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test that did not run has shown nothing: where CI is set, a skip is a failure."""
    workeroutput = getattr(session.config, "workeroutput", None)
    if workeroutput is not None:
        workeroutput["counts"] = dict(session.config.stash[_COUNTS])
    if IS_CI and session.exitstatus == pytest.ExitCode.OK and _skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Counter[str]:
    """Counts by what they count; printed at the end of the run."""
    return pytestconfig.stash[_COUNTS]
