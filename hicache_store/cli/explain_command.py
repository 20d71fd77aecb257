"""``hicache explain``: why a prefix misses."""

from __future__ import annotations

import hashlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hicache_store.cli.explain import (
    PAGE_DIGITS_MIN,
    Difference,
    Gathered,
    Holding,
    Judge,
    State,
    differences,
    gather,
    leading,
)
from hicache_store.cli.listing import the_namespace
from hicache_store.cli.masking import masked
from hicache_store.cli.opening import opened, storage_faults, warn_of_faults
from hicache_store.cli.output import Column, Output, count_text
from hicache_store.connectors.base import Connector
from hicache_store.errors import ConfigurationError, IdentityError
from hicache_store.layout.box import Box
from hicache_store.layout.canonical import canonical_json
from hicache_store.limits import EXPLAIN_PAGES_MAX, METADATA_MAX_BYTES

_COLUMNS = (
    Column("page"),
    Column("namespace"),
    Column("state"),
    Column("objects", is_number=True),
    Column("why"),
)
_PARTS: Final = ("kv", "model", "tenant", "weights")
_COMPARED_MAX: Final = 16
"""Namespaces that are compared with one; whoever has more gives --like."""
_VALUE_LETTERS: Final = 60
_NAMED_MAX: Final = 3
"""Boxes and keys that a row names; --json has all of them."""


@dataclass(frozen=True, slots=True)
class Asker:
    """The namespace that misses: its digest, and its record where it was given rather than stored."""

    digest: str
    record: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """All there is to say."""

    pages: Sequence[str]
    asker: Asker | None
    found: Gathered
    holdings: Mapping[str, Mapping[str, Holding]]
    """By page and namespace; what is not here is absent."""
    compared: Sequence[tuple[str, str, list[Difference] | str]]
    """Pairs of namespaces, with how they differ or why that cannot be told."""

    def rows(self, page: str) -> list[tuple[str, Holding]]:
        """The namespaces to name for a page: the asker, and whoever holds anything of it."""
        first = [] if self.asker is None else [self.asker.digest]
        names = [*first, *(one for one in sorted(self.holdings.get(page, {})) if one not in first)]
        return [(name, self.holding(page, name)) for name in names]

    def holding(self, page: str, namespace: str) -> Holding:
        """What a namespace holds of a page."""
        return self.holdings.get(page, {}).get(namespace, Holding(State.ABSENT))

    def leading(self) -> dict[str, int]:
        """Whole pages in front of the first that is not, for each namespace that holds any and the asker."""
        names = {name for page in self.pages for name, _ in self.rows(page)}
        return {
            name: leading(self.holding(page, name).state for page in self.pages) for name in sorted(names)
        }


def run(args: Namespace, out: Output) -> int:
    """Gather, judge, compare; exit code 1 where a page is damaged or not everything was looked at."""
    pages = _pages(args.page)
    with opened(args.url) as connector:
        asker = None if args.like is None else _asker(args.like, connector)
        with out.progress("looking") as progress:
            found = gather(connector, pages, args.limit, args.timeout, progress)
        judge = Judge(connector, args.timeout)
        holdings = {
            page: {one: judge.holding(one, entries) for one, entries in spaces.items()}
            for page, spaces in found.entries.items()
        }
        said = Explanation(pages, asker, found, holdings, _compared(asker, found, judge))
        faults = storage_faults(connector)
        out.document(_document(masked(args.url), said, judge, faults))
        _print(said, out)
        warn_of_faults(connector, out)
    if found.stopped:
        out.note(f"{found.stopped}, so what is told to be absent may be there")
    is_damaged = any(one.faults for spaces in holdings.values() for one in spaces.values())
    return 1 if is_damaged or found.stopped or faults else 0


