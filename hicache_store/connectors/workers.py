"""The batch engine of connectors whose I/O blocks: a bounded pool that drives whole batches.

Workers pull items from a shared cursor, because one future an object costs a fifth of the
throughput. How a call stops at its deadline is the pool's mode (see
:mod:`hicache_store.connectors.base`):

* ``bounded``: the caller drives its own batch beside ``threads - 1`` helpers, so a call never
  waits for another one. Past the deadline no item is started and steps that ask
  :meth:`Claim.is_cancelled` end early; the call returns when the last step has ended.
* ``abandons``: all I/O runs on the pool. A step works in memory of its own and touches the
  caller's only between :meth:`Claim.enter` and :meth:`Claim.leave`. At the deadline the call
  waits for entered items, which only copy memory, and leaves the others behind. A worker left
  behind counts as stuck and is replaced until it comes back; with ABANDONED_MAX of them, calls
  are refused.

A step must not call :meth:`Workers.run` of its own pool.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Outcome, Status
from hicache_store.connectors.batch import Batch, Claim, failure
from hicache_store.errors import HandleError
from hicache_store.limits import ABANDONED_MAX, CLOSE_JOIN_S, WORKER_GRAB_ITEMS, WORKERS_MAX
from hicache_store.metrics import Metrics

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
Mode: TypeAlias = Literal["bounded", "abandons"]


def usable_cpus() -> int:
    """Processors that this process may run on: fewer than the machine has where it is pinned or caged."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


