"""Restoring a prefix: read optimistically, fall back to other objects, end at the first bad page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Read, Status
from hicache_store.layout.box import Box
from hicache_store.layout.names import page_prefix
from hicache_store.layout.plan import Placement
from hicache_store.limits import LOOKUP_FIRST_PAGES, LOOKUP_ROUNDS, PLANNED_AT_ONCE, RESTORE_ROUNDS
from hicache_store.store.binding import Binding
from hicache_store.store.candidates import Candidate, CoverPlan
from hicache_store.store.context import Refused, StoreContext
from hicache_store.store.lookup import Faults, ask
from hicache_store.store.reports import EndReason, PrefixEnd, RestoreReport, end_reason
from hicache_store.store.transfer import PiecePlan, PieceTarget, TransferContext


@dataclass(slots=True)
class _Page:
    """One page on its way: which boxes are still to be filled, and what went wrong so far."""

    index: int
    page_hash: str
    placement: Placement
    remaining: tuple[Box, ...]
    mask: int
    hint: int | None
    used: int = 0
    excluded: int = 0
    is_failed: bool = False
    """Whether the last round left something of the page unfilled."""
    end: PrefixEnd | None = None

    @property
    def is_done(self) -> bool:
        return not self.remaining

    def note(self, reason: EndReason, key: str, detail: str = "") -> None:
        """Remember why the page may end: the first fault that is more than an absence tells most."""
        if self.end is None or self.end.reason is EndReason.ABSENT:
            self.end = PrefixEnd(self.index, reason, key, detail)


@dataclass(slots=True)
class _Tally:
    objects: int = 0
    read_bytes: int = 0
    requests: int = 0


def restore(
    context: StoreContext,
    binding: Binding,
    hashes: Sequence[str],
    placements: Sequence[Placement],
    deadline: Deadline,
    prefix: Sequence[str] = (),
) -> RestoreReport:
    """Read, verify and place the leading pages that are stored; see :class:`RestoreReport`."""
    context.learn_grids(binding)
    table = binding.table
    count = min(len(hashes), len(placements))
    hints = binding.hints.get_many(hashes[:count])
    transfer = TransferContext(binding.buffers, context.staging, deadline, context.verify)
    tally, preferred = _Tally(), table.preferred_mask
    pages: list[_Page] = []
    for number in _slices(context.connector.capabilities.lookup_items, hints):
        part = [
            _Page(i, hashes[i], placements[i], table.whole, hints[i] or preferred, hints[i])
            for i in range(len(pages), len(pages) + number)
        ]
        pages += part
        _restore_slice(context, binding, transfer, part, tally)
        if not all(page.is_done for page in part):
            break
        preferred = part[-1].used
    usable = next((page.index for page in pages if not page.is_done), len(pages))
    _remember(context, binding, pages[:usable], prefix, deadline)
    end = None if usable == count else _end_of(pages[usable], deadline)
    if end is None and count < len(hashes):
        end = PrefixEnd(count, EndReason.NO_SLOT)
    if end is not None:
        context.metrics.add(f"miss.{end.reason.value}")
    context.metrics.add_many(
        {
            "restore.pages": len(hashes),
            "restore.hits": usable,
            "restore.bytes": tally.read_bytes,
            "restore.requests": tally.requests,
        }
    )
    return RestoreReport(usable, end, tally.objects, tally.read_bytes, tally.requests)


def _slices(together: int, hints: Sequence[int | None]) -> Iterator[int]:
    """How many pages to read at a time: all, unless each object is a request.

    Then what was lately found stored and a few more, and after them slices that double as those of
    look-ups do: a tail that is not there costs at most about as many requests as what is before it, and the
    cut that served a slice is read in the next.
    """
    left = len(hints)
    number, more = left, LOOKUP_FIRST_PAGES
    if together > 0:
        number = next((i for i, hint in enumerate(hints) if not hint), left) + more
    while left > 0:
        yield min(number, left)
        left -= number
        more = number = min(2 * more, LOOKUP_ROUNDS * together)


def _restore_slice(
    context: StoreContext, binding: Binding, transfer: TransferContext, pages: Sequence[_Page], tally: _Tally
) -> None:
    """Read the pages, and again from elsewhere what failed, up to the first that cannot be had."""
    limit = len(pages)
    for attempt in range(RESTORE_ROUNDS):
        pending = [page for page in pages[:limit] if not page.is_done]
        if not pending:
            break
        if attempt > 0:
            _look_again(context, binding, pending, transfer.deadline)
            limit = _first_hopeless(binding, pages, limit)
            pending = [page for page in pages[:limit] if not page.is_done]
        _read_round(context, binding, transfer, pending, tally)
        if transfer.deadline.is_past:
            break


class _Job(NamedTuple):
    """One piece of one page on its way in."""

    page: _Page
    candidate: Candidate
    plan: PiecePlan
    read: Read


def _read_round(
    context: StoreContext,
    binding: Binding,
    transfer: TransferContext,
    pending: Sequence[_Page],
    tally: _Tally,
) -> None:
    """Read every piece the pages' masks promise, all in one batch."""
    jobs = _plan_round(context, binding, transfer, pending)
    if not jobs:
        return
    outcomes = context.connector.read_into([job.read for job in jobs], transfer.deadline)
    failed: list[tuple[_Page, Refused]] = []
    for (page, candidate, piece, read), outcome in zip(jobs, outcomes, strict=True):
        if outcome.status is Status.OK:
            page.used |= 1 << candidate.index
            tally.objects += 1
            tally.read_bytes += piece.fetched_bytes
            tally.requests += piece.requests
            continue
        page.is_failed = True
        page.excluded |= 1 << candidate.index
        failed.append((page, Refused(read.key, outcome, piece.format)))
    _settle(context, failed, transfer.deadline)
    for page in pending:
        if not page.is_failed:
            page.remaining = ()
    is_any_bad = len(context.bad) > 0
    for (page, _, piece, read), outcome in zip(jobs, outcomes, strict=True):
        if outcome.status is not Status.OK:
            continue
        if page.is_failed:
            page.remaining = tuple(rest for hole in page.remaining for rest in hole.minus(piece.read.piece))
        if is_any_bad:
            context.bad.discard(read.key)  # somebody else has put it right


