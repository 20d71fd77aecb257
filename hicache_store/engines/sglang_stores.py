"""Stores over SGLang's host pools, one a pool: hashes and token positions in, counts of pages out.

Three kinds. A pool whose memory is understood is read and written in place. One that only the engine
can take apart goes page by page through scratch memory, under a name that ties it to the ranks that
hold the same. One that only numbers slots holds nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hicache_store.connectors.base import Connector
from hicache_store.engines.sglang_pools import flat_page_bytes, slots_of
from hicache_store.layout.dtypes import DType
from hicache_store.layout.layouts import engine_layout
from hicache_store.layout.model import KVPart, Pool
from hicache_store.layout.namespace import Namespace
from hicache_store.layout.parallel import ParallelSpec, Rank
from hicache_store.layout.plan import Placement, placement_of_slot
from hicache_store.limits import ENGINE_SCRATCH_BYTES
from hicache_store.metrics import Metrics
from hicache_store.store import BackupReport, PageState, PoolBuffers, Store

_DONE = (PageState.STORED, PageState.PRESENT, PageState.NOT_ELECTED)
"""States that the engine may take for stored: another holder of the same box writes what it was elected
for, and a page that is there already is stored."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines of one call, in seconds."""

    transfer_s: float
    lookup_s: float


class PoolStore(Protocol):
    """The pages of one host pool."""

    @property
    def page_bytes(self) -> int:
        """Bytes of this rank's part of a page."""
        ...

    def leading(self, hashes: Sequence[str]) -> int:
        """How many leading pages are stored for this rank."""
        ...

    def stored(self, hashes: Sequence[str]) -> Sequence[bool]:
        """For each page whether it is stored for this rank."""
        ...

    def restore(self, hashes: Sequence[str], host_indices: Any, prefix: Sequence[str]) -> int:
        """Load pages to their token positions; how many leading ones are there, verified and whole."""
        ...

    def backup(self, hashes: Sequence[str], host_indices: Any, first_page: int) -> list[bool]:
        """Store pages; for each whether the engine may take it for stored."""
        ...

    def close(self) -> None:
        """Give the store back."""
        ...


@dataclass(frozen=True, slots=True)
class DirectStore:
    """A pool that is read and written in place. ``parts`` are the stores over it and their pools: the
    target's layers, and the draft's where they are packed behind them. A page needs all of them."""

    parts: tuple[tuple[Store, str], ...]
    page_size: int
    page_bytes: int
    limits: Limits
    is_whole_pages: bool = False
    """Whether the pools know a page as one row, so that a placement is a slot alone."""

    def leading(self, hashes: Sequence[str]) -> int:
        """The least of what the parts have."""
        pages = len(hashes)
        for store, pool in self.parts:
            pages = store.contains(hashes[:pages], pool=pool, timeout_s=self.limits.lookup_s).pages
        return pages

    def stored(self, hashes: Sequence[str]) -> Sequence[bool]:
        """What all parts have."""
        held = [store.stored(hashes, pool=pool, timeout_s=self.limits.lookup_s) for store, pool in self.parts]
        return [all(page) for page in zip(*held, strict=True)]

    def restore(self, hashes: Sequence[str], host_indices: Any, prefix: Sequence[str]) -> int:
        """The shortest run that all parts could load."""
        placements = self._placements(host_indices, len(hashes))
        pages = len(hashes)
        for store, pool in self.parts:
            pages = store.restore(
                hashes[:pages],
                placements[:pages],
                pool=pool,
                prefix=prefix,
                timeout_s=self.limits.transfer_s,
            ).pages
        return pages

    def backup(self, hashes: Sequence[str], host_indices: Any, first_page: int) -> list[bool]:
        """Store every part."""
        placements = self._placements(host_indices, len(hashes))
        done = [True] * len(hashes)
        for store, pool in self.parts:
            report = store.backup(
                hashes, placements, pool=pool, first_page=first_page, timeout_s=self.limits.transfer_s
            )
            done = [before and now for before, now in zip(done, _done(report), strict=True)]
        return done

    def close(self) -> None:
        """Close the stores."""
        for store, _ in self.parts:
            store.close()

    def _placements(self, host_indices: Any, count: int) -> list[Placement]:
        slots = slots_of(host_indices, self.page_size, count)
        tokens = 1 if self.is_whole_pages else self.page_size
        return [placement_of_slot(slot, tokens) for slot in slots]


