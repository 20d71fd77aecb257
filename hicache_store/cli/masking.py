"""Store URLs as people and logs may see them."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, unquote, urlsplit, urlunsplit

_SECRET_WORDS: Final = ("password", "passwd", "secret", "token", "credential", "access_key")
_MASK: Final = "***"


def masked(url: str) -> str:
    """``url`` without passwords and other secrets, those of nested URLs included."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(not a URL)"
    place = parts.netloc
    if "@" in place:
        user, _, host = place.rpartition("@")
        name, has_password, _ = user.partition(":")
        place = f"{name}:{_MASK}@{host}" if has_password else place
    query = "&".join(_masked_option(pair) for pair in parts.query.split("&")) if parts.query else ""
    shown = urlunsplit(("", place, parts.path, query, parts.fragment))
    slashes = "//" if url.startswith(f"{parts.scheme}:///") and not shown.startswith("///") else ""
    return f"{parts.scheme}:{slashes}{shown}"


def is_secret(name: str) -> bool:
    """Whether an option of this name holds what nobody should see; the name of a variable is none."""
    return any(word in name.lower() for word in _SECRET_WORDS) and not name.lower().endswith("_env")


def _masked_option(pair: str) -> str:
    name, equals, value = pair.partition("=")
    if is_secret(name):
        return f"{name}{equals}{_MASK}"
    if "%3a" in value.lower() or ":" in value:
        return f"{name}{equals}{quote(masked(unquote(value)), safe='/:@?=*')}"
    return pair