def _pages(given: Sequence[str] | None) -> list[str]:
    """Page hashes of the arguments, else of stdin, each once and in order."""
    if given is None and sys.stdin.isatty():
        raise ConfigurationError("give --page HASH, or hashes on stdin; `hicache ls --pages` lists them")
    # Read in bounded bites: a pipe may be endless.
    letters = (EXPLAIN_PAGES_MAX + 1) * 80
    words = sys.stdin.read(letters).split() if given is None else given
    pages = list(dict.fromkeys(word.lower() for word in words))
    if not pages or len(pages) > EXPLAIN_PAGES_MAX:
        raise ConfigurationError(f"{len(pages)} pages are given; give 1 to {EXPLAIN_PAGES_MAX}")
    for page in pages:
        if not (PAGE_DIGITS_MIN <= len(page) <= 64 and set(page) <= set("0123456789abcdef")):
            raise ConfigurationError(
                f"{page[:80]!r} is no page hash; give {PAGE_DIGITS_MIN} to 64 hex digits of each"
            )
    return pages


def _asker(like: str, connector: Connector) -> Asker:
    """The namespace of ``--like``: a digest or the start of one, or a file that holds its record."""
    path = Path(like)
    if not path.is_file():
        if set(like.lower()) <= set("0123456789abcdef") and len(like) <= 64:
            return Asker(the_namespace(connector, like.lower()))
        raise ConfigurationError(f"--like {like!r} is no file and no digest of a namespace")
    with path.open("rb") as file:
        raw = file.read(METADATA_MAX_BYTES + 1)
    if len(raw) > METADATA_MAX_BYTES:
        raise ConfigurationError(f"{like} is longer than any manifest, {METADATA_MAX_BYTES} bytes")
    try:
        # As the canonical form spells numbers beyond 2**53.
        record = json.loads(raw, parse_int=lambda text: int(float(text)))
    except ValueError as error:
        raise ConfigurationError(f"{like} is not JSON: {error}") from error
    if isinstance(record, dict) and isinstance(record.get("manifest"), dict):
        record = record["manifest"]  # one namespace of `hicache stat --json`
    if not isinstance(record, dict) or not set(_PARTS) <= set(record):
        raise ConfigurationError(f"{like} is no manifest: it needs {', '.join(_PARTS)}")
    try:
        digest = hashlib.sha256(canonical_json(record, "manifest")).hexdigest()
    except IdentityError as error:
        raise ConfigurationError(f"{like} is no manifest: {error}") from error
    return Asker(digest, record)


def _compared(
    asker: Asker | None, found: Gathered, judge: Judge
) -> list[tuple[str, str, list[Difference] | str]]:
    """The asker beside whoever holds pages, or else every namespace beside the one that holds most."""
    holders = [one for one, _ in found.holders().most_common()]
    if asker is not None:
        pairs = [(asker.digest, one) for one in holders if one != asker.digest]
    else:
        pairs = [(one, holders[0]) for one in sorted(found.namespaces) if holders and one != holders[0]]
    return [(one, other, _difference(one, other, asker, judge)) for one, other in pairs[:_COMPARED_MAX]]


def _difference(one: str, other: str, asker: Asker | None, judge: Judge) -> list[Difference] | str:
    records = []
    for digest in (one, other):
        if asker is not None and digest == asker.digest and asker.record is not None:
            records.append(asker.record)
            continue
        manifest = judge.manifest(digest)
        if manifest.record is None:
            return f"the manifest of {digest} is {manifest.detail}"
        records.append(manifest.record)
    return differences(*records)


def _print(said: Explanation, out: Output) -> None:
    with out.table(_COLUMNS) as row:
        for page in said.pages:
            rows = said.rows(page)
            for namespace, holding in rows:
                is_elsewhere = any(one.objects for name, one in rows if name != namespace)
                why = _why(holding, is_elsewhere)
                row(out.digest(page), out.digest(namespace), holding.state.value, holding.objects, why)
            if not rows:
                spaces = count_text(len(said.found.namespaces), "namespace")
                row(out.digest(page), "", State.ABSENT.value, 0, f"no object of this page in {spaces}")
    for one, other, found in said.compared:
        _print_difference(one, other, found, out)
    if len(said.pages) > 1:
        out.line()
        for namespace, count in said.leading().items():
            out.line(
                f"{out.digest(namespace)}: {count:,} of {count_text(len(said.pages), 'page')} "
                "before the first that is not whole"
            )


