"""Page-interleaved context parallelism: which rank owns which page and where its rows lie.

With ``N`` ranks and pages of ``p`` rows, a widened row index ``x`` belongs to page ``q = x div p``,
rank ``r = q mod N`` and local row ``l = (q div N) * p + x mod p``. Ownership decides who moves a
page, never what it contains, so no object name knows of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hicache_store.errors import TopologyError


@dataclass(frozen=True, slots=True)
class Owned:
    """Page, owning rank and the owner's local row of one widened row index."""

    page: int
    rank: int
    row: int


def locate(x: int, ranks: int, page_size: int) -> Owned:
    """Where widened row ``x`` lives. A bijection with :func:`widen`."""
    page = x // page_size
    return Owned(page, page % ranks, (page // ranks) * page_size + x % page_size)


def widen(rank: int, row: int, ranks: int, page_size: int) -> int:
    """The widened row index of a rank's local row: the inverse of :func:`locate`."""
    return ((row // page_size) * ranks + rank) * page_size + row % page_size


def owner(position: int, base: int, ranks: int) -> int:
    """The rank that owns the page at ``position`` of a chain whose first page went to ``base``."""
    if not 0 <= base < ranks:
        raise TopologyError(f"rotation base {base} is outside 0..{ranks - 1}")
    return (base + position) % ranks


def owned_positions(count: int, base: int, ranks: int, rank: int) -> Iterator[int]:
    """Chain positions below ``count`` that ``rank`` owns, ascending."""
    owner(0, base, ranks)
    return iter(range((rank - base) % ranks, count, ranks))


def pages_needed(count: int, base: int, ranks: int) -> tuple[int, ...]:
    """How many of ``count`` consecutive pages starting at ``base`` each rank receives."""
    return tuple(
        count // ranks + (1 if (rank - base) % ranks < count % ranks else 0) for rank in range(ranks)
    )
