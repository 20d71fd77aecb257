"""The batches of an S3 store, as coroutines over a plane, for whatever loop they run on.

Coroutines pull the items of their batch. All batches of a handle share three gates: one bounds the
requests in flight, one the look-ups, both fewer while the server throttles, and one the items and bytes in
memory, of which twice as many may be there, so that the network goes on while bodies are copied. That
happens on threads and never holds up the loop.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hicache_store.connectors.base import ABSENT, OK, Entry, Outcome, Read, Status, Write
from hicache_store.connectors.batch import failure
from hicache_store.connectors.s3_gate import Gate
from hicache_store.connectors.s3_landing import Batch, Buffers, collect, deliver
from hicache_store.connectors.s3_plane import (
    Body,
    Condition,
    ControlPlane,
    DataPlane,
    FaultKind,
    Found,
    PlaneFault,
)
from hicache_store.connectors.s3_settings import PROBE_PREFIX, S3Settings, object_key
from hicache_store.connectors.s3_threads import Threads
from hicache_store.errors import NameFormatError
from hicache_store.layout.names import FORMAT
from hicache_store.limits import (
    S3_BUFFERS_KEEP_BYTES,
    S3_DELETE_BATCH,
    S3_INFLIGHT_BYTES,
    S3_LOOKUP_CONCURRENCY,
    S3_OBJECT_BYTES_MAX,
    S3_PUT_TRIES,
    S3_RANGES_TOGETHER,
    S3_RENEW_INTERVAL_S,
)
from hicache_store.metrics import Metrics

T = TypeVar("T")

_PREFIX = re.compile(r"[A-Za-z0-9._/-]*")


@dataclass(slots=True)
class Conditions:
    """What the server does with conditions. ``creates`` is found out at attach, ``matches`` by the
    first refusal: a look before the change is needed either way, to tell which version is there."""

    creates: bool = True
    matches: bool = True


class S3Engine:
    """The batches of one handle."""

    def __init__(
        self,
        settings: S3Settings,
        plane: DataPlane,
        control: ControlPlane,
        landing: Threads,
        metrics: Metrics,
    ) -> None:
        self.settings = settings
        self.plane = plane
        self.control = control
        self.conditions = Conditions()
        self.metrics = metrics
        self._landing = landing
        self._requests = Gate(settings.concurrency, 0, metrics)
        self._memory = Gate(2 * settings.concurrency, S3_INFLIGHT_BYTES)
        self._lookups = Gate(S3_LOOKUP_CONCURRENCY, 0, metrics)
        self._buffers = Buffers(S3_BUFFERS_KEEP_BYTES)
        self._renewal = asyncio.Lock()
        self._renewed_at = float("-inf")
        self._renewals = 0
        self._bulk_deletes = True

    async def sizes(self, keys: Sequence[str], batch: Batch, found: list[int | None]) -> None:
        """Fill ``found`` with the length of each object that is there."""

        async def one(index: int) -> None:
            found[index] = await self._size(keys[index], batch)

        await _each(len(keys), S3_LOOKUP_CONCURRENCY, one, batch)

    async def read(self, reads: Sequence[Read], batch: Batch) -> None:
        """Fetch and deliver every read."""

        async def one(index: int) -> None:
            read = reads[index]
            key = object_key(self.settings.prefix, read.key)
            spans = read.fetched
            async with self._memory.hold(sum(stop - start for start, stop in spans)):
                async with self._requests.hold(0):
                    bodies = await self._fetch(key, spans, read.size_bytes)
                if isinstance(bodies, Outcome):
                    batch.record(index, bodies)
                elif not batch.is_late:
                    await self._land(lambda: deliver(read, bodies, batch, index))

        await self._each_item(len(reads), one, batch)

    async def write(self, writes: Sequence[Write], batch: Batch) -> None:
        """Collect and store every write."""

        async def one(index: int) -> None:
            write = writes[index]
            key = object_key(self.settings.prefix, write.key)
            async with self._memory.hold(write.size_bytes):
                batch.record(index, await self._write(write, key, batch))

        await self._each_item(len(writes), one, batch)

    async def delete(self, keys: Sequence[str], versions: Sequence[str | None], batch: Batch) -> None:
        """Delete objects: those without a version in bulk where the server can."""
        plain: list[int] = []
        single: list[int] = []
        for index, (key, version) in enumerate(zip(keys, versions, strict=True)):
            try:
                object_key(self.settings.prefix, key)
            except NameFormatError as error:
                batch.record(index, Outcome(Status.FAILED, str(error)))
                continue
            (plain if version is None and self._bulk_deletes else single).append(index)
        for start in range(0, len(plain), S3_DELETE_BATCH):
            if batch.is_late:
                return
            chunk = plain[start : start + S3_DELETE_BATCH]
            if not await self._delete_bulk([keys[index] for index in chunk], chunk, batch):
                single += chunk

        async def one(place: int) -> None:
            index = single[place]
            async with self._lookups.hold(0):
                batch.record(index, await self._delete_one(keys[index], versions[index]))

        await self._each_item(len(single), one, batch, lambda place: single[place])

    async def entries(self, prefix: str, token: str | None) -> tuple[list[Entry], str | None]:
        """A page of the objects whose key starts with ``prefix``, and the token of the next one."""
        if _PREFIX.fullmatch(prefix) is None:  # no key has such a prefix
            return [], None
        own = self.settings.prefix
        page = await self.ask(lambda: self.control.list_page(own + prefix, token))
        found = [
            Entry(row.key[len(own) :], row.size_bytes, row.modified_s, row.version)
            for row in page.rows
            # Gateways to file systems list the directories that deleted objects leave behind.
            if not row.key.startswith(own + PROBE_PREFIX) and not row.key.endswith("/")
        ]
        return found, page.token

    async def expire(self, days: int | None) -> None:
        """Set, change or remove the lifecycle rule of the objects, which never covers metadata."""
        await self.ask(lambda: self.control.set_expiry(f"{self.settings.prefix}{FORMAT}/", days))

    # -- one item --------------------------------------------------------------------------

    async def _size(self, key: str, batch: Batch) -> int | None:
        """A look-up tells no faults, so it is not retried from above: a connection that broke, which says
        nothing of the object and would cut a whole prefix short, is made good here, once."""
        for is_last in (False, True):
            try:
                found = await self._head(key)
            except NameFormatError:
                return None
            except PlaneFault as fault:
                if is_last or fault.kind is not FaultKind.CONNECTION or batch.is_late:
                    return None
            else:
                return None if found is None else found.size_bytes
        raise AssertionError("the second turn returns")

    async def _head(self, key: str) -> Found | None:
        whole = object_key(self.settings.prefix, key)
        async with self._lookups.hold(0):
            return await self.ask(lambda: self.plane.head(whole))

    async def _fetch(
        self, key: str, spans: Sequence[tuple[int, int]], size_bytes: int
    ) -> list[Body] | Outcome:
        """The bodies of all ``spans``, of one version of an object of the right length."""
        if not spans:
            found = await self.ask(lambda: self.plane.head(key))
            return [] if found and found.size_bytes == size_bytes else _mismatch(found, size_bytes)
        is_whole = len(spans) == 1 and spans[0] == (0, size_bytes)
        bodies: list[Body] = []
        for start in range(0, len(spans), S3_RANGES_TOGETHER):
            some = spans[start : start + S3_RANGES_TOGETHER]
            gets = [self._get(key, None if is_whole else span, size_bytes) for span in some]
            answers = [await gets[0]] if len(gets) == 1 else await _all_of(gets)
            for answer in answers:
                if not isinstance(answer, Body):
                    return _mismatch(answer, size_bytes)
                bodies.append(answer)
        if len({body.version for body in bodies}) > 1:
            self.metrics.add("s3.changed_under_read")
            return Outcome(Status.FAILED, "the object was replaced while it was read", is_transient=True)
        return bodies

    def _get(
        self, key: str, span: tuple[int, int] | None, size_bytes: int
    ) -> Coroutine[Any, Any, Body | Found | None]:
        return self.ask(lambda: self.plane.get(key, span, size_bytes))

    async def _write(self, write: Write, key: str, batch: Batch) -> Outcome:
        if not 0 < write.size_bytes <= S3_OBJECT_BYTES_MAX:
            return Outcome(Status.REFUSED, f"an object has 1 to {S3_OBJECT_BYTES_MAX} bytes")
        async with self._requests.hold(0):
            decided = await self._judge(write, key)
        if decided is not None:
            return decided
        body = await self._land(lambda: collect(write, batch, self._buffers))
        if isinstance(body, Outcome):
            return body
        for _ in range(S3_PUT_TRIES):
            async with self._requests.hold(0):
                outcome = await self._put(write, key, body)
            if outcome is not None:
                if outcome.status is Status.OK:  # else the client may not be done with the body
                    self._buffers.give_back(body)
                return outcome
        detail = f"the key was taken and freed {S3_PUT_TRIES} times over"
        return Outcome(Status.FAILED, detail, is_transient=True)

    async def _judge(self, write: Write, key: str) -> Outcome | None:
        """What a look at the key decides, where it is needed."""
        if write.replace is None and self.conditions.creates:
            return None
        found = await self.ask(lambda: self.plane.head(key))
        if write.replace is None:
            return None if found is None else _existing(write, found)
        return None if found is not None and found.version == write.replace else _replaced(found)

    async def _put(self, write: Write, key: str, body: memoryview) -> Outcome | None:
        """The outcome of one PUT; ``None`` when it met an object that has gone since."""

        def put(version: str | None) -> Awaitable[str | None]:
            creates = write.replace is None and self.conditions.creates
            return self.plane.put(key, body, Condition(creates, version))

        try:
            version = await self._conditional(put, write.replace)
        except PlaneFault as fault:
            if fault.kind is not FaultKind.CONDITION:
                raise
        else:
            return Outcome(Status.OK, version=version)
        found = await self.ask(lambda: self.plane.head(key))
        if write.replace is not None:
            return _replaced(found)
        return None if found is None else _existing(write, found)

    async def _conditional(self, change: Callable[[str | None], Awaitable[T]], version: str | None) -> T:
        """``change`` under If-Match, or without where the server knows no such condition."""
        if version is None or not self.conditions.matches:
            return await self.ask(lambda: change(None))
        try:
            return await self.ask(lambda: change(version))
        except PlaneFault as fault:
            if fault.kind is not FaultKind.UNSUPPORTED:
                raise
        self.conditions.matches = False
        return await self.ask(lambda: change(None))

    async def _delete_one(self, key: str, version: str | None) -> Outcome:
        whole = object_key(self.settings.prefix, key)
        if version is not None:
            found = await self.ask(lambda: self.plane.head(whole))
            if found is None:
                return ABSENT
            if found.version != version:
                return _replaced(found)
        try:
            await self._conditional(lambda condition: self.control.delete(whole, condition), version)
        except PlaneFault as fault:
            if fault.kind is not FaultKind.CONDITION:
                raise
            return _replaced(None)
        return OK

    async def _delete_bulk(self, keys: Sequence[str], places: Sequence[int], batch: Batch) -> bool:
        """Whether the server took the request; ``False`` leaves every key to be deleted by itself."""
        wholes = [object_key(self.settings.prefix, key) for key in keys]
        try:
            faults = await self.ask(lambda: self.control.delete_many(wholes))
        except PlaneFault as fault:
            if fault.kind in (FaultKind.UNSUPPORTED, FaultKind.REFUSED):
                self.metrics.add("s3.bulk_delete_refused")
                self._bulk_deletes = False
                return False
            faults = [fault] * len(keys)
        for place, fault_of_key in zip(places, faults, strict=True):
            batch.record(place, OK if fault_of_key is None else fault_of_key.outcome())
        return True

    # -- requests --------------------------------------------------------------------------

    async def ask(self, operation: Callable[[], Awaitable[T]]) -> T:
        """One request within its limit of time; again with new credentials when old ones are refused."""
        renewals = self._renewals
        try:
            return await self._once(operation)
        except PlaneFault as fault:
            if not fault.may_be_stale_credentials or not await self._renew(renewals):
                raise
        return await self._once(operation)

    async def _once(self, operation: Callable[[], Awaitable[T]]) -> T:
        limit_s = self.settings.operation_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await operation()
        except TimeoutError:
            fault = PlaneFault(FaultKind.TIMED_OUT, f"a request took longer than {limit_s:g} s")
        except PlaneFault as caught:
            fault = caught
        if fault.kind is not FaultKind.CONDITION:
            self.metrics.add(f"s3.fault.{fault.kind.name.lower()}")
        raise fault

    async def _renew(self, renewals_seen: int) -> bool:
        """Whether the credentials were read anew since ``renewals_seen``, by whichever request."""
        async with self._renewal:
            if self._renewals != renewals_seen:
                return True
            now = asyncio.get_running_loop().time()
            if now - self._renewed_at < S3_RENEW_INTERVAL_S:
                return False
            self._renewed_at = now
            try:
                await self._once(self.plane.renew)
            except PlaneFault:
                return False
            self._renewals += 1
            self.metrics.add("s3.credentials_renewed")
            return True

    async def _land(self, step: Callable[[], T]) -> T:
        return await self._landing.run(lambda _: step())

    async def _each_item(
        self,
        count: int,
        one: Callable[[int], Awaitable[None]],
        batch: Batch,
        place_of: Callable[[int], int] = int,
    ) -> None:
        """``one`` for every item; what it raises is that item's outcome."""

        async def guarded(index: int) -> None:
            try:
                await one(index)
            except PlaneFault as fault:
                batch.record(place_of(index), fault.outcome())
            except Exception as error:
                batch.record(place_of(index), failure(error))

        await _each(count, 2 * self.settings.concurrency, guarded, batch)


async def _each(count: int, limit: int, one: Callable[[int], Awaitable[None]], batch: Batch) -> None:
    """``one`` for every index, by at most ``limit`` coroutines that share a cursor."""
    cursor = iter(range(count))

    async def run() -> None:
        for index in cursor:
            if batch.is_late:
                return
            await one(index)

    await _all_of([run() for _ in range(min(count, limit))])


async def _all_of(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; when one fails or this is cancelled, none goes on behind our back."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _mismatch(found: Found | None, size_bytes: int) -> Outcome:
    if found is None:
        return ABSENT
    detail = f"there are {found.size_bytes} bytes, not {size_bytes}"
    return Outcome(Status.WRONG_SIZE, detail, found.version)


def _existing(write: Write, found: Found) -> Outcome:
    if found.size_bytes == write.size_bytes:
        return Outcome(Status.EXISTS, version=found.version)
    detail = f"there are {found.size_bytes} bytes, not {write.size_bytes}"
    return Outcome(Status.CONFLICT, detail, found.version)


def _replaced(found: Found | None) -> Outcome:
    if found is None:
        return Outcome(Status.CONFLICT, "the object is gone or of another version")
    return Outcome(Status.CONFLICT, "the object is of another version", found.version)
