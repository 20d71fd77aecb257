"""The page-hash chain against a reference that handles one token at a time, and frozen vectors.

Run as a script, this file adds cases that ``tests/golden`` lacks; it never changes one.
"""

from __future__ import annotations

import array
import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_store.errors import ConfigurationError, IdentityError
from hicache_store.layout.hashing import (
    ChainKind,
    LoraIdentity,
    MultimodalInput,
    RequestIdentity,
    chain_seed,
    page_hashes,
)

GOLDEN = Path(__file__).parent.parent / "golden"
CHAIN_FILE = GOLDEN / "hashing_chain.json"
SEED_FILE = GOLDEN / "hashing_seed.json"

unhurried = settings(deadline=None)
thorough = settings(deadline=None, max_examples=300)

NFC = "\u00e9"
NFD = "e\u0301"


# --- the reference -----------------------------------------------------------------------------


def reference_seed(extra_key: str | None, cache_salt: str | None) -> bytes | None:
    if extra_key is None and cache_salt is None:
        return None
    message = b"sglang-cache-namespace-v1"
    for part in (extra_key, cache_salt):
        if part is None:
            message += struct.pack("<B", 0)
        else:
            text = part.encode("utf-8")
            message += struct.pack("<BQ", 1, len(text)) + text
    return hashlib.sha256(message).digest()


def reference_chain(
    tokens: Sequence[int], page_size: int, start: bytes | None, kind: str, tail: bool
) -> list[str]:
    if kind == "bigram":
        positions = [(tokens[i], tokens[i + 1]) for i in range(len(tokens) - 1)]
    else:
        positions = [(token,) for token in tokens]
    hashes = []
    digest = start
    for begin in range(0, len(positions), page_size):
        page = positions[begin : begin + page_size]
        if len(page) < page_size and not tail:
            break
        words = [word for position in page for word in position]
        if any(word > 0xFFFFFFFF for word in words):
            body = b"\xff" + b"".join(struct.pack("<Q", word) for word in words)
        else:
            body = b"".join(struct.pack("<I", word) for word in words)
        digest = hashlib.sha256((digest or b"") + body).digest()
        hashes.append(digest.hex())
    return hashes


# --- the frozen vectors ------------------------------------------------------------------------


def _case(name: str, tokens: Sequence[int], page_size: int, **more: Any) -> dict[str, Any]:
    case = {
        "name": name,
        "tokens": list(tokens),
        "page_size": page_size,
        "kind": "plain",
        "includes_short_tail": False,
        "extra_key": None,
        "cache_salt": None,
        "prior": None,
    }
    return case | more


def chain_cases() -> list[dict[str, Any]]:
    count = list(range(1, 49))
    mixed = [7, 2**32 - 1, 2**31, 0, 65_537, 2**32, 5, 6, 7, 8, 9, 10]
    prior = hashlib.sha256(b"a page before").hexdigest()
    return [
        _case("empty", [], 4),
        _case("shorter than a page", [1, 2, 3], 4),
        _case("tail of a short chain", [1, 2, 3, 4, 5, 6, 7], 16, includes_short_tail=True),
        _case("three pages", count, 16),
        _case("page of one", [0, 151_643, 0], 1),
        _case("last page short, left out", count[:45], 16),
        _case("last page short, asked for", count[:45], 16, includes_short_tail=True),
        _case("u32 edges", [65_537, 2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1], 5),
        _case("salted", count, 16, cache_salt="tenant-7"),
        _case("adapter", count, 16, extra_key="lora-a"),
        _case("adapter and salt", count, 16, extra_key="lora-a", cache_salt="tenant-7"),
        _case("empty salt", count, 16, cache_salt=""),
        _case("continued", count, 16, prior=prior),
        _case("bigram", count, 16, kind="bigram"),
        _case("bigram, one more token fills the third page", [*count, 49], 16, kind="bigram"),
        _case("bigram of one token", [9], 1, kind="bigram"),
        _case(
            "bigram, salted, with tail", count, 16, kind="bigram", cache_salt="s", includes_short_tail=True
        ),
        _case("wide second page", mixed, 4),
        _case("wide everywhere", [2**63, 2**64 - 1, 2**40, 2**33], 2),
        _case("wide short tail", [1, 2, 3, 4, 2**50], 4, includes_short_tail=True),
        _case("bigram, wide id shared by two pages", [1, 2, 2**32, 4, 5, 6, 7], 2, kind="bigram"),
    ]


