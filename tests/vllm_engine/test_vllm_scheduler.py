"""What the half beside the scheduler finds, orders and remembers, for vLLM's own requests."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request
from vllm_parts import Rankful, faulty, until, whole_pages

from hicache_store.engines.options import EngineOptions
from hicache_store.engines.vllm_messages import SaveOrder
from hicache_store.engines.vllm_options import VllmOptions
from hicache_store.engines.vllm_requests import hashes_of
from hicache_store.engines.vllm_scheduler import SchedulerHalf
from hicache_store.layout.hashing import page_hashes
from hicache_store.limits import ENGINE_SHARED_WAIT_S
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.faults import FaultyConnector, Hold

PAGE = 64
TOKENS = list(range(1, 1 + 10 * PAGE + 7))
HASHES = tuple(page_hashes(TOKENS, PAGE))
BLOCKS = ([1, 2, 3],)


def request(name: str = "r", tokens: Sequence[int] = TOKENS, new: int = 500, **more: Any) -> Request:
    return Request(name, list(tokens), SamplingParams(max_tokens=new), None, **more)


class Half:
    """A scheduler's half over a store in memory, which holds ``stored`` pages of :data:`TOKENS`."""

    def __init__(
        self,
        stored: int = 10,
        *,
        block_tokens: Sequence[int] = (32,),
        hit_tokens: int = 1,
        min_hit: int = 0,
        store_decode: bool = False,
        page: int = PAGE,
        lookup_timeout_s: float = 30.0,
    ) -> None:
        self.connector: FaultyConnector = faulty("memory:")
        self.page = page
        writer = whole_pages(self.connector, page)
        rank = Rankful(self.connector, page=page, block=page, blocks=40, staged_pages=80)
        if stored:
            hashes = tuple(page_hashes(TOKENS, page))[:stored]
            rank.worker.save([SaveOrder("writer", hashes, 0, (list(range(1, 1 + stored)),))])
            rank.saved()
            assert writer.contains(hashes).pages == stored
        self.rank, self.store = rank, writer
        self.holds: list[Hold] = []
        self.clock = FakeClock()
        options = VllmOptions(
            shared=EngineOptions(url="memory:", lookup_timeout_s=lookup_timeout_s),
            page_size=page,
            min_hit_tokens=min_hit,
            store_decode=store_decode,
        )
        self.half = SchedulerHalf(writer, options, block_tokens, hit_tokens, self.clock.monotonic)

    def counted(self, name: str) -> int:
        return self.half.metrics.get(f"engine.{name}")

    def answer(self, asked: Request, local: int = 0) -> int:
        """What is to be loaded, once the look-up has answered."""
        until(lambda: self.half.matched(asked, local) is not None)
        found = self.half.matched(asked, local)
        assert found is not None
        return found

    def looked_up(self, asked: Request) -> None:
        tracked = self.half.track(asked)
        assert tracked is not None
        until(lambda: tracked.lookup is None or tracked.lookup.done())

    def step(self, asked: Request, tokens: int) -> list[SaveOrder]:
        """The saves of a step that computes ``tokens`` tokens, as vLLM counts them."""
        orders = self.half.saves({asked.request_id: tokens}, lambda name: BLOCKS)
        asked.num_computed_tokens += tokens
        return orders

    def load(self, asked: Request, local: int = 0) -> int:
        """Order the load of a request's hit."""
        hit = self.answer(asked, local)
        self.half.allocated(asked, BLOCKS, hit)
        return hit

    def is_empty(self) -> bool:
        half = self.half
        return not (half._requests or half._loading or half._orders)

    def hangs(self, *, ignores_deadline: bool = False) -> Hold:
        """All storage hangs from now on."""
        hold = Hold(threading.Event(), ignores_deadline=ignores_deadline)
        self.holds.append(hold)
        self.connector.plan = lambda attempt: hold
        return hold

    def goes_on(self) -> None:
        """It does no longer."""
        self.connector.plan = lambda attempt: None
        for hold in self.holds:
            hold.until.set()

    @property
    def asked(self) -> int:
        """Calls of look-ups that storage had."""
        return self.connector._calls["sizes"]

    def close(self) -> None:
        self.goes_on()
        self.half.close()
        self.rank.worker.close()


