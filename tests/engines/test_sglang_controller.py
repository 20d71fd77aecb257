"""SGLang's real controller over the adapter: threads, batches of 128, acknowledgements, attach and detach."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sglang_engine import Engine, topology
from sglang_rig import Model, fill, host_pool, page_bytes

from hicache_store.connectors.base import Outcome, Status
from hicache_store.connectors.registry import open_connector

MODEL = Model(heads=2, layers=2, k_dim=8, v_dim=8)
PAGES = 300
TOKENS = range(PAGES * MODEL.page)


@pytest.fixture(scope="module", autouse=True)
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A gloo group of this process alone, and the page hash that SGLang compiles when first used."""
    path = tmp_path_factory.mktemp("world") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    with topology():
        yield
    dist.destroy_process_group()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/kv?quota=1GiB"


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    made = Engine(MODEL, host_pool(MODEL, slots=2 * PAGES + 8, layout="page_first"))
    made.attach(url)
    yield made
    if made.controller.enable_storage:
        made.detach()


def _fill(engine: Engine, indices: torch.Tensor, tokens: range = TOKENS) -> list[str]:
    hashes = engine.hashes(tokens)
    for page_hash, token in zip(hashes, indices[:: MODEL.page].tolist(), strict=True):
        for part, values in enumerate(MODEL.page_values(page_hash)):
            fill(engine.pool, part, token // MODEL.page, values)
    return hashes


def _stored(engine: Engine) -> list[str]:
    indices = engine.pool.alloc(len(TOKENS))
    hashes = _fill(engine, indices)
    assert engine.backup(TOKENS, indices) == PAGES
    engine.free(indices)
    return hashes


def _assert_holds(engine: Engine, hashes: list[str], indices: torch.Tensor) -> None:
    for page_hash, token in zip(hashes, indices[:: MODEL.page].tolist(), strict=False):
        for part, values in enumerate(MODEL.page_values(page_hash)):
            assert (page_bytes(engine.pool, part, token // MODEL.page) == values).all()


def _object(url: str, page_hash: str) -> Path:
    """The file of a page's object, by its size and content: the file connector's own names."""
    connector = open_connector(url)
    entries = [entry for entry in connector.scan("v1/") if f"/{page_hash}/" in entry.key]
    connector.close()
    assert len(entries) == 1
    root = Path(url.removeprefix("file://").partition("?")[0])
    found = [path for path in root.rglob("*") if path.is_file() and page_hash in str(path)]
    assert len(found) == 1, found
    return found[0]


def test_three_hundred_pages_go_out_and_come_back_in_batches(engine: Engine) -> None:
    hashes = _stored(engine)
    fetched = engine.prefetch(TOKENS)
    assert (fetched.hit_pages, fetched.completed_pages) == (PAGES, PAGES)
    assert fetched.acks == 3  # one a batch of at most 128 pages
    _assert_holds(engine, hashes, fetched.host_indices)


def test_a_longer_prompt_hits_up_to_its_stored_part(engine: Engine) -> None:
    _stored(engine)
    fetched = engine.prefetch([*TOKENS, *range(90_000, 90_040)])
    assert (fetched.hit_pages, fetched.completed_pages) == (PAGES, PAGES)
    assert engine.prefetch(range(50_000, 50_400)).hit_pages == 0


@pytest.mark.parametrize("fault", ["corrupt", "truncated", "missing"])
@pytest.mark.parametrize("page", [0, 140, 299])
def test_a_bad_page_in_a_prefetch_ends_it_exactly_there(
    engine: Engine, url: str, fault: str, page: int
) -> None:
    """Found whole at look-up, bad when it is read: what is reported are the pages before it."""
    hashes = _stored(engine)
    path = _object(url, hashes[page])

    def damage(_: Any) -> None:
        if fault == "missing":
            path.unlink()
        elif fault == "truncated":
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
        else:
            with path.open("r+b") as file:
                file.seek(17)
                byte = file.read(1)
                file.seek(17)
                file.write(bytes([byte[0] ^ 0x40]))

    fetched = engine.prefetch(TOKENS, before_read=damage)
    assert fetched.hit_pages == PAGES
    assert fetched.completed_pages == page
    assert fetched.acks == 3  # ranks reduce acknowledgements: a failed batch has one too
    _assert_holds(engine, hashes[:page], fetched.host_indices)
    assert all(thread.is_alive() for thread in engine.threads())
    engine.free(fetched.host_indices)
    again = engine.prefetch(TOKENS)  # the bad object counts as absent, or is gone
    assert (again.hit_pages, again.completed_pages) == (page, page)
    engine.free(again.host_indices)
    indices = engine.pool.alloc(len(TOKENS))
    _fill(engine, indices)
    assert engine.backup(TOKENS, indices) == PAGES  # a new backup heals it
    engine.free(indices)
    healed = engine.prefetch(TOKENS)
    assert healed.completed_pages == PAGES
    _assert_holds(engine, hashes, healed.host_indices)


def test_a44_damage_of_a_stored_page_is_counted(engine: Engine, url: str) -> None:
    """Whether a loaded page is right is decided by its sums, and a wrong one is a number, not a doubt."""
    hashes = _stored(engine)
    path = _object(url, hashes[7])
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    assert engine.prefetch(TOKENS).completed_pages == 7
    assert engine.backend.metrics.get("object.corrupt") == 1


def test_a_slow_page_ends_the_batch_in_time_and_the_next_one_works(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage that does not answer costs the deadline, not the thread."""
    engine.detach()
    engine.attach(f"memory://slow-{id(engine)}", timeout_s=0.5)
    hashes = _stored(engine)
    connector = engine.backend._connector
    real, release = connector.read_into, threading.Event()

    def hanging(reads: Any, deadline: Any) -> Any:
        slow = [read for read in reads if f"/{hashes[140]}/" in read.key]
        if not slow:
            return real(reads, deadline)
        head = reads[: reads.index(slow[0])]
        outcomes = real(head, deadline)
        release.wait(deadline.remaining_s())
        return [*outcomes, *real(reads[len(head) :], deadline)]

    monkeypatch.setattr(connector, "read_into", hanging)
    fetched = engine.prefetch(TOKENS)
    assert fetched.hit_pages == PAGES
    assert fetched.completed_pages <= 140
    assert fetched.completed_pages >= 128  # the first batch was whole
    engine.free(fetched.host_indices)
    monkeypatch.undo()
    assert engine.prefetch(TOKENS).completed_pages == PAGES


def test_b07_an_aborted_prefetch_stops_between_batches_and_frees_everything(engine: Engine) -> None:
    """An abort in mid-batch: the batch ends, no other is read, and each slot comes back once."""
    _stored(engine)
    free = engine.pool.available_size()
    for _ in range(5):
        fetched = engine.prefetch(TOKENS, before_read=lambda operation: operation.mark_terminate())
        assert fetched.completed_pages == 0
        assert fetched.acks == 3
        engine.free(fetched.host_indices)
    assert engine.pool.available_size() == free
    assert engine.prefetch(TOKENS).completed_pages == PAGES


def test_an_abort_while_a_batch_is_read_leaves_the_later_batches_unread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stored(engine)
    calls: list[int] = []
    real = engine.backend.batch_get_v1
    operation: list[Any] = []

    def aborting(keys: Any, indices: Any, info: Any = None) -> Any:
        calls.append(len(keys))
        operation[0].mark_terminate()
        return real(keys, indices, info)

    monkeypatch.setattr(engine.backend, "batch_get_v1", aborting)
    fetched = engine.prefetch(TOKENS, before_read=operation.append)
    assert calls == [128]
    assert fetched.completed_pages == 128


def test_a36_a_page_that_cannot_be_written_is_not_claimed_and_is_tried_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One failed page: the controller is told, nothing behind it is claimed, and the next backup of the
    same node stores what is missing."""
    indices = engine.pool.alloc(len(TOKENS))
    hashes = _fill(engine, indices)
    connector = engine.backend._connector
    real = connector.write_from

    def failing(writes: Any, deadline: Any) -> Any:
        outcomes = real([write for write in writes if f"/{hashes[20]}/" not in write.key], deadline)
        return [outcomes.pop(0) if f"/{hashes[20]}/" not in write.key else refused for write in writes]

    refused = Outcome(Status.FAILED, detail="no")
    monkeypatch.setattr(connector, "write_from", failing)
    assert engine.backup(TOKENS, indices) == 0  # the first batch is not whole, so the controller stops
    assert engine.backend.batch_exists(hashes) == 20
    monkeypatch.undo()
    assert engine.backup(TOKENS, indices) == PAGES
    assert engine.backend.batch_exists(hashes) == PAGES


def test_a43_a_missing_head_hides_the_rest_until_it_is_stored_again(engine: Engine, url: str) -> None:
    """Pages behind a missing head are no hits, and a new backup writes the head though the rest is there."""
    hashes = _stored(engine)
    for page in (0, 1):
        _object(url, hashes[page]).unlink()
    assert engine.prefetch(TOKENS).hit_pages == 0
    indices = engine.pool.alloc(len(TOKENS))
    _fill(engine, indices)
    before = engine.backend.metrics.get("backup.objects")
    assert engine.backup(TOKENS, indices) == PAGES
    assert engine.backend.metrics.get("backup.objects") - before == 2
    assert engine.backend.batch_exists(hashes) == PAGES


def test_c13_what_is_stored_is_not_written_again(engine: Engine, url: str) -> None:
    """A second writer of the same pages sends nothing: presence is asked, not remembered."""
    _stored(engine)
    engine.detach()
    engine.attach(url)
    indices = engine.pool.alloc(len(TOKENS))
    _fill(engine, indices)
    assert engine.backup(TOKENS, indices) == PAGES
    assert engine.backend.metrics.get("backup.bytes") == 0


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.01, 2.0])
def test_c15_prefetching_has_room_at_any_ratio_of_host_to_device(url: str, ratio: float) -> None:
    """Host memory no larger than the device's still takes prefetches: SGLang's limit is half the host pool,
    not what it has beyond the device. A prefetch of all that the limit admits comes back whole."""
    made = Engine(MODEL, host_pool(MODEL, slots=64, ratio=ratio, layout="page_first"))
    made.attach(url)
    controller = made.controller
    limit = controller.prefetch_capacity_limit
    tokens = range(limit // MODEL.page * MODEL.page)
    assert len(tokens) > (64 * ratio / 2 - 1) * MODEL.page
    indices = made.pool.alloc(len(tokens))
    hashes = _fill(made, indices, tokens)
    assert made.backup(tokens, indices) == len(hashes)
    made.free(indices)
    made.pool.kv_buffer.view(torch.uint8).fill_(0)
    assert not controller.prefetch_rate_limited()
    fetched = made.prefetch(tokens)
    assert (fetched.hit_pages, fetched.completed_pages) == (len(hashes), len(hashes))
    _assert_holds(made, hashes, fetched.host_indices)
    controller.prefetch_tokens_occupied = limit  # the scheduler's count of what it has asked for
    assert controller.prefetch_rate_limited()
    made.detach()


def test_c20_what_is_stored_is_visible_before_the_operation_ends(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch of 128 can be read by others when it is written, not when the whole node is."""
    seen: list[int] = []
    hashes = engine.hashes(TOKENS)
    real = engine.backend.batch_set_v1

    def watched(keys: Any, indices: Any, info: Any = None) -> Any:
        seen.append(engine.backend.batch_exists(hashes))
        return real(keys, indices, info)

    monkeypatch.setattr(engine.backend, "batch_set_v1", watched)
    _stored(engine)
    assert seen == [0, 128, 256]


def test_e08_detach_and_attach_leave_nothing_of_the_first_store(engine: Engine, tmp_path: Path) -> None:
    """Twenty cycles: hits come from the store that is attached, and threads and files do not pile up."""
    hashes = _stored(engine)
    engine.detach()
    engine.attach(f"file://{tmp_path}/other?quota=1GiB")
    assert engine.backend.batch_exists(hashes) == 0
    engine.detach()
    before = threading.active_count()
    for _ in range(20):
        engine.attach(f"file://{tmp_path}/kv?quota=1GiB")
        assert engine.backend.batch_exists(hashes) == PAGES
        engine.detach()
    assert threading.active_count() <= before
    assert engine.backend is None


def test_e08_detach_while_a_read_hangs_is_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.detach()
    engine.attach(f"memory://hung-{id(engine)}", timeout_s=1.0)
    _stored(engine)
    connector = engine.backend._connector
    release = threading.Event()

    def hanging(reads: Any, deadline: Any) -> Any:
        release.wait(deadline.remaining_s())
        return real(reads, deadline)

    real = connector.read_into
    monkeypatch.setattr(connector, "read_into", hanging)
    controller = engine.controller

    def fetch() -> None:
        with suppress(queue.Empty):  # a detached controller acknowledges nothing
            engine.prefetch(TOKENS)

    fetching = threading.Thread(target=fetch, daemon=True)
    fetching.start()
    deadline = time.monotonic() + 30
    while controller.prefetch_buffer.qsize() and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.detach()
    assert not any(thread.is_alive() for thread in engine.threads())


def test_a_refused_attach_leaves_the_controller_as_it_was(engine: Engine, url: str) -> None:
    engine.detach()
    with pytest.raises(Exception, match="total_kv_heads"):
        engine.attach(url, total_kv_heads=4)
    assert engine.controller.enable_storage is False
    assert engine.backend is None
    engine.attach(url)
    assert engine.controller.enable_storage


def test_statistics_are_what_was_moved_since_the_last_question(engine: Engine) -> None:
    engine.controller.enable_storage_metrics = True
    engine.detach()
    engine.attach("memory://stats")
    _stored(engine)
    engine.prefetch(TOKENS)
    stats = engine.backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([128, 128, 44], [128, 128, 44])
    assert all(speed > 0 for speed in [*stats.backup_bandwidth, *stats.prefetch_bandwidth])
    assert engine.backend.get_stats().backup_pgs == []


def test_sglangs_own_fault_injector_costs_pages_and_nothing_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang can wrap a backend so that calls fail at random: what is reported is right all the same."""
    hashes = _stored(engine)
    engine.detach()
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    engine.attach("memory://injected")
    assert type(engine.backend).__name__ == "HiCacheStorageFailureInjector"
    outcomes = set()
    for _ in range(12):
        indices = engine.pool.alloc(len(TOKENS))
        _fill(engine, indices)
        engine.backup(TOKENS, indices)
        engine.free(indices)
        fetched = engine.prefetch(TOKENS)
        outcomes.add((fetched.hit_pages, fetched.completed_pages))
        assert fetched.completed_pages <= fetched.hit_pages
        _assert_holds(engine, hashes[: fetched.completed_pages], fetched.host_indices)
        engine.free(fetched.host_indices)
    assert len(outcomes) > 1
    assert all(thread.is_alive() for thread in engine.threads())
