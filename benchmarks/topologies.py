"""Reading what another topology wrote, against reading what the same topology wrote."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable

from benchmarks.measure import Case, Row, take_turns
from benchmarks.setting import RankSide, attach, hashes, model, rank_side
from hicache_store import ParallelSpec, Store
from hicache_store.layout.parallel import Rank

PAIRS = (
    ("tp2pp1", "tp2pp1", "same topology"),
    ("tp4pp2", "tp2pp1", "whole objects of a finer writer"),
    ("tp1pp1", "tp2pp1", "half the heads of each object: range reads"),
    ("tp1pp2", "tp2pp1", "half the heads of two stages: range reads"),
)
LAYOUTS = ("layer_first", "page_first")


def run(base: str, *, threads: int, pages: int, rounds: int) -> list[Row]:
    """60 layers, 8 KV heads; a TP2/PP1 rank restores pages of 7.9 MB each way."""
    rows: list[Row] = []
    for layout in LAYOUTS:
        rows.extend(_layout(base, layout, threads=threads, pages=pages, rounds=rounds))
    return rows


def _layout(base: str, layout: str, *, threads: int, pages: int, rounds: int) -> list[Row]:
    root = tempfile.mkdtemp(prefix="hicache-bench-", dir=base)
    url = f"file://{root}/store?threads={threads}&quota=16GiB"
    stores: list[Store] = []
    try:
        cases: dict[str, Case] = {}
        for writer, reader, words in PAIRS:
            made = model(60, 8, tenant=f"{writer}-{layout}")
            names = hashes(pages, writer)
            spec = ParallelSpec.parse(writer)
            for rank in spec.ranks():
                side = rank_side(made, writer, rank, layout, pages, seed=rank.tp)
                with attach(url, made, side) as store:
                    assert store.backup(names, side.placements, timeout_s=120).pages == pages
            side = rank_side(made, reader, Rank(tp=1), layout, pages, seed=9)
            store = attach(url, made, side)
            stores.append(store)
            cases[f"{writer} -> {reader} ({words})"] = Case(
                _get(store, names, side), pages * side.bytes_per_page
            )
        best = take_turns(cases, rounds)
    finally:
        for store in stores:
            store.close()
        shutil.rmtree(root, ignore_errors=True)
    first = next(iter(best.values()))
    return [
        Row(
            f"{layout}: {name}",
            timing,
            timing.wall_s / first.wall_s,
            "same topology's time",
            "1.15" if "whole" in name else "",
        )
        for name, timing in best.items()
    ]


def _get(store: Store, names: list[str], side: RankSide) -> Callable[[], None]:
    def work() -> None:
        assert store.restore(names, side.placements).pages == len(names)

    return work
