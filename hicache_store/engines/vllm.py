"""vLLM's KV connector over the store.

Loaded by ``--kv-transfer-config`` with ``kv_connector="HiCacheConnector"`` and
``kv_connector_module_path="hicache_store.engines.vllm"``. Importable where vLLM is installed; nothing else
in the package imports it. Thin: it translates vLLM's calls for the two halves, one beside the scheduler and
one in every rank.

What vLLM wants of a connector decides its shape. An exception out of a hook ends the engine, so every fault
is a counted miss. A request whose load is never reported waits for ever, so loads have deadlines of their
own. Blocks may be reused after the step that completed them, so saves copy within it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from hicache_store.config import parse_url
from hicache_store.engines.vllm_attach import attach, attach_for_lookups, model_pages, shard_of
from hicache_store.engines.vllm_codec import layer_caches
from hicache_store.engines.vllm_messages import RankReport, SaveOrder, StepOrders
from hicache_store.engines.vllm_options import read_vllm_options
from hicache_store.engines.vllm_running import check_config, place_of
from hicache_store.engines.vllm_scheduler import SchedulerHalf
from hicache_store.engines.vllm_staging import Staging
from hicache_store.engines.vllm_stats import StatsSource, StorePromMetrics, StoreStats
from hicache_store.engines.vllm_version import check_version
from hicache_store.engines.vllm_worker import WorkerHalf
from hicache_store.metrics import Metrics
from hicache_store.store import PoolBuffers

log = logging.getLogger("hicache_store")
R = TypeVar("R")

_LOCAL_SCHEMES: Final = frozenset({"file", "layered"})
"""Stores that vLLM's metrics count as disk; it has no word for the others."""


class HiCacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One instance beside the scheduler and one in every rank, as ``role`` says.

    Raises :class:`ConfigurationError` at start, with the way out, for whatever cannot be stored rightly.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _join_log()
        self._options = read_vllm_options(self._kv_transfer_config.kv_connector_extra_config)
        check_version(is_allowed=self._options.shared.allow_untested)
        check_config(vllm_config)
        self._pages = model_pages(vllm_config, kv_cache_config, self._options)
        self._block_tokens = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        scheme = parse_url(self._options.shared.url).scheme
        is_local = scheme in _LOCAL_SCHEMES
        self._cache_hit_source = CacheHitSource.DISK if is_local else CacheHitSource.EXTERNAL_UNSPECIFIED
        self.metrics = Metrics()
        self._stats = StatsSource(self.metrics)
        self._report: RankReport | None = None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._said: set[str] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._scheduler_half()
            if self._kv_transfer_config.kv_load_failure_policy != "recompute":
                log.warning(
                    'hicache_store: add "kv_load_failure_policy": "recompute" to the KV transfer config; '
                    "as it is, an object lost after its look-up fails the request that wanted it"
                )

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a later miss."""
        return False

    def _scheduler_half(self) -> SchedulerHalf:
        store = attach_for_lookups(self._pages, self._options, self.metrics)
        aligned = getattr(self._kv_cache_config, "cache_hit_alignment_tokens", None) or 1
        return SchedulerHalf(store, self._options, self._block_tokens, aligned)

    def _guarded(self, what: str, otherwise: R, call: Callable[[], R]) -> R:
        """The result of ``call``; whatever it raises is counted, said once a kind, and does nothing more."""
        try:
            return call()
        except Exception as error:
            self.metrics.add("engine.hook_raised")
            kind = f"{what} {type(error).__name__}"
            if kind not in self._said:
                self._said.add(kind)
                log.exception("hicache_store: %s failed and counts as a miss", what)
            return otherwise

    # In every rank.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the layout of what is really registered, prove it, and attach."""
        modules = self._vllm_config.compilation_config.static_forward_context
        caches = layer_caches(self._pages.layers, modules, kv_caches)
        spec, rank, held = shard_of(self._pages, place_of(self._vllm_config))
        staging = Staging(self._pages.pool, held.box, caches, self._options.staging_bytes)
        buffers = PoolBuffers(self._pages.pool, staging.layout, [staging.buffer])
        store = attach(
            self._options.shared.url, self._pages, buffers, (spec, rank), self._options, self.metrics
        )
        self._worker = WorkerHalf(store, staging, held, self._block_tokens, self._options.shared.timeout_s)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Start this step's loads on threads of their own."""
        worker, orders = self._worker, self._orders()
        if worker is not None and orders.loads:
            self._guarded("the start of a load", None, lambda: worker.load(orders.loads))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled when its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: pages are saved whole, when the step has run."""

    def wait_for_save(self) -> None:
        """Copy the pages that this step completed out of the engine's blocks."""
        worker, orders = self._worker, self._orders()
        if worker is not None and orders.saves:
            self._guarded("a save", None, lambda: worker.save(orders.saves))

    def _orders(self) -> StepOrders:
        orders = self._connector_metadata
        return orders if isinstance(orders, StepOrders) else StepOrders()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose load has ended; nothing is ever sent."""
        return None, self.get_transfer_results(finished_req_ids).finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose load has ended, well or not."""
        worker = self._worker
        if worker is None:
            return KVConnectorTransferResults()
        results = worker.results(finished_req_ids, is_idle=self._orders().is_idle)
        if results.restorable:
            self._report = RankReport(results.restorable)
        return KVConnectorTransferResults(finished_recving=results.finished, failed_recving=results.failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What is known of loads that failed."""
        report, self._report = self._report, None
        return report

    # Beside the scheduler.

    def on_new_request(self, request: Any) -> None:
        """Start the look-up."""
        if self._scheduler is not None:
            self._guarded("a look-up", None, lambda: self._half.track(request) and None)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much to load; ``None`` until the look-up has answered."""
        nothing: int | None = 0
        tokens = self._guarded("a look-up", nothing, lambda: self._half.matched(request, num_computed_tokens))
        # A producer waits for the answer too: by it, pages get their names and those that lack are stored.
        if tokens and not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load of a hit."""

        def order() -> bool:
            self._half.allocated(request, blocks.get_block_ids(), num_external_tokens)
            return True

        if not self._guarded("an order to load", False, order) and num_external_tokens > 0:
            self._half.refuse_load(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's orders."""
        nothing: list[SaveOrder] = []
        scheduled, state = scheduler_output.num_scheduled_tokens, scheduler_output.kv_connector_block_state
        loads = self._half.loads()
        saves = nothing
        if self._kv_transfer_config.is_kv_producer:
            saves = self._guarded("a save", nothing, lambda: self._half.saves(scheduled, state.get_block_ids))
        if not scheduled and not loads:
            self._guarded("a look-up", None, self._half.pause)
        return StepOrders(loads, saves, is_idle=not scheduled)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in which loads failed."""
        failed = connector_output.failed_recving
        if failed:
            report = connector_output.kv_connector_worker_meta
            known = report.restorable if isinstance(report, RankReport) else {}
            self._guarded("the end of a load", None, lambda: self._half.ended(failed, known))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """The blocks are the engine's at once."""
        self._guarded("the end of a request", None, lambda: self._half.forget(request.request_id))
        return False, None

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for models with several groups of blocks."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool | None:
        """Forget what look-ups found. The store is shared with other engines and is not emptied."""
        self._guarded("a reset", None, self._half.forget_lookups)
        return True

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler

    # In both.

    def get_kv_connector_stats(self) -> StoreStats | None:
        """What was counted since the last step."""
        return self._stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StoreStats:
        """Statistics that came from another process."""
        return StoreStats(data={} if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StorePromMetrics:
        """The Prometheus counters."""
        return StorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Finish saves and close the store. Idempotent."""
        worker, self._worker = self._worker, None
        scheduler, self._scheduler = self._scheduler, None
        for half in (worker, scheduler):
            if half is not None:
                self._guarded("a shutdown", None, half.close)


def _join_log() -> None:
    """Write where vLLM writes: it sets up its own logger only, and others are silent below a warning."""
    if not log.handlers and not logging.getLogger().handlers:
        theirs = logging.getLogger("vllm")
        log.setLevel(theirs.level)
        for handler in theirs.handlers:
            log.addHandler(handler)
