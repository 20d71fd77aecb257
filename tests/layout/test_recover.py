from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_store.layout.box import Span
from hicache_store.layout.dtypes import DType
from hicache_store.layout.format import TAIL, NameSeed, ObjectFormat, Verdict
from hicache_store.layout.model import KVPart, ModelKV, Pool
from hicache_store.layout.names import ObjectName
from hicache_store.layout.namespace import namespace
from hicache_store.layout.recover import format_in_pool, formats_of_length, main_pool, recover
from hicache_store.layout.weights import WeightsIdentity
from hicache_store.limits import KIB, LAYERS_MAX
from hicache_store.testing.strategies import pools, sub_boxes

NAMESPACE = "ab" * 32
PAGE = "cd" * 32
CONFIG = {"model_type": "llama", "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 8}


def shape_of(heads: int, layers: int, width: int) -> ObjectFormat:
    """Of a page of one token with ``width`` bytes a layer."""
    pool = Pool("x", layers, heads, (KVPart("k", width),), DType.of("int8"), 1)
    return ObjectFormat.of(pool, pool.page_box)


def name_of(heads: int, layers: int, page: str = PAGE, pool: str = "draft_01234567") -> ObjectName:
    return ObjectName(NAMESPACE, page, pool, Span(0, heads), Span(3, 3 + layers))


def sealed(shape: ObjectFormat, name: ObjectName, seed: int = 0) -> bytes:
    payload = random.Random(seed).randbytes(shape.payload_bytes)
    return payload + shape.seal(NameSeed.of(str(name)), [memoryview(payload)])


def judge(name: ObjectName, stored: bytes):
    formats = formats_of_length(len(name.heads), len(name.layers), len(stored))
    longest = max((shape.trailer_bytes for shape in formats), default=TAIL.size)
    return recover(name, memoryview(stored)[-longest:], formats)


@st.composite
def shapes(draw: st.DrawFn) -> ObjectFormat:
    """Below and above the payload from which objects are padded, of narrow and wide layers."""
    heads, layers = draw(st.integers(1, 9)), draw(st.integers(1, 64))
    most = draw(st.sampled_from((600, 40 * KIB, 300 * KIB, 1_200 * KIB)))
    width = draw(st.integers(1, max(1, most // (heads * layers))))
    return shape_of(heads, layers, width)


@settings(max_examples=120, deadline=None)
@given(shapes(), st.integers(0, 2**32))
def test_the_trailer_tells_the_format(shape, seed):
    name = name_of(shape.heads, shape.layers)
    found = judge(name, sealed(shape, name, seed))
    assert found.verdict is None
    assert found.format == shape


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_box_of_any_pool_is_recovered(data):
    pool = data.draw(pools())
    box = data.draw(sub_boxes(pool.page_box))
    shape = ObjectFormat.of(pool, box)
    name = ObjectName(NAMESPACE, PAGE, pool.key_name, box.heads, box.layers)
    assert format_in_pool(name, pool) == shape
    assert judge(name, sealed(shape, name)).format == shape


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 80), st.integers(64, 600_000))
def test_formats_of_a_length_are_exactly_those(heads, layers, object_bytes):
    """Against trying every width there is."""
    found = formats_of_length(heads, layers, object_bytes)
    least = max(1, (object_bytes - 5_000 - 8 * heads * layers) // (heads * layers) - 2)
    most = object_bytes // (heads * layers) + 2
    tried = [shape_of(heads, layers, width) for width in range(least, most)]
    assert list(found) == [shape for shape in tried if shape.object_bytes == object_bytes]


@settings(max_examples=100, deadline=None)
@given(shapes(), st.data())
def test_a_flipped_bit_of_the_trailer_is_damage(shape, data):
    """Wherever it is: also in the version, and in the fields the search goes by."""
    name = name_of(shape.heads, shape.layers)
    stored = bytearray(sealed(shape, name))
    at = data.draw(st.integers(shape.payload_bytes, shape.object_bytes - 1))
    stored[at] ^= 1 << data.draw(st.integers(0, 7))
    assert judge(name, bytes(stored)).verdict is Verdict.CORRUPT


@pytest.mark.parametrize(("heads", "layers", "width"), [(2, 3, 50), (2, 30, 16 * KIB), (1, 1, 300 * KIB + 1)])
def test_a_later_version_is_told_from_damage(heads, layers, width):
    shape = shape_of(heads, layers, width)
    name = name_of(heads, layers)
    stored = bytearray(sealed(shape, name))
    version_at = len(stored) - TAIL.size + 8
    stored[version_at : version_at + 4] = struct.pack("<I", 2)
    assert judge(name, bytes(stored)).verdict is Verdict.CORRUPT  # only the number changed: a flipped bit
    stored[-TAIL.size - 1] ^= 0xFF  # a later format sums its trailer its own way
    assert judge(name, bytes(stored)).verdict is Verdict.UNKNOWN_VERSION


@settings(max_examples=50, deadline=None)
@given(shapes())
def test_a_sound_object_of_another_page_is_foreign(shape):
    name, other = name_of(shape.heads, shape.layers), name_of(shape.heads, shape.layers, "ef" * 32)
    assert judge(name, sealed(shape, other)).verdict is Verdict.FOREIGN


def test_lengths_no_object_has():
    assert formats_of_length(2, 30, 127) == ()
    assert formats_of_length(1, 1, 64 + 8) == ()  # an object has at least one byte of payload
    assert len(formats_of_length(1, 1, 64 + 8 + 1)) == 1
    assert formats_of_length(1, LAYERS_MAX + 1, 1 << 30) == ()
    assert formats_of_length(10**8, 10**8, 1 << 40) == ()
    assert judge(name_of(2, 30), bytes(4096)).verdict is Verdict.CORRUPT


def test_the_manifest_tells_the_main_pool():
    model = ModelKV.dense(num_layers=6, num_kv_heads=4, head_dim=8, v_head_dim=6, dtype="bf16")
    told = main_pool(namespace(CONFIG, WeightsIdentity.operator("w"), model.facts(16), "t").record)
    assert told == model.pool(16)


@pytest.mark.parametrize(
    "kv",
    [
        None,
        [],
        {},
        {"num_layers": 6},
        {"num_layers": 0, "num_kv_heads": 1, "parts": [["k", 4]], "dtype": "bfloat16", "page_size": 16},
        {"num_layers": 1, "num_kv_heads": 1, "parts": [["k"]], "dtype": "bfloat16", "page_size": 16},
        {"num_layers": 1, "num_kv_heads": 1, "parts": [["k", 4]], "dtype": 7, "page_size": 16},
        {"num_layers": "1", "num_kv_heads": 1, "parts": [["k", 4]], "dtype": "bfloat16", "page_size": 16},
    ],
)
def test_a_manifest_that_tells_no_pool(kv):
    assert main_pool({"kv": kv}) is None


def test_only_plain_objects_of_the_pool_are_told_by_it():
    pool = ModelKV.mla(num_layers=4, latent_dim=8, rope_dim=4, dtype="float8_e4m3fn").pool(8)
    plain = ObjectName(NAMESPACE, PAGE, "kv", Span(0, 1), Span(0, 4))
    assert format_in_pool(plain, pool) == ObjectFormat.of(pool, pool.page_box)
    half = ObjectName(NAMESPACE, PAGE, "kv", Span(0, 1), Span(0, 4), tokens=Span(4, 8))
    assert format_in_pool(half, pool).payload_bytes == 4 * 4 * 12
    for other in (
        ObjectName(NAMESPACE, PAGE, "draft_01234567", Span(0, 1), Span(0, 4)),
        ObjectName(NAMESPACE, PAGE, "kv", Span(0, 1), Span(0, 4), pages=4),
        ObjectName(NAMESPACE, PAGE, "kv", Span(0, 1), Span(0, 4), shard="0" * 32),
    ):
        assert format_in_pool(other, pool) is None


def test_many_cells_leave_the_payload_far_from_the_length():
    """Here the sums alone take more than any padding."""
    shape = shape_of(8, 100, 150 * KIB + 1)
    assert shape.cells == 800
    assert shape in formats_of_length(8, 100, shape.object_bytes)
