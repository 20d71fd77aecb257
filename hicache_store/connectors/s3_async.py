"""The S3 store for callers that live in an event loop: the same promises, awaited."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

from hicache_store.clock import Deadline
from hicache_store.config import parse_url
from hicache_store.connectors.base import OK, TIMED_OUT, Capabilities, Entry, Outcome, Read, Touch, Write
from hicache_store.connectors.s3 import READ_ONLY
from hicache_store.connectors.s3_attach import Attached, attach
from hicache_store.connectors.s3_landing import Batch
from hicache_store.connectors.s3_settings import read_settings
from hicache_store.errors import HandleError
from hicache_store.metrics import Metrics


class AsyncS3:
    """An S3 store on the running loop; made by :meth:`connect`.

    Everything that :mod:`hicache_store.connectors.base` promises holds for the coroutines: a call that
    returned, timed out or was cancelled touches no memory of the caller any more.
    """

    def __init__(self, attached: Attached, metrics: Metrics) -> None:
        self.metrics = metrics
        self._attached: Attached | None = attached
        self._capabilities = attached.capabilities
        self._pid = os.getpid()

    @classmethod
    async def connect(cls, url: str) -> AsyncS3:
        """Open ``s3://...``; raises :class:`ConfigurationError` when it cannot be used.

        The client is aiobotocore unless the URL names another.
        """
        parsed = parse_url(url)
        if all(name != "client" for name, _ in parsed.query):
            parsed = parse_url(f"{url}{'&' if parsed.query else '?'}client=aiobotocore")
        metrics = Metrics()
        return cls(await attach(read_settings(parsed), metrics), metrics)

    @property
    def capabilities(self) -> Capabilities:
        """What this bucket's server guarantees."""
        return self._capabilities

    async def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        """Length of each object, ``None`` where it is absent or cannot be told."""
        engine = self._open().engine
        found: list[int | None] = [None] * len(keys)
        batch = Batch(0, deadline)
        await self._drive(batch, lambda: engine.sizes(keys, batch, found))
        return list(found)

    async def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        """Fetch each object's parts into its target, which is called on threads."""
        engine = self._open().engine
        batch = Batch(len(reads), deadline)
        return await self._drive(batch, lambda: engine.read(reads, batch))

    async def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        """Store each object, all or nothing; sources are called on threads."""
        engine = self._open().engine
        if self._capabilities.is_read_only:
            return [READ_ONLY] * len(writes)
        batch = Batch(len(writes), deadline)
        return await self._drive(batch, lambda: engine.write(writes, batch))

    async def delete(
        self, keys: Sequence[str], deadline: Deadline, versions: Sequence[str | None] | None = None
    ) -> list[Outcome]:
        """Remove objects; with a version, only if it is still that one (else ``CONFLICT``)."""
        engine = self._open().engine
        if self._capabilities.is_read_only:
            return [READ_ONLY] * len(keys)
        wanted = [None] * len(keys) if versions is None else versions
        batch = Batch(len(keys), deadline)
        return await self._drive(batch, lambda: engine.delete(keys, wanted, batch))

    async def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        """Nothing: S3 keeps no time of use."""
        self._open()
        if self._capabilities.is_read_only:
            return [READ_ONLY] * len(touches)
        return [TIMED_OUT if deadline.is_past else OK] * len(touches)

    async def scan(self, prefix: str = "") -> AsyncIterator[Entry]:
        """Every object whose key starts with ``prefix``, in the order of the keys, page by page."""
        token: str | None = None
        while True:
            entries, token = await self._open().engine.entries(prefix, token)
            for entry in entries:
                yield entry
            if token is None:
                return

    async def close(self) -> None:
        """Give everything back; idempotent."""
        attached, self._attached = self._attached, None
        if attached is not None and os.getpid() == self._pid:
            await attached.close()

    def _open(self) -> Attached:
        if os.getpid() != self._pid:
            raise HandleError("an asynchronous S3 store does not outlive a fork; open one in the child")
        if self._attached is None:
            raise HandleError("the asynchronous S3 store is closed; open it again")
        return self._attached

    async def _drive(self, batch: Batch, work: Callable[[], Coroutine[Any, Any, None]]) -> list[Outcome]:
        """Run a batch and return at its deadline, when nobody is in the caller's memory any more."""
        if batch.is_late:
            return batch.outcomes
        task = asyncio.ensure_future(work())
        try:
            await asyncio.wait({task}, timeout=batch.deadline.remaining_s())
        finally:
            batch.finish()
            is_unfinished = task.cancel()
            while batch.is_inside:
                await _uninterrupted(asyncio.to_thread(batch.wait_until_left))
        if not is_unfinished:
            task.result()
        return list(batch.outcomes)


async def _uninterrupted(work: Awaitable[None]) -> None:
    """Await ``work`` to its end even when cancelled; the cancellation comes after."""
    inner = asyncio.ensure_future(work)
    try:
        await asyncio.shield(inner)
    except asyncio.CancelledError:
        while not inner.done():
            await asyncio.wait({inner})
        raise
