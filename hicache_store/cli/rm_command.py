"""``hicache rm``: remove what was chosen, after saying what that is."""

from __future__ import annotations

import time
from argparse import Namespace
from collections import Counter
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

from hicache_store.cli.listing import batched, objects, the_namespace, walk
from hicache_store.cli.masking import masked
from hicache_store.cli.opening import opened, storage_faults, warn_of_faults
from hicache_store.cli.output import Output, count_text, size_text
from hicache_store.clock import Deadline
from hicache_store.connectors.base import Connector, Entry, Status
from hicache_store.errors import ConfigurationError
from hicache_store.layout.names import META_PREFIX
from hicache_store.limits import REMOVE_BATCH

_PAGE_DIGITS_MIN = 16
"""Shorter starts of a hash could name several pages of a large store."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is to go. ``used_before_s`` is wall time."""

    namespace: str | None
    page: str | None
    used_before_s: float | None

    @property
    def is_whole_namespace(self) -> bool:
        """Whether manifest and markers are to go too, once nothing else is left."""
        return self.namespace is not None and self.page is None and self.used_before_s is None

    def entries(self, connector: Connector) -> Generator[Entry, None, None]:
        """The chosen objects."""
        for entry, name in objects(connector, self.namespace or ""):
            is_page = self.page is None or name.page_hash.startswith(self.page)
            if is_page and (self.used_before_s is None or entry.last_used_s < self.used_before_s):
                yield entry


def run(args: Namespace, out: Output) -> int:
    """Count, ask, remove; exit code 1 when something that should go is still there."""
    if args.page is not None and not (
        _PAGE_DIGITS_MIN <= len(args.page) <= 64 and set(args.page.lower()) <= set("0123456789abcdef")
    ):
        raise ConfigurationError(
            f"--page {args.page!r} is not accepted; give {_PAGE_DIGITS_MIN} to 64 hex digits of the hash"
        )
    if args.namespace is None and args.page is None and args.older_than is None:
        raise ConfigurationError("give --namespace, --page or --older-than to say what should go")
    with opened(args.url, changes=not args.dry_run) as connector:
        choice = Choice(
            None if args.namespace is None else the_namespace(connector, args.namespace),
            None if args.page is None else args.page.lower(),
            None if args.older_than is None else time.time() - args.older_than,
        )
        records = _records(connector, choice)
        what = _count(connector, choice, out)
        if args.dry_run:
            out.document({"url": masked(args.url), "dry_run": True, **what, "records": len(records)})
            out.line(f"would remove {_words(what, len(records))}")
            return 0
        if not (what["objects"] or records):
            out.document(
                {"url": masked(args.url), "removed": {"objects": 0, "bytes": 0, "records": 0}, "kept": {}}
            )
            out.line("nothing to remove")
            return 0
        question = f"Remove {_words(what, len(records))}?"
        if not out.confirm(question, is_agreed=args.yes):
            out.note("nothing was removed")
            return 1
        code = _remove(connector, choice, args, what["objects"], out)
        warn_of_faults(connector, out)
    return code


def _words(what: dict[str, int], records: int) -> str:
    text = f"{count_text(what['objects'], 'object')}, {size_text(what['bytes'])}"
    return text + (f", and the namespace's {count_text(records, 'record')}" if records else "")


def _records(connector: Connector, choice: Choice) -> list[Entry]:
    """Manifest and markers that go with a whole namespace: one and at most 64."""
    if not choice.is_whole_namespace:
        return []
    return list(walk(connector, f"{META_PREFIX}/{choice.namespace}/"))


def _count(connector: Connector, choice: Choice, out: Output) -> dict[str, int]:
    count = size_bytes = 0
    with out.progress("counting") as progress:
        for entry in choice.entries(connector):
            count += 1
            size_bytes += entry.size_bytes
            progress.advance(1, f"{count_text(count, 'object')}, {size_text(size_bytes)}")
    return {"objects": count, "bytes": size_bytes}


def _remove(connector: Connector, choice: Choice, args: Namespace, total: int, out: Output) -> int:
    removed = {"objects": 0, "bytes": 0, "records": 0}
    kept: Counter[str] = Counter()
    why: dict[str, str] = {}
    with out.progress("removing", total) as progress:
        for batch in batched(choice.entries(connector), REMOVE_BATCH):
            # By age, only what nobody has used since: a use changes the version.
            versions = [entry.version for entry in batch] if choice.used_before_s is not None else None
            keys = [entry.key for entry in batch]
            outcomes = connector.delete(keys, Deadline.after(args.timeout), versions)
            for entry, outcome in zip(batch, outcomes, strict=True):
                if outcome.is_ok:
                    removed["objects"] += 1
                    removed["bytes"] += entry.size_bytes
                elif outcome.status is not Status.ABSENT:
                    kept[outcome.status.value] += 1
                    why.setdefault(outcome.status.value, outcome.detail)
            progress.advance(len(batch), f"{count_text(removed['objects'], 'object')}")
    if choice.is_whole_namespace:
        removed["records"] = _remove_records(connector, choice, args.timeout, kept)
    out.document({"url": masked(args.url), "removed": removed, "kept": dict(kept)})
    out.line(f"removed {_words(removed, removed['records'])}")
    if kept:
        reasons = {status: f" ({why[status]})" if why.get(status) else "" for status in kept}
        texts = (f"{number} {status}{reasons[status]}" for status, number in sorted(kept.items()))
        out.note(f"kept: {', '.join(texts)}")
    return 1 if set(kept) - {Status.CONFLICT.value} else 0


def _remove_records(connector: Connector, choice: Choice, timeout_s: float, kept: Counter[str]) -> int:
    """Remove manifest and markers, unless an object is left that they tell of."""
    with closing(choice.entries(connector)) as left:
        is_left = next(left, None) is not None
    if is_left or kept or storage_faults(connector):
        kept["records_of_what_is_left"] += len(_records(connector, choice))
        return 0
    keys = [entry.key for entry in _records(connector, choice)]
    outcomes = connector.delete(keys, Deadline.after(timeout_s))
    for outcome in outcomes:
        if not outcome.is_ok and outcome.status is not Status.ABSENT:
            kept[outcome.status.value] += 1
    return sum(outcome.is_ok for outcome in outcomes)
