"""Threads around an event loop: the private loop of a handle, and blocking work for any loop.

All threads are daemons, so that a hung request never keeps the process from ending; loops still open
at exit are stopped before the interpreter goes, because a native client that calls back into a dying
interpreter aborts the process.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from hicache_store.connectors.s3_plane import FaultKind, PlaneFault
from hicache_store.errors import HandleError
from hicache_store.limits import ABANDONED_MAX, CLOSE_JOIN_S
from hicache_store.metrics import Metrics

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

IsStopped: TypeAlias = Callable[[], bool]

_open_loops: weakref.WeakSet[LoopThread] = weakref.WeakSet()


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._is_closed = False
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _open_loops.add(self)

    def require_usable(self) -> None:
        """Raise :class:`HandleError` when this was closed or belongs to another process."""
        if os.getpid() != self._pid:
            raise HandleError(
                f"{self._name} was opened by process {self._pid} and is used in its forked child "
                f"{os.getpid()}, which has none of its threads; open the store again in the child"
            )
        if self._is_closed:
            raise HandleError(f"{self._name} is closed; open the store again")

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` on the loop; cancelling the result cancels the work, and so does closing."""
        with self._lock:
            if self._is_closed:
                work.close()
            self.require_usable()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._pending.add(future)
        future.add_done_callback(self._forget)
        return future

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what runs, run ``last``, stop the loop. Bounded by CLOSE_JOIN_S; idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        _open_loops.discard(self)
        self._loop.call_soon_threadsafe(self._begin_end, last)
        self._thread.join(CLOSE_JOIN_S)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._pending.discard(future)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
            with self._lock:
                left = list(self._pending)
            for future in left:
                future.cancel()

    def _begin_end(self, last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        self._ending = self._loop.create_task(self._end(last))

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        try:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=CLOSE_JOIN_S / 2)
            if last is not None:
                await asyncio.wait_for(last(), CLOSE_JOIN_S / 2)
        except Exception:
            _LOG.exception("%s did not close cleanly", self._name)
        finally:
            self._loop.stop()


at_exit_after_loops: list[Callable[[], None]] = []
"""What else to do at exit once no loop runs any more."""


def _close_all_loops() -> None:
    for loop in list(_open_loops):
        loop.close()
    for function in at_exit_after_loops:
        function()


atexit.register(_close_all_loops)


class Threads:
    """A bounded pool that runs blocking functions for coroutines.

    A function gets a callable that says whether its coroutine was cancelled. One that goes on after
    that counts as stuck and is replaced until it ends; with ABANDONED_MAX of them, new work is refused.
    """

    def __init__(self, limit: int, name: str, metrics: Metrics) -> None:
        self._limit = limit
        self._name = name
        self._metrics = metrics
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._queued = 0
        self._idle = 0
        self._stuck = 0
        self._serial = 0
        self._is_closed = False

    async def run(self, function: Callable[[IsStopped], T]) -> T:
        """The result of ``function`` on a thread of the pool; :class:`PlaneFault` when all hang."""
        loop = asyncio.get_running_loop()
        job = _Job(loop, loop.create_future(), function)
        with self._lock:
            if self._is_closed or self._stuck >= ABANDONED_MAX:
                self._metrics.add("s3.threads_refused")
                raise PlaneFault(FaultKind.OVERLOADED, f"{self._stuck} threads hang in earlier calls")
            self._queued += 1
            self._staff()
            self._jobs.put(job)
        try:
            result: T = await job.future
            return result
        except asyncio.CancelledError:
            self._abandon(job)
            raise

    def close(self) -> None:
        """Let the threads end after what they do now; idempotent."""
        with self._lock:
            self._is_closed = True
            for _ in self._threads:
                self._jobs.put(None)

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            job.is_cancelled = True
            if job.is_running and not job.is_stuck:
                job.is_stuck = True
                self._stuck += 1
                self._metrics.add("s3.threads_abandoned")
                self._staff()

    def _staff(self) -> None:
        """Start a thread when more work waits than threads do, within the limit."""
        if self._queued <= self._idle or len(self._threads) - self._stuck >= self._limit:
            return
        self._serial += 1
        thread = threading.Thread(target=self._serve, name=f"{self._name}-{self._serial}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process may have no more threads: go on with those there are
            self._metrics.add("s3.thread_start_failed")
            return
        self._threads.add(thread)

    def _serve(self) -> None:
        while True:
            with self._lock:
                if self._is_closed or len(self._threads) - self._stuck > self._limit:
                    break
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
                self._queued -= job is not None
                if job is None:
                    break
                if job.is_cancelled:
                    continue
                job.is_running = True
            self._run_one(job)
            with self._lock:
                job.is_running = False
                if job.is_stuck:
                    self._stuck -= 1
        with self._lock:
            self._threads.discard(threading.current_thread())

    @staticmethod
    def _run_one(job: _Job) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = job.function(job.is_stopped)
        except BaseException as caught:
            error = caught
        try:
            job.loop.call_soon_threadsafe(job.settle, result, error)
        except RuntimeError:  # the loop was closed and nobody waits
            return


class _Job:
    __slots__ = ("function", "future", "is_cancelled", "is_running", "is_stuck", "loop")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
        function: Callable[[IsStopped], Any],
    ) -> None:
        self.loop = loop
        self.future = future
        self.function = function
        self.is_cancelled = False
        self.is_running = False
        self.is_stuck = False

    def is_stopped(self) -> bool:
        return self.is_cancelled

    def settle(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)
