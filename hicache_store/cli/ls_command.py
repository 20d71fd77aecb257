"""``hicache ls``: the objects of a store, or its pages."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from hicache_store.cli.listing import objects
from hicache_store.cli.masking import masked
from hicache_store.cli.opening import opened, warn_of_faults, warn_of_no_store
from hicache_store.cli.output import Column, Output, age_text, size_text
from hicache_store.connectors.base import Connector, Entry
from hicache_store.layout.names import ObjectName
from hicache_store.limits import LISTING_PAGES_MAX

_OBJECT_COLUMNS = (
    Column("size", is_number=True),
    Column("used", is_number=True),
    Column("namespace"),
    Column("page"),
    Column("object"),
)
_PAGE_COLUMNS = (
    Column("objects", is_number=True),
    Column("size", is_number=True),
    Column("used", is_number=True),
    Column("namespace"),
    Column("page"),
)


@dataclass(slots=True)
class Page:
    """The objects of one page, of all pools and grids."""

    objects: int = 0
    size_bytes: int = 0
    last_used_s: float = 0.0


PageKey = tuple[str, str]
"""Namespace and page hash."""


def run(args: Namespace, out: Output) -> int:
    """List what the namespace prefix selects."""
    with opened(args.url) as connector:
        prefix = args.namespace or ""
        if args.pages:
            _list_pages(connector, masked(args.url), prefix, out)
        else:
            _list_objects(connector, masked(args.url), prefix, out)
        warn_of_faults(connector, out)
        warn_of_no_store(args.url, out)
    return 0


def _list_objects(connector: Connector, url: str, prefix: str, out: Output) -> None:
    count = total = 0
    with out.table(_OBJECT_COLUMNS) as row, out.array({"url": url}, "objects") as items:
        for entry, name in _ordered(connector, prefix, out):
            count += 1
            total += entry.size_bytes
            age = age_text(entry.last_used_s)
            size = size_text(entry.size_bytes)
            row(size, age, out.namespace(name.namespace), out.digest(name.page_hash), name.leaf)
            items.add({"key": entry.key, **_described(name), **_used(entry.size_bytes, entry.last_used_s)})
        items.tail = {"count": count, "bytes": total}
    if not count:
        out.note("0 objects")


def _ordered(connector: Connector, prefix: str, out: Output) -> Iterator[tuple[Entry, ObjectName]]:
    """The objects by key; of more than fit in memory, those that the storage gives first by key, then the
    others as they come."""
    found = objects(connector, prefix)
    first = list(islice(found, LISTING_PAGES_MAX))
    more = next(found, None)
    yield from sorted(first, key=lambda pair: pair[0].key)
    if more is not None:
        out.note(f"more than {LISTING_PAGES_MAX:,} objects: these follow in the storage's own order")
        yield more
        yield from found


def _list_pages(connector: Connector, url: str, prefix: str, out: Output) -> None:
    count = total = 0
    with out.table(_PAGE_COLUMNS) as row, out.array({"url": url}, "pages") as items:
        for (namespace, page_hash), page in pages(connector, prefix):
            count += 1
            total += page.size_bytes
            size, age = size_text(page.size_bytes), age_text(page.last_used_s)
            row(page.objects, size, age, out.namespace(namespace), out.digest(page_hash))
            used = _used(page.size_bytes, page.last_used_s)
            items.add({"namespace": namespace, "page": page_hash, "objects": page.objects, **used})
        items.tail = {"count": count, "bytes": total}
    if not count:
        out.note("0 objects")


def _described(name: ObjectName) -> dict[str, object]:
    return {
        "namespace": name.namespace,
        "page": name.page_hash,
        "pool": name.pool,
        "heads": [name.heads.start, name.heads.stop],
        "layers": [name.layers.start, name.layers.stop],
    }


def _used(size_bytes: int, last_used_s: float) -> dict[str, object]:
    return {"bytes": size_bytes, "last_used_s": last_used_s}


def pages(
    connector: Connector, prefix: str = "", pages_max: int = LISTING_PAGES_MAX
) -> Iterator[tuple[PageKey, Page]]:
    """Every page, sorted. Objects of a page may lie anywhere in a store, so each walk gathers the next
    pages in order, at most twice ``pages_max``, and a store of more is walked again."""
    after: PageKey = ("", "")
    while True:
        found: dict[PageKey, Page] = {}
        last: PageKey | None = None
        for entry, name in objects(connector, prefix):
            key = (name.namespace, name.page_hash)
            if key <= after or (last is not None and key > last):
                continue
            page = found.setdefault(key, Page())
            page.objects += 1
            page.size_bytes += entry.size_bytes
            page.last_used_s = max(page.last_used_s, entry.last_used_s)
            if len(found) > 2 * pages_max:
                last = _keep_first(found, pages_max)
        yield from sorted(found.items())
        if last is None:
            return
        after = last


def _keep_first(found: dict[PageKey, Page], count: int) -> PageKey:
    """Forget all but the first ``count`` pages; returns the last that is kept."""
    ordered = sorted(found)
    for key in ordered[count:]:
        del found[key]
    return ordered[count - 1]
