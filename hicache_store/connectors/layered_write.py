"""Writing through two layers, or to the fast one with the slow one to follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hicache_store.clock import Deadline
from hicache_store.connectors.base import (
    META_PREFIX,
    OK,
    TIMED_OUT,
    BufferSource,
    Outcome,
    Status,
    Write,
)
from hicache_store.connectors.batch import failure
from hicache_store.connectors.layered_backlog import Entry
from hicache_store.connectors.layered_copies import CapturingSource, joined
from hicache_store.connectors.layered_parts import Layers
from hicache_store.connectors.layered_read import half_of

_FULL = Outcome(Status.REFUSED, "the queue to the slow layer is full; the storage takes less than is written")


class LayeredWriter:
    """One write of two layers."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def __call__(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        """The outcomes of one batch. Metadata and replacements never wait for a slow layer to follow."""
        backs = [i for i, one in enumerate(writes) if self._goes_back(one)]
        through = [index for index in range(len(writes)) if index not in set(backs)]
        found: dict[int, Outcome] = {}
        for indices, write in ((backs, self._write_back), (through, self._write_through)):
            outcomes = write([writes[index] for index in indices], deadline) if indices else []
            found.update(zip(indices, outcomes, strict=True))
        return [found[index] for index in range(len(writes))]

    def _goes_back(self, write: Write) -> bool:
        return self._layers.is_back and write.replace is None and not write.key.startswith(META_PREFIX)

    # -- through ---------------------------------------------------------------------------

    def _write_through(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        entries: list[Entry | None] = []
        sources: list[CapturingSource | None] = []
        outcomes: list[Outcome] = []
        try:
            asked: list[Write] = []
            for write in writes:
                if self._layers.is_back and write.replace is not None:
                    self._layers.pending.flush(deadline, write.key)
                is_kept = self._layers.changes_fast and not write.key.startswith(META_PREFIX)
                entry = (
                    self._layers.fills.reserve(write.key, write.size_bytes, write.depth) if is_kept else None
                )
                source = None if entry is None else CapturingSource(write.source, write.size_bytes)
                entries.append(entry)
                sources.append(source)
                asked.append(write if source is None else write._replace(source=source))
            outcomes = self._layers.slow.write_from(asked, deadline)
            self._layers.memory.learn(asked, outcomes)
            self._drop_replaced(writes, outcomes, deadline)
        finally:
            for index, (entry, source) in enumerate(zip(entries, sources, strict=True)):
                if entry is not None:
                    is_stored = index < len(outcomes) and outcomes[index].status is Status.OK
                    self._layers.fills.offer(
                        (entry, source.data if source is not None and is_stored else None)
                    )
        return outcomes

    def _drop_replaced(
        self, writes: Sequence[Write], outcomes: Sequence[Outcome], deadline: Deadline
    ) -> None:
        replaced = [
            write.key
            for write, outcome in zip(writes, outcomes, strict=True)
            if write.replace is not None and outcome.is_ok and not write.key.startswith(META_PREFIX)
        ]
        if replaced and self._layers.changes_fast:
            self._layers.fast.delete(replaced, half_of(deadline))

    # -- back ------------------------------------------------------------------------------

    def _write_back(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        self._back_up(dict(enumerate(writes)), found, deadline, may_wait=False)
        for index, write in enumerate(writes):
            while index not in found:
                self._back_up({index: write}, found, deadline, may_wait=True)
        return [found[index] for index in range(len(writes))]

    def _back_up(
        self, writes: Mapping[int, Write], found: dict[int, Outcome], deadline: Deadline, *, may_wait: bool
    ) -> None:
        """Take what can be taken. A call that holds reservations never waits for those of another."""
        fresh: dict[int, tuple[Entry, bytearray]] = {}
        is_complete = False
        try:
            for index, write in writes.items():
                outcome = self._judge(write, deadline, {one.key for one, _ in fresh.values()}, may_wait)
                if outcome is not None:
                    found[index] = outcome
                elif self._layers.pending.find(write.key) is None:
                    taken = self._take(write)
                    if isinstance(taken, Outcome):
                        found[index] = taken
                    elif taken is not None:
                        fresh[index] = taken
                        found[index] = OK
            self._put_fast(writes, found, fresh, deadline)
            is_complete = True
        finally:
            self._layers.pending.offer(
                *[(one, data if is_complete and found[i].is_ok else None) for i, (one, data) in fresh.items()]
            )

    def _judge(self, write: Write, deadline: Deadline, taken: set[str], may_wait: bool) -> Outcome | None:
        """The outcome of a write that needs no bytes, or ``None``."""
        if deadline.is_past:
            return TIMED_OUT
        held = self._layers.pending.find(write.key)
        if held is None:
            return None
        data = (
            self._layers.pending.wait_for(held, deadline)
            if may_wait
            else self._layers.pending.data(write.key)
        )
        if write.key in taken or data is not None:
            if held.size_bytes == write.size_bytes:
                return Outcome(Status.EXISTS)
            return Outcome(Status.CONFLICT, f"there are {held.size_bytes} bytes, not {write.size_bytes}")
        if may_wait and not self._layers.pending.flush(deadline, write.key):
            return TIMED_OUT
        return None

    def _take(self, write: Write) -> tuple[Entry, bytearray] | Outcome | None:
        """Room and an own copy; ``None`` when another call took the key at this moment."""
        if write.size_bytes <= 0:
            return Outcome(Status.REFUSED, "an object has at least one byte")
        entry, is_taken = self._layers.pending.try_reserve(write.key, write.size_bytes, write.depth)
        if entry is None:
            return None if is_taken else _FULL
        try:
            try:
                data = joined(write.source.buffers(), write.size_bytes)
            finally:
                write.source.release()
        except Exception as error:
            self._layers.pending.offer((entry, None))
            return failure(error)
        if data is None:
            self._layers.pending.offer((entry, None))
            return Outcome(Status.FAILED, f"the source did not give {write.size_bytes} bytes")
        return entry, data

    def _put_fast(
        self,
        writes: Mapping[int, Write],
        found: dict[int, Outcome],
        fresh: dict[int, tuple[Entry, bytearray]],
        deadline: Deadline,
    ) -> None:
        if not fresh or not self._layers.changes_fast:
            return
        puts = [
            Write(one.key, one.size_bytes, BufferSource.of(data), writes[index].depth)
            for index, (one, data) in fresh.items()
        ]
        stored = self._layers.fast.write_from(puts, half_of(deadline))
        met = {
            index: outcome
            for index, outcome in zip(fresh, stored, strict=True)
            if outcome.status in (Status.EXISTS, Status.CONFLICT)
        }
        if met:
            self._judge_met(writes, found, fresh, met, deadline)

    def _judge_met(
        self,
        writes: Mapping[int, Write],
        found: dict[int, Outcome],
        fresh: dict[int, tuple[Entry, bytearray]],
        met: Mapping[int, Outcome],
        deadline: Deadline,
    ) -> None:
        """The fast layer had something under these keys, and only the slow one knows what it is worth.

        What was lost there, or dropped on its way, is sent again. What is there at another length is for
        the slow layer to decide. A fast copy of another length than the slow layer's object goes.
        """
        sizes = self._layers.slow.sizes([writes[index].key for index in met], half_of(deadline))
        through: list[int] = []
        bad: list[tuple[str, str | None]] = []
        for (index, outcome), size in zip(met.items(), sizes, strict=True):
            write, is_conflict = writes[index], outcome.status is Status.CONFLICT
            if is_conflict and size in (None, write.size_bytes):
                bad.append((write.key, outcome.version))
            found[index] = OK if is_conflict and size is None else Outcome(Status.EXISTS)
            if size is not None:
                self._layers.pending.offer((fresh.pop(index)[0], None))
                if size != write.size_bytes:
                    through.append(index)
        if bad:
            self._layers.fast.delete(
                [key for key, _ in bad], half_of(deadline), [version for _, version in bad]
            )
        if through:
            outcomes = self._write_through([writes[index] for index in through], deadline)
            found.update(zip(through, outcomes, strict=True))