def _plan_round(
    context: StoreContext, binding: Binding, transfer: TransferContext, pending: Sequence[_Page]
) -> list[_Job]:
    """What to read for the pages, nothing once the deadline has passed; marks those it will not fill."""
    jobs: list[_Job] = []
    asked: tuple[tuple[Box, ...], int] | None = None
    plan = CoverPlan((), False, 0)
    for number, page in enumerate(pending):
        if number % PLANNED_AT_ONCE == 0 and transfer.deadline.is_past:
            return []
        prefix = page_prefix(context.namespace, page.page_hash)
        if asked is None or asked[0] is not page.remaining or asked[1] != page.mask:
            asked = page.remaining, page.mask  # pages of a chain mostly lie alike
            plan = binding.table.cover(*asked)
        page.is_failed = not plan.is_complete
        for candidate, piece in plan.pieces:
            key = prefix + candidate.leaf
            target = PieceTarget(transfer, piece, key, page.placement)
            read = Read(key, piece.object_bytes, target, piece.ranges)
            jobs.append(_Job(page, candidate, piece, read))
    return jobs


def _settle(context: StoreContext, failed: Sequence[tuple[_Page, Refused]], deadline: Deadline) -> None:
    """Deal with what was not read, and note for each page why."""
    if not failed:
        return
    sound = context.set_aside([refused for _, refused in failed], deadline)
    for page, (key, outcome, _) in failed:
        if key in sound:
            page.note(EndReason.FAILED, key, "the object is sound: its slot was written meanwhile")
        else:
            page.note(end_reason(outcome), key, outcome.detail)


def _look_again(
    context: StoreContext, binding: Binding, pending: Sequence[_Page], deadline: Deadline
) -> None:
    """Ask which objects could fill what is still missing, under newly announced grids too."""
    context.directory.refresh(deadline)
    context.learn_grids(binding)
    everything = (1 << len(binding.table.candidates)) - 1
    questions = [(page.page_hash, everything & ~page.excluded) for page in pending]
    faults: Faults = {}
    for page, mask in zip(pending, ask(context, binding, questions, deadline, faults), strict=True):
        page.mask = mask
        if page.page_hash in faults:
            page.note(*faults[page.page_hash])


def _first_hopeless(binding: Binding, pages: Sequence[_Page], limit: int) -> int:
    """How many pages precede the first that cannot be filled; at most ``limit``."""
    for number, page in enumerate(pages[:limit]):
        if not page.is_done and not binding.table.cover(page.remaining, page.mask).is_complete:
            return number
    return limit


def _end_of(page: _Page, deadline: Deadline) -> PrefixEnd:
    if page.end is not None and page.end.reason is not EndReason.ABSENT:
        return page.end
    if deadline.is_past:  # past it an absence was not looked into, or could not be told
        return PrefixEnd(page.index, EndReason.TIMED_OUT)
    return page.end or PrefixEnd(page.index, EndReason.ABSENT)


def _remember(
    context: StoreContext,
    binding: Binding,
    usable: Sequence[_Page],
    prefix: Sequence[str],
    deadline: Deadline,
) -> None:
    """Note which objects served, for the next request, and touch the chain."""
    if not usable:
        return
    binding.table.preferred_mask = usable[-1].used
    seen = [(page.page_hash, page.used) for page in usable if page.used != page.hint]
    binding.hints.set_many(seen)
    last = usable[-1].used
    hashes = [*prefix, *(page.page_hash for page in usable)]
    masks = [*(mask or last for mask in binding.hints.get_many(prefix)), *(page.used for page in usable)]
    context.touch(binding, range(len(hashes)), hashes, masks, deadline)
