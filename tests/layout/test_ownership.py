from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from hicache_store.errors import TopologyError
from hicache_store.layout.ownership import Owned, locate, owned_positions, owner, pages_needed, widen

RANKS = (1, 2, 3, 4, 8)
PAGES = (1, 4, 16, 64)


def test_the_published_table_for_two_ranks_and_pages_of_four() -> None:
    table = [(0, 0, 0), (1, 1, 0), (2, 0, 4), (3, 1, 4), (4, 0, 8), (5, 1, 8)]
    for x in range(24):
        page, rank, first_row = table[x // 4]
        assert locate(x, 2, 4) == Owned(page, rank, first_row + x % 4)
    checks = {0: (0, 0, 0), 5: (1, 1, 1), 11: (2, 0, 7), 13: (3, 1, 5), 18: (4, 0, 10), 23: (5, 1, 11)}
    assert {x: locate(x, 2, 4) for x in checks} == {x: Owned(*row) for x, row in checks.items()}


@pytest.mark.parametrize(("ranks", "page_size"), list(product(RANKS, PAGES)))
def test_widened_rows_and_local_rows_are_one_to_one(ranks: int, page_size: int) -> None:
    pages_each = 5
    total = ranks * page_size * pages_each
    seen: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    for x in range(total):
        place = locate(x, ranks, page_size)
        assert place.page == x // page_size
        assert widen(place.rank, place.row, ranks, page_size) == x
        seen[place.rank].append(place.row)
    # Every rank's image is all of its rows, each page's rows being consecutive and in order.
    assert all(rows == list(range(page_size * pages_each)) for rows in seen.values())


def test_owners_rotate_from_the_chains_base() -> None:
    assert [owner(p, 0, 2) for p in range(4)] == [0, 1, 0, 1]
    assert [owner(p, 1, 2) for p in range(3)] == [1, 0, 1]
    assert [owner(p, 3, 4) for p in range(6)] == [3, 0, 1, 2, 3, 0]


def test_needs_are_the_published_ones() -> None:
    assert pages_needed(3, 1, 2) == (1, 2)
    assert pages_needed(6, 3, 4) == (2, 1, 1, 2)


@pytest.mark.parametrize("ranks", RANKS)
def test_positions_and_needs_agree_with_counting_owners(ranks: int) -> None:
    for base, count in product(range(ranks), range(2 * ranks + 2)):
        owners = [owner(position, base, ranks) for position in range(count)]
        counts = Counter(owners)
        assert pages_needed(count, base, ranks) == tuple(counts[rank] for rank in range(ranks))
        for rank in range(ranks):
            mine = list(owned_positions(count, base, ranks, rank))
            assert mine == [position for position, who in enumerate(owners) if who == rank]


@pytest.mark.parametrize("base", [-1, 2, 7])
def test_a_base_that_is_no_rank_is_refused(base: int) -> None:
    with pytest.raises(TopologyError, match=rf"base {base} is outside 0\.\.1"):
        owner(0, base, 2)
    with pytest.raises(TopologyError, match=rf"base {base} is outside 0\.\.1"):
        owned_positions(4, base, 2, 0)