def seed_cases() -> list[dict[str, Any]]:
    pairs: list[tuple[str | None, str | None]] = [
        (None, None), ("", None), (None, ""), ("", ""), ("a", None), (None, "a"), ("a", "b"), ("ab", ""),
        ("", "ab"), ("a\x00b", None), ("a", "\x00b"), ("a/b", "c"), ("a", "b/c"), ("a_b", "c:d"),
        (NFC, None), (NFD, None), (None, "\U0001f600"), ("../../etc/x", ".."),
    ]  # fmt: skip
    return [{"name": f"{a!r}, {b!r}", "extra_key": a, "cache_salt": b} for a, b in pairs]


def _read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text("utf-8")) if path.exists() else []


def _seed_of(case: dict[str, Any]) -> bytes | None:
    return chain_seed(case["extra_key"], case["cache_salt"])


def _hashes_of(case: dict[str, Any]) -> list[str]:
    return page_hashes(
        case["tokens"],
        case["page_size"],
        seed=_seed_of(case),
        prior=None if case["prior"] is None else bytes.fromhex(case["prior"]),
        kind=ChainKind(case["kind"]),
        includes_short_tail=case["includes_short_tail"],
    )


def _reference_hashes_of(case: dict[str, Any]) -> list[str]:
    start = reference_seed(case["extra_key"], case["cache_salt"])
    if case["prior"] is not None:
        start = bytes.fromhex(case["prior"])
    return reference_chain(
        case["tokens"], case["page_size"], start, case["kind"], case["includes_short_tail"]
    )


@pytest.mark.parametrize("case", _read(CHAIN_FILE), ids=lambda c: c["name"])
def test_frozen_chain(case: dict[str, Any]) -> None:
    assert _hashes_of(case) == case["hashes"] == _reference_hashes_of(case)


@pytest.mark.parametrize("case", _read(SEED_FILE), ids=lambda c: c["name"])
def test_frozen_seed(case: dict[str, Any]) -> None:
    seed, reference = _seed_of(case), reference_seed(case["extra_key"], case["cache_salt"])
    assert (None if seed is None else seed.hex()) == case["seed"]
    assert seed == reference


def test_every_case_is_frozen() -> None:
    frozen = {case["name"]: case for case in _read(CHAIN_FILE)}
    assert {case["name"] for case in chain_cases()} == set(frozen)
    assert all(frozen[case["name"]].items() >= case.items() for case in chain_cases())
    assert [case["name"] for case in seed_cases()] == [case["name"] for case in _read(SEED_FILE)]


def test_published_vectors_of_the_engine_that_defines_the_chain() -> None:
    """Digests that others computed with the engine's own native code."""
    assert page_hashes(range(1, 8), 16, includes_short_tail=True) == [
        "4c816952ba53cc361d8e45bd833338dc6427e4a5d5f06ebad5351fd46439a15a"
    ]
    assert page_hashes(range(1, 49), 16) == [
        "77d735ce838418aa151bd96b5b1e78ee63860892e0a95c00fe34178442be9b07",
        "1170426cf2449cebf4d17f087ce5bb43b6a910ce91b3f40922868e913e8ee91d",
        "4ef643c350b14a37eda268f7f706c44ec578320d32fdc20a9bce5f81e9603b11",
    ]
    edges = [65_537, 2_147_483_646, 2_147_483_647, 2_147_483_648, 4_294_967_295]
    assert page_hashes(edges, 16, includes_short_tail=True) == [
        "4329c31d2a34112668b50738939cee65b9565f41d8151bcc7e944c4529db60de"
    ]
    assert page_hashes(range(100_000, 100_064), 32)[1] == (
        "b9e5c32b50351992cbf3914697d89d20ff2bf504f6a57365a5e31d705f7782f0"
    )


