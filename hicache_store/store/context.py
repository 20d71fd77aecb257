"""What every operation of one store shares: where it reads and writes and what it remembers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hicache_store.clock import Clock, Deadline
from hicache_store.connectors.base import Connector, Outcome, Status, Touch
from hicache_store.layout.format import ObjectFormat
from hicache_store.layout.names import page_prefix
from hicache_store.limits import BAD_KEY_S, BAD_KEYS_MAX, TOUCH_INTERVAL_S
from hicache_store.metrics import Metrics
from hicache_store.store.binding import Binding
from hicache_store.store.bounded import BoundedDict
from hicache_store.store.grids import GridDirectory
from hicache_store.store.proof import prove
from hicache_store.store.recent import RecentLookups
from hicache_store.store.reports import EndReason, end_reason
from hicache_store.store.staging import StagingPool


@dataclass(frozen=True, slots=True)
class BadObject:
    """An object whose bytes were refused: what they were, and the version that held them."""

    reason: EndReason
    version: str | None
    seen_at: float = 0.0
    """Monotonic time."""


class Refused(NamedTuple):
    """An object that a read did not get, and the format it should have."""

    key: str
    outcome: Outcome
    format: ObjectFormat


@dataclass(slots=True)
class StoreContext:
    """The parts of an attached store."""

    connector: Connector
    namespace: str
    directory: GridDirectory
    staging: StagingPool
    metrics: Metrics
    clock: Clock
    verify: bool
    bad: BoundedDict[str, BadObject] = field(default_factory=lambda: BoundedDict(BAD_KEYS_MAX))
    """Keys whose object counts as absent although it is there."""
    recent: RecentLookups = field(default_factory=RecentLookups)
    """Look-ups that a caller may be answered from again."""

    def learn_grids(self, binding: Binding) -> bool:
        """Hand the directory's grids to a binding; whether it can now look at more objects."""
        return binding.table.add_grids(self.directory.grids)

    def bad_object(self, key: str) -> BadObject | None:
        """What is known against the object of ``key``; forgotten after BAD_KEY_S, when it is worth a look."""
        known = self.bad.get(key)
        if known is not None and self.clock.monotonic() - known.seen_at > BAD_KEY_S:
            self.bad.discard(key)
            return None
        return known

    def set_aside(self, refused: Sequence[Refused], deadline: Deadline) -> set[str]:
        """Remove objects whose bytes were refused, if they are still those; remember the others.

        The verdict fell on memory that is not ours alone, so each is read once more into memory of our own:
        the keys of those that are sound there are returned, and they stay. An object of a later format
        version is never removed, only remembered. One of the wrong length needs neither: its length alone
        keeps it from being taken for present.
        """
        self.recent.forget({one.key.rsplit("/", 2)[-2] for one in refused})
        proofs = [one for one in refused if one.outcome.status is Status.REJECTED]
        sound = prove(self.connector, self.staging, [(one.key, one.format) for one in proofs], deadline)
        doomed: list[Refused] = []
        for one in refused:
            if one.outcome.status is Status.ABSENT:
                continue
            if one.key in sound:
                self.metrics.add("object.slot_disturbed")
                continue
            reason = end_reason(one.outcome)
            self.metrics.add(f"object.{reason.value}")
            if one.outcome.status is Status.REJECTED:
                self.bad.set(one.key, BadObject(reason, one.outcome.version, self.clock.monotonic()))
                if reason is not EndReason.UNKNOWN_VERSION:
                    doomed.append(one)
        if doomed and not self.connector.capabilities.is_read_only:
            self._remove(doomed, deadline)
        return sound

    def _remove(self, doomed: Sequence[Refused], deadline: Deadline) -> None:
        keys = [one.key for one in doomed]
        versions = [one.outcome.version for one in doomed]
        for key, removed in zip(keys, self.connector.delete(keys, deadline, versions), strict=True):
            if removed.is_ok or removed.status in (Status.ABSENT, Status.CONFLICT):
                self.bad.discard(key)

    def touch(
        self,
        binding: Binding,
        depths: Sequence[int],
        hashes: Sequence[str],
        masks: Sequence[int],
        deadline: Deadline,
        *,
        has_grown: bool = False,
    ) -> None:
        """Mark the pages of a chain as used, head first; ``masks`` tell the objects that hold each.

        A chain that was touched within a minute, alone or as part of a longer one, is left out, unless
        it has just grown: all of it or nothing, because a page must never look older than one behind it.
        """
        if has_grown:
            self.recent.forget_gaps()
        if self.connector.capabilities.is_read_only or not hashes:
            return
        now = self.clock.monotonic()
        last = binding.touched.get_many(hashes)
        tail = -math.inf if last[-1] is None else last[-1]
        is_recent = now - tail < TOUCH_INTERVAL_S
        if is_recent and not has_grown and all(at is not None and at >= tail for at in last):
            return
        binding.touched.set_many([(page_hash, now) for page_hash in hashes])
        leaves = {mask: binding.table.leaves_of(mask) for mask in set(masks)}
        touches = [
            Touch(prefix + leaf, depth)
            for depth, page_hash, mask in zip(depths, hashes, masks, strict=True)
            for prefix in (page_prefix(self.namespace, page_hash),)
            for leaf in leaves[mask]
        ]
        self.connector.touch(touches, deadline)
