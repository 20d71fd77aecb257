from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from fewer import FEWER
from hypothesis import given
from hypothesis import strategies as st

from hicache_store.layout import format as format_module
from hicache_store.layout.box import Box, cover
from hicache_store.layout.dtypes import DType
from hicache_store.layout.format import ByteRange, NameSeed, ObjectFormat, Verdict
from hicache_store.layout.grid import own_grid
from hicache_store.layout.model import KVPart, ModelKV, Pool
from hicache_store.layout.names import leaf_of
from hicache_store.layout.parallel import ParallelSpec, shard
from hicache_store.layout.reading import Fetch, PieceRead, fillers, plan_piece
from hicache_store.limits import KIB, MIB
from hicache_store.testing.oracle import dense_page, object_bytes, object_payload
from hicache_store.testing.strategies import sub_boxes

FILE_COST, S3_COST = 64 * KIB, MIB
BIG = ModelKV.dense(num_layers=60, num_kv_heads=8, head_dim=128, dtype="bfloat16").pool(64)
PAYLOAD, OBJECT = 1_966_080, 1_970_176
HEAD = PAYLOAD // 2


@st.composite
def reads(draw: st.DrawFn) -> tuple[Pool, PieceRead, int, bool]:
    """A piece of a small object under cells small enough that it has several."""
    heads, layers = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    pool = Pool("kv", layers, heads, (KVPart("k", draw(st.integers(1, 4))),), DType.of("int8"), 2)
    least = draw(st.integers(1, 40))
    object_box = draw(sub_boxes(pool.page_box))
    piece = draw(sub_boxes(object_box))
    cost, verify = draw(st.integers(0, 80)), draw(st.booleans())
    with (
        mock.patch.object(format_module, "CELL_MIN_BYTES", least),
        mock.patch.object(format_module, "CELL_MAX_BYTES", 2 * least),
    ):
        read = plan_piece(pool, object_box, piece, request_cost_bytes=cost, verify=verify)
    return pool, read, cost, verify


def wanted_bytes(read: PieceRead) -> np.ndarray:
    """Marks of the payload bytes of the piece: head outermost, then layer."""
    shape, box, piece = read.format, read.object_box, read.piece
    marks = np.zeros((shape.heads, shape.layers, shape.layer_bytes), dtype=bool)
    marks[
        piece.heads.start - box.heads.start : piece.heads.stop - box.heads.start,
        piece.layers.start - box.layers.start : piece.layers.stop - box.layers.start,
    ] = True
    return marks.ravel()


def cell_bytes(read: PieceRead) -> np.ndarray:
    """Marks of the payload bytes of every cell that holds a wanted byte."""
    wanted = wanted_bytes(read)
    marks = np.zeros_like(wanted)
    for cell in range(read.format.cells):
        span = read.format.cell_range(cell)
        if wanted[span.start : span.stop].any():
            marks[span.start : span.stop] = True
    return marks


@FEWER
@given(reads())
def test_fetches_hold_the_wanted_cells_and_say_which(drawn: tuple[Pool, PieceRead, int, bool]) -> None:
    _, read, _, verify = drawn
    wanted, cells = wanted_bytes(read), cell_bytes(read)
    fetched = np.zeros(read.format.object_bytes, dtype=bool)
    seen: list[int] = []
    for fetch in read.fetches:
        assert 0 <= fetch.start < fetch.stop <= read.format.object_bytes
        assert len(fetch) == fetch.stop - fetch.start
        assert not fetched[fetch.start : fetch.stop].any()
        fetched[fetch.start : fetch.stop] = True
        for cell in fetch.cells:
            span = read.format.cell_range(cell)
            assert fetch.start <= span.start < span.stop <= fetch.stop
            assert wanted[span.start : span.stop].any()
            seen.append(cell)
    assert seen == sorted(seen)
    assert fetched[: read.format.payload_bytes][cells].all()
    assert sum(len(read.format.cell_range(cell)) for cell in seen) == cells.sum()
    assert fetched[read.format.payload_bytes :].all() == verify
    assert fetched[read.format.payload_bytes :].any() == verify


@given(reads())
def test_ranges_and_trailer_at_most_one_request_apart_are_one(
    drawn: tuple[Pool, PieceRead, int, bool],
) -> None:
    _, read, cost, verify = drawn
    cells = cell_bytes(read)
    must = np.concatenate([cells, np.full(read.format.trailer_bytes, verify)])
    # What must travel, as runs; a gap of at most the cost costs less than another request.
    edges = np.flatnonzero(np.diff(np.concatenate([[False], must, [False]])))
    runs = [tuple(run) for run in edges.reshape(-1, 2)]
    merged: list[list[int]] = []
    for start, stop in runs:
        if merged and start - merged[-1][1] <= cost:
            merged[-1][1] = stop
        else:
            merged.append([start, stop])
    assert [[fetch.start, fetch.stop] for fetch in read.fetches] == merged


