"""Real SGLang engines on a CPU, one at a time in fresh processes, that share their KV by a directory.

``cached_tokens_details`` of a response says how much of a prompt's KV came from storage, and greedy tokens
are those of the same engine without storage. See ``engine_place`` for what a CPU has replaced.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_client import PAGE, Answer, Engine, options, running
from tiny_model import write_model

from hicache_store import page_hashes
from hicache_store.clock import Deadline
from hicache_store.connectors.base import BufferSource, BufferTarget, Connector, Read, Write
from hicache_store.connectors.registry import open_connector
from hicache_store.layout.names import ObjectName

pytestmark = pytest.mark.timeout(1_200)

_DRAW = random.Random(20)
FIRST = [_DRAW.randrange(256) for _ in range(330)]
SECOND = [*FIRST[:160], *(_DRAW.randrange(256) for _ in range(100))]
"""Shares five pages with ``FIRST``, and has three of its own."""
PROMPTS = (FIRST, SECOND)
OWN = {name: [_DRAW.randrange(256) for _ in range(330)] for name in ("tp2", "pp2")}
"""What an engine of two ranks stores itself, in two objects a page."""
ROUND = [[_DRAW.randrange(256) for _ in range(10 * PAGE + more)] for more in (-1, 0, 1)]
"""Lengths at the edge of a page: of a page's tokens the last one must be computed, to have an output."""
MANY = [[_DRAW.randrange(256) for _ in range(330)] for _ in range(8)]
"""More than the device's 2048 tokens, less than the host's 4096."""
ALONE = [_DRAW.randrange(256) for _ in range(330)]
CROWD = [[_DRAW.randrange(256) for _ in range(330)] for _ in range(24)]
"""Four times what SGLang prefetches at once here: half of the host's 4096 tokens."""
NOTHING_STORED, ALL_STORED = [(0, 0), (160, 0)], [(0, 320), (160, 96)]
"""Tokens of each prompt that come from the device and from storage: the second follows the first."""


@dataclass(frozen=True)
class Shared:
    """What all engines share, and what the first of them answered."""

    model: Path
    url: str
    folder: Path
    answers: list[Answer]
    written: list[str]
    """The engines of two ranks that have stored their own prompt."""


@dataclass(frozen=True)
class Reader:
    """An engine over what is shared."""

    name: str
    engine: Engine
    shared: Shared


def configuration(url: str, **more: object) -> dict[str, Any]:
    return {
        "backend_name": "hicache_store",
        "module_path": "hicache_store.engines.sglang",
        "class_name": "HiCacheL3",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_threshold": PAGE,
        "url": url,
        **more,
    }


def sources(answers: Sequence[Answer]) -> list[tuple[int, int]]:
    assert all(answer.host == 0 for answer in answers)
    return [(answer.device, answer.storage) for answer in answers]


