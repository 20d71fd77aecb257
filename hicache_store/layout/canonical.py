"""One byte string for one value: the canonical JSON of RFC 8785.

Sorted keys, UTF-8 without any Unicode normalisation, no spaces, and every number as the shortest
decimal of its float64, so that ``1e5``, ``100000`` and ``100000.0`` are one value, while ``true``
and ``1``, or the composed and decomposed forms of a letter, stay apart.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

import numpy as np

from hicache_store.errors import IdentityError
from hicache_store.limits import CANONICAL_DEPTH_MAX

_POINT_MAX: Final = 21
"""Magnitudes below 10**21 are written without an exponent (the ECMAScript rule RFC 8785 takes)."""
_POINT_MIN: Final = -6
"""Magnitudes of 10**-6 and more are written without an exponent."""


def canonical_json(value: object, where: str = "value") -> bytes:
    """The canonical encoding of ``value``; ``where`` is what refusals call it.

    Accepts ``None``, booleans, integers, floats, strings, lists, tuples and string-keyed mappings,
    numpy scalars included. Raises :class:`IdentityError` naming the place of anything else: NaN and
    infinities, an integer that float64 cannot hold exactly (beyond 2**53 most cannot; give such a
    one as a string), lone surrogates, other types, deeper nesting than ``CANONICAL_DEPTH_MAX``.
    """
    return _encode(value, where, CANONICAL_DEPTH_MAX).encode()


def _encode(value: object, where: str, depth: int) -> str:
    if value is None:
        return "null"
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value, where)
    if isinstance(value, numbers.Integral):
        return _integer(int(value), where)
    if isinstance(value, (float, np.floating)):
        return _float(float(value), where)
    if depth == 0:
        raise IdentityError(f"{where} is nested deeper than {CANONICAL_DEPTH_MAX} levels; flatten it")
    if isinstance(value, Mapping):
        return _mapping(value, where, depth - 1)
    if isinstance(value, (list, tuple)):
        items = (_encode(item, f"{where}[{index}]", depth - 1) for index, item in enumerate(value))
        return "[" + ",".join(items) + "]"
    raise IdentityError(
        f"{where} is a {type(value).__name__}, which has no canonical form; "
        "give a number, a string, a list or a mapping"
    )


def _mapping(value: Mapping[object, object], where: str, depth: int) -> str:
    texts: dict[str, str] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise IdentityError(f"{where} has the key {key!r} of type {type(key).__name__}; use strings")
        texts[key] = _string(key, where) + ":" + _encode(item, f"{where}.{key}", depth)
    ordered = sorted(texts, key=lambda key: key.encode("utf-16-be"))
    return "{" + ",".join(texts[key] for key in ordered) + "}"


def _string(value: str, where: str) -> str:
    require_text(value, where)
    return json.dumps(str.__str__(value), ensure_ascii=False)


def require_text(value: str, where: str) -> bytes:
    """The UTF-8 of ``value``; raises :class:`IdentityError` when it has none (lone surrogates)."""
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise IdentityError(f"{where}: {value!r} is not valid Unicode; it holds a lone surrogate") from None


def _integer(value: int, where: str) -> str:
    try:
        as_float = float(value)
    except OverflowError:
        as_float = math.inf
    if math.isinf(as_float) or int(as_float) != value:
        raise IdentityError(
            f"{where} is {value}, which float64 cannot hold exactly, so its neighbours would be the "
            "same number; give it as a string"
        )
    return _float(as_float, where)


def _float(value: float, where: str) -> str:
    if not math.isfinite(value):
        raise IdentityError(f"{where} is {value}; only finite numbers can be part of an identity")
    if value == 0:
        return "0"
    # repr() is the shortest decimal that reads back as the same float64; only its spelling differs.
    sign, raw_digits, exponent = Decimal(repr(value)).as_tuple()
    digits = "".join(map(str, raw_digits))
    point = len(digits) + int(exponent)
    digits = digits.rstrip("0")
    return ("-" if sign else "") + _place_point(digits, point)


def _place_point(digits: str, point: int) -> str:
    if len(digits) <= point <= _POINT_MAX:
        return digits + "0" * (point - len(digits))
    if 0 < point <= _POINT_MAX:
        return f"{digits[:point]}.{digits[point:]}"
    if _POINT_MIN < point <= 0:
        return "0." + "0" * -point + digits
    fraction = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{digits[0]}{fraction}e{point - 1:+d}"
