"""The ``s3://`` connector: one object of a bucket an object, over any S3-compatible server.

``s3://bucket/prefix?option=value``; the options stand in
:mod:`hicache_store.connectors.s3_settings`, credentials in the environment. Requests run on one private
event loop; a body lands in memory of the client and is copied out by a thread that holds the item, so a
call returns at its deadline whatever the server does. A PUT that was left behind may still appear,
complete.

Presence is asked with HEADs, many at a time, and never with lists: a HEAD costs the server one look at
one key, a list may walk what others stored. S3 keeps no time of use, so :meth:`S3Connector.touch`
changes nothing: age is the time of writing, and expiry a lifecycle rule.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar

from hicache_store.clock import Deadline
from hicache_store.config import StoreUrl
from hicache_store.connectors.base import (
    OK,
    TIMED_OUT,
    Capabilities,
    Entry,
    Outcome,
    Read,
    Status,
    Touch,
    Write,
)
from hicache_store.connectors.s3_attach import Attached, attach
from hicache_store.connectors.s3_landing import Batch
from hicache_store.connectors.s3_plane import BucketFacts, PlaneFault
from hicache_store.connectors.s3_settings import S3Settings, read_settings
from hicache_store.connectors.s3_threads import LoopThread
from hicache_store.errors import ConfigurationError, DeadlineExceededError
from hicache_store.limits import CLOSE_JOIN_S, S3_ATTACH_TIMEOUT_S
from hicache_store.metrics import Metrics

T = TypeVar("T")

READ_ONLY: Final = Outcome(Status.REFUSED, "the store can only be read")


def connect(url: StoreUrl) -> S3Connector:
    """Open the store at ``url``; raises :class:`ConfigurationError` when it cannot be used."""
    return open_s3(read_settings(url))


def open_s3(settings: S3Settings) -> S3Connector:
    """Like :func:`connect`, with typed settings."""
    metrics = Metrics()
    loop = LoopThread(f"s3://{settings.bucket}")
    future = loop.submit(attach(settings, metrics))
    try:
        attached = future.result(S3_ATTACH_TIMEOUT_S + CLOSE_JOIN_S)
    except BaseException as error:
        loop.close()
        if isinstance(error, TimeoutError):
            raise ConfigurationError(f"{settings.place}: attaching hangs") from error
        raise
    return S3Connector(loop, attached, metrics)


class S3Connector:
    """The connector of one bucket and prefix; made by :func:`connect`. ``metrics`` counts its faults."""

    def __init__(self, loop: LoopThread, attached: Attached, metrics: Metrics) -> None:
        self.metrics = metrics
        self._loop = loop
        self._attached = attached
        self._engine = attached.engine

    @property
    def capabilities(self) -> Capabilities:
        """What this bucket's server guarantees."""
        return self._attached.capabilities

    @property
    def facts(self) -> BucketFacts:
        """What the bucket told at attach."""
        return self._attached.facts

    @property
    def settings(self) -> S3Settings:
        """The settings in force."""
        return self._engine.settings

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        """Length of each object, ``None`` where it is absent or cannot be told."""
        found: list[int | None] = [None] * len(keys)
        batch = Batch(0, deadline)
        self._drive(batch, lambda: self._engine.sizes(keys, batch, found))
        return list(found)  # what a request left behind still fills must not change under the caller

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        """Fetch each object's parts into its target."""
        batch = Batch(len(reads), deadline)
        return self._drive(batch, lambda: self._engine.read(reads, batch))

    def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        """Store each object, all or nothing."""
        if self._is_refused():
            return [READ_ONLY] * len(writes)
        batch = Batch(len(writes), deadline)
        return self._drive(batch, lambda: self._engine.write(writes, batch))

    def delete(
        self, keys: Sequence[str], deadline: Deadline, versions: Sequence[str | None] | None = None
    ) -> list[Outcome]:
        """Remove objects; with a version, only if it is still that one (else ``CONFLICT``).

        Without a version S3 does not tell whether the object was there.
        """
        if self._is_refused():
            return [READ_ONLY] * len(keys)
        wanted = [None] * len(keys) if versions is None else versions
        batch = Batch(len(keys), deadline)
        return self._drive(batch, lambda: self._engine.delete(keys, wanted, batch))

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        """Nothing: S3 keeps no time of use."""
        if self._is_refused():
            return [READ_ONLY] * len(touches)
        return [TIMED_OUT if deadline.is_past else OK] * len(touches)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key starts with ``prefix``, in the order of the keys, page by page.

        Raises :class:`~hicache_store.connectors.s3_plane.PlaneFault` when the server fails.
        """
        self._loop.require_usable()
        return self._scan(prefix)

    def listing(self, prefix: str, deadline: Deadline) -> list[str] | None:
        """Every key that starts with ``prefix``, by one list; ``None`` when there are too many for one or
        the server does not tell in time."""
        self._loop.require_usable()
        try:
            entries, token = self._result(self._engine.entries(prefix, None), deadline)
        except (PlaneFault, DeadlineExceededError):
            return None
        return None if token is not None else [entry.key for entry in entries]

    def set_expiry(self, days: int | None, deadline: Deadline) -> None:
        """Have the server remove objects ``days`` after they were written, never metadata.

        A lifecycle rule of the bucket for this store's prefix; ``None`` takes it away. Raises
        :class:`PlaneFault` when the server refuses and :class:`ConfigurationError` on a handle that may
        only read.
        """
        if self._is_refused():
            raise ConfigurationError("s3: the store was opened with readonly=1; a lifecycle rule is a change")
        self._result(self._engine.expire(days), deadline)

    def close(self) -> None:
        """Stop the loop and give everything back; idempotent."""
        self._loop.close(self._attached.close)

    def _is_refused(self) -> bool:
        self._loop.require_usable()
        return self.capabilities.is_read_only

    def _scan(self, prefix: str) -> Iterator[Entry]:
        token: str | None = None
        while True:
            limit = Deadline.after(2 * self.settings.operation_timeout_s)
            entries, token = self._result(self._engine.entries(prefix, token), limit)
            yield from entries
            if token is None:
                return

    def _result(self, work: Coroutine[Any, Any, T], deadline: Deadline) -> T:
        future = self._loop.submit(work)
        try:
            return future.result(deadline.remaining_s())
        except TimeoutError as error:
            raise DeadlineExceededError(f"{self.settings.place}: no answer in time") from error
        finally:
            future.cancel()

    def _drive(self, batch: Batch, work: Callable[[], Coroutine[Any, Any, None]]) -> list[Outcome]:
        """Run a batch and return at its deadline, when nobody is in the caller's memory any more."""
        self._loop.require_usable()
        if batch.is_late:
            return batch.outcomes
        future = self._loop.submit(work())
        future.add_done_callback(lambda _: batch.done())
        try:
            batch.wait()
        finally:
            batch.finish()
            future.cancel()
            batch.wait_until_left()
        _raise_bug(future)
        return list(batch.outcomes)


def _raise_bug(future: Future[None]) -> None:
    """Faults are outcomes; what ends a whole batch is a mistake of ours and must not look like a miss."""
    if future.done():
        try:
            future.result()
        except CancelledError:
            return
