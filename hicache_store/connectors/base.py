"""The connector protocol: opaque names and bytes, nothing of layouts.

The contract, tested by :mod:`hicache_store.testing.connector_contract` on every connector:

* every call is synchronous, thread-safe and batched, and takes one total deadline;
* a miss is a value, a failure belongs to one item and never to its batch, results keep the order
  of the items;
* an object becomes visible only when it is complete, and creating is first-writer-wins unless a
  write names the version it replaces;
* after a call returned, no byte of a target is written and no byte of a source is read any more.
  ``Capabilities.stop`` says how: ``bounded`` connectors return only when their workers have left
  the caller's memory (overrunning the deadline by at most one system call per worker),
  ``abandons`` connectors work in memory of their own and return on time.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from hicache_store.clock import Deadline

META_PREFIX: Final = "meta/"
"""Keys of manifests and markers: outside quota, time to live and eviction."""

Part: TypeAlias = tuple[int, Sequence[memoryview]]
"""(offset in the object, views filled one after the other)."""


class Status(enum.StrEnum):
    """What became of one item of a batch."""

    OK = "ok"
    EXISTS = "exists"
    """A create-only write found an object of the right size: success, nothing written."""
    ABSENT = "absent"
    WRONG_SIZE = "wrong_size"
    """A read found an object of another length; no byte was delivered."""
    REJECTED = "rejected"
    """The bytes arrived and the target's check refused them; ``detail`` holds its word."""
    CONFLICT = "conflict"
    """A create-only write met an object of another size, or a named version no longer matches."""
    REFUSED = "refused"
    """Policy: quota, read-only, too large, too much hung work."""
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one item. ``version`` is opaque: an inode and mtime, an ETag, a counter.

    ``is_transient`` says of a failure that the same call may succeed later: a throttled or failing
    server, a broken connection. ``retry_after_s`` is the wait that the storage asked for.
    """

    status: Status
    detail: str = ""
    version: str | None = None
    is_transient: bool = False
    retry_after_s: float | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the object is now where it was wanted."""
        return self.status is Status.OK or self.status is Status.EXISTS


OK = Outcome(Status.OK)
ABSENT = Outcome(Status.ABSENT)
TIMED_OUT = Outcome(Status.TIMED_OUT)


class Target(Protocol):
    """Where the bytes of one read land. All three are called by the worker of the item.

    The worker calls :meth:`parts` once, after it knows that the object is there and has the
    expected length; then it fills the parts; then :meth:`check` once, when the last byte has
    landed. :meth:`release` is called once, last, on every path on which :meth:`parts` was called.
    An exception of ``parts`` or ``check`` fails the item, never the batch.
    """

    def parts(self) -> Sequence[Part]:
        """The ranges to fetch and the views they fill."""
        ...

    def check(self) -> str | None:
        """``None`` when the bytes are good, else the reason why not."""
        ...

    def release(self) -> None:
        """Give back what :meth:`parts` took."""
        ...


class Source(Protocol):
    """Where the bytes of one write come from, called by the worker of the item."""

    def buffers(self) -> Sequence[memoryview]:
        """The views whose concatenation is the object."""
        ...

    def release(self) -> None:
        """Give back what :meth:`buffers` took."""
        ...


class Read(NamedTuple):
    """One object to read. ``size_bytes`` is the length the whole object must have.

    ``ranges`` are (start, stop) bytes that hold everything the target's parts will ask for, ascending
    and apart; ``None`` is the whole object. Connectors that fetch into memory of their own, before
    they may ask the target, fetch these.
    """

    key: str
    size_bytes: int
    target: Target
    ranges: Sequence[tuple[int, int]] | None = None

    @property
    def fetched(self) -> Sequence[tuple[int, int]]:
        """The ranges to fetch."""
        return ((0, self.size_bytes),) if self.ranges is None else self.ranges


class Write(NamedTuple):
    """One object to write.

    ``depth`` is the index of the page in its chain: among objects last used in the same second,
    the deepest is evicted first. ``replace`` names the version of a bad object that may be
    overwritten; without it the write is create-only.
    """

    key: str
    size_bytes: int
    source: Source
    depth: int = 0
    replace: str | None = None


class Touch(NamedTuple):
    """One object to mark as used now, at its depth in the chain."""

    key: str
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One object as tools see it."""

    key: str
    size_bytes: int
    last_used_s: float
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a connector guarantees and prefers."""

    scheme: str
    stop: Literal["bounded", "abandons"]
    create_only: bool
    """Two writers of one key: the first complete object stays."""
    conditional_versions: bool
    """``replace`` and ``delete(versions)`` are atomic, not only best effort."""
    request_cost_bytes: int
    """Bytes that cost as much to read as one more request."""
    concurrency: int
    """Items that make progress at the same time."""
    alignment_bytes: int = 1
    """Address and length multiple at which reads land without a copy."""
    is_read_only: bool = False
    orders_eviction: bool = False
    """Whether eviction takes the tail of a chain before its head, for certain."""
    lookup_items: int = 0
    """Keys whose sizes one round trip tells where each key is a request of its own, so that asking in
    vain costs; 0 where keys are asked for in bulk."""


class Connector(Protocol):
    """A place that keeps objects. See the module's text for the contract."""

    @property
    def capabilities(self) -> Capabilities:
        """What this connector guarantees."""
        ...

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        """Length of each object, ``None`` where it is absent, expired or cannot be told."""
        ...

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        """Fetch each object's parts into its target."""
        ...

    def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        """Store each object, all or nothing."""
        ...

    def delete(
        self, keys: Sequence[str], deadline: Deadline, versions: Sequence[str | None] | None = None
    ) -> list[Outcome]:
        """Remove objects; with a version, only if it is still that one (else ``CONFLICT``)."""
        ...

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        """Mark objects as used now, in the given order."""
        ...

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key starts with ``prefix``; for tools, never on a request's path."""
        ...

    def close(self) -> None:
        """Stop the workers and release everything; idempotent."""
        ...


@runtime_checkable
class Lister(Protocol):
    """A connector that may know what lies below a prefix by one request, whatever else it holds."""

    def listing(self, prefix: str, deadline: Deadline) -> list[str] | None:
        """Every key that starts with ``prefix``; ``None`` where one request did not tell them all."""
        ...


@dataclass(slots=True)
class BufferTarget:
    """A target of plain views, for callers that need no check."""

    fixed_parts: Sequence[Part]

    @classmethod
    def whole(cls, buffer: bytearray | memoryview) -> BufferTarget:
        """A target that takes a whole object into ``buffer``."""
        return cls([(0, [memoryview(buffer).cast("B")])])

    def parts(self) -> Sequence[Part]:
        """The fixed parts."""
        return self.fixed_parts

    def check(self) -> str | None:
        """Accept anything."""
        return None

    def release(self) -> None:
        """Nothing was taken."""


@dataclass(slots=True)
class BufferSource:
    """A source of plain views."""

    fixed_buffers: Sequence[memoryview]

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> BufferSource:
        """The source of one contiguous object."""
        return cls([memoryview(data).cast("B")])

    def buffers(self) -> Sequence[memoryview]:
        """The fixed views."""
        return self.fixed_buffers

    def release(self) -> None:
        """Nothing was taken."""
