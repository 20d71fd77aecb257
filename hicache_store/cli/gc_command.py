"""``hicache gc``: have the storage clean itself up now, by the options of the URL."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import Protocol, runtime_checkable

from hicache_store.cli.masking import masked
from hicache_store.cli.opening import opened
from hicache_store.cli.output import Output, count_text, size_text
from hicache_store.clock import Deadline
from hicache_store.config import parse_url
from hicache_store.connectors.local_sweep import SweepReport
from hicache_store.connectors.wrapping import unwrapped


@runtime_checkable
class _Sweeps(Protocol):
    def sweep(self, deadline: Deadline) -> SweepReport:
        """Clean up."""
        ...


def run(args: Namespace, out: Output) -> int:
    """Sweep; exit code 1 when the sweep could not finish."""
    bounds = {name: text for name, text in parse_url(args.url).query if name in ("quota", "ttl", "min_free")}
    with opened(args.url, changes=True) as opened_connector:
        connector = unwrapped(opened_connector)
        if not isinstance(connector, _Sweeps):
            scheme = connector.capabilities.scheme
            out.document({"url": masked(args.url), "swept": False})
            out.line(f"{scheme} storage keeps itself within its bounds; there is nothing to sweep")
            return 0
        if "quota" not in bounds:
            out.note("the URL gives no quota, so the default one applies; give what the engines are given")
        with out.progress("sweeping"):
            report = connector.sweep(Deadline.after(args.timeout))
    out.document({"url": masked(args.url), "swept": True, **asdict(report)})
    _print(report, out)
    if not report.is_complete:
        out.note(f"the sweep is incomplete: {report.reason or 'unknown reason'}")
        return 1
    return 0


def _print(report: SweepReport, out: Output) -> None:
    for label, number, n_bytes in (
        ("expired", report.expired_objects, report.expired_bytes),
        ("evicted", report.evicted_objects, report.evicted_bytes),
        ("left", report.objects, report.bytes),
    ):
        out.line(f"{label:<10} {count_text(number, 'object')}, {size_text(n_bytes)}")
    out.line(f"{'removed':<10} {count_text(report.temp_files_removed, 'temporary file')}")
    if report.strays:
        out.line(f"{'strays':<10} {count_text(report.strays, 'entry', 'entries')} of others, left alone")
    if report.failures:
        out.line(f"{'failures':<10} {count_text(report.failures, 'system call')}")
