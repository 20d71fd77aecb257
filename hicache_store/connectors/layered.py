"""``layered:``: a fast connector before a slow one.

``layered:?fast=URL&slow=URL&mode=write-through``, each URL percent-encoded. The slow layer is the
place: it decides what a write became, and versions are its own. The fast layer is a cache of it with its
own quota, and may be lost, full or hung: every call leaves the slow layer half of its time.

* A read that the fast layer cannot answer goes to the slow one in the same call, whether the copy is
  absent, fails, has another length or is refused by the target's check; a copy of the last two kinds is
  dropped, by its version. The target goes through its protocol once a try.
* Readers of one key that come together fetch it once; the others wait, within their deadline, for the
  bytes of the first. What was read whole and found good is copied and written to the fast layer behind
  the calls (``fill=seen``); ``whole`` fetches objects whole even where a part was asked for; ``none``
  fills nothing.
* ``mode=write-through``: the slow layer, then the fast one behind the call. ``write-back``: a copy of
  the object is kept, the fast layer gets it at once and the slow one behind the call; it counts as
  stored while the copy is in memory. A process that is killed loses what did not reach the slow layer
  from it, and two writers of one key are not told apart for certain. Closing waits ``drain`` for the rest.
  ``read-only-fast`` changes nothing in the fast layer.
* A removal goes to the slow layer first and takes with it every copy that is on its way.
* A look-up believes the fast layer for a while after the slow one confirmed a length, and asks it else.
* Manifests and markers, whose content may change under a key, are never kept in the fast layer.

Copies on their way are bounded by ``queue`` bytes in each direction: past it nothing is filled, and a
write-back is refused; both are counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final, Literal, TypeAlias, cast

from hicache_store.clock import SYSTEM_CLOCK, Clock, Deadline
from hicache_store.config import Option, StoreUrl, choice_option, duration_option, size_option
from hicache_store.connectors.base import (
    META_PREFIX,
    OK,
    Capabilities,
    Connector,
    Entry,
    Lister,
    Outcome,
    Read,
    Status,
    Touch,
    Write,
)
from hicache_store.connectors.layered_backlog import Backlog
from hicache_store.connectors.layered_memory import SlowMemory
from hicache_store.connectors.layered_parts import Layers
from hicache_store.connectors.layered_read import Fill, LayeredReader, half_of
from hicache_store.connectors.layered_sizes import LayeredSizes
from hicache_store.connectors.layered_write import LayeredWriter
from hicache_store.connectors.registry import open_connector
from hicache_store.errors import ConfigurationError, HandleError
from hicache_store.limits import DEFAULT_TIMEOUT_S, LAYER_DRAIN_S, LAYER_QUEUE_BYTES, LISTING_BATCH
from hicache_store.metrics import Metrics

Mode: TypeAlias = Literal["write-through", "write-back", "read-only-fast"]

_MODES: Final = ("write-through", "write-back", "read-only-fast")
_FILLS: Final = ("seen", "whole", "none")

OPTIONS: Final = (
    Option("fast", str, "a percent-encoded store URL"),
    Option("slow", str, "a percent-encoded store URL"),
    choice_option("mode", "write-through", _MODES),
    choice_option("fill", "seen", _FILLS),
    size_option("queue", LAYER_QUEUE_BYTES, 1),
    duration_option("drain", LAYER_DRAIN_S),
)


def connect(url: StoreUrl) -> LayeredConnector:
    """Open both layers; raises :class:`ConfigurationError` when one is not given or cannot be opened."""
    options = url.options(OPTIONS)
    urls = [options.optional(name, str) for name in ("fast", "slow")]
    if url.location or urls[0] is None or urls[1] is None:
        raise ConfigurationError(
            "layered: takes two stores, percent-encoded, and nothing before the '?': "
            "layered:?fast=file%3A%2F%2F%2Fcache&slow=s3%3A%2F%2Fbucket"
        )
    fast = open_connector(urls[0])
    try:
        slow = open_connector(urls[1])
    except BaseException:
        fast.close()
        raise
    return LayeredConnector(
        fast,
        slow,
        mode=cast("Mode", options.get("mode", str)),
        fill=cast("Fill", options.get("fill", str)),
        queue_bytes=options.get("queue", int),
        drain_s=options.get("drain", float),
    )


class LayeredConnector:
    """``fast`` before ``slow``, both owned. ``metrics`` counts as ``layered.*`` what came from where,
    what was dropped and why."""

    def __init__(
        self,
        fast: Connector,
        slow: Connector,
        *,
        mode: Mode = "write-through",
        fill: Fill = "seen",
        queue_bytes: int = LAYER_QUEUE_BYTES,
        drain_s: float = LAYER_DRAIN_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.metrics: Final = Metrics()
        self._fast = fast
        self._slow = slow
        self._changes_fast = mode != "read-only-fast" and not fast.capabilities.is_read_only
        self._drain_s = drain_s
        self._pid = os.getpid()
        self._is_closed = False
        self._fills = Backlog(fast, "fill", queue_bytes, self.metrics, is_lasting=False)
        self._pending = Backlog(slow, "write", queue_bytes, self.metrics, is_lasting=True)
        is_back = mode == "write-back" and not slow.capabilities.is_read_only
        self._memory = SlowMemory(clock)
        layers = Layers(
            fast,
            slow,
            self._fills,
            self._pending,
            self._memory,
            self.metrics,
            is_back=is_back,
            changes_fast=self._changes_fast,
        )
        self._sizes = LayeredSizes(layers)
        self._reader = LayeredReader(layers, fill)
        self._writer = LayeredWriter(layers)
        self._capabilities = _combined(fast.capabilities, slow.capabilities, is_back)

    @property
    def capabilities(self) -> Capabilities:
        """What both layers together guarantee."""
        return self._capabilities

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        """Length of each object by the slow layer's word, of now or of lately, or of a copy on its way."""
        self._require_usable()
        return self._sizes(keys, deadline)

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        """Fetch each object's parts from the first layer whose bytes are good."""
        self._require_usable()
        return self._reader(reads, deadline)

    def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        """Store each object as the mode says."""
        self._require_usable()
        return self._writer(writes, deadline)

    def delete(
        self, keys: Sequence[str], deadline: Deadline, versions: Sequence[str | None] | None = None
    ) -> list[Outcome]:
        """Remove objects from both layers; what the slow one keeps, the fast one keeps as well."""
        self._require_usable()
        self._pending.void(keys if versions is None else _unversioned(keys, versions))
        outcomes = self._slow.delete(keys, deadline, versions)
        for index, key in enumerate(keys):  # a version that was seen is not the one still on its way
            is_versioned = versions is not None and versions[index] is not None
            if is_versioned and self._pending.data(key) is not None:
                outcomes[index] = Outcome(Status.CONFLICT, "another version is on its way to the slow layer")
        gone = [
            key
            for key, outcome in zip(keys, outcomes, strict=True)
            if outcome.is_ok or outcome.status is Status.ABSENT
        ]
        self._fills.void(gone)
        self._memory.forget(gone)
        if not gone or not self._changes_fast:
            return outcomes
        kept = [key for key in gone if not key.startswith(META_PREFIX)]
        removed = self._fast.delete(kept, deadline)
        by_key = dict(zip(kept, removed, strict=True))
        return [_worse(outcome, by_key.get(key)) for key, outcome in zip(keys, outcomes, strict=True)]

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        """Mark objects as used now, in both layers; the slow one's word counts where it has the object."""
        self._require_usable()
        outcomes = self._slow.touch(touches, deadline)
        lost = [
            one.key for one, outcome in zip(touches, outcomes, strict=True) if outcome.status is Status.ABSENT
        ]
        self._memory.forget(lost)
        kept = [i for i, one in enumerate(touches) if not one.key.startswith(META_PREFIX)]
        if not self._changes_fast or not kept or deadline.is_past:
            return outcomes
        touched = self._fast.touch([touches[index] for index in kept], half_of(deadline))
        for index, outcome in zip(kept, touched, strict=True):
            is_known = outcome.is_ok or self._pending.data(touches[index].key) is not None
            if outcomes[index].status is Status.ABSENT and is_known:
                outcomes[index] = OK
        return outcomes

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """The slow layer's objects, then those that only the fast layer or a copy on its way has."""
        self._require_usable()
        pending = {key: size for key, size in self._pending.queued() if key.startswith(prefix)}
        for entry in self._slow.scan(prefix):
            pending.pop(entry.key, None)
            if not self._pending.is_void(entry.key):
                yield entry
        for key, size_bytes in pending.items():
            yield Entry(key, size_bytes, 0.0)
        others = (
            one
            for one in self._fast.scan(prefix)
            if not one.key.startswith(META_PREFIX)
            and one.key not in pending
            and not self._fills.is_void(one.key)
        )
        while batch := list(islice(others, LISTING_BATCH)):
            sizes = self._slow.sizes([one.key for one in batch], Deadline.after(DEFAULT_TIMEOUT_S))
            yield from (
                replace(one, version=None) for one, size in zip(batch, sizes, strict=True) if size is None
            )

    def listing(self, prefix: str, deadline: Deadline) -> list[str] | None:
        """Metadata below a prefix, which only the slow layer keeps; ``None`` for all else."""
        self._require_usable()
        if not prefix.startswith(META_PREFIX) or not isinstance(self._slow, Lister):
            return None
        found = self._slow.listing(prefix, deadline)
        if found is None:
            return None
        known = dict.fromkeys([*found, *(key for key, _ in self._pending.queued() if key.startswith(prefix))])
        return [key for key in known if not self._pending.is_void(key)]

    def flush(self, deadline: Deadline) -> bool:
        """Wait until all copies on their way have arrived or were dropped; whether they did."""
        self._require_usable()
        return self._pending.flush(deadline) and self._fills.flush(deadline)

    def close(self) -> None:
        """Wait for pending write-backs, drop pending fills, close both layers; idempotent."""
        try:
            if os.getpid() == self._pid and not self._is_closed:
                self._is_closed = True
                self._pending.close(self._drain_s)
                self._fills.close()
        finally:  # whatever interrupts the wait, no layer keeps its threads and files
            try:
                self._fast.close()
            finally:
                self._slow.close()

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise HandleError("a layered connector does not outlive a fork; open one in the child")
        if self._is_closed:
            raise HandleError("the layered connector is closed; open the store again")


def _combined(fast: Capabilities, slow: Capabilities, is_back: bool) -> Capabilities:
    return Capabilities(
        scheme="layered",
        stop="bounded" if fast.stop == slow.stop == "bounded" else "abandons",
        create_only=slow.create_only and not is_back,
        conditional_versions=slow.conditional_versions and not is_back,
        request_cost_bytes=max(fast.request_cost_bytes, slow.request_cost_bytes),
        concurrency=max(fast.concurrency, slow.concurrency),
        alignment_bytes=max(fast.alignment_bytes, slow.alignment_bytes),
        is_read_only=slow.is_read_only,
        orders_eviction=fast.orders_eviction and slow.orders_eviction and not is_back,
        lookup_items=max(fast.lookup_items, slow.lookup_items),
    )


def _unversioned(keys: Sequence[str], versions: Sequence[str | None]) -> list[str]:
    return [key for key, version in zip(keys, versions, strict=True) if version is None]


def _worse(slow: Outcome, fast: Outcome | None) -> Outcome:
    """A removal is done when no layer has the object."""
    if fast is None or fast.status is Status.ABSENT:
        return slow
    return fast if slow.is_ok or slow.status is Status.ABSENT else slow
