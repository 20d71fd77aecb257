"""``python -m benchmarks``: every figure in one run, as ratios against limits of the same run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator

from benchmarks import copies, files, layouts, planning, redis, s3, topologies
from benchmarks.measure import Row, print_table

Tables = Iterator[tuple[str, list[Row]]]


def _copies(given: argparse.Namespace) -> Tables:
    yield "layout translation, one thread, memory to memory", copies.run(rounds=given.rounds)


def _planning(given: argparse.Namespace) -> Tables:
    yield "planning and look-up", planning.run(given.tmpfs, rounds=given.rounds)


def _files(given: argparse.Namespace) -> Tables:
    size = {"threads": given.threads, "pages": given.pages, "rounds": given.rounds}
    yield f"files of 1 MiB on {given.tmpfs}", files.run(given.tmpfs, cold=False, **size)
    yield f"files of 1 MiB on {given.disk}, page cache warm", files.run(given.disk, cold=False, **size)


def _cold(given: argparse.Namespace) -> Tables:
    size = {"threads": given.threads, "pages": given.pages, "rounds": given.rounds}
    yield f"files of 1 MiB on {given.disk}, page cache dropped", files.run(given.disk, cold=True, **size)


def _layouts(given: argparse.Namespace) -> Tables:
    size = {"threads": given.threads, "pages": given.pages, "rounds": given.rounds}
    yield f"host layouts, files of 1 MiB on {given.tmpfs}", layouts.run(given.tmpfs, **size)


def _topologies(given: argparse.Namespace) -> Tables:
    pages = max(4, given.pages // 8)
    rows = topologies.run(given.tmpfs, threads=given.threads, pages=pages, rounds=given.rounds)
    yield f"cross topology, files on {given.tmpfs}", rows


def _redis(given: argparse.Namespace) -> Tables:
    yield from redis.run(threads=given.threads, pages=given.pages, rounds=given.rounds)


def _s3(given: argparse.Namespace) -> Tables:
    yield from s3.run(threads=given.threads, pages=given.pages, rounds=given.rounds)


SECTIONS: dict[str, Callable[[argparse.Namespace], Tables]] = {
    "copies": _copies,
    "planning": _planning,
    "files": _files,
    "layouts": _layouts,
    "topologies": _topologies,
    "cold": _cold,
    "redis": _redis,
    "s3": _s3,
}


def main() -> None:
    """Run the chosen sections, print their tables and, on request, keep them as JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--only", choices=tuple(SECTIONS), action="append", help="may be given several times")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pages", type=int, default=128, help="pages of one batch")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tmpfs", default="/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{given.threads} threads, best of {given.rounds} rounds taken in turn"
    )
    results: dict[str, list[dict[str, object]]] = {}
    for section in given.only or SECTIONS:
        for title, rows in SECTIONS[section](given):
            print_table(title, rows)
            results[title] = [row.record() for row in rows]
    if given.json:
        with open(given.json, "w", encoding="utf-8") as out:
            json.dump(results, out, indent=1)


if __name__ == "__main__":
    main()