@FEWER
@given(reads())
def test_every_fetched_byte_is_accounted_for(drawn: tuple[Pool, PieceRead, int, bool]) -> None:
    pool, read, _, verify = drawn
    wanted = wanted_bytes(read)
    assert read.wanted_bytes == wanted.sum() == pool.payload_bytes(read.piece)
    assert read.trailer_bytes == (read.format.trailer_bytes if verify else 0)
    assert read.fetched_bytes == read.wanted_bytes + read.over_read_bytes + read.trailer_bytes
    assert read.over_read_bytes >= cell_bytes(read).sum() - wanted.sum()
    assert read.first_byte == np.flatnonzero(wanted)[0]
    assert read.is_exact == bool(np.array_equal(wanted, cell_bytes(read)))


@FEWER
@given(reads())
def test_heads_of_all_layers_take_one_request_and_at_most_one_more_to_verify(
    drawn: tuple[Pool, PieceRead, int, bool],
) -> None:
    _, read, _, verify = drawn
    if read.piece.layers == read.object_box.layers:
        assert len(read.fetches) <= 1 + verify
        assert read.is_exact


def rank_reads(writer: str, reader: str, cost: int) -> dict[str, list[tuple[str, PieceRead]]]:
    source, target = ParallelSpec.parse(writer), ParallelSpec.parse(reader)
    chunks: dict[Box, None] = {}
    for rank in source.ranks():
        held = shard(BIG, source, rank)
        assert held is not None
        chunks.update(dict.fromkeys(own_grid(BIG, source, held.box).chunks_within(held.box)))
    objects = list(chunks)
    found: dict[str, list[tuple[str, PieceRead]]] = {}
    for rank in target.ranks():
        held = shard(BIG, target, rank)
        assert held is not None
        pieces = cover(held.box, enumerate(objects))
        assert pieces.is_complete
        found[rank.label] = [
            (
                leaf_of("kv", objects[piece.candidate]),
                plan_piece(BIG, objects[piece.candidate], piece.box, request_cost_bytes=cost),
            )
            for piece in pieces.pieces
        ]
    return found


def test_a33_tp4_pp2_writes_eight_objects_of_which_each_rank_of_tp2_reads_four_whole() -> None:
    """No rank, size or divisor of the writer is part of a name, so any other cut finds the objects."""
    by_rank = rank_reads("tp4pp2", "tp2pp1", FILE_COST)
    assert set(by_rank) == {"tp0pp0", "tp1pp0"}
    assert len({leaf for found in by_rank.values() for leaf, _ in found}) == 8
    for found in by_rank.values():
        assert len(found) == 4
        for _, read in found:
            assert read.fetches == (Fetch(0, OBJECT, tuple(range(12))),)
            assert (read.wanted_bytes, read.over_read_bytes, read.trailer_bytes) == (PAYLOAD, 0, 4096)
            assert read.is_exact
    (mine,) = [read for leaf, read in by_rank["tp1pp0"] if leaf == "kv.H004-006.L030-060"]
    assert mine.object_box == mine.piece == Box.of((4, 6), (30, 60), (0, 64))
    assert mine.first_byte == 0


def test_a_reader_of_more_ranks_reads_half_of_an_object_as_one_range() -> None:
    by_rank = rank_reads("tp4pp2", "tp8pp1", FILE_COST)
    assert all(len(found) == 2 for found in by_rank.values())
    for rank, found in by_rank.items():
        for _, read in found:
            if rank in ("tp0pp0", "tp2pp0", "tp4pp0", "tp6pp0"):
                # The first head ends 960 KiB before the trailer, farther than a request costs.
                assert read.fetches == (Fetch(0, HEAD, tuple(range(6))), Fetch(PAYLOAD, OBJECT, ()))
            else:
                assert read.fetches == (Fetch(HEAD, OBJECT, tuple(range(6, 12))),)
            assert (read.over_read_bytes, read.trailer_bytes) == (0, 4096)
    remote = rank_reads("tp4pp2", "tp8pp1", S3_COST)
    assert {fetch for _, read in remote["tp0pp0"] for fetch in read.fetches} == {
        Fetch(0, OBJECT, tuple(range(6)))
    }
    assert {read.over_read_bytes for _, read in remote["tp0pp0"]} == {HEAD}


