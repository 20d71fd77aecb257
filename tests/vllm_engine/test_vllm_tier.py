"""The tier behind vLLM's own tiering manager: what it stores comes back bit for bit, or not at all."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import vllm_faulty
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm_model import TinyLlama
from vllm_tier_rig import Machine, chain, manager_of, ours

from hicache_store.engines.vllm_tier import (
    HiCacheTier,
)
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


def test_what_a_hit_is_called(machine: Machine, faulty: Machine) -> None:
    assert HiCacheTier.medium is Medium.STORAGE
    with manager_of(machine) as rig:
        assert rig.tier.cache_hit_source is CacheHitSource.DISK
    with manager_of(faulty) as rig:
        assert rig.tier.cache_hit_source is CacheHitSource.EXTERNAL_UNSPECIFIED
