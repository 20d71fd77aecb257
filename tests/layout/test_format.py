from __future__ import annotations

import json
import random
import struct
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from fewer import FEWER
from hypothesis import given
from hypothesis import strategies as st

from hicache_store.layout.box import Box
from hicache_store.layout.dtypes import DType
from hicache_store.layout.format import (
    CELL_MAX_BYTES,
    CELL_MIN_BYTES,
    MAGIC,
    TAIL,
    ByteRange,
    NameSeed,
    ObjectFormat,
    Verdict,
    layers_per_cell,
)
from hicache_store.layout.model import KVPart, ModelKV, Pool
from hicache_store.testing.oracle import cell_layers, dense_page, object_bytes, object_payload
from hicache_store.testing.strategies import pools, sub_boxes

GOLDEN = Path(__file__).parents[1] / "golden" / "format.json"
KIB = 1024
KEY = "v1/" + "a1" * 32 + "/b2/" + "b2" * 32 + "/kv.H000-002.L000-003"
OTHER = KEY.replace("H000-002", "H002-004")
SEED = NameSeed.of(KEY)
SMALL = Pool("kv", 3, 2, (KVPart("k", 8), KVPart("v", 8)), DType.of("bfloat16"), 8)
BIG = ModelKV.dense(num_layers=60, num_kv_heads=8, head_dim=128, dtype="bfloat16").pool(64)
BIG_BOX = Box.of((4, 6), (30, 60), (0, 64))


def verdict(shape: ObjectFormat, raw: bytes | bytearray, seed: NameSeed = SEED) -> Verdict | None:
    """What a reader of the whole object concludes."""
    if len(raw) != shape.object_bytes:
        return Verdict.CORRUPT
    view = memoryview(raw)
    trailer = view[shape.payload_bytes :]
    refused = shape.check_trailer(seed, trailer)
    if refused is not None:
        return refused
    return shape.check_cells(seed, trailer, range(shape.cells), [view[: shape.payload_bytes]])


def sealed(shape: ObjectFormat, payload: bytes, key: str = KEY) -> bytes:
    return payload + shape.seal(NameSeed.of(key), [memoryview(payload)])


def small_object() -> tuple[ObjectFormat, bytes]:
    shape = ObjectFormat.of(SMALL, SMALL.page_box)
    raw = sealed(shape, object_payload(dense_page(SMALL), SMALL.page_box))
    assert len(raw) <= 4096
    return shape, raw


def test_lengths_of_the_known_example() -> None:
    shape = ObjectFormat.of(BIG, BIG_BOX)
    assert (shape.payload_bytes, shape.cells, shape.layers_per_cell) == (1_966_080, 12, 5)
    assert shape.object_bytes == 1_966_080 + 4096
    mla = ModelKV.mla(num_layers=60, latent_dim=512, rope_dim=64, dtype="bfloat16").pool(64)
    latent = ObjectFormat.of(mla, mla.page_box)
    assert (latent.cells, latent.layers_per_cell) == (30, 2)
    assert latent.object_bytes == 60 * 64 * 1152 + 4096
    assert ObjectFormat.of(SMALL, SMALL.page_box).object_bytes == 2 * 3 * 8 * 32 + 64 + 8 * 2


def test_objects_are_padded_to_whole_blocks_from_256_kib_of_payload_on() -> None:
    def size(payload: int) -> int:
        return ObjectFormat(heads=1, layers=1, layer_bytes=payload, layers_per_cell=1).object_bytes

    assert size(256 * KIB - 1) == 256 * KIB - 1 + 72
    assert size(256 * KIB) == 260 * KIB
    assert size(260 * KIB - 72) == 260 * KIB
    assert size(260 * KIB - 71) == 264 * KIB


@given(pools(), st.data())
def test_lengths_and_trailer_are_those_of_the_oracle(pool: Pool, data: st.DataObject) -> None:
    box = data.draw(sub_boxes(pool.page_box))
    shape = ObjectFormat.of(pool, box)
    dense = dense_page(pool, seed=data.draw(st.integers(0, 3)))
    key = data.draw(st.sampled_from((KEY, OTHER, "", "é/\0")))
    raw = object_bytes(dense, box, key)
    assert shape.payload_bytes == pool.payload_bytes(box)
    assert shape.object_bytes == len(raw)
    assert sealed(shape, raw[: shape.payload_bytes], key) == raw
    assert verdict(shape, raw, NameSeed.of(key)) is None


