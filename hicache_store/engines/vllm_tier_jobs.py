"""vLLM's transfer jobs on threads: each ends by its deadline, and none touches a row after it ended."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hicache_store.clock import Deadline
from hicache_store.engines.vllm_threads import Threads
from hicache_store.engines.vllm_tier_rows import DONE, Lane, RowStore
from hicache_store.limits import ENGINE_GRACE_S, ENGINE_QUEUE_MAX
from hicache_store.metrics import Metrics
from hicache_store.store import PageState

log = logging.getLogger("hicache_store")

_UNWELL = (PageState.TIMED_OUT, PageState.FAILED)
"""States after which the rest of a job is not tried."""


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks of one group that follow each other: their keys, their rows in vLLM's memory, the place of the
    first in its chain, and the keys of the chain before it."""

    keys: tuple[bytes, ...]
    rows: tuple[int, ...]
    first: int
    prefix: tuple[bytes, ...] = ()


@dataclass(slots=True)
class Job:
    """One job of vLLM's. ``lock`` is held while rows are copied; once ``is_over`` none is any more."""

    number: int
    is_load: bool
    runs: tuple[Run, ...]
    deadline: Deadline | None
    """Of the whole of a load, from when it was asked for; of what a save writes now, ``None`` before."""
    started: float = field(default_factory=time.monotonic)
    done: list[bytes] = field(default_factory=list)
    """Keys whose rows are loaded or stored."""
    seconds: float = 0.0
    is_over: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def keys(self) -> list[bytes]:
        """All keys."""
        return [key for run in self.runs for key in run.keys]

    @property
    def is_late(self) -> bool:
        """Whether its time and a little more has passed."""
        deadline = self.deadline
        return deadline is not None and deadline.clock.monotonic() >= deadline.at + ENGINE_GRACE_S

    def finish(self) -> None:
        """Nothing is copied from here on; waits for a copy that runs."""
        with self.lock:
            if not self.is_over:
                self.is_over, self.seconds = True, time.monotonic() - self.started
        self.ended.set()


