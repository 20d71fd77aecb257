"""The store as callers see it: attach, contains, backup, restore, submit, close."""

from __future__ import annotations

import logging
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

from hicache_store.clock import SYSTEM_CLOCK, Clock, Deadline
from hicache_store.connectors.base import Connector
from hicache_store.connectors.registry import open_connector
from hicache_store.errors import ConfigurationError, HandleError
from hicache_store.layout.namespace import Namespace
from hicache_store.layout.parallel import ParallelSpec, Rank
from hicache_store.layout.plan import Placement, checked_placement, require_apart
from hicache_store.limits import DEFAULT_TIMEOUT_S, STAGING_BYTES, TIMEOUT_MAX_S
from hicache_store.metrics import Metrics
from hicache_store.store import manifest
from hicache_store.store.backup import backup
from hicache_store.store.binding import Binding, FixedGrid, PoolBuffers, bind
from hicache_store.store.context import StoreContext
from hicache_store.store.grids import GridDirectory
from hicache_store.store.lookup import contains, stored
from hicache_store.store.reports import BackupReport, LookupReport, RestoreReport
from hicache_store.store.restore import restore
from hicache_store.store.staging import StagingPool
from hicache_store.store.ticket import Submitter, Ticket

R = TypeVar("R")
log = logging.getLogger("hicache_store")