@pytest.fixture
def halves() -> Iterator[Callable[..., Half]]:
    made: list[Half] = []

    def make(*given: Any, **named: Any) -> Half:
        made.append(Half(*given, **named))
        return made[-1]

    yield make
    for half in made:
        half.close()
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("hicache-")])


Halves = Callable[..., Half]


# Look-ups.


def test_a_request_waits_for_its_look_up_and_then_has_its_hit(halves: Halves) -> None:
    half = halves()
    hold = half.hangs()
    asked, calls = request(), half.asked
    half.half.track(asked)
    assert hold.entered.wait(20)
    assert [half.half.matched(asked, 0) for _ in range(3)] == [None] * 3
    assert half.asked == calls + 1, "asking again asks no storage again"
    half.half.pause()
    half.goes_on()
    assert half.answer(asked) == 10 * PAGE
    assert half.half.loads() == []


def test_a_look_up_whose_thread_never_comes_is_given_up_and_counted_once(halves: Halves) -> None:
    half = halves(lookup_timeout_s=3.0)
    hold = half.hangs(ignores_deadline=True)
    asked = request()
    assert half.half.matched(asked, 0) is None
    assert hold.entered.wait(20)
    half.clock.advance(5.9)
    assert half.half.matched(asked, 0) is None
    half.clock.advance(0.2)
    assert [half.half.matched(asked, 0) for _ in range(3)] == [0] * 3
    assert half.counted("lookup_late") == 1
    hold.until.set()


