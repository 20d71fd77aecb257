"""One real engine and a store that fails in every way: the output is that of an engine without a store."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import vllm_faulty
from vllm_client import Engine, Setup, running
from vllm_model import TinyLlama

from hicache_store import page_hashes

pytestmark = pytest.mark.timeout(900)

_DRAW = random.Random(7)
PROMPTS = [[_DRAW.randrange(256) for _ in range(600)] for _ in range(2)]
STORED = 2 * 576
"""Tokens of the whole pages of both."""
SHARED = [_DRAW.randrange(256) for _ in range(576)]
SIXTEEN = [[*SHARED, *(_DRAW.randrange(256) for _ in range(24))] for _ in range(16)]


@dataclass(frozen=True)
class Bench:
    """The engine, where its store is, and what it answered before anything was stored."""

    engine: Engine
    folder: Path
    tokens: list[tuple[int, ...]]

    def fails(self, how: str) -> None:
        self.engine.call("vllm_faulty:fail", how)

    def again(self, wait_s: float = 120.0) -> int:
        """External hits of the same prompts after the engine forgot them; the tokens are as before."""
        assert self.engine.forget(external=True)
        batch = self.engine.generate(PROMPTS, wait_s=wait_s)
        assert batch.tokens == self.tokens
        return batch.external

    def counted(self, name: str) -> float:
        return self.engine.counters().get(f"vllm:hicache_{name}", 0.0)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("faults")
    model = TinyLlama().write(root / "model")
    plugins = vllm_faulty.install(root / "plugins")
    path = os.pathsep.join([plugins, str(Path(__file__).parent)])
    connector = {
        "url": f"faulty://{root}/store?quota=1GiB",
        "timeout_s": 2,
        "lookup_timeout_s": 1,
        "min_hit_tokens": 64,
    }
    with running(Setup(model, connector=connector, blocks=256), root / "log", {"PYTHONPATH": path}) as engine:
        first = engine.generate(PROMPTS)
        assert (first.external, first.local) == (0, 0)
        assert first.margin > 0.001, "the prompts do not tell outputs apart"
        yield Bench(engine, root / "store", first.tokens)


@pytest.fixture(autouse=True)
def healthy(bench: Bench) -> Iterator[None]:
    yield
    bench.fails("none")
    assert bench.engine.call("vllm_faulty:held") == dict.fromkeys(
        ("requests", "tracked", "loading", "orders", "loads", "slots", "blocks"), 0
    )


def test_what_was_stored_is_loaded(bench: Bench) -> None:
    assert bench.again() == STORED


@pytest.mark.parametrize("how", ["flip", "vanish", "fail", "late", "raise"])
def test_a_read_that_fails_after_its_lookup_is_computed(bench: Bench, how: str) -> None:
    failed = bench.counted("load_failed")
    bench.fails(how)
    bench.again()
    assert bench.counted("load_failed") > failed
    bench.fails("none")
    bench.again()
    assert bench.again() == STORED


def test_a_storage_that_hangs_delays_no_longer_than_its_deadline(bench: Bench) -> None:
    failed = bench.counted("load_failed")
    bench.fails("hang")
    bench.again()
    assert bench.counted("load_failed") > failed
    bench.fails("none")
    assert bench.again() == STORED


def test_lookups_that_hang_are_misses(bench: Bench) -> None:
    bench.fails("lookups")
    assert bench.again() == 0
    bench.fails("none")
    assert bench.again() == STORED


def test_b04_writes_that_fail_cost_nothing_but_later_hits(bench: Bench) -> None:
    bench.fails("writes")
    other = [[token ^ 1 for token in prompt] for prompt in PROMPTS]
    tokens = bench.engine.generate(other).tokens
    bench.fails("none")
    assert bench.engine.forget(external=True)
    again = bench.engine.generate(other)
    assert (again.external, again.tokens) == (0, tokens)
    assert bench.engine.forget(external=True)
    assert bench.engine.generate(other).external == STORED


def test_objects_damaged_on_disk_are_a_shorter_hit_and_are_brought_again(bench: Bench) -> None:
    assert bench.again() == STORED
    objects = sorted(
        path for path in bench.folder.rglob("*") if path.is_file() and path.stat().st_size > 100_000
    )
    for path in objects:
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 0x10
        path.chmod(0o600)
        path.write_bytes(content)
    failed = bench.counted("load_failed")
    bench.again()
    assert bench.counted("load_failed") > failed
    bench.again()
    assert bench.again() == STORED


def test_one_lost_page_shortens_the_hit_to_the_pages_before_it(bench: Bench) -> None:
    assert bench.again() == STORED
    objects = [path for path in bench.folder.rglob("*") if path.is_file() and path.stat().st_size > 100_000]
    objects[0].unlink()
    assert 0 < bench.again() < STORED or bench.again() == STORED
    assert bench.again() == STORED


def test_sixteen_requests_fetch_a_shared_prefix_once(bench: Bench) -> None:
    bench.engine.generate(SIXTEEN[:1])
    expected = bench.engine.generate(SIXTEEN).tokens
    assert bench.engine.forget(external=True)
    bench.engine.call("vllm_faulty:reads")
    batch = bench.engine.generate(SIXTEEN)
    assert batch.tokens == expected
    assert batch.external == len(SHARED)
    assert bench.engine.call("vllm_faulty:reads") == len(SHARED) // 64
    assert batch.local >= 15 * 576


def test_a37_many_prompts_at_once_do_not_disturb_one_another(bench: Bench) -> None:
    """Twelve disjoint prompts, whose blocks fill the engine's memory, loaded side by side in three orders."""
    prompts = [[_DRAW.randrange(256) for _ in range(590)] for _ in range(12)]
    expected = bench.engine.generate(prompts).tokens
    for seed in range(3):
        order = random.Random(seed).sample(range(12), 12)
        assert bench.engine.forget(external=True)
        batch = bench.engine.generate([prompts[index] for index in order])
        assert batch.tokens == [expected[index] for index in order]
        assert batch.external == 12 * 576


