"""The JSON keys: what is accepted, what is refused, and that an engine's own keys pass."""

from __future__ import annotations

import pytest

from hicache_store.engines.options import OPTION_KEYS, EngineOptions, read_options
from hicache_store.errors import ConfigurationError, IdentityError

URL = {"url": "memory://options"}


def test_defaults_ask_for_a_url_only() -> None:
    assert read_options(URL) == EngineOptions(url="memory://options")
    assert read_options({**URL, "weights": None, "own": 1}, {"own"}) == EngineOptions(url="memory://options")


def test_every_key_is_read() -> None:
    given = {
        "url": "memory://x", "tenant": "t", "weights": "w", "draft_weights": "d", "dtype": "bf16",
        "total_kv_heads": 8, "num_layers": 61, "config": "/models/m", "timeout_s": 3, "lookup_timeout_s": 0.5,
        "verify": False, "allow_untested": True,
    }  # fmt: skip
    assert set(given) == set(OPTION_KEYS)
    options = read_options(given)
    assert {key: getattr(options, key) for key in given} == given


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, '"url"'),
        ({**URL, "tennant": "a"}, "did you mean 'tenant'"),
        ({**URL, "zzz": 1}, "known: url"),
        ({**URL, "tenant": 3}, "tenant=3"),
        ({**URL, "total_kv_heads": "8"}, "total_kv_heads='8'"),
        ({**URL, "total_kv_heads": True}, "total_kv_heads=True"),
        ({**URL, "num_layers": 0}, "num_layers=0"),
        ({**URL, "timeout_s": 0}, "timeout_s=0"),
        ({**URL, "timeout_s": float("inf")}, "timeout_s=inf"),
        ({**URL, "lookup_timeout_s": True}, "lookup_timeout_s=True"),
        ({**URL, "verify": 1}, "verify=1"),
        ({"url": "no-scheme"}, "no scheme"),
    ],
)
def test_what_is_not_right_is_refused_by_name(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        read_options(given)


def test_a_refused_url_shows_no_password() -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_options({"url": "memory://x", "config": 5, "weights": ""})
    assert "config=5" in str(refused.value)
    with pytest.raises(ConfigurationError) as refused:
        read_options({"url": "redis://user:secret@host#"})
    assert "secret" not in str(refused.value)


def test_ambiguous_dtypes_are_refused() -> None:
    with pytest.raises(IdentityError, match="four formats"):
        read_options({**URL, "dtype": "fp8"})
