"""What SGLang relies on: exact types, no exception after attach, three threads, one question a chain."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang_rig import Model, Rank, attach, host_pool, make_rank, ranks, storage_config

from hicache_store.clock import Deadline
from hicache_store.engines.sglang import HiCacheL3
from hicache_store.errors import HandleError
from hicache_store.store import transfer
from hicache_store.testing.faults import CountingConnector

MODEL = Model()
HASHES = MODEL.hashes(6)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/kv?quota=1GiB"


@pytest.fixture
def rank(url: str) -> Iterator[Rank]:
    with ranks(MODEL, url, layout="page_first") as (made,):
        yield made


def _watched(rank: Rank) -> CountingConnector:
    """The rank's connector, counting; its stores are borrowed from it."""
    counting = CountingConnector(rank.backend._connector)
    for store, _ in rank.backend._anchor.store.parts:
        store._context.connector._owner = counting
    return counting


def test_answers_have_exactly_the_types_that_are_unpacked(rank: Rank) -> None:
    backend = rank.backend
    assert isinstance(backend, HiCacheStorage)
    done = rank.write(HASHES, [0, 1, 2, 3, 4, 5])
    assert type(done) is list
    assert [type(one) for one in done] == [bool] * 6
    got = rank.read([*HASHES[:3], *MODEL.hashes(2, "x")], [6, 7, 8, 9, 10])
    assert got == [True, True, True, False, False]
    assert [type(one) for one in got] == [bool] * 5
    assert type(backend.batch_exists(HASHES)) is int
    result = backend.batch_exists_v2(HASHES, [])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (6, [1, 2, 3, 4, 5, 6])
    assert type(result.kv_hit_pages) is int
    assert result.extra_pool_hit_pages == {PoolName.KV: 6}
    assert backend.batch_exists([]) == 0
    assert rank.backend.batch_get_v1([], torch.empty(0, dtype=torch.int64)) == []
    assert backend.batch_get_v2([]) == {}
    assert backend.batch_set_v2([]) == {}
    nothing = backend.batch_exists_v2(MODEL.hashes(3, "y"), [])
    assert (nothing.kv_hit_pages, nothing.extra_pool_hit_pages, nothing.restorable_prefix_pages) == (
        0,
        {},
        [],
    )


def test_e18_calls_that_make_no_sense_here_are_answered(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    """The abstract methods of the copying interface exist, and clearing a shared store says how to do it."""
    backend = rank.backend
    assert backend.exists(HASHES[0]) is False
    assert backend.get(HASHES[0]) is None
    assert backend.batch_get(HASHES) == [None] * 6
    assert backend.set(HASHES[0], torch.zeros(1)) is False
    assert backend.batch_set(HASHES, [torch.zeros(1)] * 6) is False
    rank.write(HASHES, range(6))
    backend.clear()
    assert "hicache rm" in caplog.text
    assert backend.batch_exists(HASHES) == 6


def test_no_call_raises_after_attach(rank: Rank) -> None:
    """Whatever is wrong with a call, it is a miss that is counted: an exception would end an operation."""
    backend, whole = rank.backend, rank.indices([0])
    for indices in (whole[:-1], whole + 1, rank.indices([999]), torch.empty(0, dtype=torch.int64), None):
        assert backend.batch_get_v1(HASHES[:1], indices) == [False]
        assert backend.batch_set_v1(HASHES[:1], indices) == [False]
    assert backend.batch_exists(["../../etc/passwd"]) == 0
    assert backend.batch_set_v1(["not a hash"], whole) == [False]
    unknown = PoolTransfer(name=PoolName.SWA, keys=HASHES[:2], host_indices=rank.indices([0, 1]))
    assert backend.batch_get_v2([unknown]) == {PoolName.SWA: [False, False]}
    assert backend.batch_set_v2([unknown]) == {PoolName.SWA: [False, False]}
    rank.write(HASHES, range(6))
    result = backend.batch_exists_v2(HASHES, [unknown])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, [])
    assert backend.metrics.get("engine.read_failed") >= 6
    assert backend.metrics.get("engine.write_failed") >= 6


