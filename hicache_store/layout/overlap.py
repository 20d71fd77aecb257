"""Whether places of a strided array share bytes: exact for every slot, without walking the slots.

Contiguous axes are folded first, so that the layouts of engines come down to a few runs a slot.
Then runs of equal slot stride ``s`` are compared by their start modulo ``s``: two runs whose
residues overlap meet in some pair of slots exactly when fewer than ``slots`` strides lie between
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hicache_store.errors import ConfigurationError

_COMPARED_MAX: Final = 1 << 23
"""Pairs of run and residue range that are held at once (8 bytes each, three arrays). The layouts of
engines need as many as they have runs in a slot, at most some 100,000."""


@dataclass(frozen=True, slots=True)
class Places:
    """Elements of ``element_bytes`` on ``axes`` (size, stride) from ``offset`` on, in every slot."""

    offset: int
    axes: tuple[tuple[int, int], ...]
    element_bytes: int
    slot_stride: int


def overlaps(places: Sequence[Places], slots: int) -> bool:
    """Whether any byte of ``slots`` slots belongs to two places, of the same or of different slots.

    Strides must be positive wherever a size exceeds 1. Places with different slot strides count as
    overlapping when their extents interleave. Raises :class:`ConfigurationError` when there are too
    many runs to compare.
    """
    groups: dict[int, list[np.ndarray]] = {}
    for place in places:
        groups.setdefault(place.slot_stride if slots > 1 else 0, []).append(_runs(place))
    extents: list[np.ndarray] = []
    for stride, bounds in groups.items():
        runs = _merged(np.concatenate(bounds, axis=1))
        if runs is None or (slots > 1 and _slots_meet(runs, stride, slots)):
            return True
        extents.append(_union(runs + np.array([[0], [(slots - 1) * stride]])))
    return _merged(np.concatenate(extents, axis=1)) is None if extents else False


def _runs(place: Places) -> np.ndarray:
    """Starts and ends of the contiguous runs of slot 0, as two rows."""
    axes = sorted((axis for axis in place.axes if axis[0] > 1), key=lambda axis: axis[1])
    length = place.element_bytes
    while axes and axes[0][1] == length:
        length *= axes.pop(0)[0]
    starts = np.array([place.offset], dtype=np.int64)
    for size, stride in axes:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    return np.stack([starts, starts + length])


def _merged(bounds: np.ndarray) -> np.ndarray | None:
    """The runs in order, touching ones joined; ``None`` when two of them share a byte."""
    starts, ends = bounds[:, np.argsort(bounds[0], kind="stable")]
    if bool(np.any(ends[:-1] > starts[1:])):
        return None
    breaks = np.flatnonzero(ends[:-1] != starts[1:])
    return np.stack([starts[np.append(0, breaks + 1)], ends[np.append(breaks, len(ends) - 1)]])


def _union(bounds: np.ndarray) -> np.ndarray:
    """The ranges that the given ranges cover together."""
    starts, ends = bounds[:, np.argsort(bounds[0], kind="stable")]
    reach = np.maximum.accumulate(ends)
    breaks = np.flatnonzero(starts[1:] > reach[:-1])
    return np.stack([starts[np.append(0, breaks + 1)], reach[np.append(breaks, len(reach) - 1)]])


def _slots_meet(runs: np.ndarray, stride: int, slots: int) -> bool:
    starts, ends = runs
    turns, residues = np.divmod(starts, stride)
    stops = residues + (ends - starts)
    # A run over a multiple of the stride is two: the second begins at residue 0 one turn later. In a
    # run longer than the stride both have a residue in common, which tells that slots overlap.
    wraps = stops > stride
    first = np.concatenate([residues, np.zeros(int(wraps.sum()), dtype=np.int64)])
    last = np.concatenate([np.minimum(stops, stride), stops[wraps] - stride])
    turns = np.concatenate([turns, turns[wraps] + 1])
    # Cut the residues at every bound, so that two pieces overlap exactly when they share a cut.
    bounds = np.unique(np.concatenate([first, last]))
    low, high = np.searchsorted(bounds, first), np.searchsorted(bounds, last)
    counts = high - low
    total = int(counts.sum())
    if total > _COMPARED_MAX:
        raise ConfigurationError(
            f"a layout of {len(starts)} runs a slot is too intertwined to be checked for overlaps "
            f"({total} comparisons, at most {_COMPARED_MAX}); describe it with fewer, longer runs"
        )
    cuts = np.repeat(low - np.append(0, np.cumsum(counts)[:-1]), counts) + np.arange(total)
    turns = np.repeat(turns, counts)
    order = np.lexsort((turns, cuts))
    cuts, turns = cuts[order], turns[order]
    return bool(np.any((cuts[1:] == cuts[:-1]) & (turns[1:] - turns[:-1] < slots)))
