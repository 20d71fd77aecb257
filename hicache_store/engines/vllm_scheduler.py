"""The half of the vLLM adapter beside the scheduler: what is stored, what to load, what to save.

Look-ups run on threads of their own; until one answers, the scheduler is told to ask again. Loads are
whole, asynchronous and of prefixes only. A request whose next pages another one is loading waits for
that one, so a shared prefix is fetched once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from typing import Any

import numpy as np

from hicache_store.engines.vllm_messages import BlockTables, LoadOrder, SaveOrder
from hicache_store.engines.vllm_options import VllmOptions
from hicache_store.engines.vllm_requests import Found, TrackedRequest, hashes_of, is_storable
from hicache_store.engines.vllm_threads import Threads
from hicache_store.layout.hashing import page_hashes
from hicache_store.limits import (
    ENGINE_IDLE_WAIT_S,
    ENGINE_LOOKUP_AGE_S,
    ENGINE_LOOKUP_THREADS,
    ENGINE_QUEUE_MAX,
    ENGINE_SHARED_WAIT_S,
)
from hicache_store.metrics import Metrics
from hicache_store.store import Store

log = logging.getLogger("hicache_store")


class SchedulerHalf:
    """Decides for all ranks. Called by the scheduler's thread, which never waits here for storage.

    ``block_tokens`` are the tokens of a block of each KV cache group, ``hit_tokens`` what the engine wants
    the end of a hit to be a multiple of.
    """

    def __init__(
        self,
        store: Store,
        options: VllmOptions,
        block_tokens: Sequence[int],
        hit_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._options, self._clock = store, options, clock
        self._page = options.page_size
        self._step = math.lcm(self._page, hit_tokens, *block_tokens)
        self._lookup_s = options.shared.lookup_timeout_s
        self._requests: dict[str, TrackedRequest] = {}
        self._loading: dict[str, str] = {}
        """Page hash to the request that loads it."""
        self._orders: list[LoadOrder] = []
        self._reset_at = clock()
        self._lookups = Threads(ENGINE_LOOKUP_THREADS, "hicache-lookup", ENGINE_QUEUE_MAX)

    @property
    def metrics(self) -> Metrics:
        """Counters of this half."""
        return self._store.metrics

    # What is there.

    def track(self, request: Any) -> TrackedRequest | None:
        """Begin with a request: its look-up starts now; ``None`` where the store is not for it."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None or not is_storable(request):
            return tracked
        tracked = TrackedRequest(request, None, self._clock())
        self._requests[request.request_id] = tracked
        self._look_up(tracked)
        return tracked

    def _look_up(self, tracked: TrackedRequest) -> None:
        request = tracked.request
        # A copy: the list grows while the request runs, and only the prompt is looked up.
        tokens = list(request.all_token_ids[: request.num_prompt_tokens])
        is_asked = not getattr(request, "skip_reading_prefix_cache", False)
        tracked.asked_at = self._clock()
        tracked.lookup = self._lookups.submit(partial(self._answer, request, tokens, is_asked))
        if tracked.lookup is None:
            tracked.found = Found((), 0)
            self.metrics.add("engine.lookup_dropped")

    def _answer(self, request: Any, tokens: list[int], is_asked: bool) -> Found:
        hashes = hashes_of(request, np.asarray(tokens), self._page)
        if not hashes or not is_asked:
            return Found(hashes, 0)
        age_s = min(ENGINE_LOOKUP_AGE_S, self._clock() - self._reset_at)
        report = self._store.contains(hashes, timeout_s=self._lookup_s, max_age_s=age_s)
        return Found(hashes, report.pages)

    def _result(self, tracked: TrackedRequest) -> Found | None:
        """The look-up's answer, ``None`` while there is none."""
        if tracked.found is None and tracked.lookup is not None and tracked.lookup.done():
            error = tracked.lookup.exception()
            if error is not None:
                self.metrics.add("engine.lookup_failed")
                log.warning("hicache_store: a look-up failed and counts as a miss: %s", error)
                tracked.found = Found((), 0)
            else:
                tracked.found = tracked.lookup.result()
            tracked.saved_pages = max(tracked.saved_pages, tracked.found.pages)
        return tracked.found

    def matched(self, request: Any, local_tokens: int) -> int | None:
        """How many tokens beyond ``local_tokens`` to load, ``None`` to be asked again."""
        tracked = self.track(request)
        if tracked is None:
            return 0
        self._loaded(tracked)
        found = self._result(tracked)
        if found is None:
            # The look-up has a deadline of its own; this one is for a thread that never got to it.
            if tracked.lookup is not None and self._clock() - tracked.asked_at < 2 * self._lookup_s:
                return None
            if not tracked.was_late:
                tracked.was_late = True
                self.metrics.add("engine.lookup_late")
            return 0
        tracked.local_tokens = local_tokens
        tokens = found.pages * self._page
        if tracked.limit_tokens is not None:
            tokens = min(tokens, tracked.limit_tokens)
        hit = tokens // self._step * self._step - local_tokens
        if hit <= 0 or hit < self._options.min_hit_tokens:
            if hit > 0 and not tracked.was_short:
                tracked.was_short = True
                self.metrics.add("engine.short_hits")
            return 0
        return None if self._is_shared(tracked, found, local_tokens) else hit

    def _is_shared(self, tracked: TrackedRequest, found: Found, local_tokens: int) -> bool:
        """Whether another request loads what this one needs next, and waiting for it is worth while."""
        loader = self._loading.get(found.hashes[local_tokens // self._page])
        if loader is None or loader == tracked.request.request_id:
            tracked.waits_since = None
            return False
        if tracked.waits_since is None:
            tracked.waits_since = self._clock()
            self.metrics.add("engine.shared_loads")
        return self._clock() - tracked.waits_since < ENGINE_SHARED_WAIT_S

    # What to do.

    def allocated(self, request: Any, blocks: BlockTables, tokens: int) -> None:
        """The scheduler has blocks for ``tokens`` tokens of a hit, or for what comes after one."""
        tracked = self._requests.get(request.request_id)
        if tokens <= 0:
            if tracked is not None:
                self._loaded(tracked)
            return
        if tracked is None or tracked.found is None:
            self.refuse_load(request.request_id)
            return
        start, stop = tracked.local_tokens, tracked.local_tokens + tokens
        first, end = start // self._page, -(-stop // self._page)
        hashes = tracked.found.hashes
        order = LoadOrder(request.request_id, hashes[first:end], hashes[:first], start, stop, blocks)
        self._orders.append(order)
        self.metrics.add("engine.hit_tokens", tokens)
        tracked.loading = order.hashes
        for page_hash in order.hashes:
            self._loading.setdefault(page_hash, request.request_id)

    def refuse_load(self, request_id: str) -> None:
        """Have every rank report a load as failed that cannot be ordered: the engine waits for their word."""
        self._orders.append(LoadOrder(request_id, (), (), 0, 0, ()))

    def _loaded(self, tracked: TrackedRequest) -> None:
        """This request loads no more: what it loaded is in vLLM's own cache, or is not to be had."""
        for page_hash in tracked.loading:
            if self._loading.get(page_hash) == tracked.request.request_id:
                del self._loading[page_hash]
        tracked.loading = ()

    def loads(self) -> list[LoadOrder]:
        """Loads that every rank is to start in this step."""
        orders, self._orders = self._orders, []
        return orders

    def saves(
        self, scheduled: Mapping[str, int], blocks_of: Callable[[str], BlockTables | None]
    ) -> list[SaveOrder]:
        """What every rank is to save in this step, which computes ``scheduled`` tokens of each request."""
        orders: list[SaveOrder] = []
        for request_id, tokens in scheduled.items():
            tracked = self._requests.get(request_id)
            found = None if tracked is None else self._result(tracked)
            if tracked is None or found is None:
                continue
            pages, hashes = self._complete(tracked, found, tokens)
            if pages <= tracked.saved_pages:
                continue
            blocks = blocks_of(request_id)
            if blocks is None:
                continue
            wanted = hashes[tracked.saved_pages : pages]
            orders.append(SaveOrder(request_id, tuple(wanted), tracked.saved_pages, blocks))
            tracked.saved_pages = pages
        return orders

    def _complete(self, tracked: TrackedRequest, found: Found, tokens: int) -> tuple[int, Sequence[str]]:
        """Whole pages whose KV is computed when ``tokens`` more are, and the names of at least these."""
        request = tracked.request
        computed = int(request.num_computed_tokens) + tokens
        pages = min(computed, tracked.prompt_tokens) // self._page
        if not self._options.store_decode or computed <= tracked.prompt_tokens or not found.hashes:
            return min(pages, len(found.hashes)), found.hashes
        # The last known token is computed in this step at the earliest, and tokens that speculation proposes
        # are not known.
        known = request.all_token_ids
        whole = min(computed, len(known) - 1) // self._page
        if whole > len(found.hashes):
            start = len(found.hashes) * self._page
            more = page_hashes(
                np.asarray(known[start : whole * self._page]),
                self._page,
                prior=bytes.fromhex(found.hashes[-1]),
            )
            found = Found((*found.hashes, *more), found.pages)
            tracked.found = found
        return whole, found.hashes

    def pause(self) -> None:
        """In a step that computes nothing: a short wait for a look-up that a request waits for."""
        pending = [
            tracked.lookup
            for tracked in self._requests.values()
            if tracked.found is None and tracked.lookup is not None and not tracked.lookup.done()
        ]
        if pending:
            wait(pending, ENGINE_IDLE_WAIT_S, FIRST_COMPLETED)

    # What became of it.

    def ended(self, failed: Collection[str], restorable: Mapping[str, int]) -> None:
        """Loads that ``failed``; each is computed, but for what is known to be ``restorable``."""
        for request_id in failed:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                known = restorable.get(request_id, 0)
                tracked.limit_tokens = 0 if tracked.limit_tokens is not None else known
                tracked.saved_pages = min(tracked.saved_pages, known // self._page)
                self._loaded(tracked)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            if tracked.lookup is not None:
                tracked.lookup.cancel()
            self._loaded(tracked)

    def forget_lookups(self) -> None:
        """Believe no look-up from before now: the engine's caches were reset."""
        self._reset_at = self._clock()
        for tracked in self._requests.values():
            if tracked.found is not None and not tracked.loading:
                tracked.found = None
                self._look_up(tracked)

    def close(self) -> None:
        """End look-ups and close the store."""
        self._lookups.close()
        self._requests.clear()
        self._loading.clear()
        self._store.close()
