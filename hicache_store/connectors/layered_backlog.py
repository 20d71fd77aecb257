"""Objects on their way to one layer, in memory of their own and written by one thread behind the calls.

An entry is *reserved* (its room is counted and its bytes are on their way), *queued*, *being written*,
or over. There is one entry a key, so that a reserved entry also tells other readers of the same key that
somebody already fetches it. Room is bounded in bytes and items; without room nothing is reserved.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from hicache_store.clock import Deadline
from hicache_store.connectors.base import BufferSource, Connector, Outcome, Status, Write
from hicache_store.connectors.batch import failure
from hicache_store.limits import (
    CLOSE_JOIN_S,
    LAYER_BATCH,
    LAYER_QUEUE_ITEMS,
    LAYER_RETRY_MAX_S,
    LAYER_WRITE_S,
    RETRY_FIRST_WAIT_S,
)
from hicache_store.metrics import Metrics

_LOG: Final = logging.getLogger(__name__)


class Entry:
    """One object on its way. ``data`` is there once it is queued."""

    __slots__ = ("data", "depth", "is_fetch", "is_over", "is_void", "key", "size_bytes")

    def __init__(self, key: str, size_bytes: int, depth: int, is_fetch: bool) -> None:
        self.key = key
        self.size_bytes = size_bytes
        self.depth = depth
        self.is_fetch = is_fetch
        self.data: bytearray | None = None
        self.is_void = False
        self.is_over = False


class Backlog:
    """The entries of one layer.

    With ``is_lasting`` an entry stays until the layer took it or refused it for good; otherwise one
    failure ends it. What is dropped is counted as ``layered.NAME_dropped.REASON``.
    """

    def __init__(
        self, connector: Connector, name: str, bytes_max: int, metrics: Metrics, *, is_lasting: bool
    ) -> None:
        self._connector = connector
        self._name = name
        self._free_bytes = bytes_max
        self._metrics = metrics
        self._is_lasting = is_lasting
        self._changed = threading.Condition()
        self._entries: dict[str, Entry] = {}
        self._queue: OrderedDict[str, Entry] = OrderedDict()
        self._writing: list[Entry] = []
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._is_closing = False
        self._is_ended = False

    def reserve(self, key: str, size_bytes: int, depth: int = 0, *, is_fetch: bool = False) -> Entry | None:
        """Room for one object; ``None`` without room, or when the key has an entry."""
        return self.try_reserve(key, size_bytes, depth, is_fetch=is_fetch)[0]

    def try_reserve(
        self, key: str, size_bytes: int, depth: int = 0, *, is_fetch: bool = False
    ) -> tuple[Entry | None, bool]:
        """Room for one object, and where there is none, whether that is because the key has an entry."""
        with self._changed:
            if key in self._entries:
                return None, True
            if self._is_closing:
                return None, False
            if size_bytes > self._free_bytes or len(self._entries) >= LAYER_QUEUE_ITEMS:
                self._drop_count("full", 1)
                return None, False
            self._free_bytes -= size_bytes
            entry = self._entries[key] = Entry(key, size_bytes, depth, is_fetch)
            return entry, False

    def find(self, key: str) -> Entry | None:
        """The entry of a key."""
        with self._changed:
            return self._entries.get(key)

    def data(self, key: str) -> bytearray | None:
        """The bytes of a queued object."""
        with self._changed:
            entry = self._entries.get(key)
            return None if entry is None or entry.is_void else entry.data

    def is_void(self, key: str) -> bool:
        """Whether the key was removed and what is on its way to the layer has yet to be undone there."""
        with self._changed:
            entry = self._entries.get(key)
            return entry is not None and entry.is_void

    def queued(self) -> list[tuple[str, int]]:
        """Key and size of what is queued or being written."""
        with self._changed:
            return [
                (key, len(one.data))
                for key, one in self._entries.items()
                if one.data is not None and not one.is_void
            ]

    def offer(self, *pairs: tuple[Entry, bytearray | None]) -> None:
        """Queue reserved entries with their bytes; without bytes, let go of them."""
        with self._changed:
            for entry, data in pairs:
                if data is None or entry.is_void or self._is_closing:
                    self._end(entry)
                    continue
                entry.data = data
                self._queue[entry.key] = entry
                self._start()
            self._changed.notify_all()

    def wait_for(self, entry: Entry, deadline: Deadline) -> bytearray | None:
        """The bytes of an entry that somebody else reserved, once they are there; ``None`` if never."""
        with self._changed:
            self._changed.wait_for(
                lambda: entry.data is not None or entry.is_over or entry.is_void,
                min(deadline.remaining_s(), threading.TIMEOUT_MAX),
            )
            return None if entry.is_void else entry.data

    def void(self, keys: Sequence[str]) -> None:
        """Forget these keys: what is being written meanwhile is removed again."""
        with self._changed:
            for key in keys:
                entry = self._entries.get(key)
                if entry is None:
                    continue
                entry.is_void = True
                if self._queue.pop(key, None) is not None:
                    self._end(entry)
            self._changed.notify_all()

    def flush(self, deadline: Deadline, key: str | None = None) -> bool:
        """Wait until ``key``, or everything that is queued, has arrived or was dropped; whether it did."""

        def is_done() -> bool:
            if key is not None:
                return key not in self._entries
            return not self._queue and not self._writing

        with self._changed:
            return self._changed.wait_for(is_done, min(deadline.remaining_s(), threading.TIMEOUT_MAX))

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more; give what is queued ``drain_s`` to arrive, then drop it, counted."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            if self._thread is not None:
                longest_s = min(drain_s, threading.TIMEOUT_MAX)
                self._changed.wait_for(lambda: not self._queue and not self._writing, longest_s)
            self._is_ended = True
            if self._queue:
                self._drop_count("closed", len(self._queue))
                if self._is_lasting:
                    _LOG.warning("%d objects never reached the slow layer", len(self._queue))
            for entry in list(self._queue.values()):
                self._end(entry)
            self._queue.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_JOIN_S)

    # -- under the lock --------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._serve, name=f"layered {self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the next offer tries again
            self._metrics.add("layered.thread_failed")
            return
        self._thread = thread

    def _end(self, entry: Entry) -> None:
        if entry.is_over:
            return
        entry.is_over = True
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        self._free_bytes += entry.size_bytes
        self._changed.notify_all()

    def _drop_count(self, reason: str, number: int) -> None:
        self._metrics.add(f"layered.{self._name}_dropped.{reason}", number)

    # -- the thread ------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if self._failures:
                    wait_s = min(LAYER_RETRY_MAX_S, RETRY_FIRST_WAIT_S * 2 ** min(16, self._failures))
                    self._changed.wait_for(lambda: self._is_closing, wait_s)
                if self._is_ended or (self._is_closing and not self._queue):
                    return
                count = min(LAYER_BATCH, len(self._queue))
                self._writing = [self._queue.popitem(last=False)[1] for _ in range(count)]
            outcomes = self._write(self._writing)
            self._settle(outcomes)

    def _write(self, entries: Sequence[Entry]) -> list[Outcome]:
        writes = [
            Write(one.key, one.size_bytes, BufferSource.of(one.data or bytearray()), one.depth)
            for one in entries
        ]
        try:
            outcomes = self._connector.write_from(writes, Deadline.after(LAYER_WRITE_S))
            self._remove(
                [
                    (one.key, outcome.version)
                    for one, outcome in zip(entries, outcomes, strict=True)
                    if outcome.status is Status.CONFLICT and not self._is_lasting
                ]
            )
        except Exception as error:  # a closed or broken layer must not end the thread with entries in hand
            outcomes = [failure(error)] * len(entries)
        return outcomes

    def _remove(self, pairs: Sequence[tuple[str, str | None]]) -> None:
        """Remove copies: those of another length than the object has, and those that were voided."""
        if pairs:
            keys, versions = [key for key, _ in pairs], [version for _, version in pairs]
            self._connector.delete(keys, Deadline.after(LAYER_WRITE_S), versions)

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        with self._changed:
            is_failing = False
            for entry, outcome in zip(self._writing, outcomes, strict=True):
                may_come = outcome.is_transient or outcome.status is Status.TIMED_OUT
                if entry.is_void:
                    continue
                if outcome.is_ok:
                    self._end(entry)
                elif self._is_lasting and may_come and not self._is_ended:
                    is_failing = True
                    self._queue[entry.key] = entry
                else:
                    self._drop_count(str(outcome.status), 1)
                    self._end(entry)
            self._failures = self._failures + 1 if is_failing else 0
            self._writing = [entry for entry in self._writing if entry.is_void]
            voided = [(entry.key, None) for entry in self._writing]
            self._changed.notify_all()
        if voided:
            self._undo(voided)

    def _undo(self, voided: Sequence[tuple[str, None]]) -> None:
        try:
            self._remove(voided)
        except Exception as error:
            self._metrics.add(f"layered.{self._name}_undo_failed")
            _LOG.debug("a removed object may be back: %s", error)
        with self._changed:
            for entry in self._writing:
                self._end(entry)
            self._writing = []
            self._changed.notify_all()
