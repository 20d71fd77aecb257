"""Reading through two layers: own copies, then the fast layer, then the slow one, once a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hicache_store.clock import Deadline
from hicache_store.connectors.base import (
    ABSENT,
    META_PREFIX,
    OK,
    TIMED_OUT,
    BufferTarget,
    Outcome,
    Read,
    Status,
)
from hicache_store.connectors.layered_backlog import Entry
from hicache_store.connectors.layered_copies import CapturingTarget, deliver
from hicache_store.connectors.layered_parts import Layers

Fill: TypeAlias = Literal["seen", "whole", "none"]


def half_of(deadline: Deadline) -> Deadline:
    """The fast layer's share of the time: a fast layer that hangs leaves the other half to the slow one."""
    now = deadline.clock.monotonic()
    return Deadline(now + max(0.0, deadline.at - now) / 2, deadline.clock)


@dataclass(slots=True)
class _Fetch:
    """A read of the slow layer whose bytes are kept: by the target's hands, or whole in ``buffer``."""

    entry: Entry
    read: Read
    capture: CapturingTarget | None = None
    buffer: bytearray | None = None

    @classmethod
    def of(cls, entry: Entry, read: Read) -> _Fetch:
        """Keep what the target gets, or where it wants only a part, fetch the whole object."""
        if read.ranges is None:
            return cls(entry, read, capture=CapturingTarget(read.target, read.size_bytes))
        return cls(entry, read, buffer=bytearray(read.size_bytes))

    @property
    def slow_read(self) -> Read:
        """What to ask of the slow layer."""
        if self.capture is not None:
            return self.read._replace(target=self.capture)
        assert self.buffer is not None
        return Read(self.read.key, self.read.size_bytes, BufferTarget.whole(self.buffer))

    def finish(self, outcome: Outcome) -> Outcome:
        """The outcome for the target, which gets its part only now if the object was fetched whole."""
        if self.buffer is None or not outcome.is_ok:
            return outcome
        return deliver(self.read, self.buffer, outcome.version)

    @property
    def data(self) -> bytearray | None:
        """The bytes to keep."""
        return self.buffer if self.capture is None else self.capture.data