class FlatStore:
    """A pool that only the engine can take apart, by its flat pages.

    ``identity`` is whatever ties the bytes to the ranks that hold the same: other ranks, other sizes and
    other stages never read them.
    """

    def __init__(
        self,
        host_pool: Any,
        name: str,
        identity: str,
        connector: Connector,
        namespace: Namespace,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self._host_pool = host_pool
        self._page_size = int(host_pool.page_size)
        self._limits = limits
        self._name = name
        self.page_bytes, self._flat_dtype = flat_page_bytes(host_pool)
        self._step = max(1, min(128, ENGINE_SCRATCH_BYTES // self.page_bytes))
        # Pages on their way in have the first half of the memory, those on their way out the second: SGLang
        # reads and writes at the same time.
        self._scratch = np.zeros((2 * self._step, self.page_bytes), np.uint8)
        self._inbound, self._outbound = threading.Lock(), threading.Lock()
        # A page is one row of one head of one layer of one token here: nothing inside is told apart.
        part = KVPart("page", self.page_bytes)
        pool = Pool(name, 1, 1, (part,), DType.of("int8"), page_size=1, identity=identity)
        layout = engine_layout("canonical", pool, pool.page_box, slots=2 * self._step)
        self._store = Store.attach(
            connector,
            namespace,
            [PoolBuffers(pool, layout, [self._scratch.reshape(-1)])],
            ParallelSpec(),
            Rank(),
            writer="caller",
            staging_bytes=max(ENGINE_SCRATCH_BYTES, 2 * self.page_bytes + 8192),
            timeout_s=limits.transfer_s,
            metrics=metrics,
        )

    def leading(self, hashes: Sequence[str]) -> int:
        """How many leading pages are stored."""
        return self._store.contains(hashes, pool=self._name, timeout_s=self._limits.lookup_s).pages

    def stored(self, hashes: Sequence[str]) -> Sequence[bool]:
        """For each page whether it is stored."""
        return self._store.stored(hashes, pool=self._name, timeout_s=self._limits.lookup_s)

    def restore(self, hashes: Sequence[str], host_indices: Any, prefix: Sequence[str]) -> int:
        """Through scratch memory, as many pages at a time as it holds."""
        import torch  # noqa: PLC0415, the engine has loaded it

        slots = slots_of(host_indices, self._page_size, len(hashes))
        done = 0
        with self._inbound:
            for start in range(0, len(hashes), self._step):
                part = hashes[start : start + self._step]
                loaded = self._store.restore(
                    part,
                    [placement_of_slot(place, 1) for place in range(len(part))],
                    pool=self._name,
                    prefix=[*prefix, *hashes[:start]],
                    timeout_s=self._limits.transfer_s,
                ).pages
                for place in range(loaded):
                    page = torch.from_numpy(self._scratch[place]).view(self._flat_dtype)
                    self._host_pool.set_from_flat_data_page(slots[start + place] * self._page_size, page)
                done += loaded
                if loaded < len(part):
                    break
        return done

    def backup(self, hashes: Sequence[str], host_indices: Any, first_page: int) -> list[bool]:
        """Through scratch memory, as many pages at a time as it holds."""
        import torch  # noqa: PLC0415, the engine has loaded it

        slots = slots_of(host_indices, self._page_size, len(hashes))
        done: list[bool] = []
        with self._outbound:
            for start in range(0, len(hashes), self._step):
                part = hashes[start : start + self._step]
                places = range(self._step, self._step + len(part))
                for place, slot in zip(places, slots[start : start + self._step], strict=True):
                    page = self._host_pool.get_data_page(slot * self._page_size, flat=True)
                    self._scratch[place] = page.contiguous().view(torch.uint8).numpy().reshape(-1)
                report = self._store.backup(
                    part,
                    [placement_of_slot(place, 1) for place in places],
                    pool=self._name,
                    first_page=first_page + start,
                    timeout_s=self._limits.transfer_s,
                )
                done += _done(report)
        return done

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class LogicalStore:
    """A pool that only numbers slots: there is nothing to store and nothing missing."""

    page_bytes = 0

    def leading(self, hashes: Sequence[str]) -> int:
        """All of them."""
        return len(hashes)

    def stored(self, hashes: Sequence[str]) -> Sequence[bool]:
        """All of them."""
        return [True] * len(hashes)

    def restore(self, hashes: Sequence[str], host_indices: Any, prefix: Sequence[str]) -> int:  # noqa: ARG002
        """All of them."""
        return len(hashes)

    def backup(self, hashes: Sequence[str], host_indices: Any, first_page: int) -> list[bool]:  # noqa: ARG002
        """All of them."""
        return [True] * len(hashes)

    def close(self) -> None:
        """Nothing to close."""


def _done(report: BackupReport) -> list[bool]:
    return [state in _DONE for state in report.states]
