"""Which objects of which pages are there: batched questions, answered as bit masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from hicache_store.clock import Deadline
from hicache_store.layout.names import page_prefix
from hicache_store.limits import LOOKUP_FIRST_PAGES, LOOKUP_ROUNDS
from hicache_store.store.binding import Binding
from hicache_store.store.context import StoreContext
from hicache_store.store.reports import EndReason, LookupReport, PrefixEnd

Faults: TypeAlias = dict[str, tuple[EndReason, str]]
"""Page hash to the reason and the key of something that is there but does not count."""


def ask(
    context: StoreContext,
    binding: Binding,
    pages: Sequence[tuple[str, int]],
    deadline: Deadline,
    faults: Faults,
) -> list[int]:
    """For each (page hash, mask of candidates to ask for) the mask of those that are present.

    Present means of the right length and not known to be bad; what is there without being present
    is noted in ``faults``. One batched call for all of them.
    """
    keys: list[str] = []
    expected: list[int] = []
    owners: list[tuple[int, int]] = []
    chosen_of: dict[int, list[tuple[str, int, int]]] = {}
    for position, (page_hash, mask) in enumerate(pages):
        chosen = chosen_of.get(mask)
        if chosen is None:
            chosen = [(c.leaf, c.object_bytes, 1 << c.index) for c in binding.table.of_mask(mask)]
            chosen_of[mask] = chosen
        prefix = page_prefix(context.namespace, page_hash)
        for leaf, length, bit in chosen:
            keys.append(prefix + leaf)
            expected.append(length)
            owners.append((position, bit))
    masks = [0] * len(pages)
    if not keys:
        return masks
    has_bad = len(context.bad) > 0
    found = context.connector.sizes(keys, deadline)
    for key, size, wanted, (position, bit) in zip(keys, found, expected, owners, strict=True):
        if size is None:
            continue
        bad = context.bad_object(key) if has_bad else None
        if size == wanted and bad is None:
            masks[position] |= bit
            continue
        reason = EndReason.CORRUPT if bad is None else bad.reason
        faults.setdefault(pages[position][0], (reason, key))
        context.metrics.add(f"lookup.{reason.value}")
    return masks


def presence(
    context: StoreContext,
    binding: Binding,
    hashes: Sequence[str],
    deadline: Deadline,
    *,
    stop_at_gap: bool,
    faults: Faults,
    first: int = 0,
) -> list[int]:
    """Masks of what is stored of each page, grid after grid until a page is covered.

    With ``stop_at_gap`` pages behind the first uncovered one may be left unasked. ``first`` is a mask of
    candidates to ask for before the others.
    """
    table, wanted = binding.table, binding.table.whole
    order = table.probe_order()
    if first:
        order = [first, *(rest for mask in order if (rest := mask & ~first))]
    masks = ask(context, binding, [(h, order[0]) for h in hashes], deadline, faults)
    asked = [order[0]] * len(hashes)
    remaining = order[1:]
    while remaining:
        complete = {mask: table.cover(wanted, mask).is_complete for mask in set(masks)}
        todo = [i for i, mask in enumerate(masks) if not complete[mask]]
        todo = [i for i in todo if asked[i] & remaining[0] != remaining[0]]
        if not todo or deadline.is_past:
            break
        if stop_at_gap and not _first_completes(
            context, binding, hashes, masks, asked, todo[0], deadline, faults
        ):
            break
        batch = [(hashes[i], remaining[0]) for i in todo if asked[i] & remaining[0] != remaining[0]]
        places = [i for i in todo if asked[i] & remaining[0] != remaining[0]]
        for i, more in zip(places, ask(context, binding, batch, deadline, faults), strict=True):
            masks[i] |= more
            asked[i] |= remaining[0]
        remaining = remaining[1:]
    return masks


def _first_completes(
    context: StoreContext,
    binding: Binding,
    hashes: Sequence[str],
    masks: list[int],
    asked: list[int],
    page: int,
    deadline: Deadline,
    faults: Faults,
) -> bool:
    """Ask everything about the first uncovered page: if it stays uncovered the prefix ends there, and
    nothing behind it is worth a question."""
    everything = (1 << len(binding.table.candidates)) - 1
    (more,) = ask(context, binding, [(hashes[page], everything & ~asked[page])], deadline, faults)
    masks[page] |= more
    asked[page] = everything
    return binding.table.cover(binding.table.whole, masks[page]).is_complete


def leading(
    context: StoreContext, binding: Binding, hashes: Sequence[str], deadline: Deadline, faults: Faults
) -> list[int]:
    """Masks of the pages from the first on, at least up to the first that is not covered.

    One question where the storage takes keys in bulk. Where each key is a request, slices that double, so
    that a chain of n stored pages costs at most about 2 n requests and a missing one a handful; nothing
    is taken for stored unasked, since chains have holes. The cut that served a slice is asked for first in
    the next.
    """
    together = context.connector.capabilities.lookup_items
    if together == 0:
        return presence(context, binding, hashes, deadline, stop_at_gap=True, faults=faults)
    masks: list[int] = []
    number, first = LOOKUP_FIRST_PAGES, 0
    while len(masks) < len(hashes):
        part = hashes[len(masks) : len(masks) + number]
        found = presence(context, binding, part, deadline, stop_at_gap=True, faults=faults, first=first)
        masks += found
        if _leading(binding, found) < len(part):
            break
        first = binding.table.cover(binding.table.whole, found[-1]).mask
        number = max(1, min(2 * number, LOOKUP_ROUNDS * together // first.bit_count()))
    return masks


def contains(
    context: StoreContext,
    binding: Binding,
    hashes: Sequence[str],
    deadline: Deadline,
    max_age_s: float = 0.0,
) -> LookupReport:
    """How many leading pages are stored for this rank's box, under whatever grids.

    With ``max_age_s`` what was found so recently is not asked for again.
    """
    if max_age_s <= 0.0:
        return _contains(context, binding, hashes, deadline)
    pool, now = binding.pool.name, context.clock.monotonic()
    known, has_ended = context.recent.known(pool, hashes, now - max_age_s)
    if has_ended or known == len(hashes):
        context.metrics.add_many({"contains.pages": len(hashes), "contains.hits": known})
        return LookupReport(known, PrefixEnd(known, EndReason.ABSENT) if has_ended else None)
    report = _contains(context, binding, hashes[known:], deadline)
    context.metrics.add_many({"contains.pages": known, "contains.hits": known})
    if report.end is None or report.end.reason is EndReason.ABSENT:
        context.recent.remember(pool, hashes[known:], report.pages, now)
    end = None if report.end is None else replace(report.end, page=report.end.page + known)
    return LookupReport(known + report.pages, end)


def _contains(
    context: StoreContext, binding: Binding, hashes: Sequence[str], deadline: Deadline
) -> LookupReport:
    context.learn_grids(binding)
    faults: Faults = {}
    masks = leading(context, binding, hashes, deadline, faults)
    pages = _leading(binding, masks)
    if pages < len(hashes) and context.directory.refresh(deadline) and context.learn_grids(binding):
        masks = [*masks[:pages], *leading(context, binding, hashes[pages:], deadline, faults)]
        pages = _leading(binding, masks)
    binding.hints.set_many(list(zip(hashes[:pages], masks[:pages], strict=True)))
    context.metrics.add_many({"contains.pages": len(hashes), "contains.hits": pages})
    if pages == len(hashes):
        return LookupReport(pages, None)
    unknown = EndReason.TIMED_OUT if deadline.is_past else EndReason.ABSENT
    end = PrefixEnd(pages, *faults.get(hashes[pages], (unknown, "")))
    return LookupReport(pages, end)


def stored(
    context: StoreContext, binding: Binding, hashes: Sequence[str], deadline: Deadline
) -> tuple[bool, ...]:
    """For each page whether it is stored for this rank's box, whatever is missing before it."""
    context.learn_grids(binding)
    masks = presence(context, binding, hashes, deadline, stop_at_gap=False, faults={})
    held = tuple(binding.table.cover(binding.table.whole, mask).is_complete for mask in masks)
    if not all(held) and context.directory.refresh(deadline) and context.learn_grids(binding):
        masks = presence(context, binding, hashes, deadline, stop_at_gap=False, faults={})
        held = tuple(binding.table.cover(binding.table.whole, mask).is_complete for mask in masks)
    return held


def _leading(binding: Binding, masks: Sequence[int]) -> int:
    table = binding.table
    complete = {mask: table.cover(table.whole, mask).is_complete for mask in set(masks)}
    return next((page for page, mask in enumerate(masks) if not complete[mask]), len(masks))