@pytest.mark.parametrize(("heads", "layers"), [((0, 2), (0, 30)), ((3, 4), (7, 60)), ((0, 1), (0, 61))])
def test_objects_of_many_cells_are_those_of_the_oracle(
    heads: tuple[int, int], layers: tuple[int, int]
) -> None:
    pool = ModelKV.dense(num_layers=61, num_kv_heads=4, head_dim=128, dtype="bfloat16").pool(64)
    box = Box.of(heads, layers, (0, 64))
    shape = ObjectFormat.of(pool, box)
    raw = object_bytes(dense_page(pool), box, KEY)
    assert len(raw) % 4096 == 0
    assert shape.cells > 1
    assert sealed(shape, raw[: shape.payload_bytes]) == raw
    assert verdict(shape, raw) is None


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 24, 30, 60, 61])
def test_the_cell_rule_is_the_oracles_and_keeps_cells_in_bounds(layers: int) -> None:
    sizes = sorted({2**n + d for n in range(3, 21) for d in (-1, 0, 1)} | {73_728, 32 * KIB * 3})
    for layer_bytes in sizes:
        run = layers_per_cell(layers, layer_bytes)
        assert run == cell_layers(layers, layer_bytes)
        assert 1 <= run <= layers
        cell = run * layer_bytes
        if layers * layer_bytes >= CELL_MIN_BYTES and layer_bytes <= CELL_MAX_BYTES:
            assert CELL_MIN_BYTES <= cell <= CELL_MAX_BYTES
        elif layer_bytes > CELL_MAX_BYTES:
            assert run == 1
        else:
            assert run == layers


@FEWER
@given(pools(), st.data())
def test_cells_tile_the_payload_in_order_and_never_cross_a_head(pool: Pool, data: st.DataObject) -> None:
    shape = ObjectFormat.of(pool, data.draw(sub_boxes(pool.page_box)))
    run = data.draw(st.integers(1, shape.layers))
    shape = ObjectFormat(shape.heads, shape.layers, shape.layer_bytes, run)
    at = 0
    for cell in range(shape.cells):
        span = shape.cell_range(cell)
        assert span.start == at
        assert len(span) > 0
        assert span.start // shape.head_bytes == (span.stop - 1) // shape.head_bytes
        at = span.stop
    assert at == shape.payload_bytes


@given(st.data())
def test_the_cells_of_a_part_are_those_that_share_a_place_with_it(data: st.DataObject) -> None:
    heads, layers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    pool = Pool("kv", layers + 3, heads + 2, (KVPart("k", 2),), DType.of("int8"), 4)
    box = Box.of((2, 2 + heads), (3, 3 + layers), (0, 4))
    run = data.draw(st.integers(1, layers))
    shape = ObjectFormat(heads, layers, 4 * pool.token_bytes, run)
    wanted = data.draw(sub_boxes(box))
    cells = []
    for head, first in product(range(2, 2 + heads), range(3, 3 + layers, run)):
        cell = Box.of((head, head + 1), (first, min(first + run, 3 + layers)), (0, 4))
        cells.append(cell.intersect(wanted) is not None)
    assert shape.cells == len(cells)
    assert shape.cells_of(wanted, box) == [i for i, needed in enumerate(cells) if needed]


