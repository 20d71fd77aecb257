"""The objects that could hold a rank's part of a page, under every grid known so far.

Presence of a page is a bit mask over the candidates. Masks repeat from page to page, so covers are
worked out once a mask and looked up afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hicache_store.layout.box import Box, cover
from hicache_store.layout.format import ObjectFormat
from hicache_store.layout.grid import Grid
from hicache_store.layout.model import Pool
from hicache_store.layout.names import leaf_of
from hicache_store.limits import CANDIDATES_MAX, LAYERS_MAX, PLAN_CACHE_MAX
from hicache_store.store.bounded import BoundedDict
from hicache_store.store.transfer import PiecePlan


@dataclass(frozen=True, slots=True)
class Candidate:
    """One object of a page: its bit, the last part of its name, its box and length."""

    index: int
    leaf: str
    box: Box
    object_bytes: int


@dataclass(frozen=True, slots=True)
class CoverPlan:
    """Which candidates are read for a set of boxes, and whether that is all of them."""

    pieces: tuple[tuple[Candidate, PiecePlan], ...]
    is_complete: bool
    mask: int


class CandidateTable:
    """Candidates of one pool for one rank. Grids are only ever added, so bits keep their meaning."""

    def __init__(
        self, pool: Pool, box: Box, own: Sequence[Box], plan: Callable[[Box, Box], PiecePlan]
    ) -> None:
        self.pool = pool
        self.box = box
        self.own_mask = (1 << len(own)) - 1
        self._plan = plan
        self._lock = threading.Lock()
        self._by_leaf: dict[str, Candidate] = {}
        self.candidates: tuple[Candidate, ...] = ()
        self.groups: tuple[int, ...] = ()
        self._grids: set[Grid] = set()
        self.whole: tuple[Box, ...] = (box,)
        self._whole_covers: BoundedDict[int, CoverPlan] = BoundedDict(PLAN_CACHE_MAX)
        self._covers: BoundedDict[tuple[tuple[Box, ...], int], CoverPlan] = BoundedDict(PLAN_CACHE_MAX)
        self._chunks: BoundedDict[tuple[int, tuple[Candidate, ...]], tuple[bool, ...]] = BoundedDict(
            PLAN_CACHE_MAX
        )
        self._pieces: BoundedDict[tuple[int, Box], PiecePlan] = BoundedDict(PLAN_CACHE_MAX)
        self.preferred_mask = self.own_mask
        self._add(own)
        self.own_chunks = self.candidates

    def add_grids(self, grids: Iterable[Grid]) -> bool:
        """Take in announced grids of this pool; whether any brought a new candidate."""
        grew = False
        for grid in grids:
            if grid.pool != self.pool.key_name or grid in self._grids:
                continue
            self._grids.add(grid)
            if grid.head_cuts[-1] > self.pool.num_heads or grid.layer_cuts[-1] > LAYERS_MAX:
                continue  # of another model, or not meant seriously
            grew |= self._add(grid.chunks_touching(self.box))
        return grew

    def _add(self, chunks: Iterable[Box]) -> bool:
        with self._lock:
            added = 0
            candidates = list(self.candidates)
            for chunk in chunks:
                if len(candidates) >= CANDIDATES_MAX:
                    break
                leaf = leaf_of(self.pool.key_name, chunk)
                if leaf in self._by_leaf:
                    continue
                size = ObjectFormat.of(self.pool, chunk).object_bytes
                candidate = Candidate(len(candidates), leaf, chunk, size)
                self._by_leaf[leaf] = candidate
                candidates.append(candidate)
                added |= 1 << candidate.index
            self.candidates = tuple(candidates)
            if added:
                self.groups = (*self.groups, added)
            return bool(added)

    def of_mask(self, mask: int) -> list[Candidate]:
        """The candidates whose bits are set, those that hit last first, then in order of discovery."""
        chosen = [c for c in self.candidates if mask >> c.index & 1]
        preferred = self.preferred_mask
        chosen.sort(key=lambda c: not preferred >> c.index & 1)
        return chosen

    def leaves_of(self, mask: int) -> tuple[str, ...]:
        """The last parts of the names of the candidates in ``mask``."""
        return tuple(candidate.leaf for candidate in self.of_mask(mask))

    def probe_order(self) -> list[int]:
        """Masks to look up one after the other: what hit last, the own cut, the other grids."""
        masks: list[int] = []
        seen = 0
        for mask in (self.preferred_mask, self.own_mask, *self.groups):
            fresh = mask & ~seen
            if fresh:
                masks.append(fresh)
                seen |= fresh
        return masks

    def cover(self, wanted: tuple[Box, ...], mask: int) -> CoverPlan:
        """How the candidates in ``mask`` fill the wanted boxes; ``whole`` itself is looked up fastest."""
        is_whole = wanted is self.whole
        known = self._whole_covers.get(mask) if is_whole else self._covers.get((wanted, mask))
        if known is not None:
            return known
        chosen = self.of_mask(mask)
        pieces: list[tuple[Candidate, PiecePlan]] = []
        is_complete = True
        used = 0
        for box in wanted:
            found = cover(box, ((c.index, c.box) for c in chosen))
            is_complete &= found.is_complete
            for piece in found.pieces:
                candidate = self.candidates[piece.candidate]
                pieces.append((candidate, self.piece_plan(candidate, piece.box)))
                used |= 1 << candidate.index
        plan = CoverPlan(tuple(pieces), is_complete, used)
        if is_whole:
            self._whole_covers.set(mask, plan)
        else:
            self._covers.set((wanted, mask), plan)
        return plan

    def piece_plan(self, candidate: Candidate, piece: Box) -> PiecePlan:
        """The plan of one piece of one candidate."""
        plan = self._pieces.get((candidate.index, piece))
        if plan is None:
            plan = self._plan(candidate.box, piece)
            self._pieces.set((candidate.index, piece), plan)
        return plan

    def covered(self, mask: int, chunks: tuple[Candidate, ...]) -> tuple[bool, ...]:
        """For each chunk, whether the candidates in ``mask`` together hold all of it."""
        known = self._chunks.get((mask, chunks))
        if known is None:
            chosen = [(c.index, c.box) for c in self.of_mask(mask)]
            known = tuple(cover(chunk.box, chosen).is_complete for chunk in chunks)
            self._chunks.set((mask, chunks), known)
        return known

    def chunks_of(self, grid: Grid) -> tuple[Candidate, ...]:
        """The candidates that tile this rank's box under an announced grid; raises where they do not."""
        boxes = grid.chunks_within(self.box)
        return tuple(self._by_leaf[leaf_of(self.pool.key_name, box)] for box in boxes)