class Workers:
    """A bounded pool of daemon threads, started by the first batch that needs one."""

    def __init__(self, threads: int, name: str, mode: Mode, metrics: Metrics | None = None) -> None:
        assert 1 <= threads <= WORKERS_MAX
        self.mode: Mode = mode
        self._name = name
        self._limit = threads - 1 if mode == "bounded" else threads
        self._metrics = metrics if metrics is not None else Metrics()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._batches: list[Batch[Any, Any]] = []
        self._threads: set[threading.Thread] = set()
        self._stuck = 0
        self._serial = 0
        self._is_closed = False
        self._at_end: Callable[[], None] | None = None

    @property
    def stuck(self) -> int:
        """Workers whose call returned without them."""
        with self._lock:
            return self._stuck

    @property
    def alive(self) -> int:
        """Threads of this pool, stuck ones included."""
        with self._lock:
            return len(self._threads)

    def run(
        self,
        items: Sequence[ItemT],
        step: Callable[[ItemT, Claim], ResultT],
        deadline: Deadline,
        after: Callable[[], None] | None = None,
    ) -> list[ResultT | Outcome]:
        """Run ``step`` on every item; results in the order of the items.

        An item that was not started or not finished in time becomes ``TIMED_OUT``, one whose step
        raised ``FAILED``. ``after`` runs once when no step runs any more: before the return, or
        for a batch left behind, when its last worker comes back. Raises :class:`HandleError`
        after :meth:`close` and in a forked child.
        """
        self.require_usable()
        grab = 1
        if self.mode == "bounded":
            grab = max(1, min(WORKER_GRAB_ITEMS, len(items) // (8 * (self._limit + 1))))
        may_abandon = self.mode == "abandons"
        batch = Batch(self._lock, items, step, deadline, after, grab, may_abandon)
        if may_abandon:
            self._run_abandoning(batch)
        else:
            self._run_bounded(batch)
        return batch.results

    def require_usable(self) -> None:
        """Raise :class:`HandleError` when this pool was closed or belongs to another process."""
        if os.getpid() != self._pid:
            raise HandleError(
                f"{self._name} was opened by process {self._pid} and is used in its forked child "
                f"{os.getpid()}, which has none of its threads; open the store again in the child"
            )
        if self._is_closed:
            raise HandleError(f"{self._name} is closed; open the store again")

    # -- bounded ---------------------------------------------------------------------------

    def _run_bounded(self, batch: Batch[Any, Any]) -> None:
        after, batch.after = batch.after, None
        helpers = min(self._limit, (len(batch.items) - 1) // batch.grab)
        try:
            with self._lock:
                if helpers > 0:
                    self._batches.append(batch)
                    self._start_threads()
                    self._work.notify(helpers)
                claim = batch.take()
            while claim is not None:
                batch.execute(claim)
                with self._lock:
                    batch.record(claim)
                    claim = batch.take()
        finally:
            try:
                self._drain(batch)
            finally:
                batch.after = after
                batch.finish()

    def _drain(self, batch: Batch[Any, Any]) -> None:
        """Wait until no helper is in the caller's memory, whatever interrupts the wait."""
        interruption: BaseException | None = None
        while True:
            try:
                with self._lock:
                    if any(claim.is_mine for claim in batch.running):
                        batch.is_cancelled = True  # the caller's own step was interrupted
                        batch.running = [claim for claim in batch.running if not claim.is_mine]
                    while batch.running:
                        batch.changed.wait()
                    self._forget(batch)
                break
            except BaseException as error:
                batch.is_cancelled = True
                interruption = error
        if interruption is not None:
            raise interruption

    # -- abandons --------------------------------------------------------------------------

    def _run_abandoning(self, batch: Batch[Any, Any]) -> None:
        try:
            with self._lock:
                if self._stuck >= ABANDONED_MAX:
                    self._refuse(batch)
                    return
                self._batches.append(batch)
                self._start_threads()
                self._work.notify(min(self._limit, len(batch.items) + 1))
                while not batch.is_done and not self._is_closed:
                    left_s = batch.deadline.remaining_s()
                    if left_s <= 0.0:
                        break
                    batch.changed.wait(min(left_s, threading.TIMEOUT_MAX))
        finally:
            self._leave_behind(batch)

    def _refuse(self, batch: Batch[Any, Any]) -> None:
        self._metrics.add("workers.refused", len(batch.items))
        detail = f"{self._stuck} threads are stuck in hung I/O of earlier calls; {ABANDONED_MAX} may be"
        batch.results[:] = [Outcome(Status.REFUSED, detail)] * len(batch.items)

    def _leave_behind(self, batch: Batch[Any, Any]) -> None:
        """Return from ``batch``: at once when it is done, else without the workers in its I/O."""
        interruption: BaseException | None = None
        while True:
            try:
                with self._lock:
                    batch.is_cancelled = True
                    while any(claim.is_entered for claim in batch.running):
                        batch.changed.wait()
                    self._detach(batch)
                break
            except BaseException as error:
                interruption = error
        if interruption is not None:
            raise interruption

    def _detach(self, batch: Batch[Any, Any]) -> None:
        if batch.is_detached:
            return
        batch.is_detached = True
        batch.items = ()
        batch.cursor = 0
        for claim in batch.running:
            claim.is_abandoned = True
        self._stuck += len(batch.running)
        if batch.running:
            self._metrics.add("workers.abandoned", len(batch.running))
            self._start_threads()
        if batch.is_done:
            self._forget(batch)
        elif not batch.running:
            self._keep_for_after(batch)

    def _keep_for_after(self, batch: Batch[Any, Any]) -> None:
        waiting = sum(1 for other in self._batches if other.is_detached)
        if waiting > 2 * ABANDONED_MAX:
            self._metrics.add("workers.after_dropped")
            self._forget(batch)
            return
        if batch not in self._batches:
            self._batches.append(batch)
        self._start_threads()
        self._work.notify()

    # -- the pool --------------------------------------------------------------------------

    def _forget(self, batch: Batch[Any, Any]) -> None:
        if batch in self._batches:
            self._batches.remove(batch)

    def _start_threads(self) -> None:
        while len(self._threads) - self._stuck < self._limit and self._stuck < ABANDONED_MAX:
            self._serial += 1
            name = f"{self._name}-{self._serial}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process may have no more threads: go on with those there are
                self._metrics.add("workers.start_failed")
                return
            self._threads.add(thread)

    def _serve(self) -> None:
        claim = self._exchange(None)
        while claim is not None:
            batch = claim.batch
            try:
                batch.execute(claim)
            except BaseException as error:  # a thread that dies would leave its batch waiting
                claim.results.append(failure(error))
            claim = self._exchange(claim)
        self._end_if_last()

    def _exchange(self, done: Claim | None) -> Claim | None:
        """Give back a claim and wait for another; ``None`` tells the thread to end."""
        with self._lock:
            if done is not None:
                self._take_back(done)
            while True:
                if len(self._threads) - self._stuck > self._limit:
                    self._work.notify()  # what this one gives back may have an end to run
                    break
                claim = self._next_claim()
                if claim is not None:
                    return claim
                if self._is_closed:
                    break
                self._work.wait()
            self._threads.discard(threading.current_thread())
            return None

    def _take_back(self, claim: Claim) -> None:
        batch = claim.batch
        batch.record(claim)
        if claim.is_abandoned:
            self._stuck -= 1
            self._metrics.add("workers.came_back")
        if batch.is_detached and batch.is_done:
            self._forget(batch)

    def _next_claim(self) -> Claim | None:
        """From the batch with the fewest workers, so that a long one does not hold up a short one."""
        for batch in sorted(self._batches, key=lambda batch: len(batch.running)):
            claim = batch.take()
            if claim is not None:
                if batch.is_detached:  # nobody waits for it: it counts until it comes back
                    claim.is_abandoned = True
                    self._stuck += 1
                return claim
        return None

    def close(self, at_end: Callable[[], None] | None = None) -> None:
        """Cancel what runs and join the threads; stuck ones are given CLOSE_JOIN_S, then left.

        ``at_end`` of the first call runs once when no thread is left: here, or when the last stuck
        one comes back.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed, self._at_end = True, at_end
            for batch in self._batches:
                batch.is_cancelled = True
                batch.changed.notify_all()
            self._work.notify_all()
            threads = list(self._threads)
        give_up_at = time.monotonic() + CLOSE_JOIN_S
        for thread in threads:
            thread.join(None if self.mode == "bounded" else max(0.0, give_up_at - time.monotonic()))
        self._end_if_last()

    def _end_if_last(self) -> None:
        with self._lock:
            if not self._is_closed or self._threads:
                return
            at_end, self._at_end = self._at_end, None
        if at_end is not None:
            at_end()
