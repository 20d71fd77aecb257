"""Submitted work: a ticket to poll, driven by a few threads of the store."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from hicache_store.clock import Deadline
from hicache_store.errors import DeadlineExceededError, HandleError
from hicache_store.limits import SUBMIT_QUEUE_MAX, SUBMIT_THREADS

R = TypeVar("R")


class TicketState(enum.StrEnum):
    """Where submitted work stands."""

    PENDING = "pending"
    DRAINING = "draining"
    """Timed out, but its slots may still be written or read: not yet yours again."""
    DONE = "done"


class Ticket(Generic[R]):
    """One submitted backup or restore. Its slots are free again when :meth:`poll` says ``DONE``."""

    def __init__(self, future: Future[R], deadline: Deadline) -> None:
        self._future = future
        self._deadline = deadline

    def poll(self) -> TicketState:
        """Where the work stands, at once."""
        if self._future.done():
            return TicketState.DONE
        return TicketState.DRAINING if self._deadline.is_past else TicketState.PENDING

    def wait(self, timeout_s: float) -> R:
        """The report; :class:`DeadlineExceededError` when it is not there within ``timeout_s``."""
        try:
            return self._future.result(timeout_s)
        except TimeoutError as error:
            if self._future.done():
                raise
            raise DeadlineExceededError(
                f"the ticket is {self.poll().value} after waiting {timeout_s:g} s"
            ) from error


class Submitter:
    """At most a few tickets run and a bounded number waits; more is refused at once."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(SUBMIT_THREADS, thread_name_prefix="hicache-submit")
        self._room = threading.BoundedSemaphore(SUBMIT_QUEUE_MAX)

    def submit(self, work: Callable[[Deadline], R], deadline: Deadline) -> Ticket[R]:
        """Queue ``work``; raises :class:`HandleError` when the queue is full."""
        if not self._room.acquire(blocking=False):
            raise HandleError(
                f"{SUBMIT_QUEUE_MAX} tickets wait already; poll some until they are done, then submit again"
            )
        try:
            future = self._executor.submit(work, deadline)
        except RuntimeError as error:
            self._room.release()
            raise HandleError("the store is closed") from error
        future.add_done_callback(lambda _: self._room.release())
        return Ticket(future, deadline)

    def close(self) -> None:
        """Run what was accepted to its end, then stop the threads."""
        self._executor.shutdown(wait=True)