def test_a50_the_log_names_what_was_bad(bench: Bench) -> None:
    bench.fails("flip")
    bench.again()
    bench.fails("none")
    bench.again()
    log = bench.engine.log(1_000_000)
    assert re.search(
        r"a load ended after \d+ pages.*corrupt.*v1/[0-9a-f]{64}/[0-9a-f]{2}/[0-9a-f]{64}/kv\.H", log
    )


def test_aborts_and_hanging_loads_leave_nothing_held(bench: Bench) -> None:
    bench.fails("hang")
    given = {"prompts": [PROMPTS[0]] * 6, "name": "hang", "new_tokens": 4, "abort_at": 2}
    assert bench.engine.forget(external=True)
    found = bench.engine.call("vllm_faulty:crowd", given)
    assert [tuple(tokens) for tokens in found["tokens"]] == [bench.tokens[0][:4]] * len(found["kept"])


def test_preemption_under_load_leaves_nothing_held(bench: Bench) -> None:
    """Thirty requests of 620 tokens where blocks for 8,192 are: some are preempted, some aborted."""
    prompts = [[_DRAW.randrange(256) for _ in range(580)] for _ in range(30)]
    alone = [bench.engine.generate([prompt], new_tokens=60).tokens[0] for prompt in prompts[1:3]]
    assert bench.engine.forget(external=True)
    given = {"prompts": prompts, "name": "crowd", "new_tokens": 60, "abort_at": 4}
    found = bench.engine.call("vllm_faulty:crowd", given, wait_s=300)
    assert found["preempted"] > 0
    assert [tuple(tokens) for tokens in found["tokens"][:2]] == alone


def test_e12_pages_lost_after_their_lookup_are_computed_by_all_ranks(tmp_path: Path) -> None:
    """Two ranks of an engine of its own: three pages are there when the scheduler looks, and gone when the
    ranks load. The pages before them are loaded all the same, in a second try."""
    model = TinyLlama().write(tmp_path / "model")
    path = os.pathsep.join([vllm_faulty.install(tmp_path / "plugins"), str(Path(__file__).parent)])
    connector = {"url": f"faulty://{tmp_path}/store?quota=1GiB", "timeout_s": 5}
    setup = Setup(model, tp=2, connector=connector)
    with running(setup, tmp_path / "log", {"PYTHONPATH": path}) as engine:
        first = engine.generate(PROMPTS[:1])
        lost = page_hashes(PROMPTS[0], 64)[4:7]
        (tmp_path / "store.lost").write_text(" ".join(lost))
        assert engine.forget(external=True)
        again = engine.generate(PROMPTS[:1])
        assert again.tokens == first.tokens
        assert again.counted["vllm:hicache_load_failed"] == 2
        assert again.cached == [4 * 64]
