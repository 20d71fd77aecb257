"""Reading everything and believing nothing: every object's trailer and every cell of it.

Objects are checked by the connector's workers, while their bytes are hot, in batches of at most
``SCRUB_BYTES``. Longer ones are read in runs of whole cells.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hicache_store.cli.listing import object_name
from hicache_store.cli.records import read_manifest, record_fault
from hicache_store.clock import Deadline
from hicache_store.connectors.base import (
    META_PREFIX,
    BufferTarget,
    Connector,
    Entry,
    Outcome,
    Part,
    Read,
    Status,
)
from hicache_store.errors import ConfigurationError
from hicache_store.layout.format import NameSeed, ObjectFormat, Verdict
from hicache_store.layout.model import Pool
from hicache_store.layout.names import ObjectName
from hicache_store.layout.recover import format_in_pool, formats_of_length, main_pool, recover
from hicache_store.limits import LISTING_NAMESPACES_MAX, SCRUB_BYTES, SCRUB_ITEMS
from hicache_store.store.bounded import BoundedDict


class Fault(enum.StrEnum):
    """What may be wrong with a key."""

    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    """A sound object under a name that is not its own."""
    UNKNOWN_VERSION = "unknown_version"
    """Written by a later release, or looking like it; never removed."""
    UNREADABLE = "unreadable"
    """The storage did not give its bytes in time, or at all."""
    DAMAGED_RECORD = "damaged_record"
    """A manifest or grid marker; writers replace it by themselves."""
    STRAY = "stray"
    """A key that is none of this package's names."""


_FAULT_OF_VERDICT = {verdict.value: Fault(verdict.value) for verdict in Verdict}


@dataclass(frozen=True, slots=True)
class Finding:
    """One key that is not what it should be; ``version`` is the one that was looked at."""

    key: str
    fault: Fault
    size_bytes: int
    detail: str = ""
    version: str | None = None

    @property
    def is_removable(self) -> bool:
        """Whether it is proven to be bad bytes, which are better not there."""
        return self.fault in (Fault.CORRUPT, Fault.FOREIGN)


@dataclass(slots=True)
class Tally:
    """What a scrub has looked at so far."""

    objects: int = 0
    records: int = 0
    size_bytes: int = 0
    good: int = 0
    gone: int = 0
    """Objects that were removed or replaced between listing and reading."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One object to read, and the formats it may have: one where the manifest tells."""

    entry: Entry
    name: ObjectName
    formats: Sequence[ObjectFormat]

    @property
    def tail_bytes(self) -> int:
        """Bytes from the end that hold any of its trailers."""
        return max(shape.trailer_bytes for shape in self.formats)

    def identify(self, tail: memoryview) -> tuple[ObjectFormat | None, Verdict | None]:
        """The format that the last bytes prove, and what is wrong with them."""
        if len(self.formats) > 1:
            found = recover(self.name, tail, self.formats)
            return found.format, found.verdict
        (shape,) = self.formats
        return shape, shape.check_trailer(NameSeed.of(self.entry.key), tail[-shape.trailer_bytes :])


class _Judge:
    """A read target that takes a whole object and checks all of it."""

    def __init__(self, job: _Job, view: memoryview) -> None:
        self._job = job
        self._view = view

    def parts(self) -> Sequence[Part]:
        """Everything."""
        return [(0, [self._view])]

    def check(self) -> str | None:
        """The verdict on trailer and cells."""
        shape, verdict = self._job.identify(self._view[-self._job.tail_bytes :])
        if verdict is None and shape is not None:
            payload, trailer = self._view[: shape.payload_bytes], self._view[shape.payload_bytes :]
            seed = NameSeed.of(self._job.entry.key)
            verdict = shape.check_cells(seed, trailer, range(shape.cells), [payload])
        return None if verdict is None else verdict.value

    def release(self) -> None:
        """The batch's memory is used again by the next batch."""


