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
from typing import Final, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from hicache_store.errors import ConfigurationError
from hicache_store.limits import TIMEOUT_MAX_S

T = TypeVar("T")

_SIZE_UNITS = {
    "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip
_SHOWN_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIME_UNITS = {"s": 1.0, "ms": 1e-3, "m": 60.0, "h": 3600.0, "d": 86400.0}


_ROUND_NUMBER = 1_000
"""From here up a number alone was hardly meant in the largest unit."""


class MissingUnitError(ValueError):
    """A number alone, which may mean anything: read as bytes or seconds it would let a store be emptied.
    The text says how to write it."""


def _missing_unit(text: str, value: float, large: str, small: str, meaning: str) -> MissingUnitError:
    number = text.strip()
    guess = f"{number}{large}, or " if value < _ROUND_NUMBER else ""
    return MissingUnitError(f"give a unit, {guess}{number}{small} if you mean {meaning}")


def _split_unit(text: str) -> tuple[float, str]:
    text = text.strip().lower()
    digits = len(text.rstrip("abcdefghijklmnopqrstuvwxyz "))
    value = float(text[:digits])
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value, text[digits:].strip()


def parse_size(text: str) -> int:
    """Bytes of ``"64MiB"``, ``"10GB"``, ``"4096B"`` or ``"0"``; ``ValueError`` otherwise, and
    :class:`MissingUnitError` for any other number alone."""
    value, unit = _split_unit(text)
    if not unit:
        if value:
            raise _missing_unit(text, value, "GiB", "B", "bytes")
        return 0
    if unit not in _SIZE_UNITS:
        raise ValueError(text)
    return int(value * _SIZE_UNITS[unit])


def parse_duration(text: str) -> float:
    """Seconds of ``"30s"``, ``"500ms"``, ``"12h"``, ``"7d"`` or ``"0"``; ``ValueError`` otherwise, and
    :class:`MissingUnitError` for any other number alone."""
    value, unit = _split_unit(text)
    if not unit:
        if value:
            raise _missing_unit(text, value, "d", "s", "seconds")
        return 0.0
    if unit not in _TIME_UNITS:
        raise ValueError(text)
    seconds = value * _TIME_UNITS[unit]
    if not math.isfinite(seconds):
        raise ValueError(text)
    return seconds


def size_text(n_bytes: int) -> str:
    """``1.88 MiB``; exact below 1 KiB."""
    value, unit = float(n_bytes), 0
    while value >= 1024 and unit < len(_SHOWN_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{n_bytes} B" if unit == 0 else f"{value:.2f} {_SHOWN_UNITS[unit]}"


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
    """An option in seconds, at most TIMEOUT_MAX_S: more is a slip, and clocks and waits cannot add it."""
    accepts = f"a time such as 500ms or 12h, at least {minimum:g} s and at most {TIMEOUT_MAX_S / 86_400:g}d"
    return Option(name, parse_duration, accepts, default, minimum, TIMEOUT_MAX_S)


def int_option(name: str, default: int | None, minimum: int, maximum: int) -> Option:
    """A whole number within bounds."""
    return Option(name, int, f"a whole number from {minimum} to {maximum}", default, minimum, maximum)


def bool_option(name: str, default: bool) -> Option:
    """A yes or no."""
    return Option(name, parse_bool, "1 or 0", default)


def choice_option(name: str, default: str, choices: tuple[str, ...]) -> Option:
    """One of a few words."""
    return Option(name, str, "one of " + ", ".join(choices), default, choices=choices)


_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_SECRET_WORDS: Final = ("password", "passwd", "secret", "token", "credential", "access_key")
_MASK: Final = "***"
_PATHS: Final = frozenset({"file", "memory", "unix"})
"""Schemes after which an absolute path stands; an ``@`` in it ends no login."""


def is_secret(name: str) -> bool:
    """Whether an option of this name holds what nobody should see; the name of a variable is none."""
    return any(word in name.lower() for word in _SECRET_WORDS) and not name.lower().endswith("_env")


def redacted(url: str) -> str:
    """``url`` for people and logs: ``***`` stands for passwords, for users without one, which may be tokens,
    and for options that are secret, also in URLs within its options.

    A login ends at the last ``@``, percent-encoded or not, and may hold any character. Where it cannot be
    told what is what, more is replaced rather than less.
    """
    text = re.sub(r"[\t\r\n]", "", url).lstrip()
    scheme, colon, rest = text.partition(":")
    if not colon or _SCHEME.fullmatch(scheme) is None:
        path, mark, query = text.partition("?")
        return _MASK if "@" in unquote(text) else f"{path}{mark}{_redacted_query(query)}"
    place, mark, query = rest.partition("?")
    if "@" in query and ":" in place and "@" not in unquote(place):  # a password with a raw '?'
        return f"{scheme}:{_MASK}"
    return f"{scheme}:{_redacted_place(scheme.lower(), place)}{mark}{_redacted_query(query)}"


def _redacted_place(scheme: str, place: str) -> str:
    slashes = "//" if place.startswith("//") else ""
    login, at, host = unquote(place[len(slashes) :]).rpartition("@")
    if not at or (scheme in _PATHS and login.startswith("/")):
        return place
    user, colon, _ = login.partition(":")
    shown = f"{quote(user, safe='')}:{_MASK}" if colon else _MASK
    return f"{slashes}{shown}@{quote(host, safe='/:,[]#')}"


def _redacted_query(query: str) -> str:
    return "&".join(map(_redacted_option, query.split("&")))


def _redacted_option(pair: str) -> str:
    name, equals, value = pair.partition("=")
    if "@" in unquote(name):
        return _MASK
    if is_secret(unquote(name)):
        return f"{name}{equals}{_MASK}"
    plain = unquote(value)
    has_place = ":" in plain or "@" in plain
    return f"{name}{equals}{quote(redacted(plain), safe='/:@?=*')}" if has_place else pair


@dataclass(frozen=True, slots=True, repr=False)
class StoreUrl:
    """A parsed store URL. ``location`` is everything between the scheme and the query; it and the values
    of options may hold passwords, so that neither shows in a text of this object."""

    scheme: str
    location: str
    query: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        return f"StoreUrl(scheme={self.scheme!r}, options={[redacted(name) for name, _ in self.query]!r})"

    def options(self, known: Sequence[Option]) -> OptionValues:
        """The typed values of this URL's query; raises on any that is not right."""
        return read_options(self.scheme, self.query, known)


def parse_url(url: str) -> StoreUrl:
    """Split ``scheme://location?query``; raises :class:`ConfigurationError` when it is not one."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        why = "" if "@" in unquote(url) else f": {error}"  # whose text may hold a login
        raise ConfigurationError(f"{redacted(url)!r} is not a store URL{why}") from None
    if parts.fragment or url.endswith("#"):
        raise ConfigurationError(
            f"the {parts.scheme or 'store'} URL holds a '#', which would hide what follows; write it as %23"
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
            raise ConfigurationError(f"{where}: unknown option {redacted(name)!r}{hint}")
        if name in seen:
            raise ConfigurationError(f"{where}: option {name} is given twice")
        seen.add(name)
        values[name] = _read_one(where, by_name[name], text)
    return OptionValues(values)


def _read_one(where: str, option: Option, text: str) -> object:
    message = f"{where}: option {option.name}={redacted(text)!r} is not accepted"
    refusal = ConfigurationError(f"{message}; give {option.accepts}")
    try:
        value = option.parse(text)
    except MissingUnitError as missing:
        raise ConfigurationError(f"{message}; {missing}") from None
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
