"""The half of the vLLM adapter in every rank: loads into the engine's blocks, and saves out of them.

A load reads and verifies pages into slots of its own and only then touches the engine's blocks, so a
storage that hangs holds a slot and never a block: when the deadline passes the request is given back and
nothing is written for it any more. A save copies blocks to slots within the step that completed them, so
the engine may reuse them at once.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial

from hicache_store.clock import Deadline
from hicache_store.engines.vllm_messages import BlockTables, LoadOrder, SaveOrder
from hicache_store.engines.vllm_staging import NULL_BLOCK, Staging
from hicache_store.engines.vllm_threads import Threads
from hicache_store.layout.parallel import Shard, elected_replica
from hicache_store.layout.plan import placement_of_slot
from hicache_store.limits import (
    ENGINE_IDLE_WAIT_S,
    ENGINE_LOAD_PAGES,
    ENGINE_LOAD_THREADS,
    ENGINE_QUEUE_MAX,
    ENGINE_SAVE_THREADS,
)
from hicache_store.metrics import Metrics
from hicache_store.store import EndReason, Store

log = logging.getLogger("hicache_store")


class _State(enum.Enum):
    READING = enum.auto()
    PLACING = enum.auto()
    """Blocks of the engine are being written: for the time of a copy it cannot be given up."""
    DONE = enum.auto()
    GIVEN_UP = enum.auto()


@dataclass(slots=True)
class Load:
    """One request's load in this rank."""

    order: LoadOrder
    deadline: Deadline
    mark: object = None
    pages: int = 0
    """Leading pages that are in the engine's blocks."""
    is_late: bool = False
    is_unwanted: bool = False
    """Whether its request has ended, which the engine says once and perhaps while blocks are written."""
    state: _State = _State.READING
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_whole(self) -> bool:
        """Whether every page that was asked for is there."""
        wanted = len(self.order.hashes)
        return self.state is _State.DONE and self.pages == wanted > 0

    def move(self, source: _State, target: _State) -> bool:
        """Go from one state to another, ``False`` where the load is in none of the first."""
        with self.lock:
            if self.state is not source:
                return False
            self.state = target
            return True


@dataclass(frozen=True, slots=True)
class Results:
    """Requests whose load has ended, those among them that failed, and how many tokens from its start a
    failed one could restore again."""

    finished: set[str]
    failed: set[str]
    restorable: dict[str, int]


