"""Layout translation on the CPU against memcpy of the same bytes, one thread.

The object side is one staging block that is used again and again, as in the store; the pool side are
scattered pages. The limit is memcpy of the same pages into other memory; memcpy with one side in the
block, which stays in the cache, is printed beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.measure import Case, Row, take_turns
from benchmarks.setting import PAGE, model
from hicache_store import ParallelSpec, Rank, Segment, Span, engine_layout, shard
from hicache_store.kernels.strided import pack, unpack
from hicache_store.layout.layouts import ENGINE_AXES
from hicache_store.layout.plan import CopyPlan, plan_copy

LAYERS = 30
PAGES = 16


def run(*, rounds: int) -> list[Row]:
    """Pack and unpack 16 scattered pages: objects of 2 heads x 30 layers, and of 8 x 15 (7.9 MB, about the
    most a default grid makes)."""
    rows: list[Row] = []
    for heads, layers in ((2, 30), (8, 15)):
        rows.extend(_whole_objects(heads, layers, rounds))
    rows.extend(_narrow(rounds))
    return rows


def _whole_objects(heads: int, layers: int, rounds: int) -> list[Row]:
    made = model(layers, heads)
    held = shard(made.pool, ParallelSpec(), Rank())
    assert held is not None
    size = made.pool.payload_bytes(held.box)
    block = np.ones(size, np.uint8)
    pages = np.ones(PAGES * size, np.uint8)

    def out_of_block() -> None:
        for i in range(PAGES):
            pages[i * size : (i + 1) * size] = block

    def into_block() -> None:
        for i in range(PAGES):
            block[:] = pages[i * size : (i + 1) * size]

    others = np.ones(PAGES * size, np.uint8)

    def page_to_page() -> None:
        for i in range(PAGES):
            others[i * size : (i + 1) * size] = pages[i * size : (i + 1) * size]

    cases = {
        "memcpy": Case(page_to_page, PAGES * size),
        "memcpy out of the block": Case(out_of_block, PAGES * size),
        "memcpy into the block": Case(into_block, PAGES * size),
    }
    for name in ("canonical", "layer_first", "page_first", "page_first_direct", "page_head", "page_unified"):
        assert name in ENGINE_AXES
        group = 1 if name == "page_unified" else None
        layout = engine_layout(name, made.pool, held.box, slots=PAGES, head_group=group)
        plan = plan_copy(made.pool, layout, held.box, held.box, Span(0, PAGE))
        buffers = [memoryview(np.ones(n, np.uint8)) for n in layout.buffer_bytes(made.pool.unit_bytes)]
        order = np.random.default_rng(3).permutation(PAGES).tolist()
        payload = memoryview(block)
        cases[f"pack {name}"] = Case(_loop(pack, plan, order, buffers, payload), PAGES * size)
        cases[f"unpack {name}"] = Case(_loop(unpack, plan, order, buffers, payload), PAGES * size)
    best = take_turns(cases, rounds)
    rows: list[Row] = []
    for name, timing in best.items():
        if name.startswith("memcpy"):
            rows.append(Row(f"{name}, {heads} heads", timing))
            continue
        limit = best["memcpy"]
        target = "0.60" if name.startswith("pack") else "0.80"
        rows.append(Row(f"{name}, {heads} heads", timing, limit.wall_s / timing.wall_s, "memcpy", target))
    return rows


def _narrow(rounds: int) -> list[Row]:
    """One head of an object of 8, layer_first: rows of 256 B. Reported, without a target."""
    made = model(LAYERS, 8)
    held = shard(made.pool, ParallelSpec(tp_size=8), Rank(tp=3))
    whole = shard(made.pool, ParallelSpec(), Rank())
    assert held is not None
    assert whole is not None
    size = made.pool.payload_bytes(held.box)
    layout = engine_layout("layer_first", made.pool, held.box, slots=PAGES)
    plan = plan_copy(made.pool, layout, whole.box, held.box, Span(0, PAGE))
    buffers = [memoryview(np.ones(n, np.uint8)) for n in layout.buffer_bytes(made.pool.unit_bytes)]
    payload = memoryview(np.ones(made.pool.payload_bytes(whole.box), np.uint8))
    order = np.random.default_rng(4).permutation(PAGES).tolist()
    source, pages = np.ones(size, np.uint8), np.ones(PAGES * size, np.uint8)

    def memcpy() -> None:
        for i in range(PAGES):
            pages[i * size : (i + 1) * size] = source

    best = take_turns(
        {
            "memcpy": Case(memcpy, PAGES * size),
            "unpack": Case(_loop(unpack, plan, order, buffers, payload), PAGES * size),
        },
        rounds,
    )
    ratio = best["memcpy"].wall_s / best["unpack"].wall_s
    return [Row("unpack layer_first, 1 head of 8", best["unpack"], ratio, "memcpy")]


def _loop(
    copy: Callable[[CopyPlan, Segment, list[memoryview], memoryview], None],
    plan: CopyPlan,
    order: list[int],
    buffers: list[memoryview],
    payload: memoryview,
) -> Callable[[], None]:
    segments = [Segment(slot, 0, PAGE) for slot in order]

    def work() -> None:
        for segment in segments:
            copy(plan, segment, buffers, payload)

    return work
