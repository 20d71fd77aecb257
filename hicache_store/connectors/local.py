"""The ``file://`` connector: one file an object, on a local or a shared file system.

``file:///absolute/root?option=value``. Objects lie in ``root/objects/<a>/<b>/``, manifests and
markers in ``root/meta/``, the byte counter that all processes of a root share in ``root/account/``.
Local file systems are served ``bounded``, all others ``abandons`` (see
:mod:`hicache_store.connectors.base`); the option ``io`` overrides.

Options: ``quota`` and ``min_free`` (sizes; a share of the file system by default), ``ttl`` (time
without use after which an object counts as absent), ``threads``, ``io=auto|direct|bounce``,
``direct_io`` (O_DIRECT where the file system takes it), ``fsync``, ``readonly``, ``request_cost``
(size) and ``sweep`` (interval of background sweeps, 0 for none).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from hicache_store.clock import SYSTEM_CLOCK, Clock, Deadline
from hicache_store.config import StoreUrl
from hicache_store.connectors.base import (
    ABSENT,
    META_PREFIX,
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
from hicache_store.connectors.batch import Claim
from hicache_store.connectors.local_account import Account, Reservation, open_account
from hicache_store.connectors.local_attach import Settings, attach, read_settings
from hicache_store.connectors.local_io import PosixIO, is_absent
from hicache_store.connectors.local_names import OBJECTS_DIR
from hicache_store.connectors.local_read import Reader
from hicache_store.connectors.local_root import Place, Root, place_of, used_at_ns, version_of
from hicache_store.connectors.local_scan import remove_dead_metadata_drafts, scan
from hicache_store.connectors.local_sweep import Maintenance, SweepReport
from hicache_store.connectors.local_write import WriteBatch, Writer
from hicache_store.connectors.workers import Mode, Workers
from hicache_store.errors import ConfigurationError, DeadlineExceededError, HicacheError
from hicache_store.limits import DEFAULT_TIMEOUT_S, LOOKUP_SLICE_ITEMS
from hicache_store.metrics import Metrics

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
_READ_ONLY: Final = Outcome(Status.REFUSED, "the root can only be read")


def connect(url: StoreUrl) -> LocalConnector:
    """Open the store at ``url``; raises :class:`ConfigurationError` when it cannot be used, and
    :class:`DeadlineExceededError` when its file system does not answer in DEFAULT_TIMEOUT_S."""
    return open_local(read_settings(url))


def open_local(
    settings: Settings,
    io: PosixIO | None = None,
    clock: Clock = SYSTEM_CLOCK,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> LocalConnector:
    """Like :func:`connect`, with system calls and clock given."""
    system = PosixIO() if io is None else io

    def step(given: Settings, claim: Claim) -> LocalConnector | HicacheError:
        try:
            connector = _assemble(given, system, clock)
        except HicacheError as error:
            return error
        if not claim.enter():
            connector.close()
        return connector

    starter = Workers(1, f"attaching file://{settings.path}", "abandons")
    try:
        (result,) = starter.run([settings], step, Deadline.after(timeout_s))
    finally:
        starter.close()
    if isinstance(result, HicacheError):
        raise result
    if isinstance(result, Outcome):
        if result.status is Status.TIMED_OUT:
            raise DeadlineExceededError(f"file: {settings.path} did not answer within {timeout_s:g} s")
        raise ConfigurationError(f"file: {settings.path} cannot be used as a store: {result.detail}")
    return result


def _assemble(settings: Settings, io: PosixIO, clock: Clock) -> LocalConnector:
    metrics = Metrics()
    root = attach(settings, io, clock, metrics)
    try:
        account = None if root.is_read_only else _open_account(root, settings, clock)
        return LocalConnector(root, settings, account, metrics)
    except OSError as error:
        root.tree.close()
        raise ConfigurationError(f"file: {settings.path} cannot be accounted for: {error}") from error


def _open_account(root: Root, settings: Settings, clock: Clock) -> Account:
    top = root.tree.borrow(())
    try:
        objects = root.tree.borrow((OBJECTS_DIR,), creates=True)
        try:
            return open_account(
                top.fd,
                objects.fd,
                quota_bytes=settings.quota_bytes,
                min_free_bytes=settings.min_free_bytes,
                ttl_s=settings.ttl_s,
                clock_offset_s=lambda: root.clock.offset_s,
                io=root.io,
                metrics=root.metrics,
                clock=clock,
            )
        finally:
            root.tree.give_back(objects)
    finally:
        root.tree.give_back(top)


class LocalConnector:
    """The connector of one attached root; made by :func:`connect`. ``metrics`` counts its faults."""

    def __init__(self, root: Root, settings: Settings, account: Account | None, metrics: Metrics) -> None:
        bounces = settings.io == "bounce" or (settings.io == "auto" and not root.is_local)
        mode: Mode = "abandons" if bounces else "bounded"
        self.metrics = metrics
        self._pid = os.getpid()
        self._root = root
        self._account = account
        self._workers = Workers(settings.threads, f"file://{settings.path}", mode, metrics)
        self._reader = Reader(root, bounces)
        self._writer = Writer(root, bounces)
        self._maintenance: Maintenance | None = None
        if account is not None and settings.sweep_interval_s > 0:
            self._maintenance = Maintenance(account, settings.sweep_interval_s, metrics)
        self._capabilities = Capabilities(
            scheme="file",
            stop=mode,
            create_only=root.creates_only,
            conditional_versions=False,
            request_cost_bytes=settings.request_cost_bytes,
            concurrency=settings.threads,
            alignment_bytes=root.mover.alignment_bytes,
            is_read_only=root.is_read_only,
            orders_eviction=root.keeps_order,
        )

    @property
    def capabilities(self) -> Capabilities:
        """What this root and its file system guarantee."""
        return self._capabilities

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        """Length of each object, ``None`` where it is absent, expired or cannot be told."""
        found = self._each(keys, self._size, deadline)
        return [size if isinstance(size, int) else None for size in found]

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        """Fetch each object's parts into its target."""
        return self._workers.run(reads, self._reader, deadline)

    def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        """Store each object, all or nothing."""
        self._workers.require_usable()
        if self._account is None:
            return [_READ_ONLY] * len(writes)
        batch = WriteBatch(self._root.clock.second())
        seen = self._each(writes, lambda write: self._writer.inspect(write, batch.second), deadline)
        todo = [(write, at) for write, at in zip(writes, seen, strict=True) if not isinstance(at, Outcome)]
        written = iter(self._write(todo, batch, self._account, deadline))
        return [at if isinstance(at, Outcome) else next(written) for at in seen]

    def delete(
        self, keys: Sequence[str], deadline: Deadline, versions: Sequence[str | None] | None = None
    ) -> list[Outcome]:
        """Remove objects; with a version, only if it is still that one (else ``CONFLICT``)."""
        self._workers.require_usable()
        account = self._account
        if account is None:
            return [_READ_ONLY] * len(keys)

        def step(part: Sequence[tuple[str, str | None]], claim: Claim) -> list[Outcome]:
            mark = account.mark()
            freed: list[int] = []
            try:
                return [self._delete(*pair, freed, claim) for pair in _until_cancelled(part, claim)]
            finally:
                account.released(sum(freed), mark)

        wanted = [None] * len(keys) if versions is None else versions
        return self._in_slices(list(zip(keys, wanted, strict=True)), step, deadline)

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        """Mark objects as used now, in the given order."""
        self._workers.require_usable()
        if self._account is None:
            return [_READ_ONLY] * len(touches)
        second = self._root.clock.second()
        outcomes: list[Outcome] = []
        for part in self._slices(touches):  # one after the other: the order is part of the promise
            outcomes += self._each(part, lambda touch: self._touch(touch, second), deadline)
        return outcomes

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key starts with ``prefix``, directory by directory."""
        self._workers.require_usable()
        return scan(self._root, prefix)

    def sweep(self, deadline: Deadline) -> SweepReport:
        """Expire, evict, remove what dead writers left behind, and recount the bytes.

        Raises :class:`DeadlineExceededError` when the file system hangs, ``OSError`` when the
        account cannot be used.
        """
        self._workers.require_usable()
        account = self._account
        if account is None:
            return SweepReport(reason="the root can only be read")

        def step(_: None, __: Claim) -> SweepReport | OSError:
            try:
                report = account.sweep(deadline)
                removed = remove_dead_metadata_drafts(self._root)
            except OSError as error:
                return error
            return replace(report, temp_files_removed=report.temp_files_removed + removed)

        (result,) = self._workers.run([None], step, deadline)
        if isinstance(result, Outcome):
            raise DeadlineExceededError(f"the sweep did not end in time: {result.detail}")
        if isinstance(result, OSError):
            raise result
        return result

    def close(self) -> None:
        """Stop the threads and give everything back; idempotent."""
        if os.getpid() != self._pid:
            return
        if self._maintenance is not None:
            self._maintenance.close()
        self._workers.close(self._give_back)

    def _give_back(self) -> None:
        if self._account is not None:
            self._account.close()
        self._root.tree.close()

    # -- one item --------------------------------------------------------------------------

    def _size(self, key: str) -> int | Outcome:
        def action() -> int | Outcome:
            found = self._root.look(place_of(key))
            return ABSENT if found is None or self._root.is_expired(key, found) else found.st_size

        return self._root.guarded("look", action)

    def _touch(self, touch: Touch, second: int) -> Outcome:
        root = self._root

        def action() -> Outcome:
            place = place_of(touch.key)
            found = root.look(place)
            if found is None or root.is_expired(touch.key, found):
                return ABSENT
            mtime_ns = used_at_ns(second, touch.depth)
            try:
                root.within(place[0], lambda fd: root.io.utime(place[1], mtime_ns, dir_fd=fd))
            except OSError as error:
                if is_absent(error):
                    return ABSENT
                raise
            return OK

        return root.guarded("touch", action)

    def _delete(self, key: str, version: str | None, freed: list[int], claim: Claim) -> Outcome:
        root = self._root

        def action() -> Outcome:
            place = place_of(key)
            found = root.look(place)
            if found is None:
                return ABSENT
            if version is not None and version != version_of(found):
                return Outcome(Status.CONFLICT, "the object is of another version", version_of(found))
            if claim.is_cancelled():
                return TIMED_OUT
            try:
                root.within(place[0], lambda fd: root.io.unlink(place[1], dir_fd=fd))
            except OSError as error:
                if is_absent(error):
                    return ABSENT
                raise
            freed.append(0 if key.startswith(META_PREFIX) else found.st_size)
            return OK

        return root.guarded("delete", action)

    # -- batches ---------------------------------------------------------------------------

    def _slices(self, items: Sequence[ItemT]) -> list[Sequence[ItemT]]:
        """``items`` as tasks: one where calls end by themselves, short ones where they may hang."""
        length = LOOKUP_SLICE_ITEMS if self._workers.mode == "abandons" else max(1, len(items))
        return [items[start : start + length] for start in range(0, len(items), length)]

    def _in_slices(
        self,
        items: Sequence[ItemT],
        step: Callable[[Sequence[ItemT], Claim], list[ResultT]],
        deadline: Deadline,
    ) -> list[ResultT | Outcome]:
        slices = self._slices(items)
        results: list[ResultT | Outcome] = []
        for part, done in zip(slices, self._workers.run(slices, step, deadline), strict=True):
            if isinstance(done, Outcome):
                results += [done] * len(part)
            else:
                results += done
                results += [TIMED_OUT] * (len(part) - len(done))
        return results

    def _each(
        self, items: Sequence[ItemT], action: Callable[[ItemT], ResultT], deadline: Deadline
    ) -> list[ResultT | Outcome]:
        """``action`` on every item, for short system calls that need no memory of the caller."""

        def step(part: Sequence[ItemT], claim: Claim) -> list[ResultT]:
            return [action(item) for item in _until_cancelled(part, claim)]

        return self._in_slices(items, step, deadline)

    def _write(
        self, items: Sequence[tuple[Write, Place]], batch: WriteBatch, account: Account, deadline: Deadline
    ) -> list[Outcome]:
        """Reserve room for the writes and store them; those without room are refused."""
        if not items:
            return []
        outcomes: dict[int, Outcome] = {}
        counted: list[int] = []
        quota_bytes = account.quota_bytes
        for index, (write, _) in enumerate(items):
            if write.key.startswith(META_PREFIX):
                continue
            if quota_bytes is not None and write.size_bytes > quota_bytes:
                detail = f"{write.size_bytes} bytes exceed the whole quota of {quota_bytes}"
                outcomes[index] = Outcome(Status.REFUSED, detail)
            else:
                counted.append(index)
        reservation = self._reserve(account, [items[index][0].size_bytes for index in counted], deadline)
        if isinstance(reservation, Reservation):
            granted, after = reservation.granted, lambda: account.settle(reservation, batch.stored_bytes)
            refusal = TIMED_OUT if deadline.is_past else Outcome(Status.REFUSED, reservation.reason)
        else:
            granted, after, refusal = 0, None, reservation
        outcomes.update((index, refusal) for index in counted[granted:])
        uncounted = WriteBatch(batch.second)

        def step(item: tuple[Write, Place], claim: Claim) -> Outcome:
            is_counted = not item[0].key.startswith(META_PREFIX)
            return self._writer.write(*item, claim, batch if is_counted else uncounted)

        todo = [item for index, item in enumerate(items) if index not in outcomes]
        written = iter(self._workers.run(todo, step, deadline, after))
        return [outcomes.get(index) or next(written) for index in range(len(items))]

    def _reserve(self, account: Account, sizes: list[int], deadline: Deadline) -> Reservation | Outcome:
        def step(given: list[int], claim: Claim) -> Reservation:
            reservation = account.reserve(given, deadline)
            if not claim.enter():
                account.settle(reservation, 0)
            return reservation

        (result,) = self._workers.run([sizes], step, deadline)
        return result


def _until_cancelled(items: Sequence[ItemT], claim: Claim) -> Iterator[ItemT]:
    for item in items:
        if claim.is_cancelled():
            return
        yield item
