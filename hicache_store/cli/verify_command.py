"""``hicache verify``: check every byte of a store, and remove what is bad if told to."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from hicache_store.cli.listing import batched, walk
from hicache_store.cli.masking import masked
from hicache_store.cli.opening import opened, storage_faults, warn_of_faults
from hicache_store.cli.output import Column, Output, Progress, count_text, size_text
from hicache_store.cli.scrub import Fault, Finding, Scrub, Tally
from hicache_store.clock import Deadline
from hicache_store.connectors.base import Connector, Entry, Outcome, Status
from hicache_store.layout.names import FORMAT, META_PREFIX
from hicache_store.limits import REMOVE_BATCH

_COLUMNS = (
    Column("fault"),
    Column("size", is_number=True),
    Column("removed"),
    Column("key"),
    Column("detail"),
)


def run(args: Namespace, out: Output) -> int:
    """Scrub; exit code 1 when a key of this package is not proven good, or part of the store was missed."""
    counts: Counter[Fault] = Counter()
    removed = 0
    with opened(args.url, changes=args.delete) as connector:
        total = None
        if out.shows_progress:
            total = sum(entry.size_bytes for entry in _entries(connector, args.namespace))
        scrub = Scrub(connector, args.timeout)
        with (
            out.table(_COLUMNS) as row,
            out.array({"url": masked(args.url)}, "faults") as items,
            out.progress("verifying", total) as progress,
        ):
            entries = _watched(_entries(connector, args.namespace), progress)
            for found, outcome in _settled(connector, scrub.run(entries), args.delete, args.timeout):
                counts[found.fault] += 1
                removed += outcome is not None and outcome.is_ok
                row(
                    found.fault.value,
                    size_text(found.size_bytes),
                    _removal_text(outcome),
                    found.key,
                    found.detail,
                )
                items.add(_described(found, outcome))
            faults = storage_faults(connector)
            items.tail = {**_totals(scrub.tally, counts), "removed": removed, "storage_faults": faults}
        _print(scrub.tally, counts, removed, out)
        warn_of_faults(connector, out)
    return 1 if faults or any(fault is not Fault.STRAY for fault in counts) else 0


def _entries(connector: Connector, namespace: str | None) -> Iterator[Entry]:
    if namespace is None:
        return walk(connector, "")
    return chain(walk(connector, f"{META_PREFIX}/{namespace}"), walk(connector, f"{FORMAT}/{namespace}"))


def _watched(entries: Iterable[Entry], progress: Progress) -> Iterator[Entry]:
    for number, entry in enumerate(entries, 1):
        yield entry
        progress.advance(entry.size_bytes, count_text(number, "key"))


def _settled(
    connector: Connector, findings: Iterator[Finding], deletes: bool, timeout_s: float
) -> Iterator[tuple[Finding, Outcome | None]]:
    """Each finding with the outcome of its removal, ``None`` where none was tried."""
    if not deletes:
        yield from ((found, None) for found in findings)
        return
    for batch in batched(findings, REMOVE_BATCH):
        doomed = [found for found in batch if found.is_removable]
        keys, versions = [found.key for found in doomed], [found.version for found in doomed]
        outcomes = connector.delete(keys, Deadline.after(timeout_s), versions) if doomed else []
        by_key = dict(zip(keys, outcomes, strict=True))
        yield from ((found, by_key.get(found.key)) for found in batch)


def _removal_text(outcome: Outcome | None) -> str:
    if outcome is None:
        return "no"
    if outcome.is_ok or outcome.status is Status.ABSENT:
        return "yes"
    return "changed since" if outcome.status is Status.CONFLICT else outcome.status.value


def _described(found: Finding, outcome: Outcome | None) -> dict[str, object]:
    return {
        "key": found.key,
        "fault": found.fault.value,
        "bytes": found.size_bytes,
        "detail": found.detail,
        "removal": None if outcome is None else outcome.status.value,
    }


def _totals(tally: Tally, counts: Counter[Fault]) -> dict[str, object]:
    return {
        "objects": tally.objects,
        "bytes": tally.size_bytes,
        "good": tally.good,
        "gone": tally.gone,
        "records": tally.records,
        **{fault.value: counts[fault] for fault in Fault},
    }


def _print(tally: Tally, counts: Counter[Fault], removed: int, out: Output) -> None:
    out.line(
        f"{count_text(tally.objects, 'object')}, {size_text(tally.size_bytes)}: {tally.good:,} good, "
        + ", ".join(f"{counts[fault]:,} {fault.value.replace('_', ' ')}" for fault in Fault)
    )
    if tally.gone:
        out.line(f"{count_text(tally.gone, 'object')} went or changed meanwhile")
    if removed:
        out.line(f"{count_text(removed, 'object')} removed")