class Store:
    """One rank's handle on a store. Every method is thread-safe.

    After :meth:`attach` no method raises for anything the storage does: faults are counted misses
    of a report. What raises is misuse: a wrong placement, an unknown pool, a closed handle.
    """

    def __init__(self, context: StoreContext, bindings: dict[str, Binding], elects: bool, timeout_s: float):
        self._context = context
        self._bindings = bindings
        self._elects = elects
        self._timeout_s = timeout_s
        self._submitter = Submitter()
        self._pid = os.getpid()
        self._is_closed = False

    @classmethod
    def attach(
        cls,
        storage: str | Connector,
        namespace: Namespace,
        pools: Sequence[PoolBuffers],
        parallel: ParallelSpec,
        rank: Rank,
        *,
        model_layers: int | None = None,
        grid: FixedGrid | None = None,
        writer: Literal["elected", "caller"] = "elected",
        verify: bool = True,
        staging_bytes: int = STAGING_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        clock: Clock = SYSTEM_CLOCK,
        metrics: Metrics | None = None,
    ) -> Store:
        """Open a store for one rank and validate everything that can be known now.

        ``storage`` is a URL (``file:///srv/kv?quota=200GiB``) or an open connector, which the store
        then owns, and closes also when the attach is refused. ``model_layers`` is the number of layers
        that the pipeline divides, where packed draft layers make a pool longer. ``writer="caller"`` is
        for engines that elect the writer of replicated boxes themselves. Raises
        :class:`ConfigurationError` naming the numbers and the way out.
        """
        connector = open_connector(storage) if isinstance(storage, str) else storage
        try:
            _check_arguments(namespace, pools, writer, timeout_s, staging_bytes)
            bindings = {
                given.pool.name: bind(
                    given,
                    parallel,
                    rank,
                    model_layers=model_layers,
                    fixed=grid,
                    request_cost_bytes=connector.capabilities.request_cost_bytes,
                    verify=verify,
                )
                for given in pools
            }
            largest = max(binding.largest_object_bytes for binding in bindings.values())
            if largest > staging_bytes:
                raise ConfigurationError(
                    f"staging_bytes={staging_bytes} cannot hold an object of {largest} bytes; give at least "
                    f"{largest}, or a grid of fewer heads or layers an object"
                )
            counters = Metrics() if metrics is None else metrics
            _advise(bindings.values(), connector.capabilities.request_cost_bytes, counters)
            deadline = Deadline.after(timeout_s, clock)
            manifest.ensure(connector, namespace, deadline, counters)
            directory = GridDirectory(connector, namespace.digest, clock, counters)
            directory.refresh(deadline)
        except BaseException:
            connector.close()
            raise
        staging = StagingPool(staging_bytes)
        context = StoreContext(connector, namespace.digest, directory, staging, counters, clock, verify)
        return cls(context, bindings, writer == "elected", float(timeout_s))

    @property
    def metrics(self) -> Metrics:
        """Counters of everything this handle did."""
        return self._context.metrics

    @property
    def connector(self) -> Connector:
        """The connector underneath."""
        return self._context.connector

    def contains(
        self,
        hashes: Sequence[str],
        *,
        pool: str = "kv",
        timeout_s: float | None = None,
        max_age_s: float = 0.0,
    ) -> LookupReport:
        """How many leading pages of a chain are stored for this rank. A hint, not a promise.

        A caller that asks again and again while a request waits gives ``max_age_s``: what this handle
        found so recently is not asked for again. A page that a restore missed since is, and so is the end
        of a prefix once this handle has stored anything.
        """
        binding = self._binding(pool)
        _check_hashes(hashes)
        age_s = _seconds("max_age_s", max_age_s)
        return contains(self._context, binding, hashes, self._deadline(timeout_s), age_s)

    def stored(
        self, hashes: Sequence[str], *, pool: str = "kv", timeout_s: float | None = None
    ) -> tuple[bool, ...]:
        """For each page whether it is stored for this rank, holes included.

        For pools of which a prefix needs only its last pages. A hint, as :meth:`contains` is.
        """
        binding = self._binding(pool)
        _check_hashes(hashes)
        return stored(self._context, binding, hashes, self._deadline(timeout_s))

    def backup(
        self,
        hashes: Sequence[str],
        placements: Sequence[Placement],
        *,
        pool: str = "kv",
        first_page: int = 0,
        timeout_s: float | None = None,
    ) -> BackupReport:
        """Store this rank's part of the pages at ``placements``, what is not stored yet.

        ``first_page`` is the position of ``hashes[0]`` in its chain.
        """
        return self._backup(hashes, placements, pool, first_page)(self._deadline(timeout_s))

    def restore(
        self,
        hashes: Sequence[str],
        placements: Sequence[Placement],
        *,
        pool: str = "kv",
        prefix: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> RestoreReport:
        """Load, verify and place the leading pages that are stored.

        ``prefix`` are the hashes of the chain before ``hashes[0]``: with them the whole chain counts as
        used, head first, so that eviction takes tails before heads.
        """
        return self._restore(hashes, placements, pool, prefix)(self._deadline(timeout_s))

    def submit_backup(
        self,
        hashes: Sequence[str],
        placements: Sequence[Placement],
        *,
        pool: str = "kv",
        first_page: int = 0,
        timeout_s: float | None = None,
    ) -> Ticket[BackupReport]:
        """:meth:`backup` on a thread of the store. The slots must not change until the ticket is done."""
        work = self._backup(tuple(hashes), tuple(placements), pool, first_page)
        return self._submitter.submit(work, self._deadline(timeout_s))

    def submit_restore(
        self,
        hashes: Sequence[str],
        placements: Sequence[Placement],
        *,
        pool: str = "kv",
        prefix: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> Ticket[RestoreReport]:
        """:meth:`restore` on a thread of the store. The slots are not yours until the ticket is done."""
        work = self._restore(tuple(hashes), tuple(placements), pool, tuple(prefix))
        return self._submitter.submit(work, self._deadline(timeout_s))

    def close(self) -> None:
        """Finish accepted tickets, then close the connector. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() == self._pid:
            self._submitter.close()
        self._context.connector.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _backup(
        self, hashes: Sequence[str], placements: Sequence[Placement], pool: str, first_page: int
    ) -> Callable[[Deadline], BackupReport]:
        binding = self._binding(pool)
        if len(placements) != len(hashes):
            raise ConfigurationError(f"{len(hashes)} page hashes came with {len(placements)} placements")
        _check_hashes(hashes)
        sources = _checked(binding, placements)
        depth = operator.index(first_page)
        return lambda deadline: backup(
            self._context, binding, hashes, sources, deadline, depth, elects=self._elects
        )

    def _restore(
        self, hashes: Sequence[str], placements: Sequence[Placement], pool: str, prefix: Sequence[str]
    ) -> Callable[[Deadline], RestoreReport]:
        binding = self._binding(pool)
        if not binding.is_writable:
            raise ConfigurationError(f"pool {pool} has read-only buffers; nothing can be restored into them")
        _check_hashes(prefix)
        _check_hashes(hashes)
        targets = _checked(binding, placements)
        require_apart(targets)
        return lambda deadline: restore(self._context, binding, hashes, targets, deadline, prefix)

    def _binding(self, pool: str) -> Binding:
        if self._is_closed:
            raise HandleError("the store is closed")
        if os.getpid() != self._pid:
            raise HandleError("the store was attached before a fork; attach again in the child")
        try:
            return self._bindings[pool]
        except KeyError:
            known = ", ".join(self._bindings)
            raise ConfigurationError(f"pool {pool!r} is not attached; attached are {known}") from None

    def _deadline(self, timeout_s: float | None) -> Deadline:
        seconds = self._timeout_s if timeout_s is None else _seconds("timeout_s", timeout_s)
        return Deadline.after(seconds, self._context.clock)


def _check_arguments(
    namespace: Namespace, pools: Sequence[PoolBuffers], writer: str, timeout_s: float, staging_bytes: int
) -> None:
    if writer not in ("elected", "caller"):
        raise ConfigurationError(f"writer={writer!r} is not accepted; give 'elected' or 'caller'")
    if type(staging_bytes) is not int or staging_bytes < 1:
        raise ConfigurationError(
            f"staging_bytes={staging_bytes!r} is not accepted; give a whole number of bytes"
        )
    if _seconds("timeout_s", timeout_s) <= 0.0:
        raise ConfigurationError(f"timeout_s={timeout_s} is not accepted; give a finite time above 0 s")
    if not pools or len({given.pool.name for given in pools}) != len(pools):
        names = [given.pool.name for given in pools]
        raise ConfigurationError(f"a store needs pools of different names, got {names}")
    for given in pools:
        manifest.check_pool(namespace, given.pool)


def _advise(bindings: Iterable[Binding], request_cost_bytes: int, metrics: Metrics) -> None:
    """Warn, once an attach, of pools whose objects are too small for the storage."""
    for binding in bindings:
        advice = binding.small_object_advice(request_cost_bytes)
        if advice is not None:
            metrics.add("attach.small_objects")
            log.warning("%s", advice)


def _seconds(what: str, given: float) -> float:
    """A time in seconds as a float of Python, at most TIMEOUT_MAX_S, which is what clocks can add."""
    try:
        seconds = float(given)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not seconds <= TIMEOUT_MAX_S:
        raise ConfigurationError(
            f"{what}={given!r} is not accepted; give a finite time of at most {TIMEOUT_MAX_S:.0f} s"
        )
    return seconds


def _checked(binding: Binding, placements: Sequence[Placement]) -> list[Placement]:
    layout, page_size = binding.layout, binding.pool.page_size
    return [checked_placement(placement, layout, page_size) for placement in placements]


def _check_hashes(hashes: Sequence[str]) -> None:
    """Only digests may become part of a key."""
    for page_hash in hashes:
        if _PAGE_HASH(page_hash) is None:
            raise ConfigurationError(f"{page_hash!r} is not a page hash of 64 lower-case hex digits")


_PAGE_HASH = re.compile(r"[0-9a-f]{64}").fullmatch
