"""One batch of items on its way through a pool: what is taken, what runs, what became of it.

The state of a batch is guarded by its pool's lock (see :mod:`hicache_store.connectors.workers`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from hicache_store.clock import Deadline
from hicache_store.connectors.base import TIMED_OUT, Outcome, Status

_LOG = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def failure(error: BaseException) -> Outcome:
    """The outcome of an item whose step ended with ``error``."""
    return Outcome(Status.FAILED, f"{type(error).__name__}: {error}")


class Claim:
    """A few items of one batch in the hands of one worker; a step gets it beside its item."""

    __slots__ = ("_owner", "batch", "is_abandoned", "is_entered", "items", "results", "start")

    def __init__(self, batch: Batch[Any, Any], start: int, items: Sequence[Any]) -> None:
        self.batch = batch
        self._owner = threading.get_ident()
        self.start = start
        self.items = items
        self.results: list[Any] = []
        self.is_entered = False
        self.is_abandoned = False

    def is_cancelled(self) -> bool:
        """Whether to stop: ask before every system call and before publishing."""
        batch = self.batch
        return batch.is_cancelled or batch.deadline.is_past

    def enter(self) -> bool:
        """Before touching the caller's memory; ``False`` means the item is lost: touch nothing."""
        batch = self.batch
        if not batch.may_abandon:
            return not self.is_cancelled()
        with batch.lock:
            self.is_entered = not self.is_cancelled()
            return self.is_entered

    def leave(self) -> None:
        """After the last touch of the caller's memory."""
        batch = self.batch
        if batch.may_abandon:
            with batch.lock:
                self.is_entered = False
                batch.wake()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread took this claim."""
        return self._owner == threading.get_ident()


class Batch(Generic[ItemT, ResultT]):
    """The items of one call and how far they are. What follows runs under the pool's lock, except
    :meth:`execute` and :meth:`finish`."""

    def __init__(
        self,
        lock: threading.Lock,
        items: Sequence[ItemT],
        step: Callable[[ItemT, Claim], ResultT],
        deadline: Deadline,
        after: Callable[[], None] | None,
        grab: int,
        may_abandon: bool,
    ) -> None:
        self.lock = lock
        self.items = items
        self.step = step
        self.deadline = deadline
        self.after = after
        self.grab = grab
        self.may_abandon = may_abandon
        self.cursor = 0
        self.running: list[Claim] = []
        self.results: list[ResultT | Outcome] = [TIMED_OUT] * len(items)
        self.is_cancelled = False
        self.is_detached = False
        self.changed = threading.Condition(lock)

    @property
    def is_done(self) -> bool:
        """Whether nothing of it runs or is left to run."""
        return self.cursor >= len(self.items) and not self.running and self.after is None

    def wake(self) -> None:
        """Tell the waiting caller, unless there is nothing new for it."""
        if self.is_cancelled or self.is_done:
            self.changed.notify_all()

    def take(self) -> Claim | None:
        """The next items; after all of them, once, an empty claim for ``after``."""
        count = len(self.items)
        if self.is_cancelled or self.deadline.is_past:
            self.cursor = count
        if self.cursor < count:
            claim = Claim(self, self.cursor, self.items[self.cursor : self.cursor + self.grab])
            self.cursor += len(claim.items)
        elif self.after is not None and not self.running:
            claim = Claim(self, count, ())
        else:
            self.wake()
            return None
        self.running.append(claim)
        return claim

    def execute(self, claim: Claim) -> None:
        """Run the step on each item of ``claim``, without the lock; a failure is a result."""
        if not claim.items:
            self.finish()
        for item in claim.items:
            if claim.is_cancelled():
                break
            try:
                claim.results.append(self.step(item, claim))
            except Exception as error:
                claim.results.append(failure(error))

    def finish(self) -> None:
        """Run ``after``; nobody is left to hear of its failure but the log."""
        after, self.after = self.after, None
        if after is not None:
            try:
                after()
            except Exception:
                _LOG.exception("the end of a batch failed")

    def record(self, claim: Claim) -> None:
        """Take ``claim`` back; results of an abandoned one are dropped."""
        self.running.remove(claim)
        claim.is_entered = False
        if not claim.is_abandoned:
            results = claim.results[: len(claim.items)]
            self.results[claim.start : claim.start + len(results)] = results
        self.wake()
