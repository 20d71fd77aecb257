"""Timing that survives a noisy machine: cases take turns, and each keeps its best round."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class Timing:
    """Best wall time and least CPU time of one case. ``amount`` is bytes or operations a round."""

    wall_s: float
    cpu_s: float
    amount: float

    @property
    def mb_per_s(self) -> float:
        return self.amount / self.wall_s / 1e6

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.amount / GB)

    @property
    def us_each(self) -> float:
        return self.wall_s / self.amount * 1e6


@dataclass(frozen=True)
class Case:
    """``run`` is timed; ``before`` and ``after`` are not."""

    run: Callable[[], None]
    amount: float
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None


def take_turns(cases: Mapping[str, Case], rounds: int) -> dict[str, Timing]:
    """Run every case once a round, in turn, and keep each one's best."""
    best: dict[str, Timing] = {}
    for _ in range(rounds):
        for name, case in cases.items():
            case.before()
            gc.collect()
            gc.disable()
            try:
                wall, cpu = time.perf_counter(), time.process_time()
                case.run()
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            finally:
                gc.enable()
            case.after()
            last = best.get(name, Timing(float("inf"), float("inf"), case.amount))
            best[name] = Timing(min(last.wall_s, wall), min(last.cpu_s, cpu), case.amount)
    return best


@dataclass(frozen=True)
class Row:
    """One printed line: a case, its ratio to a limit, and the target if there is one."""

    name: str
    timing: Timing
    ratio: float | None = None
    ratio_to: str = ""
    target: str = ""
    unit: str = "bytes"

    def cells(self) -> tuple[str, ...]:
        if self.unit == "bytes":
            speed = f"{self.timing.mb_per_s:,.0f} MB/s"
            cpu = f"{self.timing.cpu_s_per_gb:.3f}"
        else:
            speed = f"{self.timing.us_each:.2f} us/{self.unit}"
            cpu = "-"
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f} of {self.ratio_to}"
        return (self.name, speed, cpu, ratio, self.target)

    def record(self) -> dict[str, object]:
        return {
            "name": self.name,
            "unit": self.unit,
            "mb_per_s": round(self.timing.mb_per_s, 1) if self.unit == "bytes" else None,
            "cpu_s_per_gb": round(self.timing.cpu_s_per_gb, 4) if self.unit == "bytes" else None,
            "us_each": round(self.timing.us_each, 3) if self.unit != "bytes" else None,
            "ratio": None if self.ratio is None else round(self.ratio, 3),
            "ratio_to": self.ratio_to,
            "target": self.target,
        }


HEADERS = ("case", "speed", "CPU-s/GB", "ratio", "target")


def print_table(title: str, rows: list[Row]) -> None:
    """Plain aligned text, the same on a terminal and in a file."""
    table = [HEADERS, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEADERS))]
    print(f"\n{title}")
    for line in table:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
