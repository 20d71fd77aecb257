"""Writing through two layers, or to the fast one with the slow one to follow."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_store.clock import Deadline
from hicache_store.connectors.base import (
    META_PREFIX,
    TIMED_OUT,
    BufferSource,
    Connector,
    Outcome,
    Status,
    Write,
)
from hicache_store.connectors.batch import failure
from hicache_store.connectors.layered_backlog import Backlog, Entry
from hicache_store.connectors.layered_copies import CapturingSource, joined
from hicache_store.connectors.layered_read import half_of

_FULL = Outcome(Status.REFUSED, "the queue to the slow layer is full; the storage takes less than is written")


class LayeredWriter:
    """One write of two layers."""

    def __init__(
        self,
        fast: Connector,
        slow: Connector,
        fills: Backlog,
        pending: Backlog,
        *,
        is_back: bool,
        changes_fast: bool,
    ) -> None:
        self.is_back = is_back
        self._fast = fast
        self._slow = slow
        self._fills = fills
        self._pending = pending
        self._changes_fast = changes_fast

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
        return self.is_back and write.replace is None and not write.key.startswith(META_PREFIX)

    # -- through ---------------------------------------------------------------------------

    def _write_through(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        entries: list[Entry | None] = []
        sources: list[CapturingSource | None] = []
        outcomes: list[Outcome] = []
        try:
            asked: list[Write] = []
            for write in writes:
                if self.is_back and write.replace is not None:
                    self._pending.flush(deadline, write.key)
                is_kept = self._changes_fast and not write.key.startswith(META_PREFIX)
                entry = self._fills.reserve(write.key, write.size_bytes, write.depth) if is_kept else None
                source = None if entry is None else CapturingSource(write.source, write.size_bytes)
                entries.append(entry)
                sources.append(source)
                asked.append(write if source is None else write._replace(source=source))
            outcomes = self._slow.write_from(asked, deadline)
            self._drop_replaced(writes, outcomes, deadline)
        finally:
            for index, (entry, source) in enumerate(zip(entries, sources, strict=True)):
                if entry is not None:
                    is_stored = index < len(outcomes) and outcomes[index].status is Status.OK
                    self._fills.offer((entry, source.data if source is not None and is_stored else None))
        return outcomes

    def _drop_replaced(
        self, writes: Sequence[Write], outcomes: Sequence[Outcome], deadline: Deadline
    ) -> None:
        replaced = [
            write.key
            for write, outcome in zip(writes, outcomes, strict=True)
            if write.replace is not None and outcome.is_ok and not write.key.startswith(META_PREFIX)
        ]
        if replaced and self._changes_fast:
            self._fast.delete(replaced, half_of(deadline))

    # -- back ------------------------------------------------------------------------------

    def _write_back(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        outcomes: list[Outcome] = []
        fresh: list[tuple[int, Entry, bytearray]] = []
        try:
            for index, write in enumerate(writes):
                outcome, entry, data = self._take(write, deadline, {one.key for _, one, _ in fresh})
                outcomes.append(outcome)
                if entry is not None and data is not None:
                    fresh.append((index, entry, data))
            self._put_fast(writes, outcomes, fresh, deadline)
        finally:
            is_complete = len(outcomes) == len(writes)
            self._pending.offer(
                *[(entry, data if is_complete and outcomes[i].is_ok else None) for i, entry, data in fresh]
            )
        return outcomes

    def _take(
        self, write: Write, deadline: Deadline, taken: set[str]
    ) -> tuple[Outcome, Entry | None, bytearray | None]:
        if deadline.is_past:
            return TIMED_OUT, None, None
        held = self._pending.find(write.key)
        if held is not None and (write.key in taken or self._pending.wait_for(held, deadline) is not None):
            if held.size_bytes == write.size_bytes:
                return Outcome(Status.EXISTS), None, None
            detail = f"there are {held.size_bytes} bytes, not {write.size_bytes}"
            return Outcome(Status.CONFLICT, detail), None, None
        if held is not None and not self._pending.flush(deadline, write.key):
            return TIMED_OUT, None, None
        if write.size_bytes <= 0:
            return Outcome(Status.REFUSED, "an object has at least one byte"), None, None
        entry = self._pending.reserve(write.key, write.size_bytes, write.depth)
        if entry is None:
            return _FULL, None, None
        try:
            try:
                data = joined(write.source.buffers(), write.size_bytes)
            finally:
                write.source.release()
        except Exception as error:
            self._pending.offer((entry, None))
            return failure(error), None, None
        if data is None:
            self._pending.offer((entry, None))
            return Outcome(Status.FAILED, f"the source did not give {write.size_bytes} bytes"), None, None
        return Outcome(Status.OK), entry, data

    def _put_fast(
        self,
        writes: Sequence[Write],
        outcomes: list[Outcome],
        fresh: Sequence[tuple[int, Entry, bytearray]],
        deadline: Deadline,
    ) -> None:
        if not fresh or not self._changes_fast:
            return
        puts = [
            Write(one.key, one.size_bytes, BufferSource.of(data), writes[index].depth)
            for index, one, data in fresh
        ]
        for (index, _, _), outcome in zip(fresh, self._fast.write_from(puts, half_of(deadline)), strict=True):
            if outcome.status in (Status.EXISTS, Status.CONFLICT):
                outcomes[index] = Outcome(outcome.status, outcome.detail)