def test_a29_pages_that_are_not_whole_are_never_moved(rank: Rank) -> None:
    """Token positions that cover a page in part, or start inside one, neither store nor load anything."""
    backend = rank.backend
    before = rank.pool.kv_buffer.clone()
    for indices in (torch.arange(1, 5), torch.arange(3), torch.arange(6)):
        assert backend.batch_set_v1(HASHES[:1], indices) == [False]
    assert backend.batch_exists(HASHES[:1]) == 0
    rank.write(HASHES[:1], [0])
    after = rank.pool.kv_buffer.clone()
    assert rank.backend.batch_get_v1(HASHES[:1], torch.arange(2, 6)) == [False]
    assert torch.equal(rank.pool.kv_buffer.view(torch.uint8), after.view(torch.uint8))
    assert not torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def test_a_closed_backend_finds_and_stores_nothing(url: str) -> None:
    made = make_rank(MODEL, url)
    made.write(HASHES, range(6))
    made.close()
    made.close()
    assert made.backend.batch_exists(HASHES) == 0
    assert made.read(HASHES[:2], [7, 8]) == [False, False]
    assert made.backend.batch_set_v1(HASHES[:1], made.indices([0])) == [False]
    assert made.backend.batch_exists_v2(HASHES, []).kv_hit_pages == 0


def test_pools_come_in_order_and_the_anchor_comes_twice(url: str) -> None:
    """SGLang registers the anchor, then every pool with the anchor again among them."""
    backend = HiCacheL3(storage_config(MODEL, url), {})
    pool = host_pool(MODEL)
    with pytest.raises(HandleError, match="before the anchor"):
        backend.register_mem_host_pool_v2(host_pool(MODEL), PoolName.SWA)
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    backend.on_host_pools_registered()
    assert backend.batch_exists(HASHES) == 0
    with pytest.raises(HandleError, match="attached already"):
        backend.register_mem_pool_host(pool)
    backend.close()


def test_the_constructor_takes_a_pool_or_a_mapping_or_nothing(url: str) -> None:
    config = storage_config(MODEL, url)
    for arguments in ((config,), (config, {}), (config, host_pool(MODEL))):
        HiCacheL3(*arguments).close()


def test_a_whole_chain_is_one_question(rank: Rank) -> None:
    """Ten thousand keys are one call to the storage, and one more for what another grid may hold."""
    long = MODEL.hashes(10_000, "long")
    rank.write(HASHES, range(6))
    counting = _watched(rank)
    assert rank.backend.batch_exists([*HASHES, *long]) == 6
    assert counting.calls["sizes"] <= 2
    assert set(counting.calls) <= {"sizes", "read"}


def test_c05_a_miss_costs_one_question_and_no_host_memory(rank: Rank) -> None:
    free = rank.pool.available_size()
    counting = _watched(rank)
    assert rank.backend.batch_exists(MODEL.hashes(300, "miss")) == 0
    assert counting.calls["sizes"] == 1
    assert rank.pool.available_size() == free


def test_c03_a_batch_is_one_call_to_the_storage(rank: Rank) -> None:
    """One read for all pages of a batch, in place: not a file, a copy and a request each."""
    rank.write(HASHES, range(6))
    counting = _watched(rank)
    assert rank.read(HASHES, range(6, 12)) == [True] * 6
    assert counting.calls["read"] == 1
    assert counting.items["read"] == 6


