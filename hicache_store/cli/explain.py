"""What a store holds of some pages, under whatever namespace, and in what two namespaces differ."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hicache_store.cli.listing import known_namespaces, object_name, walk
from hicache_store.cli.output import Progress, count_text
from hicache_store.cli.records import ManifestRead, read_grids, read_manifest
from hicache_store.cli.scrub import Finding, Scrub
from hicache_store.clock import Deadline
from hicache_store.connectors.base import Connector, Entry, Lister
from hicache_store.layout.box import Box, Span, cover
from hicache_store.layout.grid import Grid
from hicache_store.layout.model import MAIN_POOL, Pool
from hicache_store.layout.names import FORMAT, ObjectName, page_prefix
from hicache_store.layout.recover import main_pool
from hicache_store.limits import (
    EXPLAIN_ENTRIES_MAX,
    EXPLAIN_LISTS_MAX,
    LISTING_NAMESPACES_MAX,
)

PAGE_DIGITS_MIN = 16
"""Shorter starts of a hash could name several pages of a large store."""
_DIGITS = 64


class State(enum.StrEnum):
    """What a namespace holds of a page's main pool."""

    WHOLE = "whole"
    PARTIAL = "partial"
    DAMAGED = "damaged"
    UNANNOUNCED = "unannounced"
    """Whole, by objects of a grid that no marker tells: only ranks cut like its writer find them."""
    UNJUDGED = "unjudged"
    """There are objects, and no manifest says how many heads and layers a whole page has."""
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Holding:
    """One page under one namespace. ``missing`` are the boxes that no good object has."""

    state: State
    objects: int = 0
    other_pools: tuple[str, ...] = ()
    missing: tuple[Box, ...] = ()
    unannounced: tuple[str, ...] = ()
    faults: tuple[Finding, ...] = ()


@dataclass(slots=True)
class Gathered:
    """The objects of the pages that were asked for, by page as it was given and by namespace.

    ``walked`` counts what was looked at; ``stopped`` says why not everything was.
    """

    namespaces: set[str]
    entries: dict[str, dict[str, list[tuple[Entry, ObjectName]]]] = field(default_factory=dict)
    walked: int = 0
    stopped: str = ""

    def holders(self) -> Counter[str]:
        """Of how many pages each namespace holds anything."""
        return Counter(namespace for spaces in self.entries.values() for namespace in spaces)


def gather(
    connector: Connector, pages: Sequence[str], objects_max: int, timeout_s: float, progress: Progress
) -> Gathered:
    """Find the objects of ``pages``, whole hashes or starts of them, under every namespace."""
    found = Gathered(set(known_namespaces(connector)))
    by_start = {page[:PAGE_DIGITS_MIN]: page for page in pages}
    listed = _listed(connector, sorted(found.namespaces), pages, timeout_s)
    kept = 0
    for entry in walk(connector, f"{FORMAT}/") if listed is None else listed:
        if found.walked >= objects_max:
            found.stopped = f"the walk ended after {found.walked:,} objects; --limit sets how many"
            break
        found.walked += 1
        progress.advance(1, count_text(found.walked, "object"))
        name = object_name(entry)
        if name is None:
            continue
        if len(found.namespaces) < LISTING_NAMESPACES_MAX:  # also those whose records are gone
            found.namespaces.add(name.namespace)
        page = by_start.get(name.page_hash[:PAGE_DIGITS_MIN])
        if page is None or not name.page_hash.startswith(page):
            continue
        if kept >= EXPLAIN_ENTRIES_MAX:
            found.stopped = f"{kept:,} objects of these pages were looked at, and there are more"
            break
        kept += 1
        found.entries.setdefault(page, {}).setdefault(name.namespace, []).append((entry, name))
    return found


def _listed(
    connector: Connector, namespaces: Sequence[str], pages: Sequence[str], timeout_s: float
) -> list[Entry] | None:
    """The pages' objects by a list each, ``None`` where the storage or the hashes do not allow it."""
    if not isinstance(connector, Lister) or any(len(page) < _DIGITS for page in pages):
        return None
    if not 0 < len(namespaces) * len(pages) <= EXPLAIN_LISTS_MAX:
        return None
    keys: list[str] = []
    for prefix in (page_prefix(namespace, page) for namespace in namespaces for page in pages):
        found = connector.listing(prefix, Deadline.after(timeout_s))
        if found is None:
            return None
        keys += found
    sizes = connector.sizes(keys, Deadline.after(timeout_s))
    return [Entry(key, size, 0.0) for key, size in zip(keys, sizes, strict=True) if size is not None]


