"""Backing up pages: store what the union of all known grids does not hold yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Outcome, Status, Write
from hicache_store.layout.names import page_prefix
from hicache_store.layout.parallel import elected_replica
from hicache_store.layout.plan import Placement
from hicache_store.limits import PLANNED_AT_ONCE
from hicache_store.store.binding import Binding
from hicache_store.store.candidates import Candidate
from hicache_store.store.context import StoreContext
from hicache_store.store.grids import Announcement
from hicache_store.store.lookup import presence
from hicache_store.store.reports import BackupReport, EndReason, PageState, page_state
from hicache_store.store.transfer import ChunkSource, TransferContext


@dataclass(slots=True)
class _Chunk:
    """One object to write for one page."""

    page: int
    candidate: Candidate
    key: str
    write: Write


_WORST_FIRST = (PageState.FAILED, PageState.TIMED_OUT, PageState.REFUSED, PageState.STORED)


def backup(
    context: StoreContext,
    binding: Binding,
    hashes: Sequence[str],
    placements: Sequence[Placement],
    deadline: Deadline,
    first_page: int = 0,
    *,
    elects: bool = True,
) -> BackupReport:
    """Store this rank's part of each page; see :class:`BackupReport`."""
    replicas, replica = binding.shard.replicas, binding.shard.replica
    states = [PageState.NOT_ELECTED] * len(hashes)
    mine = [i for i, h in enumerate(hashes) if not elects or elected_replica(h, replicas) == replica]
    if not mine:
        return BackupReport(tuple(states))
    refusal = _announce(context, binding, deadline)
    if refusal is not None:
        state, detail = refusal
        for i in mine:
            states[i] = state
        return BackupReport(tuple(states), detail=detail)
    context.learn_grids(binding)
    masks = presence(context, binding, [hashes[i] for i in mine], deadline, stop_at_gap=False, faults={})
    transfer = TransferContext(binding.buffers, context.staging, deadline, context.verify)
    chunks: list[_Chunk] = []
    for number, (i, mask) in enumerate(zip(mine, masks, strict=True)):
        if number % PLANNED_AT_ONCE == 0 and deadline.is_past:
            for late in mine[number:]:
                states[late] = PageState.TIMED_OUT
            break
        states[i] = PageState.PRESENT
        chunks.extend(
            _missing(context, binding, transfer, i, first_page + i, hashes[i], placements[i], mask, states)
        )
    outcomes = _write(context, chunks, deadline)
    report = _settle(context, chunks, outcomes, states)
    present = [(i, mask) for i, mask in zip(mine, masks, strict=True) if mask]
    context.touch(
        binding,
        [first_page + i for i, _ in present],
        [hashes[i] for i, _ in present],
        [mask for _, mask in present],
        deadline,
        has_grown=report.objects > 0,
    )
    return report


def _announce(context: StoreContext, binding: Binding, deadline: Deadline) -> tuple[PageState, str] | None:
    """Have the grid's marker in place before the first object; else the state of every page and why."""
    announced = context.directory.ensure(binding.grid, deadline)
    if announced is Announcement.CONFIRMED:
        return None
    if announced is Announcement.FULL:
        context.learn_grids(binding)
        if binding.use_announced(context.directory.grids):
            return None
        return PageState.REFUSED, "every grid marker slot is taken; free some with `hicache grids --retire`"
    if context.connector.capabilities.is_read_only:
        return PageState.REFUSED, "the store is read-only"
    state = PageState.TIMED_OUT if deadline.is_past else PageState.FAILED
    return state, "the grid's marker could not be put in place"


def _missing(
    context: StoreContext,
    binding: Binding,
    transfer: TransferContext,
    page: int,
    depth: int,
    page_hash: str,
    placement: Placement,
    mask: int,
    states: list[PageState],
) -> list[_Chunk]:
    """The objects of one page that have to be written."""
    chunks: list[_Chunk] = []
    held = binding.table.covered(mask, binding.write_chunks)
    if all(held):
        return chunks
    prefix = page_prefix(context.namespace, page_hash)
    for candidate, is_held in zip(binding.write_chunks, held, strict=True):
        if is_held:
            continue
        key = prefix + candidate.leaf
        bad = context.bad_object(key)
        if bad is not None and bad.reason is EndReason.UNKNOWN_VERSION:
            states[page] = PageState.REFUSED  # a later format's object is never overwritten
            continue
        plan = binding.table.piece_plan(candidate, candidate.box)
        source = ChunkSource(transfer, plan, key, placement)
        write = Write(key, candidate.object_bytes, source, depth, None if bad is None else bad.version)
        chunks.append(_Chunk(page, candidate, key, write))
    return chunks


def _write(context: StoreContext, chunks: Sequence[_Chunk], deadline: Deadline) -> list[Outcome]:
    """Write all chunks, those that met something else than expected once more.

    A create-only write that met an object of another length replaces that one. A replacement whose
    version is gone met what somebody else has put there since: it becomes a create-only write.
    """
    if not chunks:
        return []
    outcomes = context.connector.write_from([chunk.write for chunk in chunks], deadline)
    again: list[int] = []
    writes: list[Write] = []
    for i, (chunk, outcome) in enumerate(zip(chunks, outcomes, strict=True)):
        replaced = chunk.write.replace
        if outcome.status is not Status.CONFLICT or (replaced is None and outcome.version is None):
            continue
        if replaced is not None:
            context.bad.discard(chunk.key)
        again.append(i)
        writes.append(chunk.write._replace(replace=outcome.version if replaced is None else None))
    if writes:
        for i, outcome in zip(again, context.connector.write_from(writes, deadline), strict=True):
            outcomes[i] = outcome
    return outcomes


def _settle(
    context: StoreContext,
    chunks: Sequence[_Chunk],
    outcomes: Sequence[Outcome],
    states: list[PageState],
) -> BackupReport:
    """Turn outcomes of objects into states of pages: the worst object decides."""
    written = objects = 0
    detail = ""
    for chunk, outcome in zip(chunks, outcomes, strict=True):
        state = page_state(outcome)
        if outcome.status is Status.EXISTS and context.bad_object(chunk.key) is not None:
            state = PageState.FAILED  # what exists is known to be bad and could not be replaced
        if outcome.status is Status.OK:
            objects += 1
            written += chunk.candidate.object_bytes
            context.bad.discard(chunk.key)
        elif not outcome.is_ok:
            detail = detail or f"{outcome.status.value}: {outcome.detail}"
            context.metrics.add(f"backup.{state.value}")
        current = states[chunk.page]
        if current is PageState.PRESENT or _WORST_FIRST.index(state) < _WORST_FIRST.index(current):
            states[chunk.page] = state
    context.metrics.add_many(
        {"backup.pages": len(states), "backup.objects": objects, "backup.bytes": written}
    )
    return BackupReport(tuple(states), objects, written, detail)