def runs_of(
    keys: Sequence[bytes], rows: Sequence[int], ends: Mapping[bytes, int], chunk_tokens: Sequence[int]
) -> tuple[Run, ...]:
    """The keys of a job cut where a chain has a gap. ``ends`` tells the token after each chunk of the
    request, of the job or not, and ``chunk_tokens`` the tokens of a chunk of each group."""

    def place(key: bytes) -> int:
        return -(-ends.get(key, 0) // chunk_tokens[_group(key)]) - 1

    runs: list[tuple[list[bytes], list[int]]] = []
    ordered = sorted(zip(keys, rows, strict=True), key=lambda item: (_group(item[0]), place(item[0])))
    last: tuple[int, int] | None = None
    for key, row in ordered:
        at = _group(key), place(key)
        if last is None or at != (last[0], last[1] + 1):
            runs.append(([], []))
        runs[-1][0].append(key)
        runs[-1][1].append(int(row))
        last = at
    chain = sorted(ends, key=lambda key: ends[key])
    return tuple(
        Run(
            tuple(of_run),
            tuple(at_rows),
            max(0, place(of_run[0])),
            tuple(k for k in chain if _group(k) == _group(of_run[0]) and ends[k] < ends.get(of_run[0], 0)),
        )
        for of_run, at_rows in runs
    )


def _group(key: bytes) -> int:
    return int.from_bytes(key[-4:], "big")


class Jobs:
    """Jobs that are under way, as the engine's thread sees them; everything but the transfers is its."""

    def __init__(self, store: RowStore, view: memoryview, timeout_s: float, metrics: Metrics) -> None:
        self._store, self._timeout_s, self._metrics = store, timeout_s, metrics
        self._view: np.ndarray[Any, Any] | None = np.asarray(view).view(np.uint8)
        self._width = store.identity.row_bytes
        self._lanes: dict[bool, queue.SimpleQueue[Lane]] = {
            True: queue.SimpleQueue(),
            False: queue.SimpleQueue(),
        }
        for is_load, lanes in ((True, store.load_lanes), (False, store.save_lanes)):
            for lane in lanes:
                self._lanes[is_load].put(lane)
        self._threads = {
            True: Threads(len(store.load_lanes), "hicache-tier-load", ENGINE_QUEUE_MAX),
            False: Threads(len(store.save_lanes), "hicache-tier-save", ENGINE_QUEUE_MAX),
        }
        self._jobs: dict[int, Job] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return bool(self._jobs)

    def submit(self, number: int, runs: tuple[Run, ...], *, is_load: bool) -> None:
        """Take a job on; where too many wait it ends at once."""
        job = Job(number, is_load, runs, Deadline.after(self._timeout_s) if is_load else None)
        self._jobs[number] = job
        if self._threads[is_load].submit(partial(self._run, job)) is None:
            self._metrics.add("tier.queue_full")
            job.finish()

    def finished(self) -> Iterator[Job]:
        """Jobs that ended since the last call; those that are late end now."""
        for number, job in list(self._jobs.items()):
            if job.is_late and not job.is_over and not job.lock.locked():
                self._metrics.add("tier.load_late" if job.is_load else "tier.save_late")
                job.finish()
            if job.is_over:
                del self._jobs[number]
                yield job

    def drain(self) -> None:
        """Wait for all jobs, as long as one transfer may take; what is not done then ends."""
        deadline = Deadline.after(self._timeout_s + ENGINE_GRACE_S)
        for job in self._jobs.values():
            job.ended.wait(deadline.remaining_s())
            job.finish()

    def close(self) -> None:
        """Drain, end the threads, and let go of vLLM's memory."""
        self.drain()
        for threads in self._threads.values():
            threads.close()
        self._view = None

    def _run(self, job: Job) -> None:
        lane = self._lanes[job.is_load].get_nowait()
        try:
            for run in job.runs:
                if not (self._load(job, run, lane) if job.is_load else self._save(job, run, lane)):
                    break
        except Exception:  # a job that never ends would keep its rows, and the requests that wait for them
            self._metrics.add("tier.raised")
            log.exception("hicache_store: a transfer of rows failed")
        finally:
            self._lanes[job.is_load].put(lane)
            job.finish()

    def _load(self, job: Job, run: Run, lane: Lane) -> bool:
        """Leading rows of a run; whether another run is worth a try."""
        assert job.deadline is not None
        for start in range(0, len(run.keys), lane.count):
            if job.is_over:
                return False
            keys, rows = run.keys[start : start + lane.count], run.rows[start : start + lane.count]
            before = (*run.prefix, *run.keys[:start])
            report = self._store.load(keys, before, lane, job.deadline.remaining_s())
            with job.lock:
                if job.is_over or self._view is None:
                    return False
                for place, row in enumerate(rows[: report.pages]):
                    self._view[row, : self._width] = self._store.scratch[lane.start + place]
                job.done += keys[: report.pages]
            self._metrics.add("tier.loaded_rows", report.pages)
            if report.end is not None:
                self._metrics.add(f"tier.load_{report.end.reason.value}")
                return not job.deadline.is_past
        return True

    def _save(self, job: Job, run: Run, lane: Lane) -> bool:
        """All rows of a run; whether another run is worth a try."""
        for start in range(0, len(run.keys), lane.count):
            keys, rows = run.keys[start : start + lane.count], run.rows[start : start + lane.count]
            with job.lock:
                if job.is_over or self._view is None:
                    return False
                for place, row in enumerate(rows):
                    self._store.scratch[lane.start + place] = self._view[row, : self._width]
                job.deadline = Deadline.after(self._timeout_s)
            report = self._store.save(keys, run.first + start, lane, self._timeout_s)
            stored = [key for key, state in zip(keys, report.states, strict=True) if state in DONE]
            with job.lock:
                if not job.is_over:
                    job.done += stored
            self._metrics.add_many(
                {"tier.stored_rows": len(stored), "tier.save_failed_rows": len(keys) - len(stored)}
            )
            if any(state in _UNWELL for state in report.states):
                return False
        return True