class WorkerHalf:
    """Loads and saves of one rank. Called by the engine's thread, which never waits here for storage."""

    def __init__(
        self, store: Store, staging: Staging, held: Shard, block_tokens: Sequence[int], timeout_s: float
    ) -> None:
        self._store, self._staging, self._held = store, staging, held
        self._block_tokens = block_tokens
        self._timeout_s = timeout_s
        self._loads: dict[str, Load] = {}
        self._loaders = Threads(ENGINE_LOAD_THREADS, "hicache-load", ENGINE_QUEUE_MAX)
        self._savers = Threads(ENGINE_SAVE_THREADS, "hicache-save", ENGINE_QUEUE_MAX)
        self._saves: set[Future[None]] = set()
        self._ended = threading.Event()

    @property
    def metrics(self) -> Metrics:
        """Counters of this rank."""
        return self._store.metrics

    # Loads.

    def load(self, orders: Sequence[LoadOrder]) -> None:
        """Start loads. Their blocks are this half's until :meth:`results` names the request."""
        # Kept before anything can fail: the engine waits for word of each.
        loads = [Load(order, Deadline.after(self._timeout_s)) for order in orders]
        self._loads.update((load.order.request_id, load) for load in loads)
        mark = self._staging.mark()
        for load in loads:
            load.mark = mark
            if self._loaders.submit(partial(self._run_load, load)) is None:
                load.move(_State.READING, _State.DONE)

    def results(self, ended: Collection[str], *, is_idle: bool = False) -> Results:
        """What ended since the last call. Loads that are late, or whose request has ``ended``, end now.

        In an ``is_idle`` step there may be a short wait for the next load to end.
        """
        if is_idle and self._loads and not ended:
            self._ended.wait(ENGINE_IDLE_WAIT_S)
        self._ended.clear()
        results = Results(set(), set(), {})
        for request_id, load in list(self._loads.items()):
            load.is_unwanted = load.is_unwanted or request_id in ended
            if load.deadline.is_past or load.is_unwanted:
                load.move(_State.READING, _State.GIVEN_UP)
            if load.state not in (_State.DONE, _State.GIVEN_UP):
                continue
            del self._loads[request_id]
            results.finished.add(request_id)
            if load.is_whole:
                continue
            results.failed.add(request_id)
            is_again = load.state is _State.DONE and not (load.is_late or load.is_unwanted)
            order = load.order
            tokens = (order.first_page + load.pages) * self._staging.page_size if is_again else 0
            results.restorable[request_id] = tokens
            if not load.is_unwanted:
                self.metrics.add("engine.load_failed")
        return results

    def _run_load(self, load: Load) -> None:
        started = time.perf_counter()
        try:
            while load.pages < len(load.order.hashes) and load.state is _State.READING:
                if load.is_unwanted or not self._load_some(load):
                    break
        except Exception as error:
            self.metrics.add("engine.load_raised")
            log.warning("hicache_store: a load failed and is computed instead: %s", error)
        finally:
            self.metrics.add_many(
                {
                    "engine.loaded_pages": load.pages,
                    "engine.loaded_bytes": load.pages * self._staging.page_bytes,
                    "engine.load_us": int((time.perf_counter() - started) * 1e6),
                }
            )
            load.move(_State.READING, _State.DONE)
            self._ended.set()

    def _load_some(self, load: Load) -> bool:
        """Read the next pages and place them; whether the load may go on."""
        order, staging, page = load.order, self._staging, self._staging.page_size
        slots = staging.inbound.wait(min(ENGINE_LOAD_PAGES, len(order.hashes) - load.pages), load.deadline)
        if not slots:
            load.is_late = True
            return False
        try:
            hashes = order.hashes[load.pages : load.pages + len(slots)]
            report = self._store.restore(
                hashes,
                [placement_of_slot(slot, page) for slot in slots],
                prefix=(*order.prefix, *order.hashes[: load.pages]),
                timeout_s=load.deadline.remaining_s(),
            )
            first = order.first_page + load.pages
            start, stop = max(order.start, first * page), min(order.stop, (first + report.pages) * page)
            if start < stop:
                if not load.move(_State.READING, _State.PLACING):
                    return False
                try:
                    staging.scatter(slots, start, stop, order.blocks, load.mark)
                    load.pages += report.pages
                finally:
                    load.move(_State.PLACING, _State.READING)
            if report.end is not None:
                load.is_late = report.end.reason is EndReason.TIMED_OUT
                log.info("hicache_store: a load ended after %d pages: %s", load.pages, report.end)
            return report.pages == len(hashes)
        finally:
            staging.inbound.give_back(slots)

    # Saves.

    def save(self, orders: Sequence[SaveOrder]) -> None:
        """Copy finished pages out of the engine's blocks and store them. What finds no free slot is left
        out: the next request with the same prefix brings it again."""
        self._saves = {future for future in self._saves if not future.done()}
        for order in orders:
            for start, stop in self._runs(order):
                slots = self._staging.outbound.take(stop - start)
                if len(slots) < stop - start:
                    self.metrics.add("engine.save_dropped_pages", stop - start - len(slots))
                if slots:
                    self._save_run(order, start, slots)

    def _save_run(self, order: SaveOrder, start: int, slots: list[int]) -> None:
        first = order.first_page + start
        try:
            mark = self._staging.gather(slots, first * self._staging.page_size, order.blocks)
            hashes = order.hashes[start : start + len(slots)]
            save = self._savers.submit(partial(self._run_save, hashes, slots, first, mark))
            if save is None:
                self.metrics.add("engine.save_dropped_pages", len(slots))
                self._staging.outbound.give_back(slots)
            else:
                self._saves.add(save)
        except BaseException:
            self._staging.outbound.give_back(slots)
            raise

    def _runs(self, order: SaveOrder) -> Iterator[tuple[int, int]]:
        """Consecutive pages that this rank writes: those it is elected for and whose blocks are all there."""
        page, start = self._staging.page_size, None
        for index, page_hash in enumerate(order.hashes):
            first = (order.first_page + index) * page
            is_mine = elected_replica(page_hash, self._held.replicas) == self._held.replica and _is_kept(
                order.blocks, self._block_tokens, first, first + page
            )
            if is_mine and start is None:
                start = index
            elif not is_mine and start is not None:
                yield start, index
                start = None
        if start is not None:
            yield start, len(order.hashes)

    def _run_save(self, hashes: Sequence[str], slots: list[int], first_page: int, mark: object) -> None:
        page = self._staging.page_size
        try:
            self._staging.finish(mark)
            report = self._store.backup(
                hashes,
                [placement_of_slot(slot, page) for slot in slots],
                first_page=first_page,
                timeout_s=self._timeout_s,
            )
            self.metrics.add_many(
                {
                    "engine.saved_pages": report.pages,
                    "engine.saved_bytes": report.written_bytes,
                    "engine.save_failed_pages": len(hashes) - report.pages,
                }
            )
        except Exception as error:
            self.metrics.add("engine.save_failed_pages", len(hashes))
            log.warning("hicache_store: a save failed: %s", error)
        finally:
            self._staging.outbound.give_back(slots)

    def close(self) -> None:
        """Finish saves, no longer than the deadline of one, end loads, and close the store."""
        for load in self._loads.values():
            load.move(_State.READING, _State.GIVEN_UP)
        wait(self._saves, timeout=self._timeout_s)
        for threads in (self._loaders, self._savers):
            threads.close()
        self._store.close()


def _is_kept(blocks: BlockTables, block_tokens: Sequence[int], start: int, stop: int) -> bool:
    """Whether every group still has the blocks of tokens from ``start`` to ``stop``."""
    return all(
        len(table) * tokens >= stop and NULL_BLOCK not in table[start // tokens : -(-stop // tokens)]
        for table, tokens in zip(blocks, block_tokens, strict=True)
    )