def test_a10_every_flipped_bit_of_a_small_object_is_seen() -> None:
    """A format without sums serves a torn or flipped block whenever its length is right."""
    shape, raw = small_object()
    assert verdict(shape, raw) is None
    damaged = bytearray(raw)
    for bit in range(8 * len(raw)):
        damaged[bit // 8] ^= 1 << bit % 8
        assert verdict(shape, damaged) is Verdict.CORRUPT, bit
        damaged[bit // 8] ^= 1 << bit % 8
    assert verdict(shape, damaged) is None


def test_flipped_bits_of_a_padded_object_are_seen_padding_included() -> None:
    shape = ObjectFormat.of(BIG, BIG_BOX)
    raw = bytearray(sealed(shape, random.Random(1).randbytes(shape.payload_bytes)))
    payload_bits = [random.Random(2).randrange(8 * shape.payload_bytes) for _ in range(40)]
    trailer_bits = range(8 * shape.payload_bytes, 8 * len(raw), 7)
    view = memoryview(raw)
    trailer = view[shape.payload_bytes :]
    for bit in trailer_bits:
        raw[bit // 8] ^= 1 << bit % 8
        assert shape.check_trailer(SEED, trailer) is Verdict.CORRUPT, bit
        raw[bit // 8] ^= 1 << bit % 8
    for bit in payload_bits:
        raw[bit // 8] ^= 1 << bit % 8
        assert verdict(shape, raw) is Verdict.CORRUPT, bit
        raw[bit // 8] ^= 1 << bit % 8
    assert verdict(shape, raw) is None


def test_every_truncation_is_seen_even_when_zeros_or_an_old_object_fill_the_rest() -> None:
    shape, raw = small_object()
    old = sealed(shape, object_payload(dense_page(SMALL, page=1), SMALL.page_box), OTHER)
    for length in range(len(raw)):
        assert verdict(shape, raw[:length]) is Verdict.CORRUPT
        assert verdict(shape, raw[:length] + bytes(len(raw) - length)) is Verdict.CORRUPT
        mixed = verdict(shape, raw[:length] + old[length:])
        assert mixed in (Verdict.CORRUPT, Verdict.FOREIGN)
    assert shape.check_trailer(SEED, memoryview(raw[shape.payload_bytes + 1 :])) is Verdict.CORRUPT
    assert verdict(shape, bytes(len(raw))) is Verdict.CORRUPT
    assert verdict(shape, raw + b"\0") is Verdict.CORRUPT


def test_a_sound_object_of_another_name_is_foreign() -> None:
    """Two files swapped by an operator or a confused store: each is whole, and neither is right."""
    shape, raw = small_object()
    other = sealed(shape, raw[: shape.payload_bytes], OTHER)
    assert verdict(shape, other) is Verdict.FOREIGN
    assert verdict(shape, raw, NameSeed.of(OTHER)) is Verdict.FOREIGN
    assert verdict(shape, other, NameSeed.of(OTHER)) is None


def test_a_trailer_of_the_same_name_for_another_geometry_is_foreign() -> None:
    """Equal lengths, unlike cuts: the fields say so, since the name alone cannot."""
    a = ObjectFormat(heads=2, layers=2, layer_bytes=8, layers_per_cell=1)
    b = ObjectFormat(heads=1, layers=4, layer_bytes=8, layers_per_cell=1)
    c = ObjectFormat(heads=4, layers=4, layer_bytes=2, layers_per_cell=4)
    assert a.object_bytes == b.object_bytes == c.object_bytes
    raw = sealed(a, bytes(range(32)))
    assert verdict(a, raw) is None
    # Same sums at the same places: same bytes, so b may read what a wrote.
    assert verdict(b, raw) is None
    assert verdict(c, raw) is Verdict.FOREIGN


def test_data_and_trailer_of_different_writes_never_verify_together() -> None:
    shape, raw = small_object()
    again = sealed(shape, raw[: shape.payload_bytes], OTHER)
    sums = slice(shape.payload_bytes, shape.payload_bytes + 8 * shape.cells)
    assert again[sums] != raw[sums]
    # Equal cells have unlike sums: the cell's index is part of the seed.
    flat = ObjectFormat(heads=4, layers=1, layer_bytes=16, layers_per_cell=1)
    trailer = flat.seal(SEED, [memoryview(bytes(64))])
    assert len({trailer[i : i + 8] for i in range(0, 32, 8)}) == 4


def future(raw: bytes, version: int) -> bytes:
    magic, _, reserved, digest = TAIL.unpack(raw[-TAIL.size :])
    return raw[: -TAIL.size] + TAIL.pack(magic, version, reserved, digest)


def test_a_later_version_is_unknown_and_a_flipped_version_bit_is_damage() -> None:
    shape, raw = small_object()
    for bit in range(32):
        assert verdict(shape, future(raw, 1 ^ 1 << bit)) is Verdict.CORRUPT
    # A later format sums what it likes: its trailer is not one of ours with another number.
    later = bytearray(future(raw, 2))
    later[shape.payload_bytes] ^= 0xFF
    assert verdict(shape, later) is Verdict.UNKNOWN_VERSION
    assert verdict(shape, later, NameSeed.of(OTHER)) is Verdict.UNKNOWN_VERSION
    assert verdict(shape, bytes(later).replace(MAGIC, b"HICACHE\1")) is Verdict.CORRUPT


def test_the_trailer_of_the_description_by_hand() -> None:
    shape, raw = small_object()
    trailer = raw[shape.payload_bytes :]
    fields = struct.unpack_from("<QIIQ", trailer, 8 * shape.cells)
    assert fields == (shape.payload_bytes, shape.cells, shape.layers_per_cell, len(raw))
    assert trailer[-32:-16] == b"HICACHE\0\x01\0\0\0\0\0\0\0"
    assert trailer[-16:] == SEED.digest
    assert int.from_bytes(SEED.digest[:8], "little") == SEED.seed


@FEWER
@given(st.data())
def test_sealing_and_checking_a_gather_list_is_that_of_its_bytes(data: st.DataObject) -> None:
    shape = ObjectFormat(
        heads=data.draw(st.integers(1, 3)),
        layers=(layers := data.draw(st.integers(1, 5))),
        layer_bytes=data.draw(st.integers(1, 40)),
        layers_per_cell=data.draw(st.integers(1, layers)),
    )
    payload = random.Random(3).randbytes(shape.payload_bytes)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(payload)), max_size=12)))
    pieces = [memoryview(payload)[a:b] for a, b in zip([0, *cuts], [*cuts, len(payload)], strict=True)]
    whole = shape.seal(SEED, [memoryview(payload)])
    assert shape.seal(SEED, pieces) == whole
    trailer = memoryview(whole)
    assert shape.check_cells(SEED, trailer, range(shape.cells), pieces) is None
    at = data.draw(st.integers(0, len(payload) - 1))
    damaged = bytearray(payload)
    damaged[at] ^= 1
    bad = [memoryview(damaged)[a:b] for a, b in zip([0, *cuts], [*cuts, len(payload)], strict=True)]
    assert shape.check_cells(SEED, trailer, range(shape.cells), bad) is Verdict.CORRUPT


@FEWER
@given(st.data())
def test_some_cells_of_a_fetched_range_are_proven_without_the_others(data: st.DataObject) -> None:
    shape = ObjectFormat(heads=3, layers=5, layer_bytes=7, layers_per_cell=2)
    payload = bytearray(random.Random(4).randbytes(shape.payload_bytes))
    trailer = memoryview(shape.seal(SEED, [memoryview(bytes(payload))]))
    first = data.draw(st.integers(0, shape.cells - 1))
    last = data.draw(st.integers(first, shape.cells - 1))
    cells = sorted(data.draw(st.sets(st.integers(first, last), min_size=1)))
    start, stop = shape.cell_range(first).start, shape.cell_range(last).stop
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= 0x10
    cut = data.draw(st.integers(start, stop))
    view = memoryview(payload)
    found = shape.check_cells(SEED, trailer, cells, [view[start:cut], view[cut:stop]], start)
    is_hit = any(shape.cell_range(cell).start <= at < shape.cell_range(cell).stop for cell in cells)
    assert found is (Verdict.CORRUPT if is_hit else None)


def test_a_byte_range_has_a_length() -> None:
    assert len(ByteRange(3, 10)) == 7


def golden_payload(size: int) -> bytes:
    index = np.arange(size)
    return ((index * 7 + index // 251 + 3) % 256).astype(np.uint8).tobytes()


def test_golden_objects() -> None:
    """Lengths, cells and trailers of version 1: another result needs another version."""
    rows = json.loads(GOLDEN.read_text())
    assert len(rows) >= 6
    for row in rows:
        parts = tuple(KVPart(name, width) for name, width in row["parts"])
        heads, layers = row["heads"], row["layers"]
        pool = Pool("kv", layers[1], heads[1], parts, DType.of(row["dtype"]), row["page_size"])
        box = Box.of(tuple(heads), tuple(layers), (0, row["page_size"]))
        shape = ObjectFormat.of(pool, box)
        assert shape.payload_bytes == row["payload_bytes"]
        assert shape.object_bytes == row["object_bytes"]
        assert (shape.cells, shape.layers_per_cell) == (row["cells"], row["layers_per_cell"])
        trailer = shape.seal(NameSeed.of(row["key"]), [memoryview(golden_payload(shape.payload_bytes))])
        before, tail = bytes.fromhex("".join(row["sums"]) + row["fields"]), bytes.fromhex(row["tail"])
        assert trailer == before + bytes(len(trailer) - len(before) - len(tail)) + tail