def test_a_look_up_that_raises_is_a_miss_and_nothing_is_saved_for_it(
    halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = halves()

    def broken(*given: Any, **named: Any) -> None:
        raise RuntimeError("a fault of the adapter")

    monkeypatch.setattr(half.store, "contains", broken)
    asked = request()
    assert half.answer(asked) == 0
    assert half.counted("lookup_failed") == 1
    assert half.step(asked, len(TOKENS)) == []


def test_one_look_up_too_many_is_a_miss(halves: Halves, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_store.engines.vllm_scheduler.ENGINE_QUEUE_MAX", 3)
    half = halves()
    hold = half.hangs(ignores_deadline=True)
    calls = half.asked
    running = [request(f"runs {number}", [number, *TOKENS]) for number in range(4)]
    for asked in running:
        half.half.track(asked)
    until(lambda: half.asked == calls + 4)
    waiting = [request(f"waits {number}", [number, *TOKENS]) for number in range(3)]
    for asked in waiting:
        assert half.half.matched(asked, 0) is None
    late = request("late")
    assert half.half.matched(late, 0) == 0
    assert (half.counted("lookup_dropped"), half.counted("lookup_late")) == (1, 0)
    half.half.forget(waiting[0].request_id)  # one that is over leaves its place
    assert half.half.matched(request("another"), 0) is None
    hold.until.set()


@pytest.mark.parametrize(
    ("block", "hit_tokens", "expected"),
    [((32,), 1, 10), ((64,), 1, 10), ((128,), 1, 10), ((48,), 1, 9), ((32, 48), 1, 9), ((32,), 256, 8)],
)
def test_hits_end_where_pages_and_blocks_do(
    halves: Halves, block: Sequence[int], hit_tokens: int, expected: int
) -> None:
    half = halves(block_tokens=block, hit_tokens=hit_tokens)
    assert half.answer(request()) == expected * PAGE
    assert expected * PAGE % math.lcm(PAGE, hit_tokens, *block) == 0


def test_an_odd_number_of_pages_is_cut_to_whole_blocks(halves: Halves) -> None:
    assert halves(stored=7, block_tokens=(128,)).answer(request()) == 6 * PAGE


@pytest.mark.parametrize(("local", "first"), [(0, 0), (32, 0), (64, 1), (96, 1), (576, 9), (608, 9)])
def test_what_the_engine_has_itself_is_not_loaded(halves: Halves, local: int, first: int) -> None:
    half = halves()
    asked = request()
    assert half.load(asked, local) == 640 - local
    (order,) = half.half.loads()
    assert (order.start, order.stop, order.blocks) == (local, 640, BLOCKS)
    assert (order.prefix, order.hashes, order.first_page) == (HASHES[:first], HASHES[first:], first)
    assert half.half.loads() == []
    assert half.counted("hit_tokens") == 640 - local


def test_the_engine_s_own_cache_may_have_it_all(halves: Halves) -> None:
    half = halves()
    asked = request()
    assert [half.answer(asked, local) for local in (640, 1024)] == [0, 0]
    assert half.counted("short_hits") == 0


def test_a_whole_prompt_may_be_a_hit(halves: Halves) -> None:
    """vLLM computes the last token again by itself."""
    half = halves()
    assert half.load(request(tokens=TOKENS[: 10 * PAGE])) == 10 * PAGE


@pytest.mark.parametrize(("local", "expected"), [(0, 640), (384, 256), (416, 0), (608, 0)])
def test_short_hits_are_computed(halves: Halves, local: int, expected: int) -> None:
    half = halves(min_hit=256)
    asked = request()
    assert [half.answer(asked, local) for _ in range(2)] == [expected] * 2
    assert half.counted("short_hits") == (0 if expected else 1)


def test_a_request_that_asks_for_no_cached_prefix_is_not_looked_up_but_stored(halves: Halves) -> None:
    """vLLM ignores hits of requests for the log-probabilities of their prompt."""
    half = halves(stored=0)
    asked = Request("r", TOKENS, SamplingParams(max_tokens=5, prompt_logprobs=1), None)
    assert asked.skip_reading_prefix_cache
    half.looked_up(asked)
    calls = half.asked
    assert half.answer(asked) == 0
    assert half.asked == calls
    (order,) = half.step(asked, len(TOKENS))
    assert order.hashes == HASHES


# One fetch of what several want.


def test_a_shared_prefix_is_fetched_once(halves: Halves) -> None:
    half = halves()
    first, second = request("first"), request("second", [*TOKENS, 5])
    other = request("other", [9, *TOKENS])
    assert half.load(first) == 640
    half.looked_up(second)
    assert [half.half.matched(second, 0) for _ in range(3)] == [None] * 3
    assert half.answer(other) == 0, "it has nothing in common with the load and does not wait"
    assert half.counted("shared_loads") == 1
    half.half.allocated(first, BLOCKS, 0)  # its load has ended, it is scheduled
    assert half.half.matched(second, 640) == 0, "the engine has it now"
    assert half.half.matched(second, 320) == 320, "or a part of it"


def test_a_request_that_needs_later_pages_of_a_load_waits_too(halves: Halves) -> None:
    half = halves()
    half.load(request("first"))
    second = request("second")
    half.looked_up(second)
    assert half.half.matched(second, 384) is None


def test_a_prefix_that_both_have_does_not_make_one_wait(halves: Halves) -> None:
    """The first loads from page 5 on; the second needs page 0 first, which nobody loads."""
    half = halves()
    half.load(request("first"), 320)
    second = request("second")
    assert half.answer(second) == 640


@pytest.mark.parametrize("how", ["scheduled", "asked again", "aborted", "failed"])
def test_a_wait_for_another_s_load_ends_with_it(halves: Halves, how: str) -> None:
    half = halves()
    first, second = request("first"), request("second")
    half.load(first)
    half.looked_up(second)
    assert half.half.matched(second, 0) is None
    if how == "scheduled":
        half.half.allocated(first, BLOCKS, 0)
    elif how == "asked again":
        half.half.matched(first, 640)
    elif how == "aborted":
        half.half.forget("first")
    else:
        half.half.ended({"first"}, {})
    assert half.load(second) == 640
    assert set(half.half._loading.values()) == {"second"}


def test_a_wait_for_another_s_load_ends_by_itself(halves: Halves) -> None:
    half = halves()
    half.load(request("first"))
    second = request("second")
    half.looked_up(second)
    assert half.half.matched(second, 0) is None
    half.clock.advance(ENGINE_SHARED_WAIT_S - 0.1)
    assert half.half.matched(second, 0) is None
    half.clock.advance(0.2)
    assert half.load(second) == 640
    half.half.forget("second")
    assert set(half.half._loading.values()) == {"first"}, "the first one's load goes on"


# Failures.


def test_a_load_that_failed_is_tried_once_more_as_far_as_it_went(halves: Halves) -> None:
    half = halves()
    asked = request()
    half.load(asked)
    half.half.ended({"r"}, {"r": 3 * PAGE})
    assert half.load(asked) == 3 * PAGE
    assert [order.stop for order in half.half.loads()] == [640, 3 * PAGE]
    half.half.ended({"r"}, {"r": 3 * PAGE})
    assert half.answer(asked) == 0
    half.half.ended({"unknown"}, {})


@pytest.mark.parametrize("known", [{}, {"r": 0}])
def test_a_load_of_which_nothing_came_is_not_tried_again(halves: Halves, known: dict[str, int]) -> None:
    half = halves()
    asked = request()
    half.load(asked)
    half.half.ended({"r"}, known)
    assert half.answer(asked) == 0


def test_what_could_not_be_loaded_is_stored_anew(halves: Halves) -> None:
    """Whatever is wrong with the stored pages: those that are computed replace them."""
    half = halves()
    asked = request()
    half.load(asked)
    assert half.step(asked, 0) == []
    half.half.ended({"r"}, {"r": 3 * PAGE})
    asked.num_computed_tokens = 3 * PAGE
    (order,) = half.step(asked, 7 * PAGE)
    assert (order.first_page, order.hashes) == (3, HASHES[3:])


def test_a_load_that_cannot_be_ordered_is_one_that_fails(halves: Halves) -> None:
    half = halves()
    half.half.allocated(request("unknown"), BLOCKS, 640)
    pending = request("pending")
    half.hangs()
    half.half.track(pending)
    half.half.allocated(pending, BLOCKS, 640)
    orders = half.half.loads()
    assert [(order.request_id, order.hashes) for order in orders] == [("unknown", ()), ("pending", ())]
    half.goes_on()
    half.rank.worker.load(orders)
    assert half.rank.ended(2) == {"unknown": 0, "pending": 0}


# Saves.


def test_pages_are_saved_as_a_chunked_prefill_completes_them(halves: Halves) -> None:
    half = halves(stored=0)
    asked = request()
    half.looked_up(asked)
    saved: list[SaveOrder] = []
    for tokens in (100, 27, 1, 300, 12, 207):
        saved += half.step(asked, tokens)
    assert asked.num_computed_tokens == len(TOKENS)
    assert [(order.first_page, len(order.hashes)) for order in saved] == [(0, 1), (1, 1), (2, 4), (6, 4)]
    assert sum((order.hashes for order in saved), ()) == HASHES
    assert all(order.blocks == BLOCKS for order in saved)


def test_what_is_stored_already_is_not_saved(halves: Halves) -> None:
    half = halves(stored=6)
    asked = request()
    half.looked_up(asked)
    (order,) = half.step(asked, len(TOKENS))
    assert (order.first_page, order.hashes) == (6, HASHES[6:])


def test_nothing_is_ordered_before_the_look_up_answers_and_then_all(halves: Halves) -> None:
    half = halves(stored=0)
    half.hangs()
    asked = request()
    half.half.track(asked)
    assert half.step(asked, len(TOKENS)) == []
    half.goes_on()
    half.looked_up(asked)
    asked.append_output_token_ids(1)
    (order,) = half.step(asked, 1)
    assert order.hashes == HASHES


def test_a_step_without_blocks_is_made_up_for(halves: Halves) -> None:
    half = halves(stored=0)
    asked = request()
    half.looked_up(asked)
    assert half.half.saves({"r": len(TOKENS), "unknown": 5}, lambda name: None) == []
    assert len(half.step(asked, len(TOKENS))) == 1


def test_a_preempted_request_saves_nothing_twice(halves: Halves) -> None:
    """It computes its prompt again, and goes on where it was."""
    half = halves(stored=0)
    asked = request()
    half.looked_up(asked)
    assert [order.first_page for order in half.step(asked, 300)] == [0]
    asked.num_computed_tokens = 0
    assert half.answer(asked) == 0
    assert half.step(asked, 200) == []
    (order,) = half.step(asked, len(TOKENS) - 200)
    assert (order.first_page, order.hashes) == (4, HASHES[4:])


def test_a_preempted_request_may_load_what_was_there_before(halves: Halves) -> None:
    half = halves(stored=4)
    asked = request()
    assert half.load(asked) == 4 * PAGE
    half.half.allocated(asked, BLOCKS, 0)
    asked.num_computed_tokens = 4 * PAGE
    half.step(asked, 300)
    asked.num_computed_tokens = 0
    assert half.load(asked, 2 * PAGE) == 2 * PAGE
    assert [order.start for order in half.half.loads()] == [0, 2 * PAGE]


def decode(half: Half, asked: Request, tokens: int) -> list[SaveOrder]:
    """One token a step, each known only when its step has run."""
    saved: list[SaveOrder] = []
    for token in range(tokens):
        asked.append_output_token_ids(token % 50)
        saved += half.step(asked, 1)
    return saved


def test_generated_tokens_are_not_saved_by_default(halves: Halves) -> None:
    half = halves(stored=0)
    asked = request()
    half.looked_up(asked)
    assert len(half.step(asked, len(TOKENS))) == 1
    assert decode(half, asked, 200) == []


def test_generated_tokens_go_on_with_the_chain_on_request(halves: Halves) -> None:
    half = halves(stored=0, store_decode=True)
    asked = request()
    half.looked_up(asked)
    (prompt,) = half.step(asked, len(TOKENS))
    saved = decode(half, asked, 200)
    whole = tuple(page_hashes(list(asked.all_token_ids), PAGE))
    assert len(whole) == 13
    assert prompt.hashes + sum((order.hashes for order in saved), ()) == whole[: 10 + len(saved)]
    assert [order.first_page for order in saved] == list(range(10, 10 + len(saved)))
    assert len(saved) in (2, 3)


def test_a_follow_up_prompt_finds_what_an_answer_stored(halves: Halves) -> None:
    half = halves(stored=0, store_decode=True)
    asked = request()
    half.looked_up(asked)
    half.step(asked, len(TOKENS))
    saved = decode(half, asked, 200)
    follow_up = request("next", list(asked.all_token_ids))
    assert saved[-1].hashes[-1] in hashes_of(follow_up, np.asarray(follow_up.prompt_token_ids), PAGE)


def test_tokens_that_are_not_known_yet_are_never_named(halves: Halves) -> None:
    """Asynchronous scheduling and speculation count tokens as computed before anybody knows them."""
    half = halves(stored=0, store_decode=True)
    asked = request(tokens=TOKENS[: 2 * PAGE])
    half.looked_up(asked)
    half.step(asked, 2 * PAGE)
    asked.append_output_token_ids(list(range(PAGE - 1)))  # one short of a page
    asked.num_computed_tokens = len(asked.all_token_ids) - 1
    for ahead in range(1, 2 * PAGE):
        assert half.half.saves({"r": ahead}, lambda name: BLOCKS) == []
    asked.append_output_token_ids([7, 8])
    (order,) = half.half.saves({"r": 2 * PAGE}, lambda name: BLOCKS)
    assert order.hashes == tuple(page_hashes(list(asked.all_token_ids), PAGE)[2:])


def test_a_short_prompt_stores_its_answer_only_with_whole_pages(halves: Halves) -> None:
    half = halves(stored=0, store_decode=True)
    asked = request(tokens=TOKENS[:40])
    half.looked_up(asked)
    assert half.step(asked, 40) == []
    assert decode(half, asked, 30) == []


# Ends.


def test_nothing_is_left_of_requests_that_are_over(halves: Halves) -> None:
    half = halves()
    names = ["loads", "waits", "fails", "runs"]
    asked = {name: request(name) for name in names}
    half.load(asked["loads"])
    half.looked_up(asked["waits"])
    assert half.half.matched(asked["waits"], 0) is None
    half.half.ended({"fails"}, {"fails": 64})
    half.looked_up(asked["runs"])
    half.step(asked["runs"], len(TOKENS))
    half.half.loads()
    assert not half.is_empty()
    for name in names:
        half.half.forget(name)
        half.half.forget(name)
    assert half.is_empty()


def test_a_look_up_that_nobody_waits_for_is_not_made(halves: Halves) -> None:
    half = halves()
    half.hangs(ignores_deadline=True)
    calls = half.asked
    for number in range(4):
        half.half.track(request(str(number), [number, *TOKENS]))
    until(lambda: half.asked == calls + 4)
    for number in range(50):
        half.half.track(request(f"over {number}", [number + 9, *TOKENS]))
        half.half.forget(f"over {number}")
    half.goes_on()
    half.looked_up(request("after", [99, *TOKENS]))
    assert half.asked == calls + 5


def test_a_reset_asks_storage_again(halves: Halves) -> None:
    half = halves(stored=4)
    asked, loading = request("asked"), request("loading", [0, *TOKENS])
    assert half.answer(asked) == 4 * PAGE
    half.looked_up(loading)
    half.rank.worker.save([SaveOrder("w", HASHES, 0, (list(range(1, 11)),))])
    half.rank.saved()
    half.clock.advance(0.1)
    assert half.half.matched(asked, 0) == 4 * PAGE
    half.half.forget_lookups()
    assert half.answer(asked) == 10 * PAGE


def test_closing_ends_while_a_look_up_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_store.engines.vllm_threads.CLOSE_JOIN_S", 0.1)
    half = Half()
    hold = half.hangs(ignores_deadline=True)
    for number in range(6):
        half.half.track(request(str(number), [number, *TOKENS]))
    assert hold.entered.wait(20)
    half.half.close()
    assert half.is_empty()
    hold.until.set()
    half.rank.worker.close()
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("hicache-")])


