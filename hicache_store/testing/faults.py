"""A connector that fails on purpose, and the other connectors that tests wrap around one.

:class:`FaultyConnector` applies the faults of :mod:`hicache_store.testing.fault_plans` to items of
the calls that pass through it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from hicache_store.clock import Deadline
from hicache_store.connectors.base import (
    ABSENT,
    OK,
    TIMED_OUT,
    BufferSource,
    Capabilities,
    Connector,
    Entry,
    Outcome,
    Part,
    Read,
    Source,
    Status,
    Target,
    Touch,
    Write,
)
from hicache_store.testing.counting import CountingConnector, ReadRecord
from hicache_store.testing.fault_plans import (
    Attempt,
    Fail,
    Fault,
    FlipBit,
    Hold,
    Operation,
    Plan,
    ServeOther,
    TimeOut,
    Truncate,
    Vanish,
    first_of,
    no_faults,
    on_calls,
    on_keys,
    seeded,
)
from hicache_store.testing.overwriting import OverwritingConnector

__all__ = [
    "Attempt",
    "CountingConnector",
    "Fail",
    "Fault",
    "FaultyConnector",
    "FlipBit",
    "Hold",
    "Operation",
    "OverwritingConnector",
    "Plan",
    "ReadRecord",
    "ServeOther",
    "TimeOut",
    "Truncate",
    "Vanish",
    "first_of",
    "no_faults",
    "on_calls",
    "on_keys",
    "seeded",
]

Item = TypeVar("Item")
Result = TypeVar("Result")

HOLD_LIMIT_S: Final = 120.0
"""A held item times out after this, so that a broken test fails instead of hanging."""


class FaultyConnector:
    """``inner`` with faults. ``plan`` may be replaced at any time; ``injected`` counts faults by kind.

    The items of a call that have no fault go through in one batch, before those that have one. A
    fault that means nothing for an operation lets the item pass.
    """

    def __init__(self, inner: Connector, plan: Plan = no_faults) -> None:
        self.plan = plan
        self.injected: Counter[str] = Counter()
        self._inner = inner
        self._calls: Counter[str] = Counter()
        self._met: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        """Those of the inner connector."""
        return self._inner.capabilities

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        """Sizes as the faults let them be seen."""
        faults = self._draw("sizes", keys)
        return _run(keys, faults, deadline, self._inner.sizes, self._faulty_size, None)

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        """Reads, some of which fail or deliver wrong bytes."""
        faults = self._draw("read", [read.key for read in reads])
        return _run(reads, faults, deadline, self._inner.read_into, self._faulty_read, TIMED_OUT)

    def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        """Writes, some of which fail, are lost or store wrong bytes."""
        faults = self._draw("write", [write.key for write in writes])
        return _run(writes, faults, deadline, self._inner.write_from, self._faulty_write, TIMED_OUT)

    def delete(
        self, keys: Sequence[str], deadline: Deadline, versions: Sequence[str | None] | None = None
    ) -> list[Outcome]:
        """Deletes, some of which do nothing."""

        def forward(items: Sequence[tuple[str, str | None]], until: Deadline) -> list[Outcome]:
            return self._inner.delete([key for key, _ in items], until, [version for _, version in items])

        pairs = list(zip(keys, [None] * len(keys) if versions is None else versions, strict=True))
        return _run(pairs, self._draw("delete", keys), deadline, forward, _faulty_change(forward), TIMED_OUT)

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        """Touches, some of which do nothing."""
        faults = self._draw("touch", [touch.key for touch in touches])
        forward = self._inner.touch
        return _run(touches, faults, deadline, forward, _faulty_change(forward), TIMED_OUT)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """What the inner connector holds."""
        return self._inner.scan(prefix)

    def close(self) -> None:
        """Close the inner connector."""
        self._inner.close()

    def _draw(self, operation: Operation, keys: Sequence[str]) -> list[Fault | None]:
        with self._lock:
            call = self._calls[operation]
            self._calls[operation] += 1
            faults = []
            for key in keys:
                fault = self.plan(Attempt(operation, key, call, self._met[operation, key]))
                self._met[operation, key] += 1
                faults.append(fault)
                if fault is not None:
                    self.injected[type(fault).__name__] += 1
            return faults

    def _faulty_size(self, key: str, fault: Fault, deadline: Deadline) -> int | None:
        if isinstance(fault, (Fail, TimeOut, Vanish)):
            return None
        size = self._inner.sizes([key], deadline)[0]
        return min(size, fault.size_bytes) if size is not None and isinstance(fault, Truncate) else size

    def _faulty_read(self, read: Read, fault: Fault, deadline: Deadline) -> Outcome:
        match fault:
            case Vanish():
                return ABSENT
            case TimeOut():
                return TIMED_OUT
            case Truncate(size_bytes=size_bytes) if size_bytes < read.size_bytes:
                return Outcome(Status.WRONG_SIZE, f"there are {size_bytes} bytes, not {read.size_bytes}")
            case Fail(detail=detail, share=share):
                read = read._replace(target=_CutTarget(read.target, share))
                outcome = self._inner.read_into([read], deadline)[0]
                return Outcome(Status.FAILED, detail) if outcome.status is Status.REJECTED else outcome
            case FlipBit(bit=bit):
                target = _FlippedTarget(read.target, bit % max(8, 8 * read.size_bytes))
                read = read._replace(target=target)
            case ServeOther(key=key):
                read = read._replace(key=key)
        return self._inner.read_into([read], deadline)[0]

    def _faulty_write(self, write: Write, fault: Fault, deadline: Deadline) -> Outcome:
        if not isinstance(fault, (Fail, FlipBit, Truncate)):
            return _faulty_change(self._inner.write_from)(write, fault, deadline)
        share = fault.share if isinstance(fault, Fail) else 1.0
        try:
            data = _take(write.source, share)
        except Exception as error:
            return Outcome(Status.FAILED, str(error))
        if isinstance(fault, Fail):
            return Outcome(Status.FAILED, fault.detail)
        if isinstance(fault, Truncate):
            del data[fault.size_bytes :]
        elif data:
            data[fault.bit // 8 % len(data)] ^= 1 << fault.bit % 8
        write = write._replace(source=BufferSource.of(data), size_bytes=len(data))
        return self._inner.write_from([write], deadline)[0]


def _run(
    items: Sequence[Item],
    faults: Sequence[Fault | None],
    deadline: Deadline,
    forward: Callable[[Sequence[Item], Deadline], list[Result]],
    inject: Callable[[Item, Fault, Deadline], Result],
    timed_out: Result,
) -> list[Result]:
    if not any(faults):
        return forward(items, deadline)
    sound = [item for item, fault in zip(items, faults, strict=True) if fault is None]
    results = iter(forward(sound, deadline))
    merged: list[Result] = []
    for fault in faults:
        if isinstance(fault, Hold):
            fault.entered.set()
    for item, fault in zip(items, faults, strict=True):
        if fault is None:
            merged.append(next(results))
        elif deadline.is_past:
            merged.append(timed_out)
        elif not isinstance(fault, Hold):
            merged.append(inject(item, fault, deadline))
        else:
            limit_s = HOLD_LIMIT_S if fault.ignores_deadline else min(HOLD_LIMIT_S, deadline.remaining_s())
            is_free = fault.until.wait(limit_s)
            merged.append(forward([item], deadline)[0] if is_free else timed_out)
    return merged


def _faulty_change(
    forward: Callable[[Sequence[Item], Deadline], list[Outcome]],
) -> Callable[[Item, Fault, Deadline], Outcome]:
    """What a fault makes of a write, a delete or a touch."""

    def inject(item: Item, fault: Fault, deadline: Deadline) -> Outcome:
        if isinstance(fault, Vanish):
            return OK
        if isinstance(fault, Fail):
            return Outcome(Status.FAILED, fault.detail)
        if isinstance(fault, TimeOut) and not fault.lands:
            return TIMED_OUT
        outcome = forward([item], deadline)[0]
        return TIMED_OUT if isinstance(fault, TimeOut) else outcome

    return inject


def _take(source: Source, share: float) -> bytearray:
    """The first ``share`` of the bytes of a source."""
    try:
        data = bytearray().join([view.cast("B") for view in source.buffers() if view.nbytes])
        return data[: round(share * len(data))]
    finally:
        source.release()


@dataclass(slots=True)
class _FlippedTarget:
    """Flips a bit of the object after it landed and before it is checked."""

    inner: Target
    bit: int
    taken: Sequence[Part] = ()

    def parts(self) -> Sequence[Part]:
        self.taken = self.inner.parts()
        return self.taken

    def check(self) -> str | None:
        for offset, views in self.taken:
            at = offset
            for view in views:
                if at <= self.bit // 8 < at + view.nbytes:
                    view.cast("B")[self.bit // 8 - at] ^= 1 << self.bit % 8
                at += view.nbytes
        return self.inner.check()

    def release(self) -> None:
        self.inner.release()


@dataclass(slots=True)
class _CutTarget:
    """Takes the first ``share`` of every part and refuses the rest."""

    inner: Target
    share: float

    def parts(self) -> Sequence[Part]:
        return [(offset, _cut(views, self.share)) for offset, views in self.inner.parts()]

    def check(self) -> str | None:
        return "cut short"

    def release(self) -> None:
        self.inner.release()


def _cut(views: Sequence[memoryview], share: float) -> list[memoryview]:
    left = round(share * sum(view.nbytes for view in views))
    kept = []
    for view in views:
        if view.nbytes:
            kept.append(view.cast("B")[:left])
            left -= kept[-1].nbytes
    return kept
