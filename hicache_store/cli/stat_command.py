"""``hicache stat``: what is in a store, by namespace."""

from __future__ import annotations

import heapq
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache_store.cli.listing import known_namespaces, objects
from hicache_store.cli.masking import masked
from hicache_store.cli.opening import opened, storage_faults, warn_of_faults, warn_of_no_store
from hicache_store.cli.output import Output, age_span_text, count_text, size_text
from hicache_store.cli.records import ManifestRead, read_grids, read_manifest
from hicache_store.clock import Deadline
from hicache_store.config import parse_url
from hicache_store.connectors.base import Connector, Entry
from hicache_store.layout.names import ObjectName
from hicache_store.limits import LISTING_NAMESPACES_MAX, PAGE_SKETCH
from hicache_store.store.grids import Slot

_HASH_SPACE = 1 << 64


class PageCount:
    """Distinct page hashes: exact up to ``size``, then an estimate.

    Keeps the ``size`` smallest hashes. Hashes are uniform, so the largest of those kept tells how dense
    they lie: n distinct ones put the k-th smallest near k/n of the space (Bar-Yossef et al., 2002).
    """

    def __init__(self, size: int = PAGE_SKETCH) -> None:
        self._size = size
        self._kept: set[int] = set()
        self._largest_first: list[int] = []
        self.is_exact = True

    def add(self, page_hash: str) -> None:
        """Count a page, once."""
        value = int(page_hash[:16], 16)
        if value in self._kept or (not self.is_exact and value > -self._largest_first[0]):
            return
        self._kept.add(value)
        heapq.heappush(self._largest_first, -value)
        if len(self._kept) > self._size:
            self.is_exact = False
            self._kept.remove(-heapq.heappop(self._largest_first))

    @property
    def value(self) -> int:
        """The count, or the estimate of it."""
        if self.is_exact:
            return len(self._kept)
        return round((self._size - 1) * _HASH_SPACE / (-self._largest_first[0] + 1))


@dataclass(slots=True)
class Usage:
    """Objects and when they were last used."""

    objects: int = 0
    size_bytes: int = 0
    oldest_s: float = float("inf")
    newest_s: float = 0.0

    def add(self, entry: Entry) -> None:
        """Count one object."""
        self.objects += 1
        self.size_bytes += entry.size_bytes
        self.oldest_s = min(self.oldest_s, entry.last_used_s)
        self.newest_s = max(self.newest_s, entry.last_used_s)


@dataclass(slots=True)
class NamespaceUsage:
    """What one namespace holds."""

    all: Usage = field(default_factory=Usage)
    pages: PageCount = field(default_factory=PageCount)
    pools: dict[str, Usage] = field(default_factory=dict)

    def add(self, entry: Entry, name: ObjectName) -> None:
        """Count one object."""
        self.all.add(entry)
        self.pages.add(name.page_hash)
        if len(self.pools) < LISTING_NAMESPACES_MAX:
            self.pools.setdefault(name.pool, Usage())
        if name.pool in self.pools:
            self.pools[name.pool].add(entry)


@dataclass(frozen=True, slots=True)
class Announced:
    """What stands beside the objects of a namespace."""

    manifest: ManifestRead
    slots: list[Slot]


def run(args: Namespace, out: Output) -> int:
    """Walk the store once, then read the records of each namespace."""
    with opened(args.url) as connector:
        usages = {digest: NamespaceUsage() for digest in known_namespaces(connector)}
        total, untold = Usage(), 0
        with out.progress("walking") as progress:
            for entry, name in objects(connector):
                total.add(entry)
                progress.advance(1, f"{total.objects:,} objects, {size_text(total.size_bytes)}")
                if name.namespace not in usages and len(usages) >= LISTING_NAMESPACES_MAX:
                    untold += 1
                    continue
                usages.setdefault(name.namespace, NamespaceUsage()).add(entry, name)
        announced = {digest: _announced(connector, digest, args.timeout) for digest in sorted(usages)}
        out.document(_document(masked(args.url), connector, usages, announced, total))
        _print(masked(args.url), connector, usages, announced, total, out)
        if untold:
            out.note(f"{count_text(untold, 'object')} of further namespaces are counted in the total only")
        warn_of_faults(connector, out)
        warn_of_no_store(args.url, out)
    return 0


def _announced(connector: Connector, digest: str, timeout_s: float) -> Announced:
    deadline = Deadline.after(timeout_s)
    return Announced(read_manifest(connector, digest, deadline), read_grids(connector, digest, deadline))


