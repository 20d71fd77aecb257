from __future__ import annotations

import json
from pathlib import Path

import pytest
from fewer import FEWER
from hypothesis import assume, given
from hypothesis import strategies as st

from hicache_store.errors import NameFormatError
from hicache_store.layout.box import Box, Span
from hicache_store.layout.dtypes import DType
from hicache_store.layout.model import KVPart, Pool
from hicache_store.layout.names import (
    FORMAT,
    ObjectName,
    box_leaf,
    leaf_of,
    manifest_key,
    marker_key,
    page_prefix,
)
from hicache_store.limits import MARKER_SLOTS

GOLDEN = Path(__file__).parents[1] / "golden" / "names.json"
NS = "a1" * 32
PAGE = "b2" * 32
VALID = f"v1/{NS}/b2/{PAGE}/kv.H004-006.L030-060"

digests = st.text("0123456789abcdef", min_size=64, max_size=64)
pool_names = st.from_regex(r"[a-z][a-z0-9]{0,15}(_[a-z0-9]{1,6})?(_[0-9a-f]{8})?", fullmatch=True)


@st.composite
def filled_spans(draw: st.DrawFn) -> Span:
    start = draw(st.one_of(st.integers(0, 1200), st.integers(0, 10**8)))
    return Span(start, start + draw(st.integers(1, 10**6)))


names = st.builds(
    ObjectName,
    digests,
    digests,
    pool_names,
    filled_spans(),
    filled_spans(),
    st.none() | filled_spans(),
    st.just(1) | st.integers(2, 64),
    st.none() | st.text("0123456789abcdef", min_size=32, max_size=32),
)


@FEWER
@given(names)
def test_a_name_is_read_back_as_it_was(name: ObjectName) -> None:
    assert ObjectName.parse(str(name)) == name


@FEWER
@given(names)
def test_d02_every_part_of_a_key_stays_far_below_the_limits_of_file_systems_and_object_stores(
    name: ObjectName,
) -> None:
    """Names made of unbounded parts fail on every store once a model path or a salt is long."""
    text = str(name)
    parts = text.split("/")
    assert len(parts) == 5
    assert max(map(len, parts)) <= 200
    assert len(text) <= 1024
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz0123456789/_.-HLTPX")


MUTATION_ALPHABET = "0179afgHLTPX.-_/ \n\0\u00e9\u0663"


@given(names, st.data())
def test_any_text_that_parses_formats_to_itself(name: ObjectName, data: st.DataObject) -> None:
    text = str(name)
    at = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 3))
    changed = text[:at] + data.draw(st.text(MUTATION_ALPHABET, max_size=3)) + text[at + cut :]
    assume(changed != text)
    try:
        parsed = ObjectName.parse(changed)
    except NameFormatError:
        return
    assert str(parsed) == changed
    assert parsed != name


@given(st.text(max_size=300))
def test_arbitrary_text_is_refused_and_never_fails_otherwise(text: str) -> None:
    with pytest.raises(NameFormatError):
        ObjectName.parse(text)


@pytest.mark.parametrize("tail", ["", ".T000-064", ".P004", ".T016-032.P004", ".X" + "0f" * 16])
def test_the_room_in_the_grammar(tail: str) -> None:
    assert str(ObjectName.parse(VALID + tail)) == VALID + tail


