"""One rank's loads and saves over a real store, also over one that hangs, fails and lies."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm_parts import (
    WAIT_S,
    Model,
    Rankful,
    close_ranks,
    everything,
    faulty,
    hashes_for,
    pages_stored,
    storage_of,
    until,
    whole_pages,
)

from hicache_store.connectors.registry import open_connector
from hicache_store.engines.vllm_messages import BlockTables, LoadOrder, SaveOrder
from hicache_store.engines.vllm_staging import NULL_BLOCK
from hicache_store.layout.parallel import ParallelSpec, Rank
from hicache_store.limits import ENGINE_LOAD_PAGES, ENGINE_LOAD_THREADS
from hicache_store.store import PageState
from hicache_store.testing.faults import Fail, Fault, FlipBit, Hold, TimeOut, Vanish, on_keys

PAGE, BLOCK, PAGES = 16, 8, 6
TOKENS = PAGES * PAGE
HASHES = hashes_for(PAGES)
TABLE = ([int(block) for block in torch.arange(1, 1 + TOKENS // BLOCK)],)
OTHER = ([int(block) for block in torch.arange(40, 40 + TOKENS // BLOCK)],)


HOLDS: list[Hold] = []


def holding(*, ignores_deadline: bool = False) -> Hold:
    """What makes storage hang until a test lets go, at its end at the latest."""
    HOLDS.append(Hold(threading.Event(), ignores_deadline=ignores_deadline))
    return HOLDS[-1]


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    url = storage_of(request.param, tmp_path)
    keeper = open_connector(url)  # a place in memory lives as long as someone has it open
    yield url
    keeper.close()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Every test closes what it opened, and nothing of it runs on."""
    yield
    while HOLDS:  # of a test that failed before it let go
        HOLDS.pop().until.set()
    close_ranks()
    until(lambda: not own_threads())


def own_threads() -> list[str]:
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(("hicache-load", "hicache-save"))
    ]


def save(rank: Rankful, hashes: tuple[str, ...] = HASHES, tables: BlockTables = TABLE) -> None:
    rank.worker.save([SaveOrder("writer", hashes, 0, tables)])
    rank.saved()


def load_order(
    start: int = 0, stop: int = TOKENS, tables: BlockTables = OTHER, name: str = "reader"
) -> LoadOrder:
    first, end = start // PAGE, -(-stop // PAGE)
    return LoadOrder(name, HASHES[first:end], HASHES[:first], start, stop, tables)


def written(url: str, hashes: tuple[str, ...] = HASHES) -> list[bytes]:
    """Store a prompt by a rank of its own; what its blocks hold."""
    rank = Rankful(url)
    save(rank, hashes)
    assert rank.counted("saved_pages") == len(hashes)
    rows = rank.rows(TABLE, 0, len(hashes) * PAGE)
    rank.worker.close()
    return rows


def test_pages_are_loaded_as_they_were_saved(url: str) -> None:
    rows = written(url)
    reader = Rankful(url)
    before = everything(reader.caches)
    reader.worker.load([load_order()])
    assert reader.ended() == {"reader": None}
    assert reader.rows(OTHER, 0, TOKENS) == rows
    assert reader.counted("loaded_pages") == PAGES
    assert reader.counted("loaded_bytes") == PAGES * reader.staging.page_bytes
    assert reader.counted("load_failed") == 0
    assert everything(reader.caches) != before
    reader.worker.close()


