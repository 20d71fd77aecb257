"""Slots of pages and the copies to and from blocks, against an account of every single token."""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_parts import WAIT_S, Model, bytes_of, everything, token_rows_of

from hicache_store.clock import Deadline
from hicache_store.engines.vllm_staging import NULL_BLOCK, Slots, Staging
from hicache_store.errors import ConfigurationError

SLOTS = 8


@dataclass(frozen=True)
class Blocks:
    """How an engine cuts tokens into blocks: ``split`` kernel blocks make one block of its tables."""

    kernel: int
    split: int

    @property
    def tokens(self) -> int:
        return self.kernel * self.split


@dataclass(frozen=True)
class Case:
    """``pages`` pages from ``first`` on of a sequence, of which tokens ``start`` to ``stop`` move."""

    page: int
    blocks: Blocks
    other: Blocks
    first: int
    pages: int
    start: int
    stop: int
    model: Model
    groups: tuple[int, ...]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page = draw(st.sampled_from([1, 2, 4, 6, 16, 48, 64]))
    one, other = (
        Blocks(draw(st.sampled_from([1, 2, 3, 4, 8, 16, 32])), draw(st.sampled_from([1, 2, 3])))
        for _ in range(2)
    )
    first, pages = draw(st.integers(0, 3)), draw(st.integers(1, 5))
    unit = math.gcd(page, other.kernel)
    bounds = st.integers(0, page // unit * pages)
    low, high = sorted((draw(bounds), draw(bounds)))
    start = first * page + min(low * unit, page - unit)  # a load begins in its first page
    stop = first * page + max(high * unit, start - first * page)
    widths = draw(st.sampled_from([(4, 4), (8, 2), (6,)]))
    model = Model(
        layers=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)) if len(widths) == 2 else 1,
        widths=widths,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])),
    )
    groups = tuple(draw(st.integers(0, 1)) for _ in range(model.layers))
    seed = draw(st.integers(0, 2**32))
    return Case(page, one, other, first, pages, start, stop, model, groups, seed)


