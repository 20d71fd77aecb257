"""A connector that counts what passes through it and remembers what was written."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hicache_store.clock import Deadline
from hicache_store.connectors.base import (
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


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """One object that was opened for reading, and the (offset, bytes) of each part asked of it."""

    key: str
    ranges: tuple[tuple[int, int], ...]


class CountingConnector:
    """``inner``, watched. Read the counts between calls, not during one.

    ``calls`` and ``items`` count by operation: sizes, read, write, delete, touch, scan.
    ``statuses`` counts (operation, status). ``reads`` lists what was opened, in the order it was.
    ``digests`` holds every content that was offered for a key, also where the object was there
    already and the inner connector asked for no bytes.
    """

    def __init__(self, inner: Connector) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget all counts and records."""
        with self._lock:
            self.calls: Counter[str] = Counter()
            self.items: Counter[str] = Counter()
            self.statuses: Counter[tuple[str, Status]] = Counter()
            self.bytes_written = 0
            self.reads: list[ReadRecord] = []
            self.digests: defaultdict[str, list[str]] = defaultdict(list)

    @property
    def parts(self) -> int:
        """Ranges asked for, which is the least number of requests they cost."""
        return sum(len(record.ranges) for record in self.reads)

    @property
    def bytes_read(self) -> int:
        """Bytes of all ranges asked for."""
        return sum(size for record in self.reads for _, size in record.ranges)

    def assert_one_content_per_key(self) -> None:
        """Raise ``AssertionError`` naming the keys for which different bytes were offered."""
        with self._lock:
            torn = sorted(key for key, digests in self.digests.items() if len(set(digests)) > 1)
        if torn:
            raise AssertionError(f"{len(torn)} keys were written with different contents: {torn[:4]}")

    @property
    def capabilities(self) -> Capabilities:
        """Those of the inner connector."""
        return self._inner.capabilities

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        """As the inner connector."""
        self._count("sizes", len(keys))
        return self._inner.sizes(keys, deadline)

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        """As the inner connector."""
        self._count("read", len(reads))
        watched = [Read(read.key, read.size_bytes, _WatchedTarget(self, read)) for read in reads]
        return self._note("read", self._inner.read_into(watched, deadline))

    def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        """As the inner connector; the content of an object that exists is looked at too."""
        self._count("write", len(writes))
        sources = [_WatchedSource(self, write) for write in writes]
        watched = [
            Write(write.key, write.size_bytes, source, write.depth, write.replace)
            for write, source in zip(writes, sources, strict=True)
        ]
        outcomes = self._note("write", self._inner.write_from(watched, deadline))
        for outcome, source in zip(outcomes, sources, strict=True):
            if outcome.status is Status.EXISTS and not source.was_asked:
                source.look()
        return outcomes

    def delete(
        self, keys: Sequence[str], deadline: Deadline, versions: Sequence[str | None] | None = None
    ) -> list[Outcome]:
        """As the inner connector."""
        self._count("delete", len(keys))
        return self._note("delete", self._inner.delete(keys, deadline, versions))

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        """As the inner connector."""
        self._count("touch", len(touches))
        return self._note("touch", self._inner.touch(touches, deadline))

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """As the inner connector."""
        self._count("scan", 1)
        return self._inner.scan(prefix)

    def close(self) -> None:
        """Close the inner connector."""
        self._inner.close()

    def _count(self, operation: str, items: int) -> None:
        with self._lock:
            self.calls[operation] += 1
            self.items[operation] += items

    def _note(self, operation: str, outcomes: list[Outcome]) -> list[Outcome]:
        with self._lock:
            self.statuses.update((operation, outcome.status) for outcome in outcomes)
        return outcomes

    def _note_read(self, record: ReadRecord) -> None:
        with self._lock:
            self.reads.append(record)

    def _note_content(self, key: str, views: Sequence[memoryview], is_moved: bool) -> None:
        digest = hashlib.blake2b(digest_size=16)
        for view in views:
            digest.update(view)
        with self._lock:
            self.digests[key].append(digest.hexdigest())
            self.bytes_written += sum(view.nbytes for view in views) if is_moved else 0


class _WatchedTarget:
    def __init__(self, watcher: CountingConnector, read: Read) -> None:
        self._watcher, self._key = watcher, read.key
        self._inner: Target = read.target

    def parts(self) -> Sequence[Part]:
        parts = self._inner.parts()
        ranges = tuple((offset, sum(view.nbytes for view in views)) for offset, views in parts)
        self._watcher._note_read(ReadRecord(self._key, ranges))
        return parts

    def check(self) -> str | None:
        return self._inner.check()

    def release(self) -> None:
        self._inner.release()


class _WatchedSource:
    def __init__(self, watcher: CountingConnector, write: Write) -> None:
        self._watcher, self._key = watcher, write.key
        self._inner: Source = write.source
        self.was_asked = False

    def buffers(self) -> Sequence[memoryview]:
        self.was_asked = True
        views = self._inner.buffers()
        self._watcher._note_content(self._key, views, is_moved=True)
        return views

    def release(self) -> None:
        self._inner.release()

    def look(self) -> None:
        """Note the content of a write that moved no bytes; its outcome stands whatever happens here."""
        with contextlib.suppress(Exception):
            try:
                self._watcher._note_content(self._key, self._inner.buffers(), is_moved=False)
            finally:
                self._inner.release()
