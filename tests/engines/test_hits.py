"""Lengths of a prefix that several pools allow, against the definition written down naively."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hicache_store.engines.sglang_hits import common_lengths, every_page, trailing_pages


@given(st.lists(st.booleans(), max_size=20), st.integers(0, 5))
def test_a_window_is_the_last_pages_before_a_boundary(held: list[bool], window: int) -> None:
    wanted = max(1, window)
    naive = {n for n in range(1, len(held) + 1) if all(held[max(0, n - wanted) : n])}
    verdict = trailing_pages(held, window)
    assert verdict.lengths == naive
    assert verdict.boundary == max(naive, default=0)


@given(st.lists(st.sets(st.integers(1, 9)), min_size=1, max_size=4), st.integers(0, 9))
def test_pools_combine_by_what_all_allow(sets: list[set[int]], leading: int) -> None:
    pools = [trailing_pages([page in found for page in range(1, 10)], 1) for found in sets]
    naive = [n for n in range(1, leading + 1) if all(n in found for found in sets)]
    assert common_lengths([every_page(leading), *pools]) == naive


def test_no_page_is_no_length() -> None:
    assert every_page(0).lengths == frozenset()
    assert common_lengths([every_page(3), every_page(0)]) == []
