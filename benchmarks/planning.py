"""What planning, naming and look-up cost an object, without any storage underneath."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence

from benchmarks.measure import Case, Row, take_turns
from benchmarks.setting import attach, hashes, model, rank_side
from hicache_store import Rank
from hicache_store.clock import Deadline
from hicache_store.connectors.base import ABSENT, OK, Capabilities, Entry, Outcome, Read, Touch, Write


class NullConnector:
    """Says yes to every read and write at once and keeps nothing: what is left is the store's own time."""

    def __init__(self) -> None:
        self.present = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("null", "bounded", True, True, 64 * 1024, 1)

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        return [None] * len(keys)

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        return [ABSENT if read.key.startswith("meta/") else OK for read in reads]

    def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        for write in writes:
            if write.key.startswith("meta/"):
                self.marker = write.source.buffers()[0]
        return [OK] * len(writes)

    def delete(
        self, keys: Sequence[str], deadline: Deadline, versions: Sequence[str | None] | None = None
    ) -> list[Outcome]:
        return [OK] * len(keys)

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        return [OK] * len(touches)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return iter(())

    def close(self) -> None:
        return None


def run(base: str, *, rounds: int) -> list[Row]:
    """Planning an object of a restore, and ``contains`` over 10,000 pages of local files."""
    pages = 512
    made = model(layers=16, heads=2, tenant="planning")
    side = rank_side(made, "tp1", Rank(), "canonical", pages, seed=5)
    names = hashes(pages, "planned")
    with attach(NullConnector(), made, side) as store:

        def plan() -> None:
            for binding in store._bindings.values():
                binding.touched._entries.clear()
            assert store.restore(names, side.placements).pages == pages

        best = take_turns({"plan": Case(plan, pages)}, rounds)
    rows = [Row("restore, planning and naming", best["plan"], target="5 us", unit="object")]
    return rows + _contains(base, rounds)


def _contains(base: str, rounds: int) -> list[Row]:
    pages = 10_000
    made = model(layers=1, heads=1, tenant="contains")
    side = rank_side(made, "tp1", Rank(), "canonical", 1, seed=6)
    names = hashes(pages, "looked-up")
    root = tempfile.mkdtemp(prefix="hicache-bench-", dir=base)
    try:
        with attach(f"file://{root}/store?quota=4GiB", made, side) as store:
            assert store.backup(names, side.placements * pages, timeout_s=300).pages == pages

            def look_up() -> None:
                assert store.contains(names).pages == pages

            best = take_turns({"contains": Case(look_up, pages)}, rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return [Row("contains, 10,000 pages of files, one call", best["contains"], unit="page")]
