"""``python -m benchmarks``: every figure of the file path in one run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile

from benchmarks import copies, files, planning, topologies
from benchmarks.measure import Row, print_table


def main() -> None:
    """Run the chosen sections and print their tables, or one JSON document."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument(
        "--only", choices=("files", "cold", "copies", "planning", "topologies"), action="append"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tmpfs", default="/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    sections = given.only or ["copies", "planning", "files", "topologies", "cold"]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{given.threads} threads, best of {given.rounds} rounds taken in turn"
    )
    results: dict[str, list[Row]] = {}

    def show(title: str, rows: list[Row]) -> None:
        print_table(title, rows)
        results[title] = rows

    size = {"threads": given.threads, "pages": given.pages, "rounds": given.rounds}
    if "copies" in sections:
        show("layout translation, one thread, memory to memory", copies.run(rounds=given.rounds))
    if "planning" in sections:
        show("planning and look-up", planning.run(given.tmpfs, rounds=given.rounds))
    if "files" in sections:
        show(f"files of 1 MiB on {given.tmpfs}", files.run(given.tmpfs, cold=False, **size))
        show(f"files of 1 MiB on {given.disk}, page cache warm", files.run(given.disk, cold=False, **size))
    if "topologies" in sections:
        rows = topologies.run(
            given.tmpfs, threads=given.threads, pages=max(4, given.pages // 8), rounds=given.rounds
        )
        show(f"cross topology, files on {given.tmpfs}", rows)
    if "cold" in sections:
        show(f"files of 1 MiB on {given.disk}, page cache dropped", files.run(given.disk, cold=True, **size))
    if given.json:
        with open(given.json, "w", encoding="utf-8") as out:
            json.dump(
                {title: [row.record() for row in rows] for title, rows in results.items()}, out, indent=1
            )


if __name__ == "__main__":
    main()
