"""``hicache bench URL``: how fast this storage is for pages, and what one more request costs."""

from __future__ import annotations

import math
import os
import secrets
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hicache_store.cli.doctor_checks import said
from hicache_store.cli.masking import masked
from hicache_store.cli.opening import opened
from hicache_store.cli.output import Column, Output, count_text, size_text
from hicache_store.clock import Deadline
from hicache_store.connectors.base import BufferSource, BufferTarget, Connector, Outcome, Read, Status, Write
from hicache_store.errors import ConfigurationError
from hicache_store.limits import BENCH_BYTES_MAX, KIB, MIB, REMOVE_BATCH

_PROBE_BYTES = 4 * KIB
"""Length of the short reads that tell the cost of a request from that of its bytes."""
_ADVICE_READS_MIN = 128
"""Fewer reads of each kind tell more about the machine's other work than about the storage."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of work: batches of ``pages``, their times, and the processor time of all."""

    work: str
    pages: int
    page_bytes: int
    seconds: Sequence[float]
    cpu_s: float

    def row(self) -> dict[str, object]:
        """Rates and percentiles. Of few batches the 99th percentile is the slowest."""
        ordered = sorted(self.seconds)
        p50, total = statistics.median(ordered), self.pages * self.page_bytes
        gigabytes = total * len(ordered) / 1e9
        return {
            "work": self.work,
            "page_bytes": self.page_bytes,
            "pages": self.pages,
            "mb_per_s": round(total / 1e6 / p50, 1) if total else None,
            "pages_per_s": round(self.pages / p50),
            "p50_ms": round(1e3 * p50, 3),
            "p99_ms": round(1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
            "cpu_s_per_gb": round(self.cpu_s / gigabytes, 3) if gigabytes else None,
        }


def run(args: Namespace, out: Output) -> int:
    """Measure; exit code 1 when an object could not be stored, read or removed."""
    if args.pages * args.size > BENCH_BYTES_MAX:
        raise ConfigurationError(
            f"{args.pages} pages of {size_text(args.size)} are more than {size_text(BENCH_BYTES_MAX)}; "
            "give fewer --pages or a smaller --size"
        )
    with opened(args.url, changes=True) as connector:
        if connector.capabilities.is_read_only:
            raise ConfigurationError(f"{masked(args.url)} can only be read; a benchmark has to write")
        default_cost = connector.capabilities.request_cost_bytes
        bench = _Bench(connector, args.pages, args.size, args.timeout)
        out.note(
            f"writes {size_text(args.pages * args.size)}; where a quota is full, older objects go for it"
        )
        try:
            with out.progress("measuring"):
                measured, cost_bytes = bench.measure(args.rounds)
        finally:
            bench.remove()
    rows = [one.row() for one in measured]
    _print(rows, out)
    if args.pages * args.rounds < _ADVICE_READS_MIN:
        cost_bytes = None
    advice = _advice(cost_bytes, default_cost, args.pages * args.rounds)
    out.line(advice)
    for fault, number in bench.faults.items():
        out.note(f"{number} x {fault}")
    out.document(
        {
            "url": masked(args.url),
            "measured": rows,
            "request_cost_bytes": cost_bytes,
            "request_cost_in_use": default_cost,
            "faults": bench.faults,
        }
    )
    return 1 if bench.faults else 0


def _print(rows: Sequence[dict[str, object]], out: Output) -> None:
    titles = ("work", "pages", "MB/s", "pages/s", "p50 ms", "p99 ms", "CPU-s/GB")
    names = ("work", "pages", "mb_per_s", "pages_per_s", "p50_ms", "p99_ms", "cpu_s_per_gb")
    with out.table([Column(title, title != "work") for title in titles]) as row:
        for one in rows:
            row(*("" if one[name] is None else str(one[name]) for name in names))


def _advice(cost_bytes: int | None, in_use: int, reads: int) -> str:
    """What ``request_cost`` fits: a power of two, since the measured number does not deserve more digits."""
    if reads < _ADVICE_READS_MIN:
        return (
            f"{count_text(reads, 'read')} are too few to tell what a request costs; give more --pages or "
            f"--rounds, {_ADVICE_READS_MIN} reads together"
        )
    if cost_bytes is None:
        return "what a request costs is lost in the noise; more --rounds or a larger --size would tell"
    rounded = 1 << max(12, min(23, round(math.log2(cost_bytes))))
    text = f"one more request costs as much as about {rounded // KIB}KiB; in use is {in_use // KIB}KiB"
    return text if rounded // 2 <= in_use <= rounded * 2 else f"{text}: give request_cost={rounded // KIB}KiB"


@dataclass(slots=True)
class _Bench:
    connector: Connector
    pages: int
    page_bytes: int
    timeout_s: float
    faults: dict[str, int] = field(default_factory=dict)
    _namespace: str = field(default_factory=lambda: secrets.token_hex(32))
    _written: list[str] = field(default_factory=list)

    def measure(self, rounds: int) -> tuple[list[Measured], int | None]:
        """What each kind of work took, and the bytes that cost as much as a request, if it can be told."""
        data = memoryview(os.urandom(self.page_bytes + self.pages))
        landed = memoryview(bytearray(self.pages * self.page_bytes))
        put = self._rounds("put", rounds, self.page_bytes, lambda: self._put(data), batch_writes=True)
        keys = self._written[-self.pages :]
        get = self._rounds("get", rounds, self.page_bytes, lambda: self._get(keys, landed, self.page_bytes))
        for index in range(self.pages):
            at = index * self.page_bytes
            if landed[at : at + self.page_bytes] != data[index : index + self.page_bytes]:
                self._fault("wrong bytes")
        short = min(_PROBE_BYTES, self.page_bytes)
        part = self._rounds(f"get {short} B", rounds, short, lambda: self._get(keys, landed, short))
        asked = [key for pair in zip(keys, self._names(), strict=True) for key in pair]
        look = self._rounds("contains", rounds, 0, lambda: self._look(asked), pages=len(asked))
        return [put, get, part, look], request_cost(get, part)

    def remove(self) -> None:
        """Remove what was written; what cannot be removed is a fault."""
        for start in range(0, len(self._written), REMOVE_BATCH):
            outcomes = self.connector.delete(self._written[start : start + REMOVE_BATCH], self._soon())
            self._judge("remove", [one for one in outcomes if one.status is not Status.ABSENT])

    def _rounds(
        self,
        work: str,
        rounds: int,
        n_bytes: int,
        batch: Callable[[], None],
        *,
        pages: int | None = None,
        batch_writes: bool = False,
    ) -> Measured:
        seconds: list[float] = []
        cpu_s = 0.0
        for _ in range(rounds):
            if batch_writes:
                self._drop_last()
            start, cpu_start_s = time.perf_counter(), time.process_time()
            batch()
            seconds.append(time.perf_counter() - start)
            cpu_s += time.process_time() - cpu_start_s
        count = self.pages if pages is None else pages
        return Measured(work, count, n_bytes, seconds, cpu_s)

    def _names(self) -> list[str]:
        hashes = [secrets.token_hex(32) for _ in range(self.pages)]
        return [f"v1/{self._namespace}/{one[:2]}/{one}/bench.H000-001.L000-001" for one in hashes]

    def _put(self, data: memoryview) -> None:
        keys = self._names()
        self._written += keys
        writes = [
            Write(key, self.page_bytes, BufferSource([data[i : i + self.page_bytes]]), i)
            for i, key in enumerate(keys)
        ]
        self._judge("put", self.connector.write_from(writes, self._soon()))

    def _drop_last(self) -> None:
        """Keep one round at a time, so that the store needs room for no more."""
        if self._written:
            self.remove()
            self._written.clear()

    def _get(self, keys: Sequence[str], landed: memoryview, n_bytes: int) -> None:
        ranges = None if n_bytes == self.page_bytes else ((0, n_bytes),)
        reads = []
        for index, key in enumerate(keys):
            view = landed[index * self.page_bytes : index * self.page_bytes + n_bytes]
            reads.append(Read(key, self.page_bytes, BufferTarget([(0, [view])]), ranges))
        self._judge("get", self.connector.read_into(reads, self._soon()))

    def _look(self, keys: Sequence[str]) -> None:
        sizes = self.connector.sizes(keys, self._soon())
        wrong = sum(size != (None if i % 2 else self.page_bytes) for i, size in enumerate(sizes))
        if wrong:
            self._fault("contains: a wrong answer", wrong)

    def _judge(self, work: str, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if not outcome.is_ok:
                self._fault(f"{work}: {said(outcome)}")

    def _fault(self, text: str, number: int = 1) -> None:
        self.faults[text] = self.faults.get(text, 0) + number

    def _soon(self) -> Deadline:
        return Deadline.after(self.timeout_s)


def request_cost(full: Measured, part: Measured) -> int | None:
    """``a / b`` of time = requests * a + bytes * b, from whole reads and short ones of equal number."""
    full_s, part_s = min(full.seconds), min(part.seconds)
    more_bytes = full.pages * (full.page_bytes - part.page_bytes)
    if more_bytes <= 0 or full_s <= part_s:
        return None
    byte_s = (full_s - part_s) / more_bytes
    request_s = part_s / part.pages - part.page_bytes * byte_s
    return None if request_s <= 0 else min(64 * MIB, round(request_s / byte_s))
