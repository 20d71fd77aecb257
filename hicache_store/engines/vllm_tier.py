"""The store as a tier behind vLLM's own offloading to host memory.

For operators who already run vLLM's ``OffloadingConnector``: vLLM moves chunks between the GPU and host
memory, and this tier moves them between host memory and the store. See docs/vllm-tier.md for the JSON, and
for when ``HiCacheConnector`` is the better choice. Importable where vLLM is installed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from hicache_store.clock import Deadline
from hicache_store.config import parse_size, parse_url
from hicache_store.engines.options import OptionKey, read_with_more
from hicache_store.engines.vllm_threads import Threads
from hicache_store.engines.vllm_tier_jobs import Jobs, runs_of
from hicache_store.engines.vllm_tier_rows import RowStore, row_identity
from hicache_store.engines.vllm_version import check_version
from hicache_store.errors import ConfigurationError
from hicache_store.limits import (
    ENGINE_GRACE_S,
    ENGINE_IDLE_WAIT_S,
    ENGINE_LOOKUP_THREADS,
    ENGINE_QUEUE_MAX,
    ENGINE_STAGING_BYTES,
)
from hicache_store.metrics import Metrics

log = logging.getLogger("hicache_store")

_ROWS: Final = "vllm:hicache_tier_rows"
_FAULTS: Final = "vllm:hicache_tier_faults"
_COUNTED: Final[Mapping[str, tuple[str, str]]] = {
    "tier.loaded_rows": (_ROWS, "loaded"),
    "tier.stored_rows": (_ROWS, "stored"),
    "tier.save_failed_rows": (_FAULTS, "save_failed"),
    "tier.save_late": (_FAULTS, "save_late"),
    "tier.load_absent": (_FAULTS, "load_absent"),
    "tier.load_corrupt": (_FAULTS, "load_corrupt"),
    "tier.load_foreign": (_FAULTS, "load_corrupt"),
    "tier.load_unknown_version": (_FAULTS, "load_failed"),
    "tier.load_failed": (_FAULTS, "load_failed"),
    "tier.load_refused": (_FAULTS, "load_failed"),
    "tier.load_timed_out": (_FAULTS, "load_late"),
    "tier.load_late": (_FAULTS, "load_late"),
    "tier.lookup_failed": (_FAULTS, "lookup_failed"),
    "tier.lookup_late": (_FAULTS, "lookup_late"),
    "tier.queue_full": (_FAULTS, "queue_full"),
    "tier.raised": (_FAULTS, "raised"),
}
"""Counter to the metric and the label that tell it."""
_LOCAL_SCHEMES: Final = frozenset({"file", "layered"})


def _size(value: object) -> object:
    try:
        return parse_size(value) if isinstance(value, str) else None
    except ConfigurationError:
        return None


_MORE_KEYS: Final[Mapping[str, OptionKey]] = {
    "staging_bytes": (_size, 'host memory for rows on their way, with its unit, such as "512MiB"'),
}

_ENGINE: ContextVar[tuple[Any, Any] | None] = ContextVar("hicache_tier_engine", default=None)


@contextmanager
def running_engine(vllm_config: Any, kv_cache_config: Any) -> Iterator[None]:
    """The engine that tiers made inside belong to: vLLM hands a tier neither."""
    token = _ENGINE.set((vllm_config, kv_cache_config))
    try:
        yield
    finally:
        _ENGINE.reset(token)


class HiCacheOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's ``OffloadingConnector``, whose tiers may know the engine they are part of, and have the
    interpreter to themselves for a moment when a step computes nothing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        with running_engine(vllm_config, kv_cache_config):
            super().__init__(vllm_config, role, kv_cache_config)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """A step's orders."""
        orders = super().build_connector_meta(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            tiers = getattr(self.connector_scheduler.manager, "secondary_tiers", ())
            if any(isinstance(tier, HiCacheTier) and tier.is_busy for tier in tiers):
                time.sleep(ENGINE_IDLE_WAIT_S)
        return orders


class RowLookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's bookkeeping of look-ups over the store, with a time after which a chunk counts as missing."""

    def __init__(self, store: RowStore, tier_type: str, timeout_s: float, metrics: Metrics) -> None:
        self._store, self._timeout_s, self._metrics = store, timeout_s, metrics
        self._asked: dict[OffloadKey, Deadline] = {}
        self._threads = Threads(ENGINE_LOOKUP_THREADS, "hicache-tier-lookup", ENGINE_QUEUE_MAX)
        super().__init__(tier_type)

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for an answer."""
        return bool(self._asked)

    def answer(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """What is known of a chunk, at once."""
        found = self.lookup(key, req_context)
        if found is not None:
            self._asked.pop(key, None)
            return LookupResult.HIT if found else LookupResult.MISS
        deadline = self._asked.get(key)
        if deadline is None:
            self._asked[key] = Deadline.after(self._timeout_s)
        elif deadline.is_past:
            self._metrics.add("tier.lookup_late")
            return LookupResult.MISS
        return LookupResult.RETRY

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:  # noqa: ARG002
        """On vLLM's look-up thread, which storage that hangs must not keep: another one asks."""
        nothing = [False] * len(keys)
        deadline = self._asked.get(keys[0])
        if deadline is None or deadline.is_past:  # nobody waits any more
            return nothing
        future = self._threads.submit(partial(self._store.stored, keys, deadline.remaining_s()))
        try:
            if future is not None:
                return future.result(deadline.remaining_s() + ENGINE_GRACE_S)
            self._metrics.add("tier.queue_full")
        except Exception:
            self._metrics.add("tier.lookup_failed")
        return nothing

    def cleanup(self, req_id: str) -> None:
        """Forget a request."""
        for key in self._req_keys.get(req_id, ()):
            self._asked.pop(key, None)
        super().cleanup(req_id)

    def shutdown(self) -> None:
        """End the threads."""
        self._asked.clear()
        self._threads.close()
        super().shutdown()


class HiCacheTier(SecondaryTierManager):  # type: ignore[misc]
    """One engine's rows in a store.

    Raises :class:`ConfigurationError` at start, with the way out, for whatever cannot be stored rightly.
    After that nothing raises: faults are counted misses.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **given: object,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        options, own = read_with_more(given, _MORE_KEYS)
        check_version(is_allowed=options.allow_untested)
        self.locality = _locality(locality)
        engine = _ENGINE.get()
        if engine is None:
            raise ConfigurationError(
                "vLLM's OffloadingConnector does not tell a tier which model it serves; load it as "
                '"kv_connector": "HiCacheOffloadingConnector", "kv_connector_module_path": '
                '"hicache_store.engines.vllm_tier"'
            )
        is_local = parse_url(options.url).scheme in _LOCAL_SCHEMES
        self.cache_hit_source = CacheHitSource.DISK if is_local else CacheHitSource.EXTERNAL_UNSPECIFIED
        self.metrics = Metrics()
        self._told: dict[str, int] = {}
        identity = row_identity(*engine, offloading_spec.config, options)
        staging = own.get("staging_bytes", ENGINE_STAGING_BYTES)
        assert isinstance(staging, int)
        if identity.row_bytes > self.block_size_bytes:
            raise ConfigurationError(
                f"a chunk has {identity.row_bytes} bytes, vLLM's rows have {self.block_size_bytes}: it lays "
                "them out in a way that is not known; run without this tier"
            )
        self._chunk_tokens = identity.chunk_tokens
        self._store = RowStore(options.url, identity, options, staging, self.metrics)
        self._jobs = Jobs(self._store, primary_kv_view, options.timeout_s, self.metrics)
        self._lookups = RowLookups(self._store, tier_type, options.lookup_timeout_s, self.metrics)
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the store."""
        return self._jobs.is_busy or self._lookups.is_busy

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk is stored; ``RETRY`` until the store has answered."""
        return LookupResult.MISS if self._is_closed else self._lookups.answer(key, req_context)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store the rows of a job that are not stored yet."""
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load the rows of a job."""
        self._submit(job_metadata, is_load=True)

    def _submit(self, job: TransferJob, *, is_load: bool) -> None:
        # A copy: vLLM goes on filling it. It has no way of asking for a whole chain.
        ends = dict(job.req_context._offload_key_positions)
        runs = runs_of(list(job.keys), [int(row) for row in job.chunk_ids], ends, self._chunk_tokens)
        self._jobs.submit(job.job_id, runs, is_load=is_load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended. Of a load that failed in part, the rows that are there."""
        results = []
        for job in self._jobs.finished():
            done = set(job.done)
            missing = [key for key in job.keys if key not in done]
            if job.is_load and missing:
                self._lookups.mark_miss(missing)
            results.append(
                JobResult(
                    job_id=job.number,
                    success=not missing,
                    successful_keys=tuple(job.done) if job.is_load and missing and done else None,
                    transfer_time=job.seconds,
                    transfer_bytes=len(done) * self._store.identity.row_bytes,
                )
            )
        return results

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        """Chunks are stored as they are computed."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget its look-ups."""
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002
        """Ask the store about the chunks of this step."""
        if not self._is_closed:
            self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait for all jobs, at most about ``timeout_s``; later none touches a row."""
        self._jobs.drain()

    def shutdown(self) -> None:
        """Finish what runs, as :meth:`drain_jobs` does, and close the store. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._jobs.close()
        self._lookups.shutdown()
        self._store.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        """Rows moved and faults; vLLM itself counts queries, hits, bytes and times of every tier."""
        return {
            _ROWS: OffloadingCounterMetadata("Rows that the store's tier loaded or stored.", ("what",)),
            _FAULTS: OffloadingCounterMetadata(
                "Faults of the store's tier; each was a miss or a row not stored.", ("kind",)
            ),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        stats = OffloadingConnectorStats()
        for counter, (metric, label) in _COUNTED.items():
            now = self.metrics.get(counter)
            if now != self._told.get(counter, 0):
                stats.increase_counter(metric, now - self._told.get(counter, 0), (label,))
                self._told[counter] = now
        return None if stats.is_empty() else stats


def _locality(given: str | None) -> Locality | None:
    try:
        return None if given is None else Locality(given)
    except ValueError:
        raise ConfigurationError(f'locality={given!r} is not accepted; give "LOCAL" or "REMOTE"') from None
