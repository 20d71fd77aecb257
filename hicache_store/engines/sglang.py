"""The storage backend that SGLang loads by ``--hicache-storage-backend dynamic``.

``module_path`` is ``hicache_store.engines.sglang``, ``class_name`` is ``HiCacheL3``; see docs/sglang.md. The
class translates SGLang's calls and keeps its contract: exact return types, exceptions at attach only, and
look-up, read and write at the same time on three threads.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from hicache_store.connectors.base import Connector
from hicache_store.connectors.registry import open_connector
from hicache_store.engines.options import read_options
from hicache_store.engines.sglang_attach import Anchor, Place, Site, attach_anchor, attach_sidecar
from hicache_store.engines.sglang_hits import common_lengths, every_page, trailing_pages
from hicache_store.engines.sglang_running import running_model, weights_state
from hicache_store.engines.sglang_stores import PoolStore
from hicache_store.errors import ConfigurationError, HandleError
from hicache_store.layout.namespace import Namespace
from hicache_store.limits import ENGINE_STATS_MAX
from hicache_store.metrics import Metrics

log = logging.getLogger("hicache_store")
R = TypeVar("R")

TESTED_VERSIONS: Final = ("0.5.23",)
"""Releases of SGLang that the tests run against."""

ENGINE_KEYS: Final = frozenset(
    {
        "backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path",
        "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys", "tp_lcm_size",
    }
)  # fmt: skip
"""Keys of the same JSON object that are SGLang's own."""


