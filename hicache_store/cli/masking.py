"""Store URLs as people and logs may see them."""

from __future__ import annotations

from hicache_store.config import is_secret, redacted

__all__ = ["is_secret", "masked"]


def masked(url: str) -> str:
    """``url`` without passwords and other secrets, those of nested URLs included."""
    return redacted(url)
