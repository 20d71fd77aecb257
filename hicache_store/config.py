"""Store URLs and their options, validated in one place.

``scheme:path?option=value``; each connector declares its options as :class:`Option` rows and gets
back typed values. Every refusal names the option, the value and what is accepted; an unknown name
gets the closest known one.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from hicache_store.errors import ConfigurationError

T = TypeVar("T")

_SIZE_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip
_TIME_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _split_unit(text: str) -> tuple[float, str]:
    text = text.strip().lower()
    digits = len(text.rstrip("abcdefghijklmnopqrstuvwxyz "))
    value = float(text[:digits])
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value, text[digits:].strip()


def parse_size(text: str) -> int:
    """Bytes of ``"64MiB"``, ``"10GB"`` or ``"4096"``; ``ValueError`` otherwise."""
    value, unit = _split_unit(text)
    if unit not in _SIZE_UNITS:
        raise ValueError(text)
    return int(value * _SIZE_UNITS[unit])


def parse_duration(text: str) -> float:
    """Seconds of ``"30"``, ``"500ms"``, ``"12h"`` or ``"7d"``; ``ValueError`` otherwise."""
    value, unit = _split_unit(text)
    if unit not in _TIME_UNITS:
        raise ValueError(text)
    seconds = value * _TIME_UNITS[unit]
    if not math.isfinite(seconds):
        raise ValueError(text)
    return seconds


def parse_bool(text: str) -> bool:
    """``1/true/yes/on`` or ``0/false/no/off``; ``ValueError`` otherwise."""
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a connector: how its text is read and what is accepted, in words."""

    name: str
    parse: Callable[[str], object]
    accepts: str
    default: object = None
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()


def size_option(name: str, default: int | None = None, minimum: int = 0) -> Option:
    """An option in bytes."""
    return Option(name, parse_size, f"a size such as 512MiB, at least {minimum}", default, minimum)


def duration_option(name: str, default: float | None = None, minimum: float = 0.0) -> Option:
    """An option in seconds."""
    accepts = f"a time such as 500ms or 12h, at least {minimum:g} s"
    return Option(name, parse_duration, accepts, default, minimum)


def int_option(name: str, default: int | None, minimum: int, maximum: int) -> Option:
    """A whole number within bounds."""
    return Option(name, int, f"a whole number from {minimum} to {maximum}", default, minimum, maximum)


def bool_option(name: str, default: bool) -> Option:
    """A yes or no."""
    return Option(name, parse_bool, "1 or 0", default)


def choice_option(name: str, default: str, choices: tuple[str, ...]) -> Option:
    """One of a few words."""
    return Option(name, str, "one of " + ", ".join(choices), default, choices=choices)


_LOGIN = re.compile(r"//([^:@/?#]*):.*@", re.DOTALL)


def redacted(url: str) -> str:
    """``url`` for people and logs: a password in it is replaced by ``***``."""
    return _LOGIN.sub(r"//\1:***@", url)


@dataclass(frozen=True, slots=True, repr=False)
class StoreUrl:
    """A parsed store URL. ``location`` is everything between the scheme and the query; it may hold a
    password, which shows in no text of this object."""

    scheme: str
    location: str
    query: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        location = redacted(f"//{self.location}")[2:]
        return f"StoreUrl(scheme={self.scheme!r}, location={location!r}, query={self.query!r})"

    def options(self, known: Sequence[Option]) -> OptionValues:
        """The typed values of this URL's query; raises on any that is not right."""
        return read_options(self.scheme, self.query, known)


def parse_url(url: str) -> StoreUrl:
    """Split ``scheme://location?query``; raises :class:`ConfigurationError` when it is not one."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigurationError(f"{redacted(url)!r} is not a store URL: {error}") from None
    if parts.fragment or url.endswith("#"):
        raise ConfigurationError(
            f"{redacted(url)!r} holds a '#', which would hide what follows; write it as %23"
        )
    if not parts.scheme:
        raise ConfigurationError(
            f"{redacted(url)!r} is not a store URL: it has no scheme; "
            "write file:///absolute/path, memory://name or another scheme"
        )
    location = unquote(parts.netloc + parts.path)
    try:
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:  # its text may be a part of a password
        message = f"{redacted(url)!r}: the options are not name=value pairs joined by &"
        raise ConfigurationError(message) from None
    return StoreUrl(parts.scheme.lower(), location, tuple(query))


class OptionValues:
    """Typed option values by name."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = dict(values)

    def get(self, name: str, kind: type[T]) -> T:
        """The value of an option that has one."""
        value = self._values[name]
        if not isinstance(value, kind):
            raise ConfigurationError(f"option {name} has no value of type {kind.__name__}")
        return value

    def optional(self, name: str, kind: type[T]) -> T | None:
        """The value, or ``None`` when it was not given and has no default."""
        return None if self._values[name] is None else self.get(name, kind)


def read_options(where: str, given: Sequence[tuple[str, str]], known: Sequence[Option]) -> OptionValues:
    """Type and bound-check ``given`` against ``known``; raises :class:`ConfigurationError`."""
    by_name = {option.name: option for option in known}
    values: dict[str, object] = {option.name: option.default for option in known}
    seen: set[str] = set()
    for name, text in given:
        if name not in by_name:
            close = difflib.get_close_matches(name, by_name, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(by_name))}"
            raise ConfigurationError(f"{where}: unknown option {name!r}{hint}")
        if name in seen:
            raise ConfigurationError(f"{where}: option {name} is given twice")
        seen.add(name)
        values[name] = _read_one(where, by_name[name], text)
    return OptionValues(values)


def _read_one(where: str, option: Option, text: str) -> object:
    message = f"{where}: option {option.name}={text!r} is not accepted; give {option.accepts}"
    refusal = ConfigurationError(message)
    try:
        value = option.parse(text)
    except (ValueError, OverflowError):
        raise refusal from None
    if option.choices and value not in option.choices:
        raise refusal
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if option.minimum is not None and value < option.minimum:
            raise refusal
        if option.maximum is not None and value > option.maximum:
            raise refusal
    return value