FRESH_PROCESS = """
import json, sys
from hicache_store.layout.hashing import *
out = []
for case in json.load(open(sys.argv[1], encoding="utf-8")):
    seed = chain_seed(case["extra_key"], case["cache_salt"])
    prior = bytes.fromhex(case["prior"]) if case["prior"] else None
    out.append(page_hashes(case["tokens"], case["page_size"], seed=seed, prior=prior,
        kind=ChainKind(case["kind"]), includes_short_tail=case["includes_short_tail"]))
identity = RequestIdentity(LoraIdentity("a", "d"), "s", (MultimodalInput(9, "x"), MultimodalInput(2, "y")))
out.append([identity.extra_key, identity.seed().hex()])
json.dump(out, sys.stdout)
"""


@pytest.mark.parametrize("hash_seed", [None, "0", "1", "random", "4242"])
def test_e04_fresh_processes_agree_whatever_their_hash_seed(hash_seed: str | None) -> None:
    """A root hash drawn per process would give every engine a key space of its own: no hits, ever."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    result = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(CHAIN_FILE)],
        env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    *chains, (extra_key, seed) = json.loads(result.stdout)
    assert chains == [case["hashes"] for case in _read(CHAIN_FILE)]
    assert extra_key == ('hicache-request-v1:{"lora":["a","d"],"multimodal":[[2,"y"],[9,"x"]]}')
    assert seed == reference_seed(extra_key, "s").hex()  # type: ignore[union-attr]


# --- properties --------------------------------------------------------------------------------

token_ids = st.one_of(st.integers(0, 200_000), st.integers(0, 2**32 + 2), st.integers(2**63 - 2, 2**64 - 1))
digests = st.binary(min_size=32, max_size=32)


@unhurried
@given(
    tokens=st.lists(token_ids, max_size=40),
    page_size=st.integers(1, 9),
    start=st.none() | digests,
    kind=st.sampled_from(ChainKind),
    tail=st.booleans(),
)
def test_the_chain_equals_the_reference(
    tokens: list[int], page_size: int, start: bytes | None, kind: ChainKind, tail: bool
) -> None:
    expected = reference_chain(tokens, page_size, start, kind.value, tail)
    got = page_hashes(tokens, page_size, seed=start, kind=kind, includes_short_tail=tail)
    assert got == expected
    as_array = np.array(tokens, np.uint64)
    assert page_hashes(as_array, page_size, prior=start, kind=kind, includes_short_tail=tail) == expected


@unhurried
@given(tokens=st.lists(token_ids, max_size=40), page_size=st.integers(1, 5), kind=st.sampled_from(ChainKind),
       cut_pages=st.integers(1, 6), seed=digests)  # fmt: skip
def test_a_chain_continued_from_its_last_page_is_the_whole_chain(
    tokens: list[int], page_size: int, kind: ChainKind, cut_pages: int, seed: bytes
) -> None:
    """Positions are continued: a bigram chain needs the token after the cut on both sides."""
    whole = page_hashes(tokens, page_size, seed=seed, kind=kind)
    cut = min(cut_pages, len(whole))
    if cut == 0:
        return
    overlap = 1 if kind is ChainKind.BIGRAM else 0
    head = page_hashes(tokens[: cut * page_size + overlap], page_size, seed=seed, kind=kind)
    rest = page_hashes(
        tokens[cut * page_size :], page_size, seed=seed, prior=bytes.fromhex(head[-1]), kind=kind
    )
    assert head + rest == whole


@unhurried
@given(
    tokens=st.lists(token_ids, min_size=1, max_size=30),
    at=st.integers(0, 29),
    change=st.integers(1, 2**64 - 1),
)
def test_a_changed_token_changes_its_page_and_all_after_it_and_none_before(
    tokens: list[int], at: int, change: int
) -> None:
    at %= len(tokens)
    other = list(tokens)
    other[at] = (other[at] + change) % 2**64
    mine, theirs = page_hashes(tokens, 3), page_hashes(other, 3)
    assert mine[: at // 3] == theirs[: at // 3]
    assert all(a != b for a, b in zip(mine[at // 3 :], theirs[at // 3 :], strict=True))


def test_a_wide_page_never_equals_the_narrow_page_of_the_same_bytes() -> None:
    """Words of 64 bits are pairs of words of 32 bits; the tag keeps them apart."""
    low_high = [2**33 + 5]
    as_pairs = [5, 2]
    assert struct.pack("<Q", *low_high) == struct.pack("<2I", *as_pairs)
    assert page_hashes(low_high, 1) != page_hashes(as_pairs, 2)


def test_bigram_and_plain_chains_share_nothing() -> None:
    """A position hashes two tokens, so that even a page of the same bytes belongs to other tokens."""
    tokens = list(range(100, 133))
    assert not set(page_hashes(tokens, 4)) & set(page_hashes(tokens, 4, kind=ChainKind.BIGRAM))


@pytest.mark.parametrize(
    "spelled",
    [
        tuple(range(32)),
        range(32),
        np.arange(32, dtype=np.int32),
        np.arange(32, dtype=">u4"),
        np.arange(64, dtype=np.int64)[::2] // 2,
        array.array("I", range(32)),
        array.array("q", range(32)),
        torch.arange(32),
        [np.int64(i) for i in range(32)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_type_of_the_sequence_does_not_matter(spelled: Any) -> None:
    assert page_hashes(spelled, 8) == page_hashes(list(range(32)), 8)


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -1], "-1 is negative"),
        (np.array([3, -2]), "-2 is negative"),
        ([2**63, -1], "token id -1 is outside"),
        ([2**64], f"token id {2**64} is outside"),
        ([1, 2.0], r"token id 2\.0 is not an integer"),
        ([1, None], "token id None is not an integer"),
        (["1"], "token id '1' is not an integer"),
        ("12", "axes"),
        ([True, False], "bool"),
        (np.array([1.0]), "float64"),
        (np.array([1], dtype=object), "object"),
        ([[1, 2], [3, 4]], "2 axes"),
        ([[1, 2], [3]], r"token id \[1, 2\] is not an integer"),
        (np.array(5), "0 axes"),
    ],
)
def test_token_ids_that_are_not_plain_numbers_are_refused(tokens: Any, message: str) -> None:
    with pytest.raises(IdentityError, match=message):
        page_hashes(tokens, 1)


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_page_without_tokens_is_refused(page_size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"page of {page_size} tokens"):
        page_hashes([1], page_size)


def test_a_seed_or_prior_of_the_wrong_length_is_refused() -> None:
    """A hex digest handed over as text would start another chain without a word."""
    text = hashlib.sha256(b"").hexdigest().encode()
    with pytest.raises(ConfigurationError, match="seed of a page chain has 64 bytes"):
        page_hashes([1], 1, seed=text)
    with pytest.raises(ConfigurationError, match="prior of a page chain has 0 bytes"):
        page_hashes([1], 1, prior=b"")


def test_the_prior_carries_its_seed() -> None:
    prior = hashlib.sha256(b"p").digest()
    assert page_hashes([1], 1, prior=prior, seed=bytes(32)) == page_hashes([1], 1, prior=prior)


@pytest.mark.parametrize("part", ["\ud800", "a\udfff"])
def test_text_without_utf8_is_refused(part: str) -> None:
    with pytest.raises(IdentityError, match="lone surrogate"):
        chain_seed(None, part)
    with pytest.raises(IdentityError, match="lone surrogate"):
        RequestIdentity(lora=LoraIdentity(part, "d")).seed()


# --- identity of a request ---------------------------------------------------------------------

# Few letters and many separators, so that two draws collide often enough to mean something.
texts = st.text(
    alphabet=["a", "b", ",", '"', "\\", "[", "]", "\x00", ":", "/", NFC, "e", "\u0301"], max_size=5
)
parts = st.none() | texts
identities = st.builds(
    RequestIdentity,
    lora=st.none() | st.builds(LoraIdentity, texts, texts.filter(bool)),
    cache_salt=parts,
    multimodal=st.lists(
        st.builds(MultimodalInput, st.integers(0, 3), texts.filter(bool)), max_size=3
    ).map(tuple),
)  # fmt: skip


@thorough
@given(first=st.tuples(parts, parts), second=st.tuples(parts, parts))
def test_a07_seeds_are_equal_only_for_equal_parts(
    first: tuple[str | None, str | None], second: tuple[str | None, str | None]
) -> None:
    """Two tenants whose salts run together with another part must not read one another's pages."""
    assert (chain_seed(*first) == chain_seed(*second)) == (first == second)


