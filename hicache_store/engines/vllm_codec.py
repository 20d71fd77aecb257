"""Where vLLM's attention backends keep K and V: views of each layer's cache, proven on the real tensors.

vLLM registers one tensor a layer of the shape (block, head, token, content), whatever the physical
order. What the content means is the backend's own: most keep K and V of a token side by side, the CPU
backend keeps the keys of a block transposed. So no shape is trusted: each way that is known is tried, and
one is taken only when rows that the backend itself wrote come back bit for bit.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hicache_store.errors import ConfigurationError

log = logging.getLogger("hicache_store")

_LAYER_NUMBER: Final = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_UNDERSTOOD: Final = ("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec")
"""Kinds of cache whose pages are K and V, or latents, of consecutive tokens."""
_PLAIN_MODES: Final = ("NONE", "FP8_PER_TENSOR")
"""Ways of quantising that leave one element a number, whatever stands beside it."""
_PROBE_VALUES: Final = 16
"""Whole numbers below this are exact in every KV dtype, eight bits included."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer that keeps KV: its name, its number in the model, the group whose block table it uses, and
    vLLM's own description of its cache."""

    name: str
    layer: int
    group: int
    spec: Any

    @property
    def is_latent(self) -> bool:
        """Whether a token has one latent row instead of K and V."""
        return type(self.spec).__name__ == "MLAAttentionSpec"

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of a token's K and V of one head, or of its latent."""
        if self.is_latent:
            return (int(self.spec.head_size),)
        return int(self.spec.head_size), int(self.spec.head_size_v)

    @property
    def heads(self) -> int:
        """KV heads of this rank."""
        return int(self.spec.num_kv_heads)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache. ``parts`` are views shaped (block, head, token, dim), one a kv part; a block here
    is what the backend's kernels use, ``split`` of them are one block of vLLM's block tables."""

    described: LayerSpec
    parts: tuple[Any, ...]
    split: int

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the views."""
        return int(self.parts[0].shape[2])


def layer_specs(kv_cache_config: Any, target_layers: int) -> tuple[LayerSpec, ...]:
    """The layers whose KV is stored, in the model's order; those of a draft model come after the target's
    and are left out.

    Raises :class:`ConfigurationError` for a kind of cache that cannot be stored: a prefix that lacks it
    could not be used.
    """
    found: list[LayerSpec] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            number = layer_number(name)
            if number < target_layers:
                _check_spec(name, spec)
                found.append(LayerSpec(name, number, index, spec))
    found.sort(key=lambda layer: layer.layer)
    shapes = {(layer.heads, layer.widths, str(layer.spec.dtype), layer.is_latent) for layer in found}
    if len(shapes) != 1:
        raise ConfigurationError(
            f"the layers of this model keep KV of {len(shapes)} shapes (heads, widths, dtype, latent): "
            f"{sorted(shapes)}; hicache_store stores models whose layers are alike: run this one without it"
        )
    numbers = [layer.layer for layer in found]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise ConfigurationError(
            f"layers {numbers} keep KV, others do not or share it; hicache_store stores models in which "
            "every layer has its own: run this one without it"
        )
    return tuple(found)


def layer_number(name: str) -> int:
    """The number of a layer in the model, from vLLM's name of it."""
    numbers = _LAYER_NUMBER.findall(name)
    if len(numbers) != 1:
        raise ConfigurationError(
            f"layer {name!r} does not tell its number in the model, so it cannot be stored; run this model "
            "without hicache_store"
        )
    return int(numbers[0])


def _check_spec(name: str, spec: Any) -> None:
    kind = type(spec).__name__
    if kind not in _UNDERSTOOD:
        raise ConfigurationError(
            f"layer {name} keeps its state as {kind}, which hicache_store does not store, and no prefix is "
            "usable without it; run this model without hicache_store"
        )
    if getattr(spec, "non_causal", False):
        raise ConfigurationError(
            f"layer {name} lets tokens of a prompt attend to later ones, so a prefix has no KV of its own; "
            "run this model without hicache_store"
        )
    is_plain = (
        spec.state_content_bytes is None
        and spec.tokens_per_state == 1
        and spec.page_size_padded is None
        and spec.num_head_slots is None
        and spec.kv_quant_mode.name in _PLAIN_MODES
    )
    if not is_plain or getattr(spec, "model_version", None) is not None:
        raise ConfigurationError(
            f"layer {name} packs its KV ({kind}, {spec.kv_quant_mode.name}) in a way that belongs to its "
            "backend; use kv_cache_dtype=auto or fp8, or run without hicache_store"
        )