def test_layers_are_widened_to_whole_cells_of_five() -> None:
    box = Box.of((4, 6), (30, 60), (0, 64))
    layer = HEAD // 30
    read = plan_piece(BIG, box, Box.of((4, 6), (33, 46), (0, 64)), request_cost_bytes=FILE_COST)
    assert read.fetches == (
        Fetch(0, 20 * layer, (0, 1, 2, 3)),
        Fetch(HEAD, HEAD + 20 * layer, (6, 7, 8, 9)),
        Fetch(PAYLOAD, OBJECT, ()),
    )
    assert read.over_read_bytes == 2 * 7 * layer
    assert read.first_byte == 3 * layer
    assert not read.is_exact
    second = plan_piece(BIG, box, Box.of((5, 6), (33, 46), (0, 64)), request_cost_bytes=FILE_COST)
    assert second.first_byte == HEAD + 3 * layer
    near = plan_piece(BIG, box, Box.of((4, 6), (33, 59), (0, 64)), request_cost_bytes=FILE_COST)
    assert near.fetches == (Fetch(0, OBJECT, tuple(range(12))),)


def test_without_verification_the_trailer_stays_where_it_is() -> None:
    box = Box.of((4, 6), (30, 60), (0, 64))
    read = plan_piece(BIG, box, box, request_cost_bytes=FILE_COST, verify=False)
    assert read.fetches == (Fetch(0, PAYLOAD, tuple(range(12))),)
    assert (read.trailer_bytes, read.over_read_bytes) == (0, 0)


@given(st.data())
def test_what_is_fetched_verifies_and_a_flipped_bit_in_it_does_not(data: st.DataObject) -> None:
    """Every byte that reaches a slot is proven by a cell of its own fetch, trailer bytes by theirs."""
    heads, layers = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    pool = Pool("kv", layers, heads, (KVPart("k", 3), KVPart("v", 2)), DType.of("int8"), 2)
    piece = data.draw(sub_boxes(pool.page_box))
    cost = data.draw(st.sampled_from((0, 20, 1000)))
    seed = NameSeed.of("key")
    with (
        mock.patch.object(format_module, "CELL_MIN_BYTES", 16),
        mock.patch.object(format_module, "CELL_MAX_BYTES", 40),
    ):
        read = plan_piece(pool, pool.page_box, piece, request_cost_bytes=cost)
    raw = bytearray(object_bytes(dense_page(pool), pool.page_box, "key"))
    del raw[read.format.payload_bytes :]
    raw += read.format.seal(seed, [memoryview(bytes(raw))])

    def verdict() -> Verdict | None:
        view = memoryview(raw)
        trailer = view[read.format.payload_bytes :]
        refused = read.format.check_trailer(seed, trailer)
        for fetch in read.fetches:
            got = [view[fetch.start : fetch.stop]]
            refused = refused or read.format.check_cells(seed, trailer, fetch.cells, got, fetch.start)
        return refused

    assert verdict() is None
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    fetched = any(fetch.start <= bit // 8 < fetch.stop for fetch in read.fetches)
    needed = bit // 8 >= read.format.payload_bytes or cell_bytes(read)[bit // 8]
    assert fetched >= needed
    assert (verdict() is Verdict.CORRUPT) == needed


@given(st.data())
def test_fillers_are_what_is_left_of_a_fetch(data: st.DataObject) -> None:
    fetch = Fetch(start := data.draw(st.integers(0, 20)), start + data.draw(st.integers(1, 30)), ())
    cuts = sorted(data.draw(st.lists(st.integers(fetch.start, fetch.stop), max_size=8)))
    taken = [ByteRange(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    left = fillers(fetch, taken)
    marks = np.zeros(fetch.stop, dtype=int)
    for span in (*taken, *left):
        marks[span.start : span.stop] += 1
    assert (marks[fetch.start :] == 1).all()
    assert all(len(span) for span in left)


def test_a_piece_read_names_its_object() -> None:
    box = BIG.page_box
    read = plan_piece(BIG, box, box, request_cost_bytes=0)
    assert read.object_box == read.piece == box
    assert read.format == ObjectFormat.of(BIG, box)


@pytest.mark.parametrize("cost", [0, FILE_COST, 256 * KIB, S3_COST, 10**9])
def test_small_objects_are_always_read_whole_in_one_request_but_for_a_cost_of_nothing(cost: int) -> None:
    pool = ModelKV.dense(num_layers=2, num_kv_heads=4, head_dim=16, dtype="bfloat16").pool(16)
    half = Box.of((0, 2), (0, 2), (0, 16))
    read = plan_piece(pool, pool.page_box, half, request_cost_bytes=cost)
    payload = object_payload(dense_page(pool), pool.page_box)
    if cost == 0:
        assert [len(fetch) for fetch in read.fetches] == [len(payload) // 2, read.format.trailer_bytes]
    else:
        assert [len(fetch) for fetch in read.fetches] == [read.format.object_bytes]
