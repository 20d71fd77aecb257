"""Look-ups in two layers: the fast one answers for what the slow one is known to hold.

A length in the fast layer counts once the slow layer has confirmed it, by a look-up, a write or a read of
this handle within the last LAYER_CONFIRMED_S; until then the slow layer is asked, in the same request as
for what the fast one lacks, and where both know the key its word counts. So a cut copy hides no object,
and an object that the slow layer lost counts as absent, to be written again. Absence must be certain for
that: what the slow layer cannot tell, because it fails or is late, the fast layer's word is good enough for.
"""

from __future__ import annotations

from collections.abc import Sequence

from hicache_store.clock import Deadline
from hicache_store.connectors.base import META_PREFIX, BufferTarget, Read, Status
from hicache_store.connectors.layered_parts import Layers
from hicache_store.connectors.layered_read import half_of
from hicache_store.limits import LAYER_LOST_S, LAYER_RETRY_MAX_S


class LayeredSizes:
    """One look-up of two layers."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._asks_again_at = layers.memory.now()

    def __call__(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        """The length of each object; ``None`` where it is absent or cannot be told."""
        if deadline.is_past:
            return [None] * len(keys)
        copies = [self._layers.pending.data(key) or self._layers.fills.data(key) for key in keys]
        found = {index: len(data) for index, data in enumerate(copies) if data is not None}
        unconfirmed = self._from_fast(keys, found, deadline)
        unknown = [
            index
            for index, key in enumerate(keys)
            if index not in found and index not in unconfirmed and not self._layers.pending.is_void(key)
        ]
        if unconfirmed and self._layers.memory.now() < self._asks_again_at:
            found.update(unconfirmed)
            unconfirmed = {}
        self._from_slow(keys, found, unconfirmed, unknown, deadline)
        return [found.get(index) for index in range(len(keys))]

    def _from_fast(self, keys: Sequence[str], found: dict[int, int], deadline: Deadline) -> dict[int, int]:
        """Add to ``found`` what the slow layer has confirmed; the other lengths by index are returned."""
        asked = [
            index
            for index, key in enumerate(keys)
            if index not in found and not key.startswith(META_PREFIX) and not self._layers.fills.is_void(key)
        ]
        if not asked:
            return {}
        names = [keys[index] for index in asked]
        sizes = self._layers.fast.sizes(names, half_of(deadline))
        unconfirmed: dict[int, int] = {}
        for index, size, known in zip(asked, sizes, self._layers.memory.sizes(names), strict=True):
            if size is not None:
                (found if size == known else unconfirmed)[index] = size
        return unconfirmed

    def _from_slow(
        self,
        keys: Sequence[str],
        found: dict[int, int],
        unconfirmed: dict[int, int],
        unknown: Sequence[int],
        deadline: Deadline,
    ) -> None:
        asked = sorted([*unconfirmed, *unknown])
        if not asked:
            return
        until = deadline if unknown else half_of(deadline)
        sizes = self._layers.slow.sizes([keys[index] for index in asked], until)
        held = {i: size for i, size in zip(asked, sizes, strict=True) if size is not None}
        found.update(held)
        self._layers.memory.confirm((keys[index], size) for index, size in held.items())
        self._layers.metrics.add(
            "layered.fast_differs", sum(held.get(i, n) != n for i, n in unconfirmed.items())
        )
        missing = [index for index in unconfirmed if index not in held]
        lost = self._lost([(keys[index], unconfirmed[index]) for index in missing], until, deadline)
        found.update((i, unconfirmed[i]) for i, is_lost in zip(missing, lost, strict=True) if not is_lost)

    def _lost(self, missing: Sequence[tuple[str, int]], asked: Deadline, deadline: Deadline) -> list[bool]:
        """Whether each of these keys of the fast layer is gone from the slow one and should come back.

        A look-up tells absence and failure alike, a read of one byte tells them apart.
        """
        if not missing:
            return []
        if asked.is_past:  # a slow layer that hangs must not take half the time of every look-up
            self._asks_again_at = self._layers.memory.now() + LAYER_RETRY_MAX_S
        if asked.is_past or not self._layers.may_heal:
            return [False] * len(missing)
        reads = [Read(key, size, BufferTarget([]), ((0, min(1, size)),)) for key, size in missing]
        outcomes = self._layers.slow.read_into(reads, half_of(deadline))
        absent = [key for (key, _), one in zip(missing, outcomes, strict=True) if one.status is Status.ABSENT]
        ages = dict(zip(absent, self._layers.memory.lost_s(absent), strict=True))
        grace_s = LAYER_LOST_S if self._layers.is_back else 0.0
        lost = [ages.get(key, -1.0) >= grace_s for key, _ in missing]
        self._layers.metrics.add("layered.slow_lost", sum(lost))
        return lost