def layer_caches(
    layers: Sequence[LayerSpec], modules: Mapping[str, Any], registered: Mapping[str, Any]
) -> tuple[LayerCache, ...]:
    """The views of each layer's cache.

    ``modules`` are vLLM's attention layers by name, ``registered`` the tensors that it registers. Raises
    :class:`ConfigurationError` naming the backend where no known way reads back what it wrote.
    """
    caches = []
    for described in layers:
        module, whole = modules[described.name], registered[described.name]
        cache = module.kv_cache if module.kv_cache.dim() == 4 else module.kv_cache.unsqueeze(1)
        expected = (described.heads, cache.shape[2], sum(described.widths))
        if tuple(cache.shape[1:]) != expected or cache.shape[0] % whole.shape[0]:
            raise ConfigurationError(
                f"layer {described.name}: the cache of backend {_backend(module)} has the shape "
                f"{tuple(cache.shape)}, where {expected} a block was expected; run without hicache_store"
            )
        name, parts = _proven(described, module, cache)
        caches.append(LayerCache(described, parts, cache.shape[0] // whole.shape[0]))
    log.info("hicache_store: %s keeps %s", _backend(modules[layers[0].name]), name)
    return tuple(caches)


def _backend(module: Any) -> str:
    return str(module.attn_backend.get_name())


def token_rows(cache: Any, widths: Sequence[int]) -> tuple[Any, ...]:
    """K and V of a token side by side: FlashAttention, Triton, FlashInfer, MLA."""
    return tuple(torch.split(cache, list(widths), dim=-1))


def block_halves(cache: Any, widths: Sequence[int]) -> tuple[Any, ...]:
    """All keys of a block and head, then all values."""
    return _halves(cache, widths, is_transposed=False)


def transposed_keys(cache: Any, widths: Sequence[int]) -> tuple[Any, ...]:
    """All keys of a block and head, dim before token, then all values: the CPU's vector kernels."""
    return _halves(cache, widths, is_transposed=True)


def _halves(cache: Any, widths: Sequence[int], *, is_transposed: bool) -> tuple[Any, ...]:
    blocks, heads, tokens, content = cache.shape
    if len(widths) != 2 or cache.stride(3) != 1 or cache.stride(2) != content:
        return ()
    outer, start = cache.stride()[:2], cache.storage_offset()
    key_strides = (1, tokens) if is_transposed else (widths[0], 1)
    keys = cache.as_strided((blocks, heads, tokens, widths[0]), (*outer, *key_strides), start)
    values = cache.as_strided(
        (blocks, heads, tokens, widths[1]), (*outer, widths[1], 1), start + tokens * widths[0]
    )
    return keys, values


WAYS: Final[Mapping[str, Callable[[Any, Sequence[int]], tuple[Any, ...]]]] = {
    "K and V of a token side by side": token_rows,
    "the keys of a block transposed, then its values": transposed_keys,
    "the keys of a block, then its values": block_halves,
}


def _proven(described: LayerSpec, module: Any, cache: Any) -> tuple[str, tuple[Any, ...]]:
    """The way in which ``module`` writes its cache, shown in the first and in the last block."""
    with torch.inference_mode(), _Probe(described, module, cache) as probe:
        for name, way in WAYS.items():
            parts = way(cache, described.widths)
            if parts and probe.comes_back(parts):
                return name, parts
    raise ConfigurationError(
        f"layer {described.name}: backend {_backend(module)} keeps K and V in a way that hicache_store does "
        "not know, so nothing of it can be shared; choose another attention backend, or run without it"
    )


class _Probe:
    """Rows that the backend itself writes into two blocks, which get their content back afterwards.

    Before any request runs no block holds anything; block 0 never does.
    """

    def __init__(self, described: LayerSpec, module: Any, cache: Any) -> None:
        self._blocks = sorted({0, cache.shape[0] - 1})
        self._cache = cache
        self._kept = cache[self._blocks].clone()
        tokens = cache.shape[2]
        count = tokens * len(self._blocks)
        generator = torch.Generator().manual_seed(described.layer)
        dtype = module.kv_cache.dtype if module.kv_cache.dtype.is_floating_point else torch.bfloat16
        compute = dtype if dtype.itemsize > 1 else torch.bfloat16

        def rows(width: int) -> Any:
            shape = (count, described.heads, width)
            drawn = torch.randint(0, _PROBE_VALUES, shape, generator=generator)
            return drawn.to(device=cache.device, dtype=compute)

        self._rows = [rows(width) for width in described.widths]
        slots = torch.cat([torch.arange(tokens) + block * tokens for block in self._blocks])
        self._slots = slots.to(cache.device)
        self._write(described, module)

    def _write(self, described: LayerSpec, module: Any) -> None:
        update = getattr(module.impl, "do_kv_cache_update", None)
        if update is None:
            raise ConfigurationError(
                f"layer {described.name}: backend {_backend(module)} writes its cache inside its kernels, so "
                "its layout cannot be proven; choose another attention backend, or run without hicache_store"
            )
        if not described.is_latent:
            update(module, *self._rows, module.kv_cache, self._slots)
            return
        rope = int(module.qk_rope_head_dim)
        latent, position = self._rows[0][:, 0, :-rope].contiguous(), self._rows[0][:, :, -rope:].contiguous()
        update(latent, position, module.kv_cache, self._slots, module.kv_cache_dtype, module._k_scale)

    def comes_back(self, parts: Sequence[Any]) -> bool:
        """Whether the views show, in both blocks, what was given to the backend."""
        for view, rows in zip(parts, self._rows, strict=True):
            found = view[self._blocks].transpose(1, 2).reshape(rows.shape)
            if not _is_image(found, rows):
                return False
        return True

    def __enter__(self) -> _Probe:
        return self

    def __exit__(self, *exc: object) -> None:
        self._cache[self._blocks] = self._kept


def _is_image(found: Any, rows: Any) -> bool:
    """Whether ``found`` holds ``rows``. Elements of eight bits are scaled by factors of the checkpoint's: of
    those, one value must lie everywhere as one byte, and not all values as the same."""
    if found.dtype.itemsize > 1:
        return bool(torch.equal(found, rows))
    bytes_of = found.view(torch.uint8)
    images = [set(bytes_of[rows == value].tolist()) for value in range(_PROBE_VALUES)]
    return all(len(image) <= 1 for image in images) and len(set().union(*images)) > 1