def _meaning(identity: RequestIdentity) -> tuple[Any, ...]:
    inputs = sorted((item.position, item.content_digest) for item in identity.multimodal)
    return identity.lora, identity.cache_salt, inputs


@thorough
@given(first=identities, second=identities)
def test_seeds_are_equal_only_for_equal_identities(first: RequestIdentity, second: RequestIdentity) -> None:
    same = _meaning(first) == _meaning(second)
    assert (first.seed() == second.seed()) == same
    assert ((first.extra_key, first.cache_salt) == (second.extra_key, second.cache_salt)) == same


def test_a07_salts_that_look_alike_share_no_page() -> None:
    """Separators, NUL, Unicode forms, empty against absent, and a salt that swallows its neighbour."""
    tokens = list(range(40))
    salts = [
        None,
        "",
        "a",
        "b",
        "ab",
        "a/",
        "/a",
        "a_",
        "a:",
        "a\x00",
        "\x00a",
        "a ",
        "A",
        NFC,
        NFD,
        "null",
        "None",
    ]
    chains = [page_hashes(tokens, 4, seed=RequestIdentity(cache_salt=salt).seed()) for salt in salts]
    assert len({digest for chain in chains for digest in chain}) == 10 * len(salts)


def test_a18_adapters_of_one_name_or_one_digest_share_nothing() -> None:
    """Neither another adapter, nor the same name reloaded with new weights, nor the base model may hit."""
    loras = [None, *(LoraIdentity(name, digest) for name in "AB" for digest in ("digest1", "digest2"))]
    seeds = {RequestIdentity(lora=lora).seed() for lora in loras}
    assert len(seeds) == len(loras)
    assert RequestIdentity(lora=LoraIdentity("A", "digest1")).seed() in seeds
    with pytest.raises(IdentityError, match="no weights digest"):
        LoraIdentity("A", "")