@pytest.mark.parametrize(
    "text",
    [
        "",
        VALID.upper(),
        VALID + "\n",
        VALID + "/",
        "/" + VALID,
        "./" + VALID,
        VALID.replace("v1/", "v2/"),
        VALID.replace("v1/", "meta/v1/"),
        VALID.replace("/b2/", "/b3/"),
        VALID.replace("/b2/", "/../"),
        VALID.replace("/b2/", "//"),
        VALID.replace(PAGE, PAGE[:-1]),
        VALID.replace(PAGE, PAGE.upper()),
        VALID.replace(NS, "x" * 64),
        VALID.replace("H004", "H4"),
        VALID.replace("H004", "H0004"),
        VALID.replace("H004", "H006"),
        VALID.replace("H004", "H007"),
        VALID.replace("L030", "L060"),
        VALID.replace("L030", "L+30"),
        VALID.replace("L030", "L03_"),
        VALID.replace("L030", "L\u0660\u0663\u0660"),
        VALID.replace("-060", "-9999999999"),
        VALID.replace("kv.", "Kv."),
        VALID.replace("kv.", "."),
        VALID.replace("kv.", "../kv."),
        VALID.replace("kv.", "a" * 33 + "."),
        VALID + ".T000-000",
        VALID + ".T064-000",
        VALID + ".P000",
        VALID + ".P001",
        VALID + ".P004.T000-064",
        VALID + ".X" + "0F" * 16,
        VALID + ".X" + "0f" * 15,
        VALID + ".tmp",
    ],
)
def test_what_formatting_would_not_produce_is_refused(text: str) -> None:
    with pytest.raises(NameFormatError):
        ObjectName.parse(text)


NASTY = ["../../etc/x", "..", "/abs", "a\0b", "CON", "a/b", "x" * 300, "e\u0301", "%2e%2e", "a:b\nc", ""]


@pytest.mark.parametrize("text", NASTY)
def test_e06_what_users_type_is_no_part_of_a_name(text: str) -> None:
    """A pool's origin enters its name as a digest only; anything else in a name is refused."""
    for template in (
        f"{FORMAT}/{text}/b2/{PAGE}/kv.H000-001.L000-001",
        f"{FORMAT}/{NS}/b2/{text}/kv.H000-001.L000-001",
        f"{FORMAT}/{NS}/b2/{PAGE}/{text}.H000-001.L000-001",
        f"{FORMAT}/{NS}/b2/{PAGE}/kv.H000-001.L000-001.X{text}",
    ):
        with pytest.raises(NameFormatError):
            ObjectName.parse(template)
    pool = Pool("draft", 2, 2, (KVPart("k", 2),), DType.of("int8"), 16, identity=text)
    name = ObjectName(NS, PAGE, pool.key_name, Span(0, 2), Span(0, 2))
    assert ObjectName.parse(str(name)) == name
    assert not text or text not in str(name)


def test_long_identities_that_differ_in_their_last_letters_give_different_names() -> None:
    def leaf(identity: str) -> str:
        pool = Pool("draft", 2, 2, (KVPart("k", 2),), DType.of("int8"), 16, identity=identity)
        return leaf_of(pool.key_name, pool.page_box)

    assert leaf("m" * 400 + "a") != leaf("m" * 400 + "b")


def test_prefix_and_leaf_make_the_name() -> None:
    box = Box.of((4, 6), (30, 60), (0, 64))
    name = ObjectName(NS, PAGE, "kv", box.heads, box.layers)
    assert str(name) == page_prefix(NS, PAGE) + leaf_of("kv", box) == VALID
    assert name.leaf == box_leaf("kv", box.heads, box.layers)


def test_metadata_keys_are_no_object_names_and_bounded() -> None:
    keys = [manifest_key(NS), *(marker_key(NS, slot) for slot in range(MARKER_SLOTS))]
    assert len(set(keys)) == MARKER_SLOTS + 1
    for key in keys:
        assert key.startswith("meta/v1/")
        assert max(map(len, key.split("/"))) <= 200
        with pytest.raises(NameFormatError):
            ObjectName.parse(key)
    assert marker_key(NS, 3) == f"meta/v1/{NS}/grid-03"


def test_golden_names() -> None:
    for row in json.loads(GOLDEN.read_text()):
        name = ObjectName(
            row["namespace"],
            row["page_hash"],
            row["pool"],
            Span(*row["heads"]),
            Span(*row["layers"]),
            Span(*row["tokens"]) if row["tokens"] else None,
            row["pages"],
            row["shard"],
        )
        assert str(name) == row["text"]
        assert ObjectName.parse(row["text"]) == name
