"""A few threads with a bounded queue, for work that an engine's own thread must not wait for.

No executor of the standard library does: its queue has no bound and keeps what was cancelled, and the
interpreter does not end before its threads do, which storage that hangs would put off for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from hicache_store.clock import Deadline
from hicache_store.limits import CLOSE_JOIN_S

R = TypeVar("R")


class Threads:
    """At most ``count`` daemon threads, started when there is work for them, and ``queue_max`` calls that
    wait for one. Thread-safe."""

    def __init__(self, count: int, name: str, queue_max: int) -> None:
        self._count, self._name, self._queue_max = count, name, queue_max
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._is_closed = False

    def submit(self, call: Callable[[], R]) -> Future[R] | None:
        """Run ``call`` on a thread; ``None`` where too many wait, and after :meth:`close`."""
        future: Future[R] = Future()
        with self._changed:
            if len(self._queue) >= self._queue_max:
                self._queue = deque(item for item in self._queue if not item[0].cancelled())
            if self._is_closed or len(self._queue) >= self._queue_max:
                return None
            if self._idle <= len(self._queue) and len(self._threads) < self._count:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
            self._queue.append((future, call))
            self._changed.notify()
        return future

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._is_closed:
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                future, call = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # a thread that dies would leave its caller waiting
                    future.set_exception(error)
            del future, call  # what they hold is not kept until there is more work

    def close(self) -> None:
        """Cancel what waits and end the threads. One that hangs in a call is left behind after a while."""
        with self._changed:
            self._is_closed = True
            waiting, self._queue = self._queue, deque()
            self._changed.notify_all()
        for future, _ in waiting:
            future.cancel()
        deadline = Deadline.after(CLOSE_JOIN_S)
        for thread in self._threads:
            thread.join(deadline.remaining_s())