class Judge:
    """Tells what a namespace holds of a page, from its manifest, its markers and the bytes themselves."""

    def __init__(self, connector: Connector, timeout_s: float) -> None:
        self._connector = connector
        self._timeout_s = timeout_s
        self._scrub = Scrub(connector, timeout_s)
        self._manifests: dict[str, ManifestRead] = {}
        self._grids: dict[str, list[Grid]] = {}

    def manifest(self, namespace: str) -> ManifestRead:
        """The namespace's own record."""
        if namespace not in self._manifests:
            deadline = Deadline.after(self._timeout_s)
            self._manifests[namespace] = read_manifest(self._connector, namespace, deadline)
        return self._manifests[namespace]

    def holding(self, namespace: str, entries: Sequence[tuple[Entry, ObjectName]]) -> Holding:
        """What ``entries``, all of one page under ``namespace``, amount to."""
        others = tuple(sorted({name.pool for _, name in entries if name.pool != MAIN_POOL}))
        objects = sorted(
            ((entry, name) for entry, name in entries if name.pool == MAIN_POOL), key=lambda one: one[1]
        )
        if not objects:
            return Holding(State.ABSENT, other_pools=others)
        faults = tuple(self._scrub.run(entry for entry, _ in objects))
        record = self.manifest(namespace).record
        pool = None if record is None else main_pool(record)
        if pool is None:
            return Holding(State.UNJUDGED, len(objects), others, faults=faults)
        bad = {finding.key for finding in faults}
        boxes = [(_box(name, pool), entry.key not in bad) for entry, name in objects]
        good = [box for box, is_good in boxes if is_good]
        told = [box for box in good if self._is_announced(namespace, box)]
        missing = cover(pool.page_box, enumerate(good)).missing
        if cover(pool.page_box, enumerate(told)).is_complete:
            state = State.WHOLE
        elif not missing:
            state = State.UNANNOUNCED
        else:
            state = State.DAMAGED if faults else State.PARTIAL
        untold = tuple(
            name.leaf for _, name in objects if not self._is_announced(namespace, _box(name, pool))
        )
        return Holding(state, len(objects), others, missing, untold, faults)

    def _is_announced(self, namespace: str, box: Box) -> bool:
        if namespace not in self._grids:
            slots = read_grids(self._connector, namespace, Deadline.after(self._timeout_s))
            self._grids[namespace] = [slot.grid for slot in slots if slot.grid is not None]
        return any(_has_chunk(grid, box) for grid in self._grids[namespace] if grid.pool == MAIN_POOL)


def _box(name: ObjectName, pool: Pool) -> Box:
    return Box(name.heads, name.layers, name.tokens or Span(0, pool.page_size))


def _has_chunk(grid: Grid, box: Box) -> bool:
    heads, layers = (box.heads.start, box.heads.stop), (box.layers.start, box.layers.stop)
    return heads in pairwise(grid.head_cuts) and layers in pairwise(grid.layer_cuts)


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of two namespaces' records that is not the same: its values, empty where one lacks it."""

    field: str
    one: tuple[Any, ...]
    other: tuple[Any, ...]


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """Every field in which two records differ, by its dotted path."""
    mine, theirs = dict(_fields(one)), dict(_fields(other))
    found = (Difference(path, mine.get(path, ()), theirs.get(path, ())) for path in sorted({*mine, *theirs}))
    return [field for field in found if field.one != field.other]


def _fields(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, tuple[Any]]]:
    for key, inner in value.items():
        here = f"{path}.{key}" if path else key
        if isinstance(inner, Mapping) and inner:
            yield from _fields(inner, here)
        else:
            yield here, (inner,)


def leading(states: Iterable[State]) -> int:
    """How many pages of a chain are whole before the first that is not."""
    count = 0
    for state in states:
        if state is not State.WHOLE:
            break
        count += 1
    return count
