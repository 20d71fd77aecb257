from __future__ import annotations

from dataclasses import replace

import pytest
from fewer import FEWER
from hypothesis import given
from hypothesis import strategies as st

from hicache_store.errors import ConfigurationError, TopologyError
from hicache_store.layout.box import Box, Span
from hicache_store.layout.dtypes import ALL_DTYPES, DType
from hicache_store.layout.model import Attention, HitRule, KVPart, ModelKV, Pool
from hicache_store.testing.strategies import pools

BF16 = DType.of("bfloat16")


def pool(**changes: object) -> Pool:
    base = Pool("draft", 3, 2, (KVPart("k", 4), KVPart("v", 6)), BF16, 16)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_sizes_of_a_known_model() -> None:
    model = ModelKV.dense(num_layers=60, num_kv_heads=8, head_dim=128, dtype="bfloat16", num_query_heads=64)
    main = model.pool(64)
    assert model.attention is Attention.GQA
    assert main.token_bytes == 512
    assert main.payload_bytes(main.page_box) == 8 * 60 * 64 * 512
    assert main.payload_bytes(Box.of((4, 6), (30, 60), (0, 64))) == 1_966_080


def test_attention_is_told_from_the_query_heads() -> None:
    def of(query_heads: int | None) -> Attention:
        return ModelKV.dense(
            num_layers=1, num_kv_heads=4, head_dim=8, dtype="float16", num_query_heads=query_heads
        ).attention

    assert [of(4), of(8), of(None)] == [Attention.MHA, Attention.GQA, Attention.GQA]


def test_mla_is_one_head_whose_row_is_latent_then_rope() -> None:
    main = ModelKV.mla(num_layers=60, latent_dim=512, rope_dim=64, dtype="bfloat16").pool(64)
    assert (main.num_heads, main.part_row_bytes) == (1, (1152,))
    with pytest.raises(TopologyError, match="4 KV heads; use 1"):
        ModelKV(2, 4, (KVPart("latent", 8),), BF16, Attention.MLA)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda dtype: dtype.name)
def test_rows_are_counted_in_whole_bytes_for_every_dtype(dtype: DType) -> None:
    main = ModelKV(1, 1, (KVPart("k", 6), KVPart("v", 10)), dtype, Attention.MHA).pool(1)
    assert main.part_row_bytes == (6 * dtype.bits // 8, 10 * dtype.bits // 8)
    assert main.unit_bytes == max(1, dtype.bits // 8)
    assert tuple(units * main.unit_bytes for units in main.part_units) == main.part_row_bytes
    if dtype.bits == 4:
        with pytest.raises(ConfigurationError, match="12 bits"):
            ModelKV(1, 1, (KVPart("k", 3),), dtype, Attention.MHA).pool(1)


@FEWER
@given(pools(), st.data())
def test_payload_bytes_count_every_element_once(main: Pool, data: st.DataObject) -> None:
    box = main.page_box
    bits = sum(part.width for part in main.parts) * main.dtype.bits
    assert main.payload_bytes(box) * 8 == len(box.heads) * len(box.layers) * len(box.tokens) * bits
    cut = data.draw(st.integers(0, main.num_layers))
    halves = [
        Box(box.heads, Span(0, cut), box.tokens),
        Box(box.heads, Span(cut, main.num_layers), box.tokens),
    ]
    assert sum(map(main.payload_bytes, halves)) == main.payload_bytes(box)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "Draft"}, "'Draft'"),
        ({"name": ""}, "''"),
        ({"name": "a" * 17}, "a{17}"),
        ({"name": "a/b"}, "'a/b'"),
        ({"name": "draft\n"}, "draft"),
        ({"name": "kv.H000-001"}, "not accepted"),
        ({"num_layers": 0}, "0 layers"),
        ({"num_heads": 0}, "0 heads"),
        ({"page_size": 0}, "0 tokens a page"),
        ({"parts": ()}, "0 kv parts"),
        ({"layer_ids": (0, 1)}, "3 ascending numbers"),
        ({"layer_ids": (0, 2, 2)}, "3 ascending numbers"),
        ({"layer_ids": (2, 1, 0)}, "3 ascending numbers"),
        ({"layer_ids": (-1, 0, 1)}, "3 ascending numbers"),
        ({"hit_rule": HitRule.TRAILING_WINDOW}, "window_pages"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_with_its_numbers(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        pool(**changes)


def test_parts_and_models_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="width 0"):
        KVPart("k", 0)
    with pytest.raises(ConfigurationError, match="0 layers, 2 heads, 1 parts"):
        ModelKV(0, 2, (KVPart("k", 1),), BF16, Attention.MHA)
    with pytest.raises(ConfigurationError, match="1 layers, 2 heads, 0 parts"):
        ModelKV(1, 2, (), BF16, Attention.MHA)


def test_the_main_pool_keeps_its_name_and_any_other_carries_a_digest_of_all_that_shapes_it() -> None:
    """A draft pool of another geometry, origin or hit rule must never be taken for this one."""
    assert pool(name="kv").key_name == "kv"
    variants = [
        pool(),
        pool(name="draft2"),
        pool(num_layers=4),
        pool(num_heads=4),
        pool(page_size=32),
        pool(parts=(KVPart("k", 6), KVPart("v", 4))),
        pool(parts=(KVPart("v", 4), KVPart("k", 6))),
        pool(dtype=DType.of("float16")),
        pool(layer_ids=(1, 2, 3)),
        pool(hit_rule=HitRule.TRAILING_WINDOW, window_pages=1),
        pool(hit_rule=HitRule.TRAILING_WINDOW, window_pages=2),
        pool(identity="another draft"),
    ]
    names = [variant.key_name for variant in variants]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 32 for name in names)
    assert pool().key_name == pool().key_name
    # Every layer, told or left out, is the same pool.
    assert pool(layer_ids=(0, 1, 2)).key_name == pool().key_name


def test_key_names_are_fixed() -> None:
    assert pool().key_name == "draft_7ec70abe"
    assert len(pool(name="a" * 16 + "_" + "b" * 6).key_name) == 32


def test_packed_draft_layers_lengthen_the_pool_and_not_the_model() -> None:
    model = ModelKV.dense(num_layers=5, num_kv_heads=2, head_dim=4, dtype="int8")
    assert (model.pool(16, draft_layers=2).num_layers, model.num_layers) == (7, 5)


def test_layers_of_a_stage_are_counted_within_the_pool() -> None:
    group = pool(num_layers=3, layer_ids=(0, 6, 12))
    assert [group.local_layers(Span(a, a + 4)) for a in (0, 4, 8, 12)] == [
        Span(0, 1),
        Span(1, 2),
        Span(2, 2),
        Span(2, 3),
    ]
    every = pool(num_layers=3)
    assert every.local_layers(Span(1, 9)) == Span(1, 3)
    assert len(every.local_layers(Span(3, 9))) == 0


def test_a_group_pool_has_the_geometry_of_its_layers() -> None:
    model = ModelKV.dense(num_layers=13, num_kv_heads=4, head_dim=192, dtype="bfloat16")
    full = model.group_pool(
        "full", 16, layer_ids=[0, 6, 12], num_heads=8, parts=[KVPart("k", 192), KVPart("v", 128)]
    )
    assert (full.num_layers, full.num_heads, full.part_row_bytes) == (3, 8, (384, 256))
