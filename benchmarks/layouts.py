"""Store backup and restore through every host layout, against bare files of the same bytes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

from benchmarks.files import MIB, BareFiles
from benchmarks.measure import Case, Row, take_turns
from benchmarks.setting import RankSide, attach, hashes, model, rank_side
from hicache_store import Rank, Store
from hicache_store.clock import Deadline

LAYOUTS = ("canonical", "layer_first", "page_first", "page_first_direct", "page_head", "page_unified")


def run(base: str, *, threads: int, pages: int, rounds: int) -> list[Row]:
    """Pages of 1 MiB: 2 heads x 16 layers."""
    root = Path(tempfile.mkdtemp(prefix="hicache-bench-", dir=base))
    stores: list[Store] = []
    total = pages * MIB
    made = model(layers=16, heads=2, tenant="layouts")
    url = f"file://{root}/store?threads={threads}&quota={16 * total + (1 << 30)}B"
    serial = count()
    try:
        bare_get = BareFiles(root / "bare-get", pages, MIB, threads)
        bare_get.write()
        bare_put = BareFiles(root / "bare-put", pages, MIB, threads)
        cases = {
            "bare preadv": Case(bare_get.read, total),
            "bare pwritev": Case(bare_put.write, total, after=bare_put.clear),
        }
        kept = hashes(pages, "kept")
        for name in LAYOUTS:
            side = rank_side(
                made, "tp1", Rank(), name, pages, seed=7, head_group=1 if name == "page_unified" else None
            )
            store = attach(url, made, side)
            stores.append(store)
            assert store.backup(kept, side.placements).pages == pages
            cases[f"restore {name}"] = Case(_get(store, kept, side), total)
            cases[f"backup {name}"] = Case(_put(store, serial, side), total, after=_clear(store, kept))
        best = take_turns(cases, rounds)
    finally:
        for store in stores:
            store.close()
        shutil.rmtree(root, ignore_errors=True)
    rows: list[Row] = []
    for name, timing in best.items():
        if name.startswith("bare"):
            rows.append(Row(name, timing))
            continue
        limit = "bare preadv" if name.startswith("restore") else "bare pwritev"
        rows.append(Row(name, timing, best[limit].wall_s / timing.wall_s, limit))
    return rows


def _get(store: Store, names: list[str], side: RankSide) -> Callable[[], None]:
    def work() -> None:
        assert store.restore(names, side.placements).pages == len(names)

    return work


def _put(store: Store, serial: count[int], side: RankSide) -> Callable[[], None]:
    def work() -> None:
        names = hashes(len(side.placements), f"put-{next(serial)}")
        assert store.backup(names, side.placements).pages == len(names)

    return work


def _clear(store: Store, kept: list[str]) -> Callable[[], None]:
    keep = set(kept)

    def work() -> None:
        doomed = [e.key for e in store.connector.scan("v1/") if e.key.split("/")[3] not in keep]
        store.connector.delete(doomed, Deadline.after(60))

    return work
