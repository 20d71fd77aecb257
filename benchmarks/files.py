"""Local files: store backup and restore against bare pwritev and preadv with the same threads."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.measure import Case, Row, take_turns
from benchmarks.setting import attach, hashes, model, rank_side
from hicache_store import Rank
from hicache_store.clock import Deadline

MIB = 1 << 20


def on_threads(threads: int, items: int, step: Callable[[int], None]) -> None:
    """``step`` for every index, from ``threads`` threads that share a cursor."""
    cursor = count()

    def work() -> None:
        while (index := next(cursor)) < items:
            step(index)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


class BareFiles:
    """What the operating system gives: open, one vectored call, close."""

    def __init__(self, root: Path, pages: int, page_bytes: int, threads: int) -> None:
        self.root, self.pages, self.page_bytes, self.threads = root, pages, page_bytes, threads
        self.memory = np.random.default_rng(1).integers(0, 256, pages * page_bytes, dtype=np.uint8)
        self.views = [memoryview(self.memory)[i * page_bytes : (i + 1) * page_bytes] for i in range(pages)]
        root.mkdir()

    def _path(self, index: int) -> str:
        return f"{self.root}/{index:04d}"

    def clear(self) -> None:
        for index in range(self.pages):
            Path(self._path(index)).unlink(missing_ok=True)

    def write(self) -> None:
        def step(index: int) -> None:
            fd = os.open(self._path(index), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            assert os.pwritev(fd, [self.views[index]], 0) == self.page_bytes
            os.close(fd)

        on_threads(self.threads, self.pages, step)

    def read(self) -> None:
        def step(index: int) -> None:
            fd = os.open(self._path(index), os.O_RDONLY)
            assert os.preadv(fd, [self.views[index]], 0) == self.page_bytes
            os.close(fd)

        on_threads(self.threads, self.pages, step)


def drop_cache(root: Path) -> None:
    """Forget the page cache of every file below ``root``."""
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def run(base: str, *, threads: int, pages: int, rounds: int, cold: bool) -> list[Row]:
    """Get and put of ``pages`` pages of 1 MiB, contiguous layout."""
    root = Path(tempfile.mkdtemp(prefix="hicache-bench-", dir=base))
    try:
        return _run(root, threads=threads, pages=pages, rounds=rounds, cold=cold)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _run(root: Path, *, threads: int, pages: int, rounds: int, cold: bool) -> list[Row]:
    made = model(layers=16, heads=2)
    total = pages * MIB
    bare = BareFiles(root / "bare", pages, MIB, threads)
    bare.write()
    side = rank_side(made, "tp1", Rank(), "canonical", pages, seed=2)
    assert side.bytes_per_page == MIB
    url = f"file://{root}/store?threads={threads}&quota={4 * total + (1 << 30)}B"
    kept = hashes(pages, "kept")
    rows: list[Row] = []
    with attach(url, made, side) as checked, attach(url, made, side, verify=False) as unchecked:
        assert checked.backup(kept, side.placements).pages == pages
        fresh = count()
        objects = root / "store" / "objects"
        before_puts = {path for path in objects.rglob("*") if path.is_file()}

        def put() -> None:
            assert checked.backup(hashes(pages, f"put-{next(fresh)}"), side.placements).pages == pages

        def clear_puts() -> None:
            doomed = [
                entry.key for entry in checked.connector.scan("v1/") if entry.key.split("/")[3] not in keep
            ]
            checked.connector.delete(doomed, Deadline.after(60))

        keep = set(kept)
        assert before_puts

        def get(store_is_checked: bool) -> Callable[[], None]:
            store = checked if store_is_checked else unchecked

            def work() -> None:
                assert store.restore(kept, side.placements).pages == pages

            return work

        cool: Callable[[], None] = (lambda: drop_cache(root)) if cold else (lambda: None)
        cases = {
            "bare preadv": Case(bare.read, total, before=cool),
            "get, verification off": Case(get(False), total, before=cool),
            "get, verified": Case(get(True), total, before=cool),
        }
        if not cold:
            bare2 = BareFiles(root / "bare-put", pages, MIB, threads)
            cases["bare pwritev"] = Case(bare2.write, total, after=bare2.clear)
            cases["put"] = Case(put, total, after=clear_puts)
        best = take_turns(cases, rounds)
    read = best["bare preadv"]
    rows.append(Row("bare preadv", read))
    for name, target in (
        ("get, verification off", "0.95" if cold else "0.90"),
        ("get, verified", "0.95" if cold else "0.80"),
    ):
        rows.append(Row(name, best[name], read.wall_s / best[name].wall_s, "bare preadv", target))
    if not cold:
        rows.append(Row("bare pwritev, fresh files", best["bare pwritev"]))
        rows.append(
            Row("put", best["put"], best["bare pwritev"].wall_s / best["put"].wall_s, "bare pwritev", "0.80")
        )
        extra = best["get, verified"].cpu_s_per_gb - best["get, verification off"].cpu_s_per_gb
        print(f"\nverification costs {extra:.3f} CPU-s/GB (target 0.05)")
    return rows