def tokens(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


def stored(connector: Connector) -> dict[str, list[str]]:
    """The keys of each page's objects: a writer of one rank stores one a page, two ranks store two."""
    found: dict[str, list[str]] = {}
    for entry in connector.scan("v1/"):
        found.setdefault(ObjectName.parse(entry.key).page_hash, []).append(entry.key)
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """A store that an engine of one rank with page_first host memory has written to."""
    folder = tmp_path_factory.mktemp("engines")
    url = f"file://{folder}/kv?quota=1GiB"
    write_model(folder / "model")
    given = options(folder / "model", tp=1, pp=1, layout="page_first", configuration=configuration(url))
    with running(given, folder / "writer.log") as engine:
        answers = engine.generate(PROMPTS)
        wait_for(url, PROMPTS, objects=1)
    return Shared(folder / "model", url, folder, answers, [])


READERS = {
    "tp2": {"tp": 2, "pp": 1, "layout": "layer_first"},
    "pp2": {"tp": 1, "pp": 2, "layout": "page_head"},
    "restarted": {"tp": 1, "pp": 1, "layout": "page_first"},
}


@pytest.fixture(scope="module")
def reader(shared: Shared, request: pytest.FixtureRequest) -> Iterator[Reader]:
    """An engine that one test after another asks; it ends before that of another topology starts."""
    name: str = request.param
    given = options(shared.model, **READERS[name], configuration=configuration(shared.url))
    with running(given, shared.folder / f"{name}.log") as engine:
        yield Reader(name, engine, shared)


of_two_ranks = pytest.mark.parametrize("reader", ["tp2", "pp2"], indirect=True, scope="module")
restarted = pytest.mark.parametrize("reader", ["restarted"], indirect=True, scope="module")


def wait_for(url: str, prompts: Sequence[Sequence[int]], *, objects: int) -> None:
    """Backups run behind the answers: wait until every page of the prompts has so many objects."""
    hashes = {page_hash for prompt in prompts for page_hash in page_hashes(prompt, PAGE)}
    connector, end = open_connector(url), time.monotonic() + 60.0
    try:
        while any(len(stored(connector).get(page_hash, [])) != objects for page_hash in hashes):
            assert time.monotonic() < end, {one: stored(connector).get(one, []) for one in hashes}
            time.sleep(0.2)
    finally:
        connector.close()


def test_what_an_engine_stored_bears_the_names_that_anyone_can_compute(shared: Shared) -> None:
    connector = open_connector(shared.url)
    assert set(stored(connector)) == {*page_hashes(FIRST, PAGE), *page_hashes(SECOND, PAGE)}
    connector.close()
    assert sources(shared.answers) == NOTHING_STORED


@of_two_ranks
def test_e16_tokens_from_storage_are_those_that_all_ranks_have(reader: Reader) -> None:
    """One of two ranks lacks a page: what is told is the length that both could load, whichever it is."""
    engine, shared, own = reader.engine, reader.shared, OWN[reader.name]
    (computed,) = engine.generate([own])
    wait_for(shared.url, [own], objects=2)
    shared.written.append(reader.name)
    assert sources([computed]) == [(0, 0)]
    for one_of_two in (0, 1):
        remove(shared.url, page_hashes(own, PAGE)[6], one_of_two)
        engine.forget()
        (read,) = engine.generate([own])
        assert sources([read]) == [(0, 6 * PAGE)]
        assert read.tokens == computed.tokens
        wait_for(shared.url, [own], objects=2)


@of_two_ranks
def test_an_engine_of_another_topology_and_layout_continues_from_storage(reader: Reader) -> None:
    engine = reader.engine
    engine.forget()
    read = engine.generate(PROMPTS)
    engine.detach()
    engine.forget()
    computed = engine.generate(PROMPTS)
    assert sources(read) == ALL_STORED
    assert {answer.backend for answer in read} == {"HiCacheL3"}
    assert sources(computed) == NOTHING_STORED
    assert tokens(read) == tokens(computed)


@restarted
def test_a41_a_hit_answers_as_a_miss_at_the_edges_of_pages(reader: Reader) -> None:
    """A token short of ten pages, ten pages, a token more: 64 greedy tokens are those that were computed."""
    engine = reader.engine
    cold = engine.generate(ROUND, new_tokens=64)
    wait_for(reader.shared.url, ROUND, objects=1)
    engine.forget()
    read = engine.generate(ROUND, new_tokens=64)
    assert sources(cold) == [(0, 0)] * 3
    assert sources(read) == [(0, 9 * PAGE), (0, 9 * PAGE), (0, 10 * PAGE)]
    assert [len(answer.tokens) for answer in read] == [64] * 3
    assert tokens(read) == tokens(cold)


@restarted
def test_e16_every_cached_token_is_told_with_the_tier_that_had_it(reader: Reader) -> None:
    """Prompts of any length, in any order, of more than the device holds. All their whole pages are stored,
    so those before the last token are cached, and the tiers of each answer add up to them."""
    engine, draw = reader.engine, random.Random(16)
    cold = engine.generate(MANY)
    wait_for(reader.shared.url, MANY, objects=1)
    engine.forget()
    asked = [draw.choice(MANY)[: draw.randrange(2 * PAGE, 331)] for _ in range(60)]
    answers = engine.generate(asked, new_tokens=1)
    whole = engine.generate(MANY)
    tiers = [(answer.device, answer.host, answer.storage) for answer in [*answers, *whole]]
    assert [sum(one) for one in tiers] == [(len(prompt) - 1) // PAGE * PAGE for prompt in [*asked, *MANY]]
    mixes = {tuple(bool(held) for held in one) for one in tiers}
    assert {(True, False, False), (False, True, False), (False, False, True)} <= mixes
    assert (True, True, True) in mixes
    assert tokens(whole) == tokens(cold)


@restarted
def test_b10_a_hit_too_short_to_be_read_ends_its_prefetch(reader: Reader) -> None:
    """Five pages are stored and ten are worth a prefetch: the request, which waits for its prefetch to end,
    is answered without, and so are later ones, until a hit is long enough."""
    engine, url = reader.engine, reader.shared.url
    begun = [[*FIRST[: 5 * PAGE], *random.Random(seed).choices(range(256), k=6 * PAGE)] for seed in range(3)]
    engine.detach()
    engine.attach(configuration(url, prefetch_threshold=10 * PAGE))
    engine.forget()
    short = engine.generate(begun[:1])
    engine.forget()
    short += engine.generate(begun[1:2])
    engine.forget()
    long = engine.generate([FIRST])
    engine.detach()
    engine.attach(configuration(url))
    engine.forget()
    assert sources(short) == [(0, 0)] * 2
    assert sources(long) == [(0, 320)]
    assert sources(engine.generate(begun[2:])) == [(0, 160)]


@restarted
def test_b14_more_prefetches_than_the_host_has_room_for_all_end(reader: Reader) -> None:
    """What SGLang admits is read, the rest is computed: all are answered, and nothing stays taken."""
    engine = reader.engine
    engine.forget()
    cold = engine.generate(CROWD, new_tokens=4)
    wait_for(reader.shared.url, CROWD, objects=1)
    engine.forget()
    crowded = engine.generate(CROWD, new_tokens=4, at_once=True)
    engine.forget()
    calm = engine.generate(CROWD, new_tokens=4)
    assert {(answer.device, answer.host) for answer in crowded} == {(0, 0)}
    assert {320} <= {answer.storage for answer in crowded} <= {0, 320}
    assert sources(calm) == [(0, 320)] * len(CROWD)
    assert tokens(crowded) == tokens(calm) == tokens(cold)


@restarted
def test_another_tenant_and_other_weights_find_nothing_and_answer_alike(reader: Reader) -> None:
    """The engine, its model and its prompt are the same; only the namespace is another."""
    engine, url = reader.engine, reader.shared.url
    (computed,) = engine.generate([ALONE])
    wait_for(url, [ALONE], objects=1)
    for objects, apart in enumerate(({"tenant": "other"}, {"weights": "other"}), start=2):
        engine.detach()
        engine.attach(configuration(url, **apart))
        engine.forget()
        (refused,) = engine.generate([ALONE])
        wait_for(url, [ALONE], objects=objects)
        engine.forget()
        (own,) = engine.generate([ALONE])
        assert sources([refused, own]) == [(0, 0), (0, 320)]
        assert refused.tokens == own.tokens == computed.tokens
    engine.detach()
    engine.attach(configuration(url))


@restarted
def test_a_restarted_engine_reads_what_all_wrote_and_altered_bytes_are_noticed(reader: Reader) -> None:
    """Last, because it alters the store. With verification off altered KV changes the answer, which shows
    that answers depend on what is read; with it on the altered pages are computed and stored again."""
    engine, shared = reader.engine, reader.shared
    others = [OWN[name] for name in shared.written]
    engine.forget()
    read, read_others = engine.generate(PROMPTS), engine.generate(others)
    engine.detach()
    engine.forget()
    computed, computed_others = engine.generate(PROMPTS), engine.generate(others)

    negate(shared.url, page_hashes(FIRST, PAGE)[5:])
    engine.attach(configuration(shared.url, verify=False))
    engine.forget()
    altered = engine.generate(PROMPTS)
    engine.detach()

    engine.attach(configuration(shared.url))
    engine.forget()
    refused = engine.generate(PROMPTS)
    repaired = until_all_stored(engine)
    assert tokens(shared.answers) == tokens(read) == tokens(computed)
    assert sources(read) == sources(altered) == ALL_STORED
    assert sources(computed) == NOTHING_STORED
    assert sources(read_others) == [(0, 320)] * len(others)
    assert sources(computed_others) == [(0, 0)] * len(others)
    assert tokens(read_others) == tokens(computed_others)
    assert altered[0].tokens != read[0].tokens
    assert altered[1].tokens == read[1].tokens
    assert sources(refused) == [(0, 160), (160, 96)]
    assert tokens(refused) == tokens(read) == tokens(repaired)


def until_all_stored(engine: Engine) -> list[Answer]:
    """Backups run behind the answers: ask until all of a prompt comes from storage again."""
    end = time.monotonic() + 60.0
    while True:
        engine.forget()
        answers = engine.generate(PROMPTS)
        if sources(answers) == ALL_STORED:
            return answers
        assert time.monotonic() < end, answers


def remove(url: str, page_hash: str, one: int) -> None:
    """Delete one of a page's objects behind the engine's back."""
    connector = open_connector(url)
    key = sorted(stored(connector)[page_hash])[one]
    (outcome,) = connector.delete([key], Deadline.after(10.0))
    assert outcome.is_ok
    connector.close()


def negate(url: str, hashes: Sequence[str]) -> None:
    """Flip the sign of every stored float32 of these pages; lengths, names and sums stay as they are."""
    connector = open_connector(url)
    keys = stored(connector)
    for page_hash in hashes:
        (key,), deadline = keys[page_hash], Deadline.after(10.0)
        (size,) = connector.sizes([key], deadline)
        assert size is not None
        raw = bytearray(size)
        (outcome,) = connector.read_into([Read(key, size, BufferTarget.whole(raw))], deadline)
        assert outcome.is_ok
        payload_bytes = 2 * 4 * 2 * PAGE * 16 * 4  # K and V x layers x heads x tokens x dim x float32
        np.frombuffer(raw, "<u4", payload_bytes // 4)[:] ^= 0x80000000
        (outcome,) = connector.write_from(
            [Write(key, size, BufferSource.of(raw), replace=outcome.version)], deadline
        )
        assert outcome.is_ok
    connector.close()
