"""Real SGLang engines on a CPU, one at a time in fresh processes, that share their KV by a directory.

``cached_tokens_details`` of a response says how much of a prompt's KV came from storage, and greedy tokens
are those of the same engine without storage. See ``engine_place`` for what a CPU has replaced.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
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

    def options(self, tp: int, pp: int, layout: str) -> dict[str, Any]:
        return options(self.model, tp=tp, pp=pp, layout=layout, configuration=configuration(self.url))

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


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


@pytest.mark.parametrize(
    ("name", "tp", "pp", "layout"),
    [("tp2", 2, 1, "layer_first"), ("pp2", 1, 2, "page_head")],
)
def test_an_engine_of_another_topology_and_layout_continues_from_storage(
    shared: Shared, name: str, tp: int, pp: int, layout: str
) -> None:
    with running(shared.options(tp, pp, layout), shared.log(name)) as engine:
        read = engine.generate(PROMPTS)
        engine.generate([OWN[name]])
        wait_for(shared.url, [OWN[name]], objects=2)
        shared.written.append(name)
        engine.detach()
        engine.forget()
        computed = engine.generate(PROMPTS)
    assert sources(read) == ALL_STORED
    assert {answer.backend for answer in read} == {"HiCacheL3"}
    assert sources(computed) == NOTHING_STORED
    assert tokens(read) == tokens(computed)


def test_a_restarted_engine_reads_what_all_wrote_and_altered_bytes_are_noticed(shared: Shared) -> None:
    """Last, because it alters the store. With verification off altered KV changes the answer, which shows
    that answers depend on what is read; with it on the altered pages are computed and stored again."""
    others = [OWN[name] for name in shared.written]
    with running(shared.options(1, 1, "page_first"), shared.log("restarted")) as engine:
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
