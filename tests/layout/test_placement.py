from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_store.errors import ConfigurationError
from hicache_store.layout.dtypes import DType
from hicache_store.layout.layouts import engine_layout
from hicache_store.layout.model import KVPart, Pool
from hicache_store.layout.plan import (
    Placement,
    Segment,
    checked_placement,
    placement_of_blocks,
    placement_of_slot,
)

SMALL = Pool("kv", 3, 4, (KVPart("k", 4), KVPart("v", 4)), DType.of("bfloat16"), 64)


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 5),
    st.lists(st.integers(0, 99), unique=True, max_size=40),
)
def test_a45_a_page_lies_where_its_tokens_are_whatever_the_blocks(
    page_size: int, block: int, page: int, blocks: list[int]
) -> None:
    """Counting blocks by rounding the length up forgets that the first one starts in its middle."""
    tokens = range(page * page_size, (page + 1) * page_size)
    if (tokens[-1] // block) >= len(blocks):
        with pytest.raises(ConfigurationError, match=f"page {page} of {page_size} tokens needs block"):
            placement_of_blocks(blocks, page, page_size, block)
        return
    placement = placement_of_blocks(blocks, page, page_size, block)
    spots = [(s.slot, s.slot_token + i) for s in placement for i in range(s.tokens)]
    assert spots == [(blocks[token // block], token % block) for token in tokens]
    assert len({segment.slot for segment in placement}) == len(placement)
    assert all(segment.tokens > 0 for segment in placement)


def test_a_page_that_fills_a_slot_is_one_segment() -> None:
    assert placement_of_slot(3, 64) == placement_of_blocks([3], 0, 64, 64) == (Segment(3, 0, 64),)


GOOD = (Segment(0, 8, 8), Segment(2, 0, 8))


def test_a_placement_inside_the_layout_is_accepted() -> None:
    layout = engine_layout("layer_first", SMALL, SMALL.page_box, slots=3, slot_tokens=16)
    checked_placement(GOOD, layout, 16)
    checked_placement((Segment(2, 0, 16),), layout, 16)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ((), "0 tokens does not hold a page of 16"),
        (GOOD[:1], "8 tokens does not hold a page of 16"),
        ((*GOOD, Segment(1, 0, 1)), "17 tokens"),
        ((Segment(3, 0, 16),), "slot 3 are outside 3 slots"),
        ((Segment(-1, 0, 16),), "slot -1"),
        ((Segment(0, 1, 16),), "1..17 of slot 0"),
        ((Segment(0, -1, 16),), "-1..15"),
        ((Segment(0, 0, 0), Segment(1, 0, 16)), "0..0"),
        ((Segment(0, 0, 24), Segment(0, 8, -8)), "0..24"),
        ((Segment(1, 0, 8), Segment(1, 0, 8)), "twice"),
        ((Segment(1, 0, 8), Segment(2, 0, 4), Segment(1, 7, 4)), "twice"),
    ],
)
def test_a_placement_that_is_no_page_of_the_layout_is_refused(placement: Placement, words: str) -> None:
    layout = engine_layout("layer_first", SMALL, SMALL.page_box, slots=3, slot_tokens=16)
    with pytest.raises(ConfigurationError, match=words):
        checked_placement(placement, layout, 16)