class Engine:
    """Blocks of one engine and its staging memory, all of random content."""

    def __init__(self, case: Case, blocks: Blocks) -> None:
        draw = np.random.default_rng(case.seed)
        pool = case.model.pages(case.page).pool
        self.caches = case.model.caches(
            2 * case.page * 8 // blocks.tokens + 8, blocks.tokens, split=blocks.split, groups=case.groups
        )
        self.staging = Staging(pool, pool.page_box, self.caches, SLOTS * pool.payload_bytes(pool.page_box))
        self.staging.buffer[:] = draw.integers(0, 256, self.staging.buffer.size, np.uint8)
        count = self.caches[0].parts[0].shape[0] // blocks.split
        # Two groups never share a block.
        order = [int(block) for block in 1 + draw.permutation(count - 1)]
        needed = -(-(case.first + case.pages) * case.page // blocks.tokens)
        self.tables = (order[:needed], order[needed : 2 * needed])
        self.slots = [int(slot) for slot in draw.permutation(SLOTS)[: case.pages]]

    def forget_some(self, seed: int) -> None:
        """Put vLLM's null block where a window has passed."""
        draw = np.random.default_rng(seed)
        for table in self.tables:
            for index in range(len(table)):
                if draw.random() < 0.3:
                    table[index] = NULL_BLOCK

    def kept(self, token: int) -> bool:
        """Whether every layer has a block for this token."""
        return all(
            self.tables[cache.described.group][token // (cache.block_tokens * cache.split)] != NULL_BLOCK
            for cache in self.caches
        )


def rows_of(case: Case, memory: np.ndarray, slot: int, token: int) -> bytes:
    """A token's rows in a slot: heads over layers over K and V over tokens, as stored objects have them."""
    width = case.model.torch_dtype.itemsize
    found, block = b"", case.page * sum(case.model.widths) * width
    slot_bytes = block * case.model.heads * case.model.layers
    for index in range(case.model.heads * case.model.layers):
        at = slot * slot_bytes + index * block
        for part in case.model.widths:
            row = at + token * part * width
            found += memory[row : row + part * width].tobytes()
            at += case.page * part * width
    return found


@given(cases())
@settings(max_examples=100)
def test_pages_hold_what_blocks_held(case: Case) -> None:
    engine = Engine(case, case.blocks)
    before = everything(engine.caches)
    memory = engine.staging.buffer.copy()
    engine.staging.finish(engine.staging.gather(engine.slots, case.first * case.page, engine.tables))
    assert everything(engine.caches) == before
    for index, slot in enumerate(engine.slots):
        for token in range(case.page):
            place = (case.first + index) * case.page + token
            expected = token_rows_of(engine.caches, engine.tables, place)
            assert rows_of(case, engine.staging.buffer, slot, token) == expected
    size = engine.staging.page_bytes
    for slot in set(range(SLOTS)) - set(engine.slots):
        span = slice(slot * size, (slot + 1) * size)
        assert np.array_equal(engine.staging.buffer[span], memory[span])


@given(cases())
@settings(max_examples=100)
def test_pages_go_to_the_blocks_of_another_engine(case: Case) -> None:
    """Other blocks, other split, from any token to any: what is not asked for stays as it was."""
    writer, reader = Engine(case, case.blocks), Engine(case, case.other)
    writer.staging.gather(writer.slots, case.first * case.page, writer.tables)
    size = writer.staging.page_bytes
    for source, target in zip(writer.slots, reader.slots, strict=True):
        reader.staging.buffer[target * size : (target + 1) * size] = writer.staging.buffer[
            source * size : (source + 1) * size
        ]
    memory = reader.staging.buffer.copy()
    end = (case.first + case.pages) * case.page
    before = [token_rows_of(reader.caches, reader.tables, token) for token in range(end)]
    outside = untouched(reader)
    reader.staging.scatter(reader.slots, case.start, case.stop, reader.tables, reader.staging.mark())
    assert np.array_equal(reader.staging.buffer, memory)
    for token in range(end):
        found = token_rows_of(reader.caches, reader.tables, token)
        is_asked = case.start <= token < case.stop
        assert found == (token_rows_of(writer.caches, writer.tables, token) if is_asked else before[token])
    assert untouched(reader) == outside


def untouched(engine: Engine) -> list[bytes]:
    """Blocks that belong to no table, the null block among them."""
    found = []
    for cache in engine.caches:
        used = set(engine.tables[cache.described.group])
        for block in range(cache.parts[0].shape[0]):
            if block // cache.split not in used:
                found.extend(bytes_of(part[block]) for part in cache.parts)
    return found


@given(cases())
@settings(max_examples=60)
def test_null_blocks_are_neither_read_nor_written(case: Case) -> None:
    engine = Engine(case, case.other)
    engine.forget_some(case.seed)
    outside = untouched(engine)
    end = (case.first + case.pages) * case.page
    before = [token_rows_of(engine.caches, engine.tables, token) for token in range(end)]
    engine.staging.scatter(engine.slots, case.start, case.stop, engine.tables, None)
    assert untouched(engine) == outside
    for token in range(case.start, case.stop):
        index, inside = divmod(token - case.first * case.page, case.page)
        if engine.kept(token):
            expected = rows_of(case, engine.staging.buffer, engine.slots[index], inside)
            assert token_rows_of(engine.caches, engine.tables, token) == expected
    for token in [*range(case.start), *range(case.stop, end)]:
        assert token_rows_of(engine.caches, engine.tables, token) == before[token]
    memory = engine.staging.buffer.copy()
    engine.staging.gather(engine.slots, case.first * case.page, engine.tables)
    for index, slot in enumerate(engine.slots):
        for inside in range(case.page):
            token = (case.first + index) * case.page + inside
            if engine.kept(token):
                expected = token_rows_of(engine.caches, engine.tables, token)
                assert rows_of(case, engine.staging.buffer, slot, inside) == expected
            elif all(engine.tables[group][token // case.other.tokens] == 0 for group in set(case.groups)):
                assert rows_of(case, engine.staging.buffer, slot, inside) == rows_of(
                    case, memory, slot, inside
                )


def test_a_budget_below_two_pages_is_refused_with_what_is_needed() -> None:
    model = Model()
    pool = model.pages(16).pool
    size = pool.payload_bytes(pool.page_box)
    with pytest.raises(ConfigurationError, match=rf"staging_bytes={2 * size - 1} holds 1 pages .*{2 * size}"):
        Staging(pool, pool.page_box, model.caches(4, 16), 2 * size - 1)
    staging = Staging(pool, pool.page_box, model.caches(4, 16), 2 * size)
    assert (staging.inbound.take(9), staging.outbound.take(9)) == ([0], [1])


def test_slots_are_taken_once_and_never_waited_for_by_take() -> None:
    slots = Slots(range(3))
    first = slots.take(2)
    assert sorted(first + slots.take(5)) == [0, 1, 2]
    assert slots.take(1) == []
    slots.give_back(first)
    assert sorted(slots.take(9)) == sorted(first)


def test_a_wait_for_slots_ends_at_its_deadline_or_with_the_first_slot() -> None:
    slots = Slots(range(2))
    assert len(slots.wait(5, Deadline.after(WAIT_S))) == 2
    assert slots.wait(1, Deadline.after(0.0)) == []
    assert slots.wait(1, Deadline.after(0.05)) == []
    waiting = threading.Thread(target=lambda: got.extend(slots.wait(2, Deadline.after(WAIT_S))))
    got: list[int] = []
    waiting.start()
    slots.give_back([1])
    waiting.join(WAIT_S)
    assert got == [1]


def test_slots_that_ended_a_wait_are_not_taken_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that was woken and finds nothing counts as late."""
    slots, theirs = Slots(range(2)), []

    def take_beside_a_rival(count: int) -> list[int]:
        rival = threading.Thread(target=lambda: theirs.extend(Slots.take(slots, 9)))
        rival.start()
        rival.join(0.05)
        return Slots.take(slots, count)

    monkeypatch.setattr(slots, "take", take_beside_a_rival)
    assert slots.wait(2, Deadline.after(WAIT_S)) == [0, 1]
    assert theirs == []


def test_many_threads_share_slots_without_loss() -> None:
    slots, held, lock = Slots(range(2)), set(), threading.Lock()
    wrong: list[str] = []

    def work() -> None:
        for _ in range(150):
            mine = slots.wait(2, Deadline.after(WAIT_S))
            with lock:
                if not mine or held & set(mine):
                    wrong.append(f"{mine} beside {held}")
                held.update(mine)
            with lock:
                held.difference_update(mine)
            slots.give_back(mine)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert sorted(slots.take(9)) == [0, 1]
