"""What the tier refuses at start, what vLLM asks of it beside the data path, and how its jobs are run."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm_model import TinyLlama
from vllm_tier_rig import HEADS, LAYERS, MODULE, Machine, Rig, chain, manager_of, ours

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

KEYS = chain("prompt", 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama().write(tmp_path_factory.mktemp("tier") / "model")


@pytest.fixture
def machine(model: Path, tmp_path: Path) -> Machine:
    return Machine(model, f"file://{tmp_path}/store?quota=1GiB")


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