def test_multimodal_inputs_count_by_place_and_content_not_by_order() -> None:
    first, second = MultimodalInput(3, "cat"), MultimodalInput(90, "dog")
    swapped = (MultimodalInput(3, "dog"), MultimodalInput(90, "cat"))
    assert (
        RequestIdentity(multimodal=(first, second)).seed()
        == RequestIdentity(multimodal=(second, first)).seed()
    )
    assert RequestIdentity(multimodal=(first, second)).seed() != RequestIdentity(multimodal=swapped).seed()
    assert RequestIdentity(multimodal=(first, first)).seed() != RequestIdentity(multimodal=(first,)).seed()
    with pytest.raises(IdentityError, match="cannot start at token -1"):
        MultimodalInput(-1, "cat")
    with pytest.raises(IdentityError, match="no content digest"):
        MultimodalInput(3, "")


def test_a_plain_request_has_no_seed_and_a_salt_keeps_its_own_slot() -> None:
    """So that pages of plain and of salted requests have one name whichever engine hashed them."""
    assert RequestIdentity().seed() is None
    assert RequestIdentity().extra_key is None
    assert RequestIdentity(cache_salt="s").seed() == chain_seed(None, "s")


def _write_missing() -> None:
    for path, cases in ((CHAIN_FILE, chain_cases()), (SEED_FILE, seed_cases())):
        frozen = {case["name"]: case for case in _read(path)}
        for case in cases:
            if path == CHAIN_FILE:
                result: dict[str, Any] = {"hashes": _reference_hashes_of(case)}
            else:
                seed = reference_seed(case["extra_key"], case["cache_salt"])
                result = {"seed": None if seed is None else seed.hex()}
            frozen.setdefault(case["name"], case | result)
        lines = ",\n".join(json.dumps(case, sort_keys=True) for case in frozen.values())
        path.write_text(f"[\n{lines}\n]\n", "utf-8")


if __name__ == "__main__":
    _write_missing()