def _print_difference(one: str, other: str, found: list[Difference] | str, out: Output) -> None:
    out.line()
    if isinstance(found, str):
        out.line(f"{out.digest(one)} and {out.digest(other)} cannot be compared: {found}")
        return
    columns = (Column("field"), Column(out.digest(one)), Column(out.digest(other)))
    with out.table(columns, f"{out.digest(one)} is another namespace than {out.digest(other)} by") as row:
        for field in found:
            row(field.field, _value(field.one), _value(field.other))


def _value(values: Sequence[object]) -> str:
    text = ", ".join(json.dumps(value, ensure_ascii=False) for value in values) or "(no such field)"
    return text if len(text) <= _VALUE_LETTERS else f"{text[: _VALUE_LETTERS - 3]}..."


def _why(holding: Holding, is_elsewhere: bool) -> str:
    others = f"; pools {', '.join(holding.other_pools)} are there" if holding.other_pools else ""
    bad = _some(f"{one.fault.value} {one.key.rpartition('/')[2]}" for one in holding.faults)
    match holding.state:
        case State.WHOLE:
            text = f"also {bad}" if bad else "a look-up finds it"
        case State.PARTIAL:
            text = f"no object of {_some(map(_box_text, holding.missing))}"
        case State.DAMAGED:
            text = f"{bad}; `hicache verify --repair` removes it"
        case State.UNANNOUNCED:
            text = f"no marker tells of the grid of {_some(holding.unannounced)}; its next writer will"
        case State.UNJUDGED:
            text = "its manifest is absent or damaged, so a whole page is not known"
        case _:
            text = "another namespace holds it" if is_elsewhere else "no object of this page"
    return text + others


def _some(texts: Iterable[str]) -> str:
    named = list(texts)
    more = len(named) - _NAMED_MAX
    return ", ".join(named[:_NAMED_MAX]) + (f" and {more:,} more" if more > 0 else "")


def _box_text(box: Box) -> str:
    return f"heads {box.heads.start}-{box.heads.stop} x layers {box.layers.start}-{box.layers.stop}"


def _document(url: str, said: Explanation, judge: Judge, faults: Mapping[str, int]) -> dict[str, object]:
    return {
        "url": url,
        "like": None if said.asker is None else said.asker.digest,
        "objects_looked_at": said.found.walked,
        "stopped": said.found.stopped or None,
        "namespaces": [
            {"namespace": one, "manifest_fault": judge.manifest(one).detail or None}
            for one in sorted(said.found.namespaces)
        ],
        "pages": [
            {"page": page, "namespaces": [_held(name, holding) for name, holding in said.rows(page)]}
            for page in said.pages
        ],
        "leading_pages": said.leading(),
        "differences": [
            {
                "namespace": one,
                "other": other,
                "fault": found if isinstance(found, str) else None,
                "fields": [] if isinstance(found, str) else [_field(one) for one in found],
            }
            for one, other, found in said.compared
        ],
        "storage_faults": dict(faults),
    }


def _field(found: Difference) -> dict[str, object]:
    """A value is left out where its side lacks the field: ``null`` is a value."""
    named = {"value": found.one, "other": found.other}
    return {"field": found.field, **{side: values[0] for side, values in named.items() if values}}


def _held(namespace: str, holding: Holding) -> dict[str, object]:
    return {
        "namespace": namespace,
        "state": holding.state.value,
        "objects": holding.objects,
        "other_pools": list(holding.other_pools),
        "missing": [
            {
                "heads": [box.heads.start, box.heads.stop],
                "layers": [box.layers.start, box.layers.stop],
            }
            for box in holding.missing
        ],
        "unannounced": list(holding.unannounced),
        "faults": [
            {"key": one.key, "fault": one.fault.value, "detail": one.detail} for one in holding.faults
        ],
    }
