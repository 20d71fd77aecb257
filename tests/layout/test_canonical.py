from __future__ import annotations

import enum
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_store.errors import IdentityError
from hicache_store.layout.canonical import canonical_json
from hicache_store.limits import CANONICAL_DEPTH_MAX

unhurried = settings(deadline=None)


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("0000000000000001", "5e-324"),
        ("8000000000000001", "-5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("44b52d02c7e14af6", "1e+23"),
        ("44b52d02c7e14af7", "1.0000000000000001e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555556", "333333333.3333334"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
        ("43143ff3c1cb0959", "1424953923781206.2"),
    ],
)
def test_numbers_of_the_standard(bits: str, text: str) -> None:
    """The samples that RFC 8785 lists."""
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical_json(value).decode() == text


@pytest.mark.parametrize(
    "spelled",
    [100000, 100000.0, np.int32(100000), np.float32(1e5), np.uint64(100000), np.float64(1e5)],
)
def test_one_number_has_one_spelling(spelled: Any) -> None:
    assert canonical_json(spelled) == b"100000"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (np.bool_(False), "false"),
        (1, "1"),
        (-7, "-7"),
        (1e-6, "0.000001"),
        (1.5e-7, "1.5e-7"),
        (2**53 + 2, "9007199254740994"),
        (2**60, "1152921504606847000"),
        ([], "[]"),
        ((1, [2.5, "x"]), '[1,[2.5,"x"]]'),
        ({"b": 1, "a": {"d": None, "c": False}}, '{"a":{"c":false,"d":null},"b":1}'),
        ('"\\\x00\n\x1f\x7f/\u00e9\u2028', '"\\"\\\\\\u0000\\n\\u001f\x7f/\u00e9\u2028"'),
        (enum.StrEnum("Kind", {"A": "a"})("a"), '"a"'),
    ],
)
def test_forms(value: object, text: str) -> None:
    assert canonical_json(value).decode() == text


def test_keys_are_sorted_by_utf16_units() -> None:
    """Where code points and UTF-16 units disagree, the standard takes the units."""
    assert (
        canonical_json({"\ue000": 1, "\U00010000": 2, "a": 3}) == '{"a":3,"\U00010000":2,"\ue000":1}'.encode()
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_numbers_that_equal_nothing_are_refused(value: float) -> None:
    with pytest.raises(IdentityError, match=r"value\.x\[0\] is -?(nan|inf)"):
        canonical_json({"x": [value]})


@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, 2**64 - 1, 10**400])
def test_integers_that_a_float_would_round_are_refused(value: int) -> None:
    with pytest.raises(IdentityError, match="give it as a string"):
        canonical_json(value)


@pytest.mark.parametrize("value", [b"a", {1, 2}, object(), 1j, {1: 2}, {"a": np.zeros(2)}])
def test_values_without_a_canonical_form_are_refused(value: object) -> None:
    with pytest.raises(IdentityError, match="value"):
        canonical_json(value)


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, ["a\udc80b"]])
def test_text_without_utf8_is_refused(value: object) -> None:
    with pytest.raises(IdentityError, match="lone surrogate"):
        canonical_json(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    knot: list[object] = []
    knot.append(knot)
    with pytest.raises(IdentityError, match=f"deeper than {CANONICAL_DEPTH_MAX}"):
        canonical_json({"knot": knot})


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@unhurried
@given(values)
def test_a_reader_of_json_gets_the_value_back(value: object) -> None:
    """Reading numbers as float64, as the standard does: large ones are written rounded."""
    assert json.loads(canonical_json(value), parse_int=float) == value


def _typed(value: object) -> object:
    """The value with booleans and numbers told apart, which ``==`` does not."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return (isinstance(value, bool), value)


@unhurried
@given(values, values)
def test_encodings_are_equal_only_for_equal_values(first: object, second: object) -> None:
    assert (canonical_json(first) == canonical_json(second)) == (_typed(first) == _typed(second))
