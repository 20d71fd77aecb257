"""The keys of ``kv_connector_extra_config`` that only the vLLM adapter has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hicache_store.config import parse_size
from hicache_store.engines.options import (
    EngineOptions,
    OptionKey,
    as_count,
    as_flag,
    read_with_more,
)
from hicache_store.errors import ConfigurationError
from hicache_store.limits import ENGINE_STAGING_BYTES

PAGE_SIZE: Final = 64
"""Default tokens of a page. Engines that share a store must agree on it; vLLM's blocks may differ."""

MIN_HIT_TOKENS: Final = 128
"""Default of the shortest hit that is loaded, see docs/vllm.md for how it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """``shared`` are the options of every engine. ``page_size`` counts tokens, as does ``min_hit_tokens``,
    below which a hit beyond vLLM's own cache is computed instead of loaded. ``store_decode`` also stores
    pages of generated tokens. ``staging_bytes`` is host memory of one rank."""

    shared: EngineOptions
    page_size: int = PAGE_SIZE
    min_hit_tokens: int = MIN_HIT_TOKENS
    store_decode: bool = False
    staging_bytes: int = ENGINE_STAGING_BYTES


def _tokens(value: object) -> object:
    return 0 if value == 0 and not isinstance(value, bool) else as_count(value)


def _size(value: object) -> object:
    try:
        return parse_size(value) if isinstance(value, str) else None
    except (ConfigurationError, ValueError):
        return None


_KEYS: Final[Mapping[str, OptionKey]] = {
    "page_size": (as_count, "tokens of a stored page, a whole number of at least 1"),
    "min_hit_tokens": (_tokens, "a whole number of tokens, 0 to load every hit"),
    "store_decode": (as_flag, "true or false"),
    "staging_bytes": (_size, 'host memory of a rank with its unit, such as "512MiB"'),
}
OPTION_KEYS: Final = tuple(_KEYS)


def read_vllm_options(given: Mapping[str, object]) -> VllmOptions:
    """The options of ``kv_connector_extra_config``. Raises :class:`ConfigurationError` naming the key."""
    shared, own = read_with_more(given, _KEYS)
    return VllmOptions(shared=shared, **own)  # type: ignore[arg-type]
