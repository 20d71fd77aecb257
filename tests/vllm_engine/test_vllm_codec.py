"""Where backends keep K and V: recognised by what they write, read and written bit for bit, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import MLAAttentionImpl
from vllm.v1.attention.backends import cpu_attn, flash_attn, triton_attn
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)
from vllm_parts import (
    Bound,
    Update,
    bytes_of,
    config_of,
    in_rows,
    kernel_views,
    names_of,
    random_tensor,
    spec_of,
)

from hicache_store.engines.vllm_codec import LayerCache, layer_number, layer_specs
from hicache_store.errors import ConfigurationError

ORDERS = list(KVCacheLayout)
TOKEN_INSIDE = [KVCacheLayout.LBHNC, KVCacheLayout.LHBNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC]
"""Orders in which a head's tokens of one block lie side by side."""


def in_halves(*, is_transposed: bool) -> Update:
    def update(module: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        tokens, half = cache.shape[2], cache.shape[2] * key.shape[-1]
        for index, slot in enumerate(slots.tolist()):
            for head in range(cache.shape[1]):
                cell = cache[slot // tokens, head].view(-1)
                keys = cell[:half].view(-1, tokens).T if is_transposed else cell[:half].view(tokens, -1)
                keys[slot % tokens] = key[index, head]
                cell[half:].view(tokens, -1)[slot % tokens] = value[index, head]

    return update


def agrees(bound: Bound, caches: Sequence[LayerCache], dtype: torch.dtype | None = None) -> None:
    """Rows that the backend writes anywhere are read, and rows that are written are where it writes them."""
    modules = bound.modules()
    for cache, view in zip(caches, bound.views, strict=True):
        module = modules[cache.described.name]
        tokens, count = cache.block_tokens, 3 * cache.block_tokens // 2
        slots = torch.randperm(view.shape[0] * tokens)[:count]
        rows = [
            random_tensor((count, cache.described.heads, width), dtype or view.dtype)
            for width in cache.described.widths
        ]
        before = view.clone()
        bound.update(module, *rows, view, slots)
        after = view.clone()
        for part, given in zip(cache.parts, rows, strict=True):
            found = part[slots // tokens, :, slots % tokens]
            if view.dtype.itemsize > 1:
                assert torch.equal(found, given)
        kept = [part[slots // tokens, :, slots % tokens].clone() for part in cache.parts]
        view.copy_(before)
        for part, found in zip(cache.parts, kept, strict=True):
            part[slots // tokens, :, slots % tokens] = found
        assert bytes_of(view) == bytes_of(after)


# The backends of vLLM.


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 64, 80, 128])
def test_the_cpu_backend(dim: int, dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiled kernel, which transposes keys; with tiles of AMX it has another way, left out here."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype))
    monkeypatch.setattr(cpu_attn, "get_current_vllm_config", lambda: config)
    impl = cpu_attn.CPUAttentionBackendImpl(4, dim, 1.0, 2, None, None, "auto")
    isa = cpu_attn._get_attn_isa(dtype, block, dim, "auto")

    def update(module: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        module.isa = isa
        impl.do_kv_cache_update(module, key, value, cache, slots)

    spec = spec_of(block, 2, dim, dtype=dtype)
    views = kernel_views(spec, 4, cpu_attn.CPUAttentionBackend.supported_kv_cache_layouts()[0], 2, block)
    bound = Bound(spec, views, update, 4)
    caches = bound.caches()
    agrees(bound, caches)
    assert caches[0].parts[0].stride()[2:] == (1, block)


def test_the_cpu_mla_backend() -> None:
    """Its own writing, of a latent and of a position."""
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    update = CPUMLAImpl.__new__(CPUMLAImpl).do_kv_cache_update
    latents_agree(Bound(spec, kernel_views(spec, 5, KVCacheLayout.LBNHC, 2, 16), update, 5, rope=64))


@pytest.mark.parametrize("order", ORDERS)
def test_mla_backends_of_gpus(order: KVCacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """How they cut rows; the compiled copy itself is made with indices here."""

    def reference(
        latent: Any, position: Any, cache: Any, slots: Any, kv_cache_dtype: str, scale: Any
    ) -> None:
        for index, slot in enumerate(slots.tolist()):
            row = cache[slot // cache.shape[-2]].view(-1, cache.shape[-1])[slot % cache.shape[-2]]
            row[: latent.shape[1]], row[latent.shape[1] :] = latent[index], position[index]

    monkeypatch.setattr("vllm._custom_ops.concat_and_cache_mla", reference)
    spec = MLAAttentionSpec(block_size=8, num_kv_heads=1, head_size=20, dtype=torch.bfloat16)
    update = partial(MLAAttentionImpl.do_kv_cache_update, None)
    latents_agree(Bound(spec, kernel_views(spec, 5, order, 2, 8), update, 5))


def latents_agree(bound: Bound) -> None:
    before = [bytes_of(view) for view in bound.views]
    cache = bound.caches()[1]
    assert [bytes_of(view) for view in bound.views] == before
    (part,), tokens, rope = cache.parts, cache.block_tokens, bound.rope
    slots = torch.randperm(5 * tokens)[:20]
    latent = torch.randn(20, cache.described.widths[0] - rope).to(part.dtype)
    position = torch.randn(20, 1, rope).to(part.dtype)
    assert bound.update is not None
    bound.update(latent, position, bound.views[1], slots, "auto", torch.tensor(1.0))
    found = part[slots // tokens, 0, slots % tokens]
    assert torch.equal(found, torch.cat([latent, position[:, 0]], dim=1))


def reference_copy(
    key: Any, value: Any, keys: Any, values: Any, slots: Any, named: str, key_scale: Any, value_scale: Any
) -> None:
    for rows, cache, scale in ((key, keys, key_scale), (value, values, value_scale)):
        stored = (rows.float() / scale).to(torch.float8_e4m3fn) if cache.dtype.itemsize == 1 else rows
        cache[slots // cache.shape[1], slots % cache.shape[1]] = stored.view(cache.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", ["flash", "triton"])
def test_backends_of_gpus(
    backend: str, order: KVCacheLayout, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How FlashAttention and Triton cut blocks; the compiled copy itself is made with indices here."""
    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", reference_copy, raising=False)
    monkeypatch.setattr(triton_attn, "triton_reshape_and_cache_flash", reference_copy)
    kind = flash_attn.FlashAttentionImpl if backend == "flash" else triton_attn.TritonAttentionImpl
    impl = kind.__new__(kind)
    impl.attn_type, impl.head_size, impl._is_per_token_head_quant = "decoder", 8, False
    impl.kv_cache_dtype, impl.fp8_dtype = "fp8" if dtype.itemsize == 1 else "auto", torch.float8_e4m3fn
    spec = spec_of(16, 3, 8, dtype=dtype, kv_quant_mode=get_kv_quant_mode(impl.kv_cache_dtype))
    bound = Bound(spec, kernel_views(spec, 5, order, 3, 16), impl.do_kv_cache_update, 5)
    before = [bytes_of(view) for view in bound.views]
    caches = bound.caches()
    assert [bytes_of(view) for view in bound.views] == before
    agrees(bound, caches, torch.bfloat16)


# Ways and orders.

WAYS: dict[str, Update] = {
    "rows": in_rows,
    "halves": in_halves(is_transposed=False),
    "transposed": in_halves(is_transposed=True),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_every_order(way: str, order: KVCacheLayout) -> None:
    if way != "rows" and order not in TOKEN_INSIDE:
        order = TOKEN_INSIDE[ORDERS.index(order) % 4]  # no block of a head is in one piece
    spec = spec_of(8, 3, 8, 4)
    bound = Bound(spec, kernel_views(spec, 5, order, 3, 8), WAYS[way], 5)
    before = [bytes_of(view) for view in bound.views]
    caches = bound.caches()
    assert [bytes_of(view) for view in bound.views] == before, "the probed blocks have their content back"
    assert all(
        [tuple(part.shape) for part in cache.parts] == [(5, 3, 8, 8), (5, 3, 8, 4)] for cache in caches
    )
    agrees(bound, caches)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", [4, 8])
def test_kernel_blocks_below_the_manager_s(way: str, kernel: int) -> None:
    spec = spec_of(16, 2, 8)
    order = KVCacheLayout.LBNHC if way == "rows" else KVCacheLayout.LBHNC
    bound = Bound(spec, kernel_views(spec, 3, order, 2, kernel), WAYS[way], 3)
    caches = bound.caches()
    assert {(cache.split, cache.block_tokens) for cache in caches} == {(16 // kernel, kernel)}
    agrees(bound, caches)


@pytest.mark.parametrize("way", ["rows", "rows of uint8"])
def test_bytes_are_known_by_where_equal_values_lie(way: str) -> None:
    dtype = torch.uint8 if way.endswith("uint8") else torch.float8_e4m3fn
    spec = spec_of(8, 2, 8, 4, dtype=dtype, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    bound = Bound(spec, kernel_views(spec, 5, KVCacheLayout.LBNHC, 2, 8), in_rows, 5)
    agrees(bound, bound.caches(), torch.bfloat16)


def one_block_only(module: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
    first = slots < cache.shape[2]
    in_rows(module, key[first], value[first], cache, slots[first])
    in_rows(module, value[~first], key[~first], cache, slots[~first])


UNKNOWN: dict[str, Update] = {
    "values first": lambda module, key, value, cache, slots: in_rows(module, value, key, cache, slots),
    "nothing": lambda module, key, value, cache, slots: None,
    "heads exchanged": lambda module, key, value, cache, slots: in_rows(
        module, key.flip(1), value.flip(1), cache, slots
    ),
    "tokens exchanged": lambda module, key, value, cache, slots: in_rows(
        module, key.flip(0), value.flip(0), cache, slots
    ),
    "dims exchanged": lambda module, key, value, cache, slots: in_rows(
        module, key, value.flip(2), cache, slots
    ),
    "the last block otherwise": one_block_only,
    "no number": lambda module, key, value, cache, slots: in_rows(module, key * 0, value * 0, cache, slots),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("way", UNKNOWN)
def test_a_backend_that_writes_otherwise_is_refused(way: str, dtype: torch.dtype) -> None:
    mode = KVQuantMode.NONE if dtype.itemsize > 1 else KVQuantMode.FP8_PER_TENSOR
    spec = spec_of(8, 2, 8, dtype=dtype, kv_quant_mode=mode)
    views = kernel_views(spec, 5, KVCacheLayout.LBNHC, 2, 8)
    before = [bytes_of(view) for view in views]
    with pytest.raises(ConfigurationError, match=r"backend ODD_ATTN .* choose another .*, or run"):
        Bound(spec, views, UNKNOWN[way], 5, "ODD_ATTN").caches()
    assert [bytes_of(view) for view in views] == before


def test_a_backend_that_writes_within_its_kernels_is_refused() -> None:
    spec = spec_of(8)
    bound = Bound(spec, kernel_views(spec, 5, KVCacheLayout.LBNHC, 2, 8), None, 5, "FUSED_ATTN")
    with pytest.raises(ConfigurationError, match=r"FUSED_ATTN writes its cache inside .* choose another"):
        bound.caches()


def test_a_cache_of_another_shape_is_refused() -> None:
    spec = spec_of(8, 2, 8)
    views = kernel_views(spec_of(8, 2, 9), 5, KVCacheLayout.LBNHC, 2, 8)
    with pytest.raises(ConfigurationError, match=r"backend TEST_ATTN has the shape \(5, 2, 8, 18\), where"):
        Bound(spec, views, in_rows, 5).caches()


# What models keep.

MLA = partial(MLAAttentionSpec, block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
REFUSED: dict[str, Any] = {
    "MambaSpec": MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,)),
    "ChunkedLocalAttentionSpec": ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, attention_chunk_size=64
    ),
    "SlidingWindowMLASpec": SlidingWindowMLASpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64
    ),
    "SinkFullAttentionSpec": SinkFullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, sink_len=4
    ),
    "INT8_PER_TOKEN_HEAD": spec_of(dtype=torch.int8, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD),
    "FP8_PER_TOKEN_HEAD": spec_of(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD),
    "NVFP4": spec_of(dtype=torch.uint8, kv_quant_mode=KVQuantMode.NVFP4),
    "TURBOQUANT_K8V4": spec_of(dtype=torch.uint8, kv_quant_mode=KVQuantMode.TURBOQUANT_K8V4),
    "ULTRAQUANT_4BIT": spec_of(dtype=torch.uint8, kv_quant_mode=KVQuantMode.ULTRAQUANT_4BIT),
    "packs its KV.*way out of padding": spec_of(page_size_padded=2**20),
    "packs its KV.*opaque": spec_of(state_content_bytes=100),
    "packs its KV.*slots": spec_of(num_head_slots=1),
    "packs its KV.*states": spec_of(tokens_per_state=4),
    "packs its KV.*half states": spec_of(tokens_per_state=Fraction(1, 2)),
    "MLAAttentionSpec.*aligned": MLA(alignment=2**16),
    "MLAAttentionSpec.*v4": MLA(model_version="deepseek_v4"),
    "attend to later ones": spec_of(non_causal=True),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_stored_is_refused_with_a_way_out(why: str) -> None:
    with pytest.raises(ConfigurationError, match=why.partition(".*")[0]) as refused:
        layer_specs(config_of((names_of(2), REFUSED[why])), 2)
    assert "model.layers.0" in str(refused.value)
    assert "run" in str(refused.value)
    assert "without hicache_store" in str(refused.value)


@pytest.mark.parametrize(
    "other",
    [spec_of(heads=1), spec_of(dim=16), spec_of(value=4), spec_of(dtype=torch.bfloat16), MLA()],
    ids=["heads", "width", "value width", "dtype", "latent"],
)
def test_layers_that_are_not_alike_are_refused(other: Any) -> None:
    first, second = names_of(2)
    with pytest.raises(ConfigurationError, match=r"KV of 2 shapes .* run this one without it"):
        layer_specs(config_of(([first], spec_of()), ([second], other)), 2)


def test_a_model_some_of_whose_layers_keep_nothing_is_refused() -> None:
    names = names_of(4)
    with pytest.raises(ConfigurationError, match=r"layers \[0, 1, 3\] keep KV, others do not or share it"):
        layer_specs(config_of(([names[0], names[1], names[3]], spec_of())), 4)


def test_layers_come_in_the_model_s_order_with_their_groups_and_without_drafts() -> None:
    """Whole attention and windows are groups of their own; layers 12 and 13 belong to a draft model."""
    window = SlidingWindowSpec(
        block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=64
    )
    names = names_of(14)
    config = config_of(
        (names[12:], spec_of(heads=7)), (names[1:12:2], window), (list(reversed(names[0:12:2])), spec_of())
    )
    layers = layer_specs(config, 12)
    assert [layer.name for layer in layers] == names[:12]
    assert [layer.group for layer in layers] == [2, 1] * 6
    assert [type(layer.spec) for layer in layers[:2]] == [FullAttentionSpec, SlidingWindowSpec]


def test_a_stage_of_a_pipeline_has_its_own_layers() -> None:
    layers = layer_specs(config_of((names_of(6)[3:], spec_of())), 6)
    assert [layer.layer for layer in layers] == [3, 4, 5]


def test_a_group_of_one_kind_describes_each_layer_by_itself() -> None:
    names = names_of(2)
    each = {name: spec_of(sliding_window=window) for name, window in zip(names, (None, 64), strict=True)}
    group = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=each)
    assert [layer.spec for layer in layer_specs(config_of((names, group)), 2)] == list(each.values())


def test_a_latent_has_one_part() -> None:
    (layer,) = layer_specs(config_of((names_of(1), MLA())), 1)
    assert (layer.is_latent, layer.widths, layer.heads) == (True, (576,), 1)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("model.layers.7.self_attn.attn", 7),
        ("transformer.h.12.attn", 12),
        ("vlm.model.layers.0.x", 0),
    ],
)
def test_a_layer_tells_its_number(name: str, number: int) -> None:
    assert layer_number(name) == number


@pytest.mark.parametrize("name", ["model.attn", "decoder.3.layers.4.attn", "model.layers.7b.attn", ""])
def test_a_layer_that_does_not_tell_its_number_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"does not tell its number .* without hicache_store"):
        layer_number(name)