class Copies:
    """Where the bytes between a rank's pool and the storage lie, and how many the store itself copied."""

    def __init__(self, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool_bytes = self.other_bytes = self.copied_bytes = 0
        self._pool = [_extent(buffer.view(torch.uint8).reshape(-1).numpy()) for buffer in rank.pool.kv_buffer]
        self._lock = threading.Lock()
        parts, buffers = transfer.PieceTarget.parts, transfer.ChunkSource.buffers

        def watched_parts(target: Any) -> Any:
            found = parts(target)
            self._note([view for _, views in found for view in views])
            return found

        def watched_buffers(source: Any) -> Any:
            found = buffers(source)
            self._note(found)
            return found

        monkeypatch.setattr(transfer.PieceTarget, "parts", watched_parts)
        monkeypatch.setattr(transfer.ChunkSource, "buffers", watched_buffers)
        for name in ("pack", "unpack"):
            monkeypatch.setattr(transfer, name, self._counted(getattr(transfer, name)))

    def _note(self, views: Any) -> None:
        for view in views:
            start, stop = _extent(np.frombuffer(view, np.uint8))
            inside = any(first <= start and stop <= last for first, last in self._pool)
            with self._lock:
                self.pool_bytes += inside * (stop - start)
                self.other_bytes += (not inside) * (stop - start)

    def _counted(self, copy: Callable[..., None]) -> Callable[..., None]:
        def counted(plan: Any, *more: Any) -> None:
            with self._lock:
                self.copied_bytes += plan.total_bytes
            copy(plan, *more)

        return counted


def _extent(memory: np.ndarray) -> tuple[int, int]:
    start = int(memory.__array_interface__["data"][0])
    return start, start + memory.nbytes


@pytest.mark.parametrize(
    ("layout", "tp_size", "copies"), [("layer_first", 8, 0), ("page_first", 8, 1), ("page_head", 1, 1)]
)
def test_c07_pages_are_copied_once_at_most_and_into_memory_that_stays(
    url: str, monkeypatch: pytest.MonkeyPatch, layout: str, tp_size: int, copies: int
) -> None:
    """Between the storage and the host pool. Where a page lies in long runs the storage reads and writes the
    pool's own memory; elsewhere it passes through one block a worker, that the next page takes over."""
    model = Model(k_dim=128, v_dim=128, page=64, layers=4)
    page_bytes = 2 * model.layers * model.page * model.heads // tp_size * model.k_dim * 2
    hashes, trailers = model.hashes(12), 12 * 4096
    made = make_rank(model, url, layout=layout, tp_size=tp_size, slots=32)
    made.write(model.hashes(1, "first"), [31])  # announces, opens, plans
    made.read(model.hashes(1, "first"), [31])
    (store, _), *_ = made.backend._anchor.store.parts
    filled = made.indices(range(12))
    for call in (made.backend.batch_set_v1, made.backend.batch_get_v1):
        with monkeypatch.context() as patch:
            seen = Copies(made, patch)
            tracemalloc.start()
            done = call(hashes, filled)
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        payload = 12 * page_bytes
        assert done == [True] * 12
        assert seen.copied_bytes == copies * payload
        assert seen.pool_bytes == (0 if copies else payload)
        assert 0 <= seen.other_bytes - copies * payload <= trailers
        assert peak_bytes < payload / 4  # bookkeeping, and no second home for pages
    workers = made.backend._connector.capabilities.concurrency
    assert store._context.staging.allocated_bytes <= copies * workers * (page_bytes + 65536)
    made.close()


def test_lookup_read_and_write_run_at_the_same_time(url: str) -> None:
    """SGLang has one thread for each; none may wait for another's turn, and answers stay right."""
    with ranks(MODEL, url, layout="page_head", slots=64) as (made,):
        made.write(HASHES, range(6))
        wrong: list[str] = []

        def repeat(call: Any, expected: Any) -> None:
            for _ in range(30):
                if call() != expected:
                    wrong.append(str(call))

        threads = [
            threading.Thread(target=repeat, args=(lambda: made.backend.batch_exists(HASHES), 6)),
            threading.Thread(target=repeat, args=(lambda: made.read(HASHES, range(10, 16)), [True] * 6)),
            threading.Thread(
                target=repeat, args=(lambda: made.write(MODEL.hashes(4, "n"), range(20, 24)), [True] * 4)
            ),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert wrong == []
        assert made.holds(HASHES, range(10, 16))


def test_a_set_is_done_with_its_pages_when_it_returns(rank: Rank) -> None:
    """SGLang evicts host pages as soon as a backup is acknowledged: what is stored is what was there then."""
    assert rank.write(HASHES, range(6)) == [True] * 6
    rank.pool.kv_buffer.view(torch.uint8).fill_(0)
    assert rank.read(HASHES, range(6, 12)) == [True] * 6
    assert rank.holds(HASHES, range(6, 12))


def test_e05_a_sidecar_that_fails_costs_its_own_pages_only(rank: Rank) -> None:
    rank.write(HASHES, range(6))
    sidecar = host_pool(MODEL, layout="page_first")
    rank.backend.register_mem_host_pool_v2(sidecar, PoolName.SWA)
    swa = PoolTransfer(name=PoolName.SWA, keys=HASHES, host_indices=rank.indices(range(6)))
    bad = PoolTransfer(name=PoolName.MAMBA, keys=HASHES[:1], host_indices=torch.zeros(1, dtype=torch.int64))
    assert rank.backend.batch_set_v2([swa, bad]) == {PoolName.SWA: [True] * 6, PoolName.MAMBA: [False]}
    assert rank.backend.batch_get_v2([bad, swa]) == {PoolName.SWA: [True] * 6, PoolName.MAMBA: [False]}
    assert rank.read(HASHES, range(6, 12)) == [True] * 6


def test_missing_prefix_keys_are_said_once(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        rank.backend.batch_set_v1(HASHES[:1], rank.indices([0]), HiCacheStorageExtraInfo(prefix_keys=None))
    assert caplog.text.count("hicache_storage_pass_prefix_keys") == 1


def test_prefix_keys_count_as_used_with_the_chain(rank: Rank, url: str) -> None:
    """A read of the tail touches the head before it, so that eviction takes tails first."""
    rank.write(HASHES[:3], range(3))
    rank.write(HASHES[3:], range(3, 6), prefix=HASHES[:3])
    with ranks(MODEL, url) as (reader,):
        counting = _watched(reader)
        assert reader.read(HASHES[3:], [7, 8, 9], prefix=HASHES[:3]) == [True] * 3
        assert counting.items["touch"] == 6


def test_a47_replicated_heads_are_written_by_one_elected_rank(url: str) -> None:
    """Two ranks hold each head of four over eight ranks: both say stored, each page is written once."""
    model = Model(heads=4)
    hashes = model.hashes(8)
    with ranks(model, url, tp_size=8) as made:
        for one in made:
            assert one.write(hashes, range(8)) == [True] * 8
        written = [one.backend.metrics.get("backup.objects") for one in made]
        assert sum(written) == 8 * 4
        assert 0 < written[0] < 8
        for one in made:
            assert one.backend.batch_exists(hashes) == 8


def test_a_policy_that_never_gates_only_tells(rank: Rank) -> None:
    rank.write(HASHES, range(6))
    sidecar = host_pool(MODEL, layout="page_first")
    rank.backend.register_mem_host_pool_v2(sidecar, PoolName.SWA)
    rank.backend.batch_set_v2(
        [PoolTransfer(name=PoolName.SWA, keys=HASHES[:2], host_indices=rank.indices([0, 1]))]
    )
    groups = PoolTransfer(name=PoolName.SWA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    result = rank.backend.batch_exists_v2(HASHES, [groups])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages[PoolName.SWA]) == (6, 2)


def test_deadlines_are_those_of_the_options(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_rank(MODEL, url, timeout_s=3, lookup_timeout_s=1.5)
    seen: list[float] = []
    counting = _watched(made)
    real = counting.sizes

    def watching(keys: Any, deadline: Deadline) -> Any:
        seen.append(deadline.remaining_s())
        return real(keys, deadline)

    monkeypatch.setattr(counting, "sizes", watching)
    made.backend.batch_exists(HASHES)
    assert 0 < seen[0] <= 1.5
    made.write(HASHES, range(6))
    assert 1.5 < max(seen) <= 3
    made.close()


def test_attach_refused_closes_what_it_opened(url: str) -> None:
    backend = HiCacheL3(storage_config(MODEL, url, total_kv_heads=4), {})
    with pytest.raises(Exception, match="total_kv_heads"):
        backend.register_mem_pool_host(host_pool(MODEL))
    assert backend._connector is None
    again = attach(host_pool(MODEL), MODEL, url)
    again.close()
