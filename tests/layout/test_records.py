from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_store.errors import ConfigurationError
from hicache_store.layout.grid import Grid
from hicache_store.layout.names import marker_key
from hicache_store.layout.records import (
    BLOCK_BYTES,
    decode_grid,
    encode_grid,
    first_slot,
    frame,
    unframe,
)
from hicache_store.limits import MARKER_BYTES, MARKER_SLOTS
from hicache_store.testing.strategies import cuts

GOLDEN = Path(__file__).parents[1] / "golden" / "format_records.json"
KEY = marker_key("a1" * 32, 7)
GRID = Grid("kv", (0, 2, 4, 6, 8), (30, 60))

grids = st.builds(
    Grid,
    st.from_regex(r"[a-z][a-z0-9_]{0,31}", fullmatch=True),
    st.integers(1, 40).flatmap(cuts),
    st.integers(1, 80).flatmap(cuts),
)


@given(st.text(max_size=40), st.binary(max_size=3 * BLOCK_BYTES))
def test_a_record_gives_back_its_body_in_whole_blocks(key: str, body: bytes) -> None:
    key = key.encode("utf-8", "replace").decode()
    raw = frame(key, body)
    assert len(raw) % BLOCK_BYTES == 0
    assert 0 < len(raw) - len(body) <= BLOCK_BYTES + 32
    assert unframe(key, raw) == body
    assert unframe(key + "x", raw) is None


@pytest.mark.parametrize("length", [0, 1, 4063, 4064, 4065, 8160, 8161])
def test_lengths_at_the_edges_of_a_block(length: int) -> None:
    raw = frame(KEY, bytes(length))
    assert len(raw) == (4096 if length <= 4064 else 8192 if length <= 8160 else 12288)
    assert unframe(KEY, raw) == bytes(length)


@pytest.mark.parametrize("body", [encode_grid(GRID), b"", b"\0" * 40])
def test_every_flipped_bit_of_a_record_is_seen(body: bytes) -> None:
    raw = bytearray(frame(KEY, body))
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        assert unframe(KEY, bytes(raw)) is None, bit
        raw[bit // 8] ^= 1 << bit % 8
    assert unframe(KEY, bytes(raw)) == body


def test_every_truncation_and_zero_filled_tail_is_seen() -> None:
    raw = frame(KEY, encode_grid(GRID))
    for length in range(len(raw)):
        assert unframe(KEY, raw[:length]) is None
        assert unframe(KEY, raw[:length] + bytes(len(raw) - length)) is None
    assert unframe(KEY, raw + b"\0") is None
    assert unframe(KEY, raw + bytes(BLOCK_BYTES)) is None


def test_a_record_of_another_slot_or_a_later_version_is_not_ours() -> None:
    raw = frame(KEY, encode_grid(GRID))
    assert unframe(marker_key("a1" * 32, 8), raw) is None
    assert unframe(marker_key("a2" * 32, 7), raw) is None
    assert unframe(KEY, raw[:-24] + b"\2\0\0\0" + raw[-20:]) is None


@given(grids)
def test_grids_come_back_and_a_marker_is_one_block(grid: Grid) -> None:
    body = encode_grid(grid)
    assert decode_grid(body) == grid
    assert len(frame(KEY, body)) == MARKER_BYTES
    assert 0 <= first_slot(grid) < MARKER_SLOTS


def test_a_grid_that_does_not_fit_its_marker_is_refused_with_its_numbers() -> None:
    big = Grid("kv", tuple(range(129)), tuple(range(1000)))
    with pytest.raises(ConfigurationError, match=r"129 head cuts and 1000 layer cuts .* 4096-byte marker"):
        encode_grid(big)
    fitting = Grid("kv", tuple(range(129)), tuple(range(201)))
    assert decode_grid(encode_grid(fitting)) == fitting


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"null",
        b'"kv"',
        b"\xff\xfe",
        b"[" * 4000,
        b'{"a":' * 800,
        b'{"head_cuts":[0,1],"layer_cuts":[0,1]}',
        b'{"head_cuts":[0,1],"layer_cuts":[0,1],"pool":1}',
        b'{"head_cuts":[0,1],"layer_cuts":[0,1],"pool":null}',
        b'{"head_cuts":"01","layer_cuts":[0,1],"pool":"kv"}',
        b'{"head_cuts":{},"layer_cuts":[0,1],"pool":"kv"}',
        b'{"head_cuts":5,"layer_cuts":[0,1],"pool":"kv"}',
        b'{"head_cuts":[0],"layer_cuts":[0,1],"pool":"kv"}',
        b'{"head_cuts":[1,0],"layer_cuts":[0,1],"pool":"kv"}',
        b'{"head_cuts":[0,1.0],"layer_cuts":[0,1],"pool":"kv"}',
        b'{"head_cuts":[0,true],"layer_cuts":[0,1],"pool":"kv"}',
        b'{"head_cuts":[0,1],"layer_cuts":[-1,1],"pool":"kv"}',
        b'{"head_cuts":[0,NaN],"layer_cuts":[0,1],"pool":"kv"}',
        b'{"head_cuts":[0,1e400],"layer_cuts":[0,1],"pool":"kv"}',
    ],
)
def test_a_body_that_is_no_grid_is_told_by_a_value_and_never_raises(body: bytes) -> None:
    """Anyone who may write to the storage may write a sound record around any bytes."""
    assert decode_grid(body) is None


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_record_and_rarely_a_grid(raw: bytes) -> None:
    assert unframe(KEY, raw) is None
    assert decode_grid(raw) is None


def test_golden_records_and_slots() -> None:
    """Racing announcers of any release start from the same slot and read each other's bytes."""
    for row in json.loads(GOLDEN.read_text()):
        grid = Grid(row["pool"], tuple(row["head_cuts"]), tuple(row["layer_cuts"]))
        assert encode_grid(grid) == row["body"].encode()
        assert first_slot(grid) == row["first_slot"]
        raw = frame(row["key"], encode_grid(grid))
        tail = bytes.fromhex(row["tail"])
        assert raw == row["body"].encode() + bytes(MARKER_BYTES - len(row["body"]) - len(tail)) + tail
