from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_store.layout.box import Box, Span, cover

SIDE = 4
WHOLE = Box.of((0, SIDE), (0, SIDE), (0, SIDE))


def mark(box: Box, into: np.ndarray, value: int = 1) -> None:
    into[
        box.heads.start : box.heads.stop,
        box.layers.start : box.layers.stop,
        box.tokens.start : box.tokens.stop,
    ] += value


def counted(boxes: list[Box]) -> np.ndarray:
    grid = np.zeros((SIDE, SIDE, SIDE), dtype=int)
    for box in boxes:
        mark(box, grid)
    return grid


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start = draw(st.integers(0, SIDE - 1))
    return Span(start, draw(st.integers(start + 1, SIDE)))


boxes = st.builds(Box, spans(), spans(), spans())


def test_spans_behave_like_ranges_for_every_small_pair() -> None:
    all_spans = [Span(a, b) for a in range(5) for b in range(a, 5)]
    for a, b in product(all_spans, repeat=2):
        common = sorted(set(range(a.start, a.stop)) & set(range(b.start, b.stop)))
        both = a.intersect(b)
        assert (list(range(both.start, both.stop)) if both else []) == common
        if len(b):
            assert a.covers(b) == (set(range(b.start, b.stop)) <= set(range(a.start, a.stop)))
    for a in all_spans:
        assert len(a) == len(range(a.start, a.stop))
        assert [value in a for value in range(6)] == [value in range(a.start, a.stop) for value in range(6)]
        assert a.shifted(3) == Span(a.start + 3, a.stop + 3)


@pytest.mark.parametrize(("start", "stop"), [(-1, 0), (2, 1), (-3, -1)])
def test_a_span_that_is_no_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"{start}..{stop}"):
        Span(start, stop)


@given(boxes, boxes)
def test_minus_and_intersection_tile_the_box_exactly(a: Box, b: Box) -> None:
    common = a.intersect(b)
    rest = a.minus(b)
    assert len(rest) <= 6
    assert all(part.cells for part in rest)
    tiled = counted([*rest, *([common] if common else [])])
    assert np.array_equal(tiled, counted([a]))
    assert not np.any(counted(rest) & counted([b]))


@given(boxes, boxes)
def test_covering_and_cells_are_those_of_the_dense_grid(a: Box, b: Box) -> None:
    assert a.cells == counted([a]).sum()
    assert a.covers(b) == bool(np.all(counted([a]) >= counted([b])))


@given(boxes, st.lists(boxes, max_size=6))
def test_a_cover_takes_every_held_place_once_from_the_first_candidate_that_holds_it(
    wanted: Box, candidates: list[Box]
) -> None:
    found = cover(wanted, list(enumerate(candidates)))
    assert np.array_equal(
        counted([*(piece.box for piece in found.pieces), *found.missing]), counted([wanted])
    )
    owner = np.full((SIDE, SIDE, SIDE), -1)
    for index, box in reversed(list(enumerate(candidates))):
        owner[counted([box]) > 0] = index
    owner[counted([wanted]) == 0] = -1
    taken = np.full((SIDE, SIDE, SIDE), -1)
    for piece in found.pieces:
        taken[counted([piece.box]) > 0] = piece.candidate
    assert np.array_equal(taken, owner)
    assert found.is_complete == bool(np.all(owner[counted([wanted]) > 0] >= 0))


def test_half_of_one_grid_and_half_of_another_fill_a_box() -> None:
    by_heads = [Box.of((0, 2), (0, 4), (0, 4)), Box.of((2, 4), (0, 4), (0, 4))]
    by_layers = [Box.of((0, 4), (0, 1), (0, 4)), Box.of((0, 4), (1, 4), (0, 4))]
    held = [by_heads[0], *by_layers]
    assert cover(WHOLE, enumerate(held)).is_complete
    for lost in range(3):
        left = [(i, box) for i, box in enumerate(held) if i != lost]
        missing = cover(WHOLE, left).missing
        # Without the first, the other grid is whole; without either layer half, a quarter is gone.
        assert bool(missing) == (lost != 0)
        assert all(box.intersect(held[lost]) == box for box in missing)
    assert cover(WHOLE, []).missing == (WHOLE,)