@dataclass(slots=True)
class Scrub:
    """A scrub of what a listing gives; ``tally`` grows while :meth:`run` is read."""

    connector: Connector
    timeout_s: float
    batch_bytes: int = SCRUB_BYTES
    manifests: Connector | None = None
    """Where manifests lie, if not beside the objects."""
    tally: Tally = field(default_factory=Tally)
    _memory: bytearray = field(default_factory=bytearray)
    _pools: BoundedDict[str, tuple[Pool | None]] = field(
        default_factory=lambda: BoundedDict(LISTING_NAMESPACES_MAX)
    )

    def run(self, entries: Iterable[Entry]) -> Iterator[Finding]:
        """What is wrong with ``entries``, batch by batch."""
        batch: list[_Job] = []
        size_bytes = 0
        for entry in entries:
            job = self._triage(entry)
            if isinstance(job, Finding):
                yield job
            if not isinstance(job, _Job):
                continue
            if entry.size_bytes > self.batch_bytes:
                yield from self._settle([(job, self._read_long(job))])
                continue
            if batch and (len(batch) >= SCRUB_ITEMS or size_bytes + entry.size_bytes > self.batch_bytes):
                yield from self._read_batch(batch)
                batch, size_bytes = [], 0
            batch.append(job)
            size_bytes += entry.size_bytes
        yield from self._read_batch(batch)

    def _triage(self, entry: Entry) -> _Job | Finding | None:
        """A job, or what is wrong without reading, or nothing more to do."""
        if entry.key.startswith(META_PREFIX):
            return self._check_record(entry)
        name = object_name(entry)
        if name is None:
            return Finding(entry.key, Fault.STRAY, entry.size_bytes)
        self.tally.objects += 1
        self.tally.size_bytes += entry.size_bytes
        return self._job(entry, name)

    def _job(self, entry: Entry, name: ObjectName) -> _Job | Finding:
        pool = self._pool(name.namespace)
        told = None if pool is None else format_in_pool(name, pool)
        if told is not None:
            formats: Sequence[ObjectFormat] = [told] if told.object_bytes == entry.size_bytes else []
            expected = f", its box has {told.object_bytes}"
        else:
            formats = formats_of_length(len(name.heads), len(name.layers), entry.size_bytes)
            expected = ", which no object of its heads and layers has"
        if not formats:
            detail = f"{entry.size_bytes} bytes{expected}"
            return Finding(entry.key, Fault.CORRUPT, entry.size_bytes, detail, entry.version)
        return _Job(entry, name, formats)

    def _check_record(self, entry: Entry) -> Finding | None:
        self.tally.records += 1
        try:
            fault = record_fault(self.connector, entry.key, Deadline.after(self.timeout_s))
        except ConfigurationError:
            return Finding(entry.key, Fault.STRAY, entry.size_bytes)
        return None if fault is None else Finding(entry.key, Fault.DAMAGED_RECORD, entry.size_bytes, fault)

    def _pool(self, namespace: str) -> Pool | None:
        known = self._pools.get(namespace)
        if known is None:
            place = self.connector if self.manifests is None else self.manifests
            record = read_manifest(place, namespace, Deadline.after(self.timeout_s)).record
            known = (None if record is None else main_pool(record),)
            self._pools.set(namespace, known)
        return known[0]

    def sound(self, keys: Sequence[str]) -> Iterator[dict[str, memoryview]]:
        """Those of ``keys`` whose object here is good, with its bytes, run by run: a run is valid until the
        next one. Objects longer than a batch are passed over, and nothing is tallied."""
        sizes = self.connector.sizes(keys, Deadline.after(self.timeout_s))
        run: list[_Job] = []
        size_bytes = 0
        for key, size in zip(keys, sizes, strict=True):
            if size is None or size > self.batch_bytes:
                continue
            job = self._job(Entry(key, size, 0.0), ObjectName.parse(key))
            if isinstance(job, Finding):
                continue
            if run and size_bytes + size > self.batch_bytes:
                yield self._good(run)
                run, size_bytes = [], 0
            run.append(job)
            size_bytes += size
        if run:
            yield self._good(run)

    def _good(self, run: Sequence[_Job]) -> dict[str, memoryview]:
        return {job.entry.key: view for job, view, outcome in self._read(run) if outcome.status is Status.OK}

    def _read_batch(self, batch: Sequence[_Job]) -> Iterator[Finding]:
        yield from self._settle([(job, outcome) for job, _, outcome in self._read(batch)])

    def _read(self, batch: Sequence[_Job]) -> list[tuple[_Job, memoryview, Outcome]]:
        """Read and judge objects that fit together."""
        needed = sum(job.entry.size_bytes for job in batch)
        if len(self._memory) < needed:
            self._memory = bytearray(needed)
        memory, at = memoryview(self._memory), 0
        views: list[memoryview] = []
        for job in batch:
            views.append(memory[at : at + job.entry.size_bytes])
            at += job.entry.size_bytes
        reads = [
            Read(job.entry.key, job.entry.size_bytes, _Judge(job, view))
            for job, view in zip(batch, views, strict=True)
        ]
        outcomes = self.connector.read_into(reads, Deadline.after(self.timeout_s)) if reads else []
        return list(zip(batch, views, outcomes, strict=True))

    def _settle(self, outcomes: Sequence[tuple[_Job, Outcome]]) -> Iterator[Finding]:
        for job, outcome in outcomes:
            entry = job.entry
            if outcome.status is Status.OK:
                self.tally.good += 1
            elif outcome.status in (Status.ABSENT, Status.WRONG_SIZE):
                self.tally.gone += 1
            elif outcome.status is Status.REJECTED and outcome.detail in _FAULT_OF_VERDICT:
                yield Finding(
                    entry.key, _FAULT_OF_VERDICT[outcome.detail], entry.size_bytes, "", outcome.version
                )
            else:
                detail = f"{outcome.status.value} {outcome.detail}".rstrip()
                yield Finding(entry.key, Fault.UNREADABLE, entry.size_bytes, detail)

    def _read_long(self, job: _Job) -> Outcome:
        """The outcome of an object that is read in parts: as of one read of the whole."""
        entry, size = job.entry, job.entry.size_bytes
        tail = memoryview(bytearray(min(job.tail_bytes, self.batch_bytes)))
        if len(tail) < job.tail_bytes:
            return Outcome(Status.REFUSED, f"its trailer may take {job.tail_bytes} bytes")
        first = self._read_part(entry, size - len(tail), tail)
        if first.status is not Status.OK:
            return first
        shape, verdict = job.identify(tail)
        if verdict is not None or shape is None:
            return Outcome(Status.REJECTED, (verdict or Verdict.CORRUPT).value, first.version)
        trailer, seed = tail[-shape.trailer_bytes :], NameSeed.of(entry.key)
        for cells in _runs_of_cells(shape, self.batch_bytes):
            start, stop = shape.cell_range(cells[0]).start, shape.cell_range(cells[-1]).stop
            if stop - start > self.batch_bytes:
                return Outcome(Status.REFUSED, f"one of its cells takes {stop - start} bytes")
            if len(self._memory) < stop - start:
                self._memory = bytearray(self.batch_bytes)
            view = memoryview(self._memory)[: stop - start]
            outcome = self._read_part(entry, start, view)
            if outcome.status is not Status.OK:
                return outcome
            if outcome.version != first.version:
                return Outcome(Status.WRONG_SIZE, "it was replaced while it was read")
            verdict = shape.check_cells(seed, trailer, cells, [view], start)
            if verdict is not None:
                return Outcome(Status.REJECTED, verdict.value, first.version)
        return first

    def _read_part(self, entry: Entry, offset: int, view: memoryview) -> Outcome:
        read = Read(entry.key, entry.size_bytes, BufferTarget([(offset, [view])]))
        (outcome,) = self.connector.read_into([read], Deadline.after(self.timeout_s))
        return outcome


def _runs_of_cells(shape: ObjectFormat, at_most_bytes: int) -> Iterator[range]:
    """Consecutive cells of at most so many bytes, or single ones."""
    first = 0
    for cell in range(1, shape.cells + 1):
        if cell == shape.cells or shape.cell_range(cell).stop - shape.cell_range(first).start > at_most_bytes:
            yield range(first, cell)
            first = cell
