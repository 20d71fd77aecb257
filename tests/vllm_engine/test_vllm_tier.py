"""The tier behind vLLM's own tiering manager: what it stores comes back bit for bit, or not at all."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm_faulty
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm_model import TinyLlama
from vllm_tier_rig import HEADS, LAYERS, MODULE, Machine, Rig, chain, manager_of

from hicache_store.engines import vllm_version
from hicache_store.engines.options import OPTION_KEYS, read_with_more
from hicache_store.engines.vllm_tier import (
    _COUNTED,
    _MORE_KEYS,
    HiCacheOffloadingConnector,
    HiCacheTier,
)
from hicache_store.engines.vllm_tier_jobs import Job, Jobs, Run, runs_of
from hicache_store.engines.vllm_tier_rows import Lane, RowIdentity
from hicache_store.errors import ConfigurationError, IdentityError
from hicache_store.limits import ENGINE_IDLE_WAIT_S
from hicache_store.metrics import Metrics
from hicache_store.store.reports import EndReason, RestoreReport
from hicache_store.testing.fault_plans import Attempt, Hold

KEYS = chain("prompt", 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama().write(tmp_path_factory.mktemp("tier") / "model")


@pytest.fixture
def machine(model: Path, tmp_path: Path) -> Machine:
    return Machine(model, f"file://{tmp_path}/store?quota=1GiB")


@pytest.fixture
def faulty(machine: Machine, tmp_path: Path) -> Iterator[Machine]:
    """A store that fails on command, with short deadlines."""
    path = vllm_faulty.install(tmp_path / "plugins")
    sys.path.insert(0, path)
    vllm_faulty._OPEN.clear()
    yield replace(
        machine,
        store=f"faulty://{tmp_path}/faulty?quota=1GiB",
        tier={"timeout_s": 1, "lookup_timeout_s": 1},
    )
    vllm_faulty.fail(None, "none")
    sys.path.remove(path)


@contextmanager
def hanging_writes() -> Iterator[None]:
    """Writes that do not come back inside, whatever their deadline."""
    until = threading.Event()

    def plan(attempt: Attempt) -> Hold | None:
        return Hold(until, ignores_deadline=True) if attempt.operation == "write" else None

    for connector in vllm_faulty._OPEN:
        connector.plan = plan
    try:
        yield
    finally:
        until.set()
        vllm_faulty.fail(None, "none")


def ours() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(("hicache", "vllm_offloading_lookup"))}


# What comes back.


def test_rows_come_back_bit_for_bit_in_a_fresh_manager(machine: Machine) -> None:
    with manager_of(machine) as first:
        first.store("writer", KEYS)
        assert first.counted("stored_rows") == len(KEYS)
    with manager_of(machine) as second:
        assert second.load("reader", [*KEYS, *chain("other", 2)]) == len(KEYS)
        assert second.counted("loaded_rows") == len(KEYS)


def test_rows_that_the_host_tier_evicted_come_back(machine: Machine) -> None:
    with manager_of(replace(machine, chunks=8)) as rig:
        rig.store("first", KEYS)
        rig.store("second", chain("second", 8))
        assert rig.load("again", KEYS) == len(KEYS)
        assert rig.counted("loaded_rows") == len(KEYS)


def test_what_is_stored_is_not_written_again(machine: Machine) -> None:
    with manager_of(machine) as first:
        first.store("writer", KEYS)
    with manager_of(machine) as second:
        second.store("writer", KEYS)
        assert second.tier.metrics.get("backup.bytes") == 0
        assert second.counted("stored_rows") == len(KEYS)


@pytest.mark.parametrize("tp", [1, 2])
def test_canonical_rows_are_shared_by_engines_of_other_tensor_parallel_sizes(
    machine: Machine, tp: int
) -> None:
    with manager_of(replace(machine, tp=tp)) as first:
        first.store("writer", KEYS)
    with manager_of(replace(machine, tp=3 - tp)) as second:
        assert second.load("reader", KEYS) == len(KEYS)


def test_more_ranks_than_heads_store_each_head_once(machine: Machine) -> None:
    with manager_of(machine) as first:
        first.store("writer", KEYS)
    with manager_of(replace(machine, tp=8)) as second:
        assert second.view.shape[1] == 2 * machine.row_bytes
        assert second.load("reader", KEYS) == len(KEYS)


def test_groups_of_layers_have_rows_of_their_own(machine: Machine) -> None:
    """One block hash names a chunk in each group, and in a sliding window only the last chunks are wanted."""
    hybrid = replace(machine, window=64)
    windows = [OffloadKey(key[:-4] + (1).to_bytes(4, "big")) for key in KEYS]
    with manager_of(hybrid) as first:
        first.store("full", KEYS)
        first.store("windows", windows[4:])
        assert first.counted("stored_rows") == len(KEYS) + 4
    with manager_of(replace(hybrid, tp=2)) as second:
        assert second.load("full", KEYS) == len(KEYS)
        assert second.load("early", windows[:4]) == 0
        assert second.load("late", windows[4:]) == 4


ALIKE = [
    ("other chunks", {"blocks_per_chunk": 4, "chunks": 8}),
    ("other blocks", {"block": 64, "blocks_per_chunk": 1}),
    ("other layout", {"layout": "LBNHC"}),
    ("not canonical", {"is_canonical": False}),
    ("other dtype", {"dtype": "bfloat16"}),
    ("other hash", {"algorithm": "sha256_cbor"}),
    ("other tenant", {"tier": {"tenant": "b"}}),
    ("other weights", {"tier": {"weights": "b"}}),
]


@pytest.mark.parametrize("other", [other for _, other in ALIKE], ids=[name for name, _ in ALIKE])
def test_rows_that_differ_in_meaning_never_meet(machine: Machine, other: dict[str, object]) -> None:
    with manager_of(machine) as first:
        first.store("writer", KEYS[:4])
    with manager_of(replace(machine, **other)) as second:  # type: ignore[arg-type]
        assert second.load("reader", KEYS[:4]) == 0
        assert second.counted("loaded_rows") == 0


@pytest.mark.parametrize("model_fields", [{"seed": 1}, {"rope_theta": 20_000.0}, {"rope_scaling": 2.0}])
def test_other_models_never_meet(machine: Machine, tmp_path: Path, model_fields: dict[str, object]) -> None:
    with manager_of(machine) as first:
        first.store("writer", KEYS[:4])
    model = TinyLlama(**model_fields).write(tmp_path / "other")  # type: ignore[arg-type]
    with manager_of(replace(machine, model=model)) as second:
        assert second.load("reader", KEYS[:4]) == 0


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_rows_of_each_ranks_own_bytes_are_pinned_to_the_parallel_sizes(
    machine: Machine, sizes: tuple[int, int]
) -> None:
    """Without a canonical layout vLLM calls rows of any tensor-parallel size the same, and they are not."""
    own = replace(machine, is_canonical=False)
    with manager_of(replace(own, tp=sizes[0])) as first:
        first.store("writer", KEYS)
    with manager_of(replace(own, tp=sizes[1])) as second:
        assert second.load("reader", KEYS) == 0
    with manager_of(replace(own, tp=sizes[0])) as third:
        assert third.load("reader", KEYS) == len(KEYS)


def test_pipeline_stages_are_pinned_too(machine: Machine) -> None:
    own = replace(machine, is_canonical=False)
    with manager_of(replace(own, pp=2)) as first:
        first.store("writer", KEYS)
    with manager_of(own) as second:
        assert second.load("reader", KEYS) == 0
    with manager_of(replace(own, pp=2)) as third:
        assert third.load("reader", KEYS) == len(KEYS)


# What fails.


def objects(machine: Machine) -> list[Path]:
    root = Path(machine.store.removeprefix("file://").partition("?")[0])
    return sorted(
        path for path in root.rglob("*") if path.is_file() and path.stat().st_size >= machine.row_bytes
    )


def test_a_row_that_was_damaged_or_removed_ends_the_prefix_and_nothing_else(machine: Machine) -> None:
    with manager_of(machine) as first:
        first.store("writer", KEYS)
        names = first.tier._store.names(KEYS)
    by_name = {
        key: next(p for p in objects(machine) if n in str(p)) for key, n in zip(KEYS, names, strict=True)
    }
    assert len(set(by_name.values())) == len(KEYS)
    damaged = by_name[KEYS[5]]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with manager_of(machine) as second:
        assert second.load("reader", KEYS) == 5
        assert second.counted("load_corrupt") == 1
        assert second.load("again", KEYS) == 5, "the damaged row counts as missing"
        second.store("repairs", KEYS)
    with manager_of(machine) as third:
        assert third.load("reader", KEYS) == len(KEYS)
    by_name[KEYS[2]].unlink()
    with manager_of(machine) as fourth:
        assert fourth.load("reader", KEYS) == 2


@pytest.mark.parametrize(
    ("how", "counter"),
    [
        ("vanish", "load_absent"), ("flip", "load_corrupt"), ("fail", "load_failed"),
        ("late", "load_timed_out"), ("raise", "raised"),
    ],
)  # fmt: skip
def test_a_store_that_fails_is_a_counted_miss(faulty: Machine, how: str, counter: str) -> None:
    with manager_of(faulty) as rig:
        rig.store("writer", KEYS)
    with manager_of(faulty) as rig:
        vllm_faulty.fail(None, how)
        assert rig.load("reader", KEYS) == 0
        assert rig.counted(counter) >= 1
        vllm_faulty.fail(None, "none")
        assert rig.tier.get_stats() is not None


def test_writes_that_fail_store_nothing_and_release_their_rows(faulty: Machine) -> None:
    with manager_of(replace(faulty, chunks=8)) as rig:
        vllm_faulty.fail(None, "writes")
        rig.store("writer", KEYS)
        assert (rig.counted("stored_rows"), rig.counted("save_failed_rows")) == (0, len(KEYS))
        rig.store("other", chain("other", 8))


def test_a_read_that_hangs_is_given_up_and_touches_no_row_when_it_returns(faulty: Machine) -> None:
    with manager_of(faulty) as rig:
        rig.store("writer", KEYS)
    with manager_of(faulty) as rig:
        vllm_faulty.fail(None, "hang")
        assert rig.load("reader", KEYS) == 0
        assert rig.counted("load_late") == 1
        rig.view[:] = 0x55
        vllm_faulty.fail(None, "none")
        end = time.monotonic() + 30
        while rig.tier._jobs._lanes[True].qsize() < len(rig.tier._store.load_lanes):
            assert time.monotonic() < end, "the thread does not come back"
            time.sleep(0.01)
        assert (rig.view == 0x55).all()
        assert rig.load("again", KEYS) == len(KEYS)


def test_a_write_that_hangs_is_given_up_and_reads_no_row_later(faulty: Machine) -> None:
    with manager_of(faulty) as rig, hanging_writes():
        rig.store("writer", KEYS)
        assert rig.counted("save_late") == 1
        rig.view[:] = 0x55
    with manager_of(faulty) as rig:
        rig.load("reader", KEYS)  # what came of the write is whole, or not there


def test_look_ups_never_wait_and_are_given_up(faulty: Machine) -> None:
    with manager_of(faulty) as rig:
        rig.store("writer", KEYS)
    with manager_of(faulty) as rig:
        vllm_faulty.fail(None, "lookups")
        context = rig.request("reader", KEYS)
        assert {rig.manager.lookup(key, context) for key in KEYS} == {LookupResult.RETRY}
        rig.step()
        assert rig.found(context, KEYS) == 0
        assert rig.counted("lookup_late") >= 1
        rig.manager.on_request_finished(context)
        vllm_faulty.fail(None, "none")
        rig.load("meanwhile", KEYS)  # it may share the question that was given up
        assert rig.load("later", KEYS) == len(KEYS)


def test_the_engines_thread_asks_the_store_nothing(faulty: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    sizes = vllm_faulty.FaultyConnector.sizes

    def noted(self, keys, deadline):  # type: ignore[no-untyped-def]
        threads.add(threading.current_thread().name)
        return sizes(self, keys, deadline)

    with manager_of(faulty) as rig:
        monkeypatch.setattr(vllm_faulty.FaultyConnector, "sizes", noted)
        rig.store("writer", KEYS)
        assert rig.load("reader", [*KEYS, *chain("more", 4)]) == len(KEYS)
    assert threads
    assert threading.current_thread().name not in threads


def test_jobs_beyond_the_queue_end_at_once(faulty: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_store.engines.vllm_tier_jobs.ENGINE_QUEUE_MAX", 1)
    with manager_of(faulty) as rig:
        context = rig.request("writer", KEYS)
        with hanging_writes():
            for key in KEYS:
                rig.offer(context, [key])
            assert rig.counted("queue_full") >= 1
        rig.manager.on_request_finished(context)
        rig.settle()


# Draining and shutting down.


def test_a_reset_waits_for_jobs_and_what_they_stored_stays(machine: Machine) -> None:
    with manager_of(machine) as rig:
        context = rig.request("writer", KEYS)
        rig.offer(context, KEYS)
        rig.manager.on_request_finished(context)
        rig.manager.reset_cache()
        assert not rig.manager.has_pending_work()
        assert rig.counted("stored_rows") == len(KEYS)
        assert rig.load("reader", KEYS) == len(KEYS)


def test_a_reset_ends_although_the_store_hangs(faulty: Machine) -> None:
    with manager_of(faulty) as rig:
        context = rig.request("writer", KEYS)
        with hanging_writes():
            rig.offer(context, KEYS)
            rig.manager.on_request_finished(context)
            rig.manager.reset_cache()
            assert not rig.manager.has_pending_work()


def test_shutdown_stores_what_was_submitted_and_leaves_no_thread_and_no_memory(machine: Machine) -> None:
    assert not ours()
    with manager_of(machine) as rig:
        context = rig.request("writer", KEYS)
        rig.offer(context, KEYS)
        assert rig.manager.lookup(chain("other", 1)[0], context) is LookupResult.RETRY
        rig.step()
        region = rig.manager.primary_tier._mmap_region
        assert Path(region.mmap_path).exists()
    assert not ours()
    assert region.mmap_obj is None
    assert not Path(region.mmap_path).exists()
    with manager_of(machine) as second:
        assert second.load("reader", KEYS) == len(KEYS)


def test_a_tier_that_is_shut_down_finds_nothing_and_raises_nothing(machine: Machine) -> None:
    with manager_of(machine) as rig:
        tier = rig.tier
        context = rig.request("reader", KEYS)
        tier.shutdown()
        tier.shutdown()
        assert tier.lookup(KEYS[0], context) is LookupResult.MISS
        rig.offer(context, KEYS)
        rig.settle()
        assert rig.counted("stored_rows") == 0


# What is refused.


def refused(machine: Machine, kind: type[Exception], *words: str) -> None:
    with pytest.raises(kind) as caught, manager_of(machine):
        pass
    for word in words:
        assert word in str(caught.value)
    assert not ours()


def test_a_tier_of_plain_offloading_names_the_connector_to_use(machine: Machine) -> None:
    config = build_offloading_config(machine.vllm_config(), machine.kv_cache_config())
    with pytest.raises(ConfigurationError, match="HiCacheOffloadingConnector"):
        TieringOffloadingSpec(config).get_manager()


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("seed", [None, "0"])
def test_hashes_that_collide_are_refused_seeded_or_not(
    machine: Machine, algorithm: str, seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    refused(replace(machine, algorithm=algorithm), ConfigurationError, "--prefix-caching-hash-algo")


def test_another_seed_of_hashes_is_another_place(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with manager_of(machine) as first:
        first.store("writer", KEYS)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with manager_of(machine) as second:
        assert second.load("reader", KEYS) == 0


def test_adapters_are_refused(machine: Machine) -> None:
    refused(replace(machine, lora=True), ConfigurationError, "LoRA", "HiCacheConnector")


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        ({"tennant": "a"}, ["tennant", "tenant"]),
        ({"url": "nowhere://x"}, ["nowhere"]),
        ({"timeout_s": -1}, ["timeout_s"]),
        ({"staging_bytes": "64KiB"}, ["staging_bytes", "MiB"]),
        ({"staging_bytes": 4096}, ["staging_bytes", "512MiB"]),
        ({"locality": "HERE"}, ["locality", "LOCAL"]),
        ({"total_kv_heads": 0}, ["total_kv_heads"]),
        ({"total_kv_heads": HEADS // 2}, ["total_kv_heads", "remove"]),
        ({"num_layers": LAYERS + 1}, ["num_layers", "remove"]),
    ],
)
def test_a_wrong_key_names_the_way_out(machine: Machine, tier: dict[str, object], words: list[str]) -> None:
    refused(replace(machine, tier=tier), ConfigurationError, *words)


def test_weights_that_nobody_tells_are_refused(machine: Machine) -> None:
    config = machine.vllm_config()
    config.load_config.load_format = "dummy"
    try:
        refused(machine, IdentityError, '"weights"')
    finally:
        config.load_config.load_format = "auto"


def test_rows_that_are_smaller_than_a_chunk_are_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hicache_store.engines.vllm_tier_rows._row_bytes", lambda *_: machine.row_bytes + 8192
    )
    refused(machine, ConfigurationError, "rows", "run without")


def test_an_untested_release_is_refused_unless_it_is_allowed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_version, "installed_version", lambda: "9.9.9")
    refused(machine, ConfigurationError, "9.9.9", "allow_untested")
    with manager_of(replace(machine, tier={"allow_untested": True})) as rig:
        rig.store("writer", KEYS[:1])


# What vLLM asks beside the data path.


def test_metrics_are_defined_and_told_once(machine: Machine) -> None:
    defined = HiCacheTier.build_metric_definitions({})
    with manager_of(machine) as rig:
        rig.store("writer", KEYS)
        stats = rig.tier.get_stats()
        assert stats is not None
        assert set(stats._values) <= set(defined)
        assert stats.reduce() == {"vllm:hicache_tier_rows:('stored',)": len(KEYS)}
        assert rig.tier.get_stats() is None
        assert rig.manager.get_stats() is not None


def test_every_counter_has_a_metric_that_is_defined() -> None:
    defined = HiCacheTier.build_metric_definitions({})
    assert {metric for metric, _ in _COUNTED.values()} == set(defined)
    assert {f"tier.load_{reason.value}" for reason in EndReason} - {"tier.load_no_slot"} <= set(_COUNTED)


def test_the_documentation_is_of_this_tier() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm-tier.md").read_text(encoding="utf-8")
    given = json.loads(page.partition("```json\n")[2].partition("```")[0])
    assert given["kv_connector"] == HiCacheOffloadingConnector.__name__
    (tier,) = given["kv_connector_extra_config"]["secondary_tiers"]
    assert SecondaryTierFactory.get_tier_class(tier) is HiCacheTier
    read_with_more({key: tier[key] for key in tier.keys() - {"type", "module_path"}}, _MORE_KEYS)
    table = page.partition("## Every key")[2].partition("##")[0]
    for key in (*OPTION_KEYS, *_MORE_KEYS, "locality"):
        assert f"`{key}`" in table


def test_what_a_hit_is_called(machine: Machine, faulty: Machine) -> None:
    assert HiCacheTier.medium is Medium.STORAGE
    with manager_of(machine) as rig:
        assert rig.tier.cache_hit_source is CacheHitSource.DISK
    with manager_of(faulty) as rig:
        assert rig.tier.cache_hit_source is CacheHitSource.EXTERNAL_UNSPECIFIED


def test_the_factory_finds_the_tier_by_its_path_and_the_connector_is_vllms() -> None:
    assert SecondaryTierFactory.get_tier_class({"type": "HiCacheTier", "module_path": MODULE}) is HiCacheTier
    assert issubclass(HiCacheOffloadingConnector, OffloadingConnector)


def test_the_connector_makes_the_tier_beside_the_scheduler(machine: Machine) -> None:
    connector = KVConnectorFactory.create_connector(
        machine.vllm_config(), KVConnectorRole.SCHEDULER, machine.kv_cache_config()
    )
    try:
        manager = connector.connector_scheduler.manager
        assert isinstance(manager.secondary_tiers[0], HiCacheTier)
        rig = Rig(machine, manager)
        rig.store("writer", KEYS)
        assert rig.load("reader", KEYS) == len(KEYS)
        del rig, manager
    finally:
        connector.shutdown()
    assert not ours()


# Jobs.


@dataclass
class LateStore:
    """Loads what it is asked for after ``wait``, whatever the deadline."""

    wait: threading.Event
    identity: RowIdentity
    scratch: np.ndarray[Any, Any]
    load_lanes: tuple[Lane, ...] = (Lane(0, 4),)
    save_lanes: tuple[Lane, ...] = (Lane(4, 4),)

    def load(
        self, keys: Sequence[bytes], prefix: Sequence[bytes], lane: Lane, timeout_s: float
    ) -> RestoreReport:
        assert self.wait.wait(30)
        self.scratch[lane.start : lane.start + len(keys)] = 0x77
        return RestoreReport(len(keys), None)


@pytest.mark.parametrize("is_late", [False, True])
def test_rows_that_come_too_late_are_not_placed(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_store.engines.vllm_tier_jobs.ENGINE_GRACE_S", 0.0)
    identity: Any = SimpleNamespace(row_bytes=8)
    store: Any = LateStore(threading.Event(), identity, np.zeros((8, 8), np.uint8))
    view = np.full((4, 16), 0x55, np.uint8)
    jobs = Jobs(store, memoryview(view), 0.05 if is_late else 30.0, Metrics())
    jobs.submit(7, (Run(tuple(chain("a", 2)), (1, 3), 0),), is_load=True)
    ended: list[Job] = []
    if not is_late:
        store.wait.set()
    while not ended:
        ended += jobs.finished()
    store.wait.set()
    jobs.close()
    (job,) = ended
    assert job.done == ([] if is_late else chain("a", 2))
    placed = 0x55 if is_late else 0x77
    assert (view[[1, 3], :8] == placed).all()
    assert (view[[0, 2]] == 0x55).all()
    assert (view[:, 8:] == 0x55).all()


def test_steps_that_compute_nothing_pause_while_the_store_works_and_only_then(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("hicache_store.engines.vllm_tier.time", SimpleNamespace(sleep=pauses.append))
    monkeypatch.setattr(OffloadingConnector, "build_connector_meta", lambda *_: None)
    connector = KVConnectorFactory.create_connector(
        machine.vllm_config(), KVConnectorRole.SCHEDULER, machine.kv_cache_config()
    )
    idle: Any = SimpleNamespace(num_scheduled_tokens={})
    busy: Any = SimpleNamespace(num_scheduled_tokens={"a": 1})
    try:
        rig = Rig(machine, connector.connector_scheduler.manager)
        connector.build_connector_meta(idle)
        assert not pauses
        context = rig.request("reader", KEYS)
        assert rig.manager.lookup(KEYS[0], context) is LookupResult.RETRY
        connector.build_connector_meta(busy)
        assert not pauses
        connector.build_connector_meta(idle)
        assert pauses == [ENGINE_IDLE_WAIT_S]
        assert rig.found(context, KEYS) == 0
        rig.offer(context, KEYS)
        connector.build_connector_meta(idle)
        assert pauses == [ENGINE_IDLE_WAIT_S] * 2
        rig.manager.on_request_finished(context)
        rig.settle()
        connector.build_connector_meta(idle)
        assert len(pauses) == 2
        del rig
    finally:
        connector.shutdown()


# How jobs are cut.


def test_jobs_are_cut_at_gaps_and_between_groups_and_know_what_was_before() -> None:
    first, second = chain("a", 5), [key[:-4] + (1).to_bytes(4, "big") for key in chain("a", 3)]
    ends = {key: 64 * (place + 1) for place, key in enumerate(first)}
    ends |= {key: 128 * (place + 1) for place, key in enumerate(second)}
    keys = [second[2], first[4], first[1], first[2]]
    runs = runs_of(keys, [7, 8, 9, 10], ends, (64, 128))
    assert [(run.keys, run.rows, run.first) for run in runs] == [
        ((first[1], first[2]), (9, 10), 1),
        ((first[4],), (8,), 4),
        ((second[2],), (7,), 2),
    ]
    assert [run.prefix for run in runs] == [(first[0],), tuple(first[:4]), tuple(second[:2])]


def test_keys_of_unknown_places_are_runs_of_their_own() -> None:
    keys = chain("a", 2)
    assert [run.keys for run in runs_of(keys, [0, 1], {}, (64,))] == [(keys[0],), (keys[1],)]