class LayeredReader:
    """One read of two layers; what is on its way to either is looked at first."""

    def __init__(self, layers: Layers, fill: Fill) -> None:
        self._layers = layers
        self._fill = fill if layers.changes_fast else "none"

    def __call__(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        """The outcomes of one batch. A version in them is always the slow layer's."""
        found = self._from_copies(reads, deadline)
        refused = self._from_fast(reads, found, deadline)
        if not self._layers.is_back:
            self._drop(reads, refused, deadline)
        self._from_slow(reads, found, deadline)
        if self._layers.is_back:  # what the slow layer has not may be on its way there from another handle
            alone = [index for index in refused if found[index].status is Status.ABSENT]
            found.update((index, replace(refused[index], version=None)) for index in alone)
            self._drop(reads, {i: one for i, one in refused.items() if i not in alone}, deadline)
        return [found[index] for index in range(len(reads))]

    def _from_copies(self, reads: Sequence[Read], deadline: Deadline) -> dict[int, Outcome]:
        found: dict[int, Outcome] = {}
        for index, read in enumerate(reads):
            if deadline.is_past:
                break
            pending = self._layers.pending.data(read.key)
            data = self._layers.fills.data(read.key) if pending is None else pending
            if data is None:
                continue
            outcome = deliver(read, data)
            if outcome.is_ok or pending is not None:
                found[index] = outcome
            else:
                self._layers.fills.void([read.key])
        self._layers.metrics.add("layered.read_from_copies", len(found))
        return found

    def _from_fast(
        self, reads: Sequence[Read], found: dict[int, Outcome], deadline: Deadline
    ) -> dict[int, Outcome]:
        """Add what the fast layer has to ``found``; what it has and the target refused is given back."""
        refused: dict[int, Outcome] = {}
        asked = [
            index
            for index, read in enumerate(reads)
            if index not in found
            and not read.key.startswith(META_PREFIX)
            and not self._layers.fills.is_void(read.key)
        ]
        if not asked:
            return refused
        outcomes = self._layers.fast.read_into([reads[index] for index in asked], half_of(deadline))
        for index, outcome in zip(asked, outcomes, strict=True):
            if outcome.is_ok:
                found[index] = OK
            elif outcome.status in (Status.REJECTED, Status.WRONG_SIZE):
                refused[index] = outcome
            elif outcome.status is not Status.ABSENT:
                self._layers.metrics.add("layered.fast_failed")
        self._layers.metrics.add("layered.read_from_fast", sum(outcome.is_ok for outcome in outcomes))
        self._layers.metrics.add("layered.fast_bad", len(refused))
        return refused

    def _drop(self, reads: Sequence[Read], refused: dict[int, Outcome], deadline: Deadline) -> None:
        if refused and self._layers.changes_fast:
            keys = [reads[index].key for index in refused]
            self._layers.fast.delete(
                keys, half_of(deadline), [outcome.version for outcome in refused.values()]
            )

    def _from_slow(self, reads: Sequence[Read], found: dict[int, Outcome], deadline: Deadline) -> None:
        plain: list[int] = []
        fetches: dict[int, _Fetch] = {}
        waiting: dict[int, Entry] = {}
        try:
            for index, read in enumerate(reads):
                if index in found:
                    continue
                if self._layers.pending.is_void(read.key):
                    found[index] = ABSENT
                    continue
                entry = self._mine_to_fetch(read)
                other = self._layers.fills.find(read.key) if entry is None and self._keeps(read) else None
                if entry is not None:
                    fetches[index] = _Fetch.of(entry, read)
                elif other is not None and other.is_fetch and not other.is_void:
                    waiting[index] = other
                else:
                    plain.append(index)
            self._fetch(reads, plain, fetches, found, deadline)
        finally:
            for index, fetch in fetches.items():  # whoever waits must be told, whatever happened
                is_good = index in found and found[index].is_ok
                self._layers.fills.offer((fetch.entry, fetch.data if is_good else None))
        self._await_others(reads, waiting, found, deadline)

    def _keeps(self, read: Read) -> bool:
        if self._fill == "none" or read.key.startswith(META_PREFIX):
            return False
        return self._fill == "whole" or read.ranges is None

    def _mine_to_fetch(self, read: Read) -> Entry | None:
        return (
            self._layers.fills.reserve(read.key, read.size_bytes, is_fetch=True)
            if self._keeps(read)
            else None
        )

    def _fetch(
        self,
        reads: Sequence[Read],
        plain: list[int],
        fetches: dict[int, _Fetch],
        found: dict[int, Outcome],
        deadline: Deadline,
    ) -> None:
        indices = [*fetches, *plain]
        if not indices:
            return
        asked = [fetches[index].slow_read if index in fetches else reads[index] for index in indices]
        self._layers.metrics.add("layered.read_from_slow", len(asked))
        outcomes = self._layers.slow.read_into(asked, deadline)
        self._layers.memory.learn(asked, outcomes)
        for index, outcome in zip(indices, outcomes, strict=True):
            fetch = fetches.get(index)
            if fetch is not None and fetch.buffer is not None and deadline.is_past:
                found[index] = TIMED_OUT
            else:
                found[index] = outcome if fetch is None else fetch.finish(outcome)

    def _await_others(
        self, reads: Sequence[Read], waiting: dict[int, Entry], found: dict[int, Outcome], deadline: Deadline
    ) -> None:
        left: list[int] = []
        for index, entry in waiting.items():
            data = self._layers.fills.wait_for(entry, deadline)
            if deadline.is_past:
                found[index] = TIMED_OUT
            elif data is None or not (outcome := deliver(reads[index], data)).is_ok:
                left.append(index)
            else:
                found[index] = outcome
                self._layers.metrics.add("layered.read_of_others")
        self._fetch(reads, left, {}, found, deadline)