def _document(
    url: str,
    connector: Connector,
    usages: Mapping[str, NamespaceUsage],
    announced: Mapping[str, Announced],
    total: Usage,
) -> dict[str, object]:
    can = connector.capabilities
    return {
        "url": url,
        "options": dict(parse_url(url).query),
        "capabilities": {
            "scheme": can.scheme,
            "stop": can.stop,
            # What only a handle that may write finds out is left out: `hicache doctor` tells it.
            **(
                {}
                if can.is_read_only
                else {
                    "create_only": can.create_only,
                    "conditional_versions": can.conditional_versions,
                    "orders_eviction": can.orders_eviction,
                }
            ),
            "request_cost_bytes": can.request_cost_bytes,
        },
        "total": _usage(total),
        "namespaces": [
            {
                "namespace": digest,
                "manifest": one.manifest.record,
                "manifest_fault": one.manifest.detail or None,
                **_usage(usages[digest].all),
                "pages": usages[digest].pages.value,
                "pages_are_exact": usages[digest].pages.is_exact,
                "pools": [
                    {"pool": pool, **_usage(usage)} for pool, usage in sorted(usages[digest].pools.items())
                ],
                "grids": [
                    {
                        "slot": number,
                        "pool": slot.grid.pool,
                        "head_cuts": slot.grid.head_cuts,
                        "layer_cuts": slot.grid.layer_cuts,
                    }
                    for number, slot in enumerate(one.slots)
                    if slot.grid is not None
                ],
            }
            for digest, one in announced.items()
        ],
        "storage_faults": storage_faults(connector),
    }


def _usage(usage: Usage) -> dict[str, object]:
    """Counts, and how long ago the objects were used last: the longest and the shortest such time."""
    has_any, now_s = usage.objects > 0, time.time()
    return {
        "objects": usage.objects,
        "bytes": usage.size_bytes,
        "oldest_use_s": round(max(0.0, now_s - usage.oldest_s), 3) if has_any else None,
        "newest_use_s": round(max(0.0, now_s - usage.newest_s), 3) if has_any else None,
    }


def _print(
    url: str,
    connector: Connector,
    usages: Mapping[str, NamespaceUsage],
    announced: Mapping[str, Announced],
    total: Usage,
    out: Output,
) -> None:
    options = dict(parse_url(url).query)
    bounds = [f"{name} {options[name]}" for name in ("quota", "ttl") if name in options]
    head = f"{connector.capabilities.scheme} store: {count_text(len(usages), 'namespace')}"
    out.line(f"{head}, {_usage_text(total)}; {', '.join(bounds) or 'the URL gives no quota and no ttl'}")
    for digest, one in announced.items():
        usage = usages[digest]
        about = "" if usage.pages.is_exact else "about "
        out.line()
        out.line(f"namespace {digest}")
        for line in _manifest_lines(one.manifest):
            out.line(f"  {line}")
        pages = count_text(usage.pages.value, "page")
        out.line(f"  stored    {about}{pages}, {_usage_text(usage.all)}")
        if len(usage.pools) > 1:
            for pool, part in sorted(usage.pools.items()):
                out.line(f"  pool      {pool}: {_usage_text(part)}")
        for number, slot in enumerate(one.slots):
            if slot.grid is not None:
                out.line(f"  grid {number:<4} {grid_text(slot)}")
            elif not slot.is_free:
                out.line(f"  grid {number:<4} {'damaged' if slot.is_damaged else 'cannot be read'}")


def grid_text(slot: Slot) -> str:
    """The cuts of a marker in words."""
    assert slot.grid is not None
    heads = ",".join(map(str, slot.grid.head_cuts))
    layers = ",".join(map(str, slot.grid.layer_cuts))
    return f"{slot.grid.pool}: heads cut at {heads}, layers at {layers}"


def _usage_text(usage: Usage) -> str:
    text = f"{count_text(usage.objects, 'object')}, {size_text(usage.size_bytes)}"
    if usage.objects:
        text += f", used {age_span_text(usage.newest_s, usage.oldest_s)} ago"
    return text


def _manifest_lines(manifest: ManifestRead) -> list[str]:
    if manifest.record is None:
        return [f"manifest  {manifest.detail}"]
    record = manifest.record
    try:
        kv, model, weights = record["kv"], record["model"], record["weights"]
        parts = " + ".join(f"{name} {width}" for name, width in kv["parts"])
        source = " ".join(str(weights[key]) for key in ("kind", "repository", "value") if weights[key])
        name = model["model_type"] or ", ".join(model["architectures"])
        return [
            f"model     {name}, tenant {record['tenant']!r}",
            f"weights   {source}",
            f"kv        {kv['attention']}, {kv['num_layers']} layers x {kv['num_kv_heads']} heads "
            f"x ({parts}) {kv['dtype']}, pages of {kv['page_size']} tokens, {kv['chain']} chain",
        ]
    except (KeyError, TypeError, ValueError):
        return ["manifest  of a form this release does not know"]
