"""The keys of the JSON that an operator gives an engine for this store, the same for every engine."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from hicache_store.config import parse_url, redacted
from hicache_store.errors import ConfigurationError
from hicache_store.layout.dtypes import DType
from hicache_store.limits import ENGINE_LOOKUP_S, ENGINE_TRANSFER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an operator decides, and what the running model may not tell.

    ``url`` names the store. ``tenant`` keeps users apart who must not share. ``weights`` says which
    weights run (see :func:`hicache_store.engines.identity.weights_of`), ``draft_weights`` the same of a
    draft model. ``dtype``, ``total_kv_heads``, ``num_layers`` and ``config`` (a ``config.json`` or its
    directory) are needed only where the engine does not tell. ``timeout_s`` bounds one transfer of a
    batch, ``lookup_timeout_s`` one look-up.
    """

    url: str
    tenant: str = "default"
    weights: str | None = None
    draft_weights: str | None = None
    dtype: str | None = None
    total_kv_heads: int | None = None
    num_layers: int | None = None
    config: str | None = None
    timeout_s: float = ENGINE_TRANSFER_S
    lookup_timeout_s: float = ENGINE_LOOKUP_S
    verify: bool = True
    allow_untested: bool = False

    def __post_init__(self) -> None:
        parse_url(self.url)
        if self.dtype is not None:
            DType.of(self.dtype)


OptionKey = tuple[Callable[[object], object], str]
"""How a value is read (``None`` where it is not accepted), and what to give instead."""


def as_text(value: object) -> object:
    """A string that says something."""
    return value if isinstance(value, str) and value else None


def as_count(value: object) -> object:
    """A whole number of at least 1."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def as_seconds(value: object) -> object:
    """A finite time above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 < value < math.inf else None


def as_flag(value: object) -> object:
    """True or false."""
    return value if isinstance(value, bool) else None


_KEYS: Final[Mapping[str, OptionKey]] = {
    "url": (as_text, "the URL of a store, such as file:///srv/kv?quota=200GiB or s3://bucket/kv"),
    "tenant": (as_text, "a string; tenants share nothing"),
    "weights": (as_text, "a string that changes with the weights, 'full', or hub:org/model@40-hex-commit"),
    "draft_weights": (as_text, "a string that changes with the draft model's weights"),
    "dtype": (as_text, "the KV cache's own dtype, such as bfloat16 or float8_e4m3fn"),
    "total_kv_heads": (as_count, "the KV heads of the whole model, a whole number of at least 1"),
    "num_layers": (as_count, "the layers of the whole model without drafts, a whole number of at least 1"),
    "config": (as_text, "the path of the model's config.json or of its directory"),
    "timeout_s": (as_seconds, "a number of seconds above 0"),
    "lookup_timeout_s": (as_seconds, "a number of seconds above 0"),
    "verify": (as_flag, "true or false"),
    "allow_untested": (as_flag, "true or false"),
}
OPTION_KEYS: Final = tuple(_KEYS)
"""Every key there is, in the order of the documentation."""


def read_options(given: Mapping[str, object], engine_keys: Collection[str] = ()) -> EngineOptions:
    """The options of a JSON object; ``engine_keys`` are the engine's own and are left alone.

    Raises :class:`ConfigurationError` for an unknown key, because a misspelt tenant or weights tag
    would share what must not be shared, and for a value of the wrong kind.
    """
    return read_with_more(given, {}, engine_keys)[0]


def read_with_more(
    given: Mapping[str, object], more: Mapping[str, OptionKey], engine_keys: Collection[str] = ()
) -> tuple[EngineOptions, dict[str, object]]:
    """:func:`read_options` of an adapter that has keys of its own, and the values given for those."""
    known = {**_KEYS, **more}
    values: dict[str, object] = {}
    for key, value in given.items():
        if key in engine_keys:
            continue
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ConfigurationError(f"unknown key {key!r} in the configuration of hicache_store; {hint}")
        if value is None:
            continue
        read, accepts = known[key]
        values[key] = read(value)
        if values[key] is None:
            shown = redacted(value) if isinstance(value, str) else value
            raise ConfigurationError(f"{key}={shown!r} is not accepted; give {accepts}")
    if "url" not in values:
        raise ConfigurationError(
            'the configuration of hicache_store names no store; add "url": "file:///srv/kv?quota=200GiB" '
            "or another store's URL"
        )
    shared = {key: value for key, value in values.items() if key in _KEYS}
    own = {key: value for key, value in values.items() if key in more}
    return EngineOptions(**shared), own  # type: ignore[arg-type]