class HiCacheL3(HiCacheStorage):  # type: ignore[misc]
    """One rank's L3: pages of SGLang's host pools in canonical objects.

    Built without a host pool; everything that can refuse does so in :meth:`register_mem_pool_host`, where
    SGLang still rolls back.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _second: object = None) -> None:
        extra = dict(storage_config.extra_config or {})
        self._options = read_options(extra, ENGINE_KEYS)
        _check_version(is_allowed=self._options.allow_untested)
        _check_config(storage_config, extra)
        self._config = storage_config
        self.metrics = Metrics()
        self._connector: Connector | None = None
        self._site: Site | None = None
        self._anchor: Anchor | None = None
        self._sidecars: dict[str, PoolStore] = {}
        self._weights: tuple[object, object] = (None, None)
        self._transfers: deque[tuple[bool, int, float]] = deque(maxlen=ENGINE_STATS_MAX)
        self._said: set[str] = set()
        self._lock = threading.Lock()

    @property
    def namespace(self) -> Namespace | None:
        """Where this engine's pages are kept; ``None`` while no pool is attached."""
        return None if self._anchor is None else self._anchor.namespace

    # Attach and detach.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Attach the anchor pool. Raises :class:`ConfigurationError` with the way out."""
        if self._anchor is not None:
            raise HandleError("a host pool is attached already; detach first")
        super().register_mem_pool_host(mem_pool_host)
        config = self._config
        place = Place(
            config.tp_rank, config.tp_size, config.pp_rank, config.pp_size, bool(config.is_mla_model)
        )
        running = running_model(config.pp_rank, config.pp_size)
        self._weights = weights_state()
        self._connector = open_connector(self._options.url)
        self._site = Site(self._connector, place, self._options, running, self.metrics)
        try:
            self._anchor = attach_anchor(self._site, mem_pool_host)
        except BaseException:
            self.close()
            raise

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Attach a sidecar pool; the anchor comes again under its own name and is left alone."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name == str(PoolName.KV):
            return
        if self._site is None or self._anchor is None:
            raise HandleError(f"pool {name} was registered before the anchor pool")
        try:
            store = attach_sidecar(self._site, self._anchor, host_pool, name)
        except BaseException:
            # SGLang leaves its threads running after a late refusal: they must find nothing.
            self.close()
            raise
        with self._lock:
            self._sidecars[name] = store

    def close(self) -> None:
        """Release the store. Idempotent; later calls find and store nothing."""
        with self._lock:
            stores = [*self._sidecars.values()]
            if self._anchor is not None:
                stores.append(self._anchor.store)
            connector, self._connector = self._connector, None
            self._anchor, self._site, self._sidecars = None, None, {}
        for store in stores:
            store.close()
        if connector is not None:
            connector.close()

    # What is stored.

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:  # noqa: ARG002
        """How many leading pages are stored for this rank; the whole chain is one question."""
        return self._guarded("look-up", 0, lambda: self._store("kv").leading(keys))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> PoolTransferResult:
        """The lengths that every pool allows, and each pool's own longest one."""
        nothing = PoolTransferResult(0, {}, [])
        return self._guarded("look-up", nothing, lambda: self._lengths(keys, pool_transfers or []))

    def _lengths(self, keys: list[str], transfers: Sequence[PoolTransfer]) -> PoolTransferResult:
        pages = self._store("kv").leading(keys)
        verdicts = [every_page(pages)]
        boundaries: dict[str, int] = {PoolName.KV: pages} if pages else {}
        for transfer in transfers:
            if not pages:
                break
            store = self._store(str(transfer.name))
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                verdict = trailing_pages(store.stored(keys[:pages]), len(transfer.keys or ()))
            else:
                verdict = every_page(store.leading(keys[:pages]))
            if transfer.hit_policy != PoolHitPolicy.BLOCK_GROUPS:  # those tell, and never stop a prefix
                verdicts.append(verdict)
            if verdict.boundary:
                boundaries[transfer.name] = verdict.boundary
        lengths = common_lengths(verdicts)
        return PoolTransferResult(lengths[-1] if lengths else 0, boundaries, lengths)

    # Reading and writing.

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages into the anchor pool: ``True`` for each leading page that is whole and verified."""
        self._expect_prefix(extra_info)
        return self._get("kv", keys, host_indices, extra_info)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the anchor pool. They are in the store, or copied, when this returns."""
        self._expect_prefix(extra_info)
        return self._set("kv", keys, host_indices, extra_info)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages of sidecar pools."""
        return {
            transfer.name: self._get(
                str(transfer.name), transfer.keys or [], transfer.host_indices, extra_info
            )
            for transfer in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of sidecar pools."""
        return {
            transfer.name: self._set(
                str(transfer.name), transfer.keys or [], transfer.host_indices, extra_info
            )
            for transfer in transfers
        }

    def _get(
        self, name: str, keys: Sequence[str], indices: Any, extra_info: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        def load() -> list[bool]:
            store, started = self._store(name), time.perf_counter()
            pages = store.restore(keys, indices, _prefix(extra_info))
            self._note(False, pages, pages * store.page_bytes, time.perf_counter() - started)
            return [True] * pages + [False] * (len(keys) - pages)

        return self._guarded("read", [False] * len(keys), load)

    def _set(
        self, name: str, keys: Sequence[str], indices: Any, extra_info: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        def save() -> list[bool]:
            store, started = self._store(name), time.perf_counter()
            done = store.backup(keys, indices, len(_prefix(extra_info)))
            pages = sum(done)
            self._note(True, pages, pages * store.page_bytes, time.perf_counter() - started)
            return done

        return self._guarded("write", [False] * len(keys), save)

    # What SGLang asks beside its data path.

    def get_stats(self) -> Any:
        """Pages and GB/s of the transfers since the last question, as SGLang's ``StorageMetrics``."""
        from sglang.srt.observability.metrics_collector import StorageMetrics  # noqa: PLC0415, imports much

        stats = StorageMetrics()
        while self._transfers:
            is_backup, pages, speed = self._transfers.popleft()
            (stats.backup_pgs if is_backup else stats.prefetch_pgs).append(pages)
            (stats.backup_bandwidth if is_backup else stats.prefetch_bandwidth).append(speed)
        return stats

    def clear(self) -> None:
        """Not supported: the store is shared. Says how to do it."""
        log.warning(
            "the store is shared with other engines, so an engine does not clear it; use `hicache rm` with "
            "the namespace that the log names at attach"
        )

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:  # noqa: ARG002
        """Only called without ``interface_v1``, which is refused."""
        return

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> list[None]:
        """Only called without ``interface_v1``, which is refused."""
        return [None] * len(keys)

    def set(
        self,
        key: str,  # noqa: ARG002
        value: Any = None,  # noqa: ARG002
        target_location: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Only called without ``interface_v1``, which is refused."""
        return False

    def batch_set(
        self,
        keys: list[str],  # noqa: ARG002
        values: Any = None,  # noqa: ARG002
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Only called without ``interface_v1``, which is refused."""
        return False

    def exists(self, key: str) -> bool:
        """Whether one page is stored for this rank."""
        return self.batch_exists([key]) == 1

    # Inside.

    def _store(self, name: str) -> PoolStore:
        with self._lock:
            if self._anchor is None:
                raise HandleError("no host pool is attached")
            if name == "kv":
                return self._anchor.store
            if name not in self._sidecars:
                raise ConfigurationError(f"pool {name} was never registered")
            return self._sidecars[name]

    def _guarded(self, what: str, otherwise: R, call: Callable[[], R]) -> R:
        """The result of ``call``; whatever it raises is a miss, counted and said once a kind: an exception
        here would cost SGLang the rest of an operation, and never help it."""
        if self._weights != weights_state():
            self.metrics.add("engine.weights_changed")
            self._say_once(
                "weights",
                "the engine's weights were replaced: nothing is read or stored until the next attach",
            )
            return otherwise
        try:
            return call()
        except Exception as error:
            self.metrics.add(f"engine.{what}_failed")
            self._say_once(f"{what} {type(error).__name__}", f"a {what} failed and counts as a miss: {error}")
            return otherwise

    def _expect_prefix(self, extra_info: HiCacheStorageExtraInfo | None) -> None:
        if extra_info is None or extra_info.prefix_keys is None:
            self._say_once(
                "prefix",
                "SGLang passes no prefix keys, so eviction cannot spare the heads of chains; add "
                '"hicache_storage_pass_prefix_keys": true to the configuration',
            )

    def _note(self, is_backup: bool, pages: int, size_bytes: int, seconds: float) -> None:
        if pages and self._config.enable_storage_metrics:
            self._transfers.append((is_backup, pages, size_bytes / 1e9 / max(seconds, 1e-9)))

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            log.warning("hicache_store: %s", text)


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str]:
    return () if extra_info is None else extra_info.prefix_keys or ()


def _check_version(*, is_allowed: bool) -> None:
    found = importlib.metadata.version("sglang")
    if found.partition("+")[0] in TESTED_VERSIONS or is_allowed:
        return
    raise ConfigurationError(
        f"SGLang {found} is not among the versions that hicache_store was tested with "
        f'({", ".join(TESTED_VERSIONS)}); use one of them, or add "allow_untested": true and compare outputs'
    )


def _check_config(config: HiCacheStorageConfig, extra: dict[str, object]) -> None:
    if not extra.get("interface_v1"):
        raise ConfigurationError(
            'add "interface_v1": 1 to the configuration; SGLang copies every page without'
        )
    for what, size in (("decode", config.dcp_size), ("attention", config.attn_cp_size)):
        if size > 1:
            raise ConfigurationError(
                f"{what} context parallelism of size {size} is not supported: a storage backend is not told "
                "which rank holds which tokens; run with size 1"
            )
