"""What was looked up a moment ago, for callers that ask again before anything can have changed.

An engine asks for the prefix of a request at every turn of its scheduler while the request waits. Such a
caller says how old an answer may be. A page is forgotten when a restore finds it wanting, a gap as soon as
this handle has stored something; what others change is seen when the answer is too old.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hicache_store.limits import HINTS_MAX, RECENT_GAPS_MAX
from hicache_store.store.bounded import BoundedDict


class RecentLookups:
    """Thread-safe memory of pages that were found, by pool and hash, and of those at which a prefix ended."""

    def __init__(self) -> None:
        self._found: BoundedDict[tuple[str, str], float] = BoundedDict(HINTS_MAX)
        self._gaps: BoundedDict[tuple[str, str], float] = BoundedDict(RECENT_GAPS_MAX)
        self._pools: tuple[str, ...] = ()

    def known(self, pool: str, hashes: Sequence[str], since_s: float) -> tuple[int, bool]:
        """How many leading pages were found at ``since_s`` or later, and whether the page behind them was
        found to be missing since."""
        times = self._found.get_many((pool, page_hash) for page_hash in hashes)
        pages = next((i for i, at in enumerate(times) if at is None or at < since_s), len(hashes))
        if pages == len(hashes):
            return pages, False
        missed = self._gaps.get((pool, hashes[pages]))
        return pages, missed is not None and missed >= since_s

    def remember(self, pool: str, hashes: Sequence[str], pages: int, now_s: float) -> None:
        """The first ``pages`` were found; the one behind them, if there is one, is missing."""
        if pool not in self._pools:
            self._pools = (*self._pools, pool)
        self._found.set_many([((pool, page_hash), now_s) for page_hash in hashes[:pages]])
        if pages < len(hashes):
            self._gaps.set((pool, hashes[pages]), now_s)

    def forget(self, page_hashes: Iterable[str]) -> None:
        """These pages are not what they were, in any pool."""
        for page_hash in page_hashes:
            for pool in self._pools:
                self._found.discard((pool, page_hash))

    def forget_gaps(self) -> None:
        """Something was stored: what was missing may be there."""
        self._gaps = BoundedDict(RECENT_GAPS_MAX)
