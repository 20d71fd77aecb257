"""One rank's connection between its engine's pool and the store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hicache_store.demo.identity import demo_namespace
from hicache_store.demo.messages import GroupSpec, Message
from hicache_store.demo.pool import KVPool
from hicache_store.demo.weights import ModelConfig
from hicache_store.layout.hashing import page_hashes
from hicache_store.layout.layouts import engine_layout
from hicache_store.layout.parallel import Rank, shard
from hicache_store.layout.plan import placement_of_slot
from hicache_store.layout.weights import WeightsIdentity, WeightsKind
from hicache_store.store import PoolBuffers, RestoreReport, Store


@dataclass(frozen=True, slots=True)
class Restored:
    """What a rank loaded, and how long that took it."""

    report: RestoreReport
    seconds: float

    def to_message(self) -> Message:
        """The JSON form."""
        end = self.report.end
        return {
            "pages": self.report.pages,
            "objects": self.report.objects,
            "bytes": self.report.read_bytes,
            "seconds": self.seconds,
            "end": "" if end is None else f"page {end.page}: {end.reason.value} {end.detail}".strip(),
        }


class RankStore:
    """Backs up and restores the pages of sequences that lie in one rank's pool."""

    def __init__(self, store: Store, page_size: int) -> None:
        self._store, self._page_size = store, page_size

    @classmethod
    def attach(
        cls, spec: GroupSpec, rank: Rank, config: ModelConfig, memory: KVPool, message: Message
    ) -> RankStore:
        """Attach as ``message`` says: url, tenant, weights, verify, timeout_s."""
        pool = config.kv().pool(spec.page_size)
        held = shard(pool, spec.parallel, rank)
        assert held is not None
        layout = engine_layout("layer_first", pool, held.box, slots=memory.slots)
        weights = WeightsIdentity(WeightsKind(message["weights"]["kind"]), message["weights"]["value"])
        store = Store.attach(
            message["url"],
            demo_namespace(config, weights, spec.page_size, message["tenant"]),
            [PoolBuffers(pool, layout, [memory.bytes_view()])],
            spec.parallel,
            rank,
            verify=message["verify"],
            timeout_s=message["timeout_s"],
        )
        return cls(store, spec.page_size)

    def backup(self, tokens: Sequence[int], slots: Sequence[int]) -> Message:
        """Store this rank's part of the full pages of ``tokens``, which lie in ``slots``."""
        hashes = page_hashes(tokens, self._page_size)
        placements = [placement_of_slot(slot, self._page_size) for slot in slots[: len(hashes)]]
        report = self._store.backup(hashes, placements)
        return {
            "states": [state.value for state in report.states],
            "objects": report.objects,
            "bytes": report.written_bytes,
            "detail": report.detail,
        }

    def restore(self, tokens: Sequence[int], slots: Sequence[int]) -> Restored:
        """Load the stored leading pages of ``tokens`` into ``slots``; at least one token stays to compute."""
        begun = time.monotonic()
        hashes = page_hashes(tokens[:-1], self._page_size)
        placements = [placement_of_slot(slot, self._page_size) for slot in slots[: len(hashes)]]
        report = self._store.restore(hashes, placements)
        return Restored(report, time.monotonic() - begun)

    def close(self) -> None:
        """Close the store."""
        self._store.close()