def test_another_block_size_and_the_middle_of_a_page(url: str) -> None:
    """Tokens that the engine has itself are not touched, nor are blocks of others."""
    rows = written(url)
    reader = Rankful(url, block=4, blocks=128)
    table = ([int(block) for block in torch.randperm(100)[: TOKENS // 4] + 20],)
    own = reader.rows(table, 0, TOKENS)
    outside = everything(reader.caches)
    reader.worker.load([load_order(start=20, stop=64, tables=table)])
    assert reader.ended() == {"reader": None}
    assert reader.rows(table, 0, TOKENS) == [*own[:20], *rows[20:64], *own[64:]]
    for cache in reader.caches:
        for part in cache.parts:
            part[table[0]] = 0
    emptied = everything(reader.caches)
    assert emptied != outside
    reader.worker.close()


def test_a_save_is_a_copy_of_the_moment(url: str) -> None:
    """The engine may reuse blocks as soon as ``save`` has returned, however late storage comes to them."""
    gate = holding()
    connector = faulty(url)
    rank = Rankful(connector)
    connector.plan = lambda attempt: gate if attempt.operation == "write" else None
    rows = rank.rows(TABLE, 0, TOKENS)
    rank.worker.save([SaveOrder("writer", HASHES, 0, TABLE)])
    for cache in rank.caches:
        for part in cache.parts:
            part.zero_()
    gate.until.set()
    rank.saved()
    assert rank.counted("saved_pages") == PAGES
    rank.worker.load([load_order()])
    assert rank.ended() == {"reader": None}
    assert rank.rows(OTHER, 0, TOKENS) == rows
    rank.worker.close()


@pytest.mark.parametrize("fault", [FlipBit(12_345), Vanish(), Fail()], ids=["flip", "vanish", "fail"])
def test_a_bad_page_in_the_middle_ends_the_prefix_there(url: str, fault: Fault) -> None:
    rows = written(url)
    connector = faulty(url)
    connector.plan = on_keys(lambda key: HASHES[3] in key, fault)
    reader = Rankful(connector)
    own = reader.rows(OTHER, 0, TOKENS)
    reader.worker.load([load_order(start=24)])
    assert reader.ended() == {"reader": 3 * PAGE}
    found = reader.rows(OTHER, 0, TOKENS)
    assert found[:24] == own[:24]
    assert found[24 : 3 * PAGE] == rows[24 : 3 * PAGE]
    assert found[3 * PAGE :] == own[3 * PAGE :]
    assert reader.counted("load_failed") == 1
    connector.plan = lambda attempt: None
    reader.worker.load([load_order(stop=3 * PAGE, name="again")])
    assert reader.ended() == {"again": None}
    reader.worker.close()


def test_the_tokens_before_a_bad_page_are_told_across_batches(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load moves some pages at a time; where its third batch fails, the first two count."""
    pages = 2 * ENGINE_LOAD_PAGES + 5
    hashes = hashes_for(pages)
    size = {"blocks": 2 * pages * PAGE // BLOCK + 2, "staged_pages": 4 * pages}
    table = (list(range(1, 1 + pages * PAGE // BLOCK)),)
    writer = Rankful(url, **size)
    save(writer, hashes, table)
    rows = writer.rows(table, 0, pages * PAGE)
    writer.worker.close()
    connector = faulty(url)
    connector.plan = on_keys(lambda key: hashes[pages - 2] in key, Vanish())
    reader = Rankful(connector, **size)
    restore, prefixes = reader.store.restore, []

    def watched(*given: object, prefix: tuple[str, ...], **named: object) -> object:
        prefixes.append(prefix)
        return restore(*given, prefix=prefix, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(reader.store, "restore", watched)
    reader.worker.load([LoadOrder("reader", hashes, (), 0, pages * PAGE, table)])
    assert reader.ended() == {"reader": (pages - 2) * PAGE}
    counts = (0, ENGINE_LOAD_PAGES, 2 * ENGINE_LOAD_PAGES)
    assert prefixes == [hashes[:count] for count in counts], "the pages before are marked as used too"
    assert reader.rows(table, 0, (pages - 2) * PAGE) == rows[: (pages - 2) * PAGE]
    reader.worker.close()


def test_a_load_that_hangs_is_given_back_and_its_blocks_are_left_alone(url: str) -> None:
    written(url)
    hold = holding(ignores_deadline=True)
    connector = faulty(url)
    connector.plan = on_keys(lambda key: HASHES[0] in key, hold)
    reader = Rankful(connector, timeout_s=0.3)
    reader.worker.load([load_order()])
    assert hold.entered.wait(WAIT_S)
    assert reader.ended() == {"reader": 0}
    assert own_threads(), "the read still hangs"
    for cache in reader.caches:  # the blocks are the engine's, which computes in them
        for part in cache.parts:
            part.fill_(3)
    before = everything(reader.caches)
    hold.until.set()
    until(lambda: reader.counted("load_us") > 0)
    assert everything(reader.caches) == before
    assert reader.counted("loaded_pages") == 0
    assert len(reader.staging.inbound.take(99)) == reader.staged_pages // 2
    reader.worker.close()


def test_the_engine_s_thread_never_waits_for_storage(url: str) -> None:
    """Every call of a step returns while all storage hangs; what waits for a thread has a deadline too."""
    hold = holding(ignores_deadline=True)
    connector = faulty(url)
    rank = Rankful(connector, timeout_s=0.3)
    connector.plan = lambda attempt: hold
    names = [f"reader {number}" for number in range(3 * ENGINE_LOAD_THREADS)]
    rank.worker.load([load_order(name=name) for name in names])
    rank.worker.save([SaveOrder("writer", HASHES, 0, TABLE)])
    assert rank.worker.results(set(), is_idle=True).finished == set()
    assert rank.ended(len(names)) == dict.fromkeys(names, 0)
    hold.until.set()
    rank.worker.close()


def test_an_aborted_request_s_load_ends_at_once(url: str) -> None:
    written(url)
    hold = holding(ignores_deadline=True)
    connector = faulty(url)
    connector.plan = on_keys(lambda key: HASHES[0] in key, hold)
    reader = Rankful(connector)
    reader.worker.load([load_order()])
    assert hold.entered.wait(WAIT_S)
    assert reader.worker.results(set()).finished == set()
    results = reader.worker.results({"reader", "a request without a load"})
    assert (results.finished, results.failed) == ({"reader"}, {"reader"})
    assert reader.counted("load_failed") == 0, "nobody missed it"
    before = everything(reader.caches)
    hold.until.set()
    until(lambda: reader.counted("load_us") > 0)
    assert everything(reader.caches) == before
    assert reader.worker.results({"reader"}).finished == set(), "a request is told of once"
    reader.worker.close()


def test_a_load_that_is_aborted_while_blocks_are_written_ends_after_that(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says once that a request ended. Its blocks stay this half's for the time of a copy, and no
    further page is read for it."""
    pages = 2 * ENGINE_LOAD_PAGES
    hashes, table = hashes_for(pages), (list(range(1, 1 + pages * PAGE // BLOCK)),)
    size = {"blocks": pages * PAGE // BLOCK + 1, "staged_pages": 2 * pages}
    writer = Rankful(url, **size)
    save(writer, hashes, table)
    writer.worker.close()
    reader = Rankful(url, **size)
    placing, go_on = threading.Event(), threading.Event()
    scatter = reader.staging.scatter

    def slow_scatter(*given: object) -> None:
        placing.set()
        assert go_on.wait(WAIT_S)
        scatter(*given)

    monkeypatch.setattr(reader.staging, "scatter", slow_scatter)
    reader.worker.load([LoadOrder("reader", hashes, (), 0, pages * PAGE, table)])
    assert placing.wait(WAIT_S)
    assert reader.worker.results({"reader"}).finished == set()
    placing.clear()
    own = threading.Thread(target=lambda: (time.sleep(0.05), go_on.set()))
    own.start()
    assert reader.ended() == {"reader": 0}
    own.join()
    until(lambda: reader.counted("load_us") > 0)
    assert reader.counted("loaded_pages") <= ENGINE_LOAD_PAGES
    reader.worker.close()


def test_null_blocks_leave_their_pages_out(url: str) -> None:
    """Of a window that has passed: a page is stored only where every layer still keeps all of it."""
    rank = Rankful(url, groups=(0, 1))
    window = list(OTHER[0])
    window[4] = window[5] = window[8] = NULL_BLOCK
    save(rank, HASHES, (TABLE[0], window))
    assert rank.counted("saved_pages") == PAGES - 2
    with whole_pages(url) as store:
        assert store.stored(HASHES) == (True, True, False, True, False, True)
    rank.worker.close()


def test_a_table_that_ends_early_leaves_its_pages_out(url: str) -> None:
    rank = Rankful(url)
    save(rank, HASHES, (TABLE[0][:5],))
    assert pages_stored(url, HASHES) == rank.counted("saved_pages") == 2
    rank.worker.close()


def test_a_load_into_passed_windows_fills_the_rest(url: str) -> None:
    rows = written(url)
    reader = Rankful(url, groups=(0, 1))
    window = [NULL_BLOCK] * 6 + OTHER[0][6:]
    null = [bytes(part[NULL_BLOCK].numpy().tobytes()) for cache in reader.caches for part in cache.parts]
    reader.worker.load([load_order(tables=(TABLE[0], window))])
    assert reader.ended() == {"reader": None}
    assert reader.rows((TABLE[0], window), 48, TOKENS) == rows[48:]
    assert null == [
        bytes(part[NULL_BLOCK].numpy().tobytes()) for cache in reader.caches for part in cache.parts
    ]
    reader.worker.close()


def test_full_staging_memory_drops_saves_and_counts_them(url: str) -> None:
    hold = holding()
    connector = faulty(url)
    rank = Rankful(connector, staged_pages=8)
    connector.plan = lambda attempt: hold if attempt.operation == "write" else None
    rank.worker.save([SaveOrder("one", HASHES, 0, TABLE)])
    rank.worker.save([SaveOrder("two", hashes_for(3, first=7), 0, TABLE)])
    assert rank.counted("save_dropped_pages") == 2 + 3
    connector.plan = lambda attempt: None
    hold.until.set()
    rank.saved()
    assert (pages_stored(url, HASHES), rank.counted("saved_pages")) == (4, 4)
    save(rank, hashes_for(3, first=7))
    assert pages_stored(url, hashes_for(3, first=7)) == 3
    rank.worker.close()


def test_loads_share_staging_memory_that_is_smaller_than_each(url: str) -> None:
    rows = written(url)
    reader = Rankful(url, staged_pages=2, blocks=200)
    tables = [([int(block) for block in torch.arange(12) + 12 * index + 1],) for index in range(8)]
    orders = [load_order(tables=table, name=str(index)) for index, table in enumerate(tables)]
    reader.worker.load(orders)
    assert reader.ended(8) == {str(index): None for index in range(8)}
    assert all(reader.rows(table, 0, TOKENS) == rows for table in tables)
    reader.worker.close()


@pytest.mark.parametrize(("model", "spec"), [
    (Model(heads=1, widths=(12,)), ParallelSpec(4)),
    (Model(heads=2), ParallelSpec(8)),
    (Model(heads=2), ParallelSpec(2)),
], ids=["latent of 4 ranks", "2 heads of 8 ranks", "a head of each rank"])  # fmt: skip
def test_of_ranks_with_the_same_kv_one_writes_a_page(
    model: Model, spec: ParallelSpec, tmp_path: Path
) -> None:
    """Written once, whoever is elected, and by all of them in turn; then there for any topology."""
    url, hashes = storage_of("memory", tmp_path), hashes_for(24)
    keeper = open_connector(url)
    table = (list(range(1, 1 + 24 * PAGE // BLOCK)),)
    ranks = [Rankful(url, model, spec=spec, rank=Rank(tp), staged_pages=64) for tp in range(spec.tp_size)]
    states: Counter[PageState] = Counter()
    for rank in ranks:
        backup = rank.store.backup

        def watched(*given: object, backup: object = backup, **named: object) -> object:
            report = backup(*given, **named)  # type: ignore[operator]
            states.update(report.states)
            return report

        rank.store.backup = watched  # type: ignore[method-assign]
        save(rank, hashes, table)
    copies = spec.tp_size // min(spec.tp_size, model.heads)
    assert states == {PageState.STORED: 24 * spec.tp_size // copies}, "no rank staged a page for nothing"
    assert all(rank.counted("saved_pages") > 0 for rank in ranks)
    assert pages_stored(url, hashes, model=model) == 24
    for rank in ranks:
        rank.worker.close()
    keeper.close()


@pytest.mark.parametrize("what", ["restore", "scatter", "slots"])
def test_what_raises_in_a_load_fails_that_load(what: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written(url)
    reader = Rankful(url)

    def broken(*given: object, **named: object) -> None:
        raise RuntimeError("a fault of the adapter")

    with monkeypatch.context() as patch:
        owner, name = {
            "restore": (reader.store, "restore"),
            "scatter": (reader.staging, "scatter"),
            "slots": (reader.staging.inbound, "wait"),
        }[what]
        patch.setattr(owner, name, broken)
        reader.worker.load([load_order()])
        assert reader.ended() == {"reader": 0}
    assert reader.counted("load_raised") == 1
    reader.worker.load([load_order()])
    assert reader.ended() == {"reader": None}
    assert len(reader.staging.inbound.take(99)) == reader.staged_pages // 2
    reader.worker.close()


@pytest.mark.parametrize("what", ["backup", "finish"])
def test_what_raises_in_a_save_is_counted(what: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rankful(url)

    def broken(*given: object, **named: object) -> None:
        raise RuntimeError("a fault of the adapter")

    with monkeypatch.context() as patch:
        patch.setattr(rank.store if what == "backup" else rank.staging, what, broken)
        save(rank)
    assert rank.counted("save_failed_pages") == PAGES
    save(rank)
    assert rank.counted("saved_pages") == PAGES
    assert len(rank.staging.outbound.take(99)) == rank.staged_pages // 2
    rank.worker.close()


def test_a_copy_out_that_raises_gives_its_slots_back(url: str) -> None:
    rank = Rankful(url)
    with pytest.raises(IndexError):
        rank.worker.save([SaveOrder("writer", HASHES, 0, ([10_000] * 12,))])
    assert len(rank.staging.outbound.take(99)) == rank.staged_pages // 2
    rank.worker.close()


def test_writes_that_fail_are_counted_and_change_nothing(url: str) -> None:
    connector = faulty(url)
    rank = Rankful(connector)
    connector.plan = on_keys(lambda key: HASHES[2] in key, TimeOut(), operations=("write",))
    save(rank)
    assert (rank.counted("saved_pages"), rank.counted("save_failed_pages")) == (2, PAGES - 2)
    connector.plan = lambda attempt: None
    save(rank)
    assert pages_stored(url, HASHES) == PAGES
    rank.worker.close()


def test_a_load_that_cannot_be_ordered_is_reported_failed(url: str) -> None:
    rank = Rankful(url)
    rank.worker.load([LoadOrder("refused", (), (), 0, 0, ())])
    assert rank.ended() == {"refused": 0}
    rank.worker.close()


def test_one_load_too_many_is_computed_and_the_others_are_not(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(url)
    monkeypatch.setattr("hicache_store.engines.vllm_worker.ENGINE_QUEUE_MAX", 5)
    hold = holding(ignores_deadline=True)
    connector = faulty(url)
    reader = Rankful(connector, staged_pages=200)
    connector.plan = lambda attempt: hold if attempt.operation == "read" else None
    calls = connector._calls["read"]
    reader.worker.load([load_order(name=str(number)) for number in range(ENGINE_LOAD_THREADS)])
    until(lambda: connector._calls["read"] == calls + ENGINE_LOAD_THREADS)
    reader.worker.load([load_order(name=f"waits {number}") for number in range(7)])
    assert reader.ended(2) == {"waits 5": 0, "waits 6": 0}
    connector.plan = lambda attempt: None
    hold.until.set()
    assert set(reader.ended(5 + ENGINE_LOAD_THREADS).values()) == {None}
    reader.worker.close()


def test_closing_ends_while_storage_hangs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves have the time of a deadline to end; loads are given up; no wait is without an end."""
    monkeypatch.setattr("hicache_store.engines.vllm_threads.CLOSE_JOIN_S", 0.1)
    hold = holding(ignores_deadline=True)
    connector = faulty(url)
    rank = Rankful(connector, timeout_s=0.2)
    connector.plan = lambda attempt: hold
    rank.worker.load([load_order(name=str(number)) for number in range(9)])
    rank.worker.save([SaveOrder("writer", HASHES, 0, TABLE)])
    assert hold.entered.wait(WAIT_S)
    before = everything(rank.caches)
    rank.worker.close()
    hold.until.set()
    until(lambda: not own_threads())
    assert everything(rank.caches) == before


def test_closing_finishes_the_saves_of_the_last_step(url: str) -> None:
    gate = holding()
    connector = faulty(url)
    rank = Rankful(connector)
    connector.plan = lambda attempt: gate if attempt.operation == "write" else None
    rank.worker.save([SaveOrder("writer", HASHES, 0, TABLE)])
    assert gate.entered.wait(WAIT_S)
    opener = threading.Thread(target=lambda: (time.sleep(0.1), gate.until.set()))
    opener.start()
    rank.worker.close()
    opener.join()
    assert pages_stored(url, HASHES) == PAGES


def test_a_process_ends_while_a_call_hangs() -> None:
    """Storage that never answers keeps a thread for ever, but not the process."""
    script = """
        import threading
        from hicache_store.engines.vllm_threads import Threads
        entered = threading.Event()
        threads = Threads(2, "hicache-load", 5)
        threads.submit(lambda: entered.set() or threading.Event().wait())
        assert entered.wait(60)
        print("ends", flush=True)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=120, check=False
    )
    assert (run.stdout.strip(), run.returncode) == (b"ends", 0), run.stderr[-2000:]