# Who shares with whom.


def adapter(folder: Path, content: bytes) -> LoRARequest:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (folder / "adapter_model.safetensors").write_bytes(content)
    return LoRARequest("adapter", 1, str(folder))


def image(digest: str | None, at: int = 3, identifier: str = "") -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=at, length=5), digest)


def test_what_makes_kv_another_makes_other_names(tmp_path: Path) -> None:
    one, other = (adapter(tmp_path / name, name.encode() * 100) for name in ("one", "other"))
    same = adapter(tmp_path / "same", b"one" * 100)
    named = [
        request(),
        request(tokens=[9, *TOKENS]),
        request(cache_salt="a"),
        request(cache_salt="b"),
        request(lora_request=one),
        request(lora_request=other),
        request(lora_request=one, cache_salt="a"),
        request(mm_features=[image("x")]),
        request(mm_features=[image("y")]),
        request(mm_features=[image("x", at=4)]),
        request(mm_features=[image("x"), image("y", at=20)]),
        request(mm_features=[image(None, identifier="z")]),
    ]
    names = [hashes_of(asked, np.asarray(list(asked.all_token_ids)), PAGE) for asked in named]
    assert all(len(found) == 10 for found in names)
    firsts = [found[0] for found in names]
    assert len(set(firsts)) == len(firsts)
    assert names[0] == HASHES
    again = request(lora_request=same)
    assert hashes_of(again, np.asarray(TOKENS), PAGE) == names[4], "the same weights under the same name"


def test_an_adapter_that_cannot_be_read_is_neither_loaded_nor_stored(halves: Halves, tmp_path: Path) -> None:
    half = halves()
    asked = request(lora_request=LoRARequest("gone", 1, str(tmp_path / "gone")))
    assert half.answer(asked) == 0
    assert half.step(asked, len(TOKENS)) == []


def test_prompts_of_embeddings_are_not_touched(halves: Halves) -> None:
    half = halves()
    asked = Request("r", None, SamplingParams(max_tokens=5), None, prompt_embeds=torch.zeros(640, 8))
    assert half.half.track(asked) is None
    assert half.half.matched(asked, 0) == 0
    assert half.step(asked, 640) == []
    assert half.is_empty()
