"""Which lengths of a prefix can be restored when several pools must hold their part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one pool allows: ``boundary`` is its longest length, ``lengths`` every one, from 1 up."""

    boundary: int
    lengths: frozenset[int]


def every_page(leading: int) -> Verdict:
    """A pool of which every page is needed, and whose first ``leading`` pages are there."""
    return Verdict(leading, frozenset(range(1, leading + 1)))


def trailing_pages(held: Sequence[bool], window: int) -> Verdict:
    """A pool of which a prefix needs its last ``window`` pages, or all it has where it is shorter."""
    lengths = set()
    run = 0
    for length, is_held in enumerate(held, 1):
        run = run + 1 if is_held else 0
        if run >= min(max(1, window), length):
            lengths.add(length)
    return Verdict(max(lengths, default=0), frozenset(lengths))


def common_lengths(verdicts: Sequence[Verdict]) -> list[int]:
    """The lengths that all pools allow, ascending."""
    return sorted(frozenset.intersection(*(verdict.lengths for verdict in verdicts)))
