"""Replicated heads, context parallelism and pipelines: who writes, what is stored, who may read."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from store_rig import (
    Place,
    attach_rank,
    chain,
    distinct_ranks,
    namespace_of,
    page_values,
    read_pages,
    tiny,
    write_pages,
)

from hicache_store.connectors.base import Connector
from hicache_store.errors import TopologyError
from hicache_store.layout.box import Span
from hicache_store.layout.grid import own_grid
from hicache_store.layout.model import ModelKV
from hicache_store.layout.names import ObjectName
from hicache_store.layout.ownership import owned_positions, pages_needed
from hicache_store.layout.parallel import ParallelSpec, Rank, elected_replica, head_spans, shard
from hicache_store.store import PageState
from hicache_store.testing.faults import CountingConnector

PAGES = 12


@pytest.mark.parametrize(
    ("heads", "tp_sizes"), [(2, (1, 2, 4, 8)), (4, (4, 8)), (1, (1, 4)), (4, (1, 16)), (8, (16, 2))]
)
@pytest.mark.parametrize("stages", [1, 2])
def test_a08_replicated_heads_are_stored_once_and_read_by_all(
    heads: int, tp_sizes: tuple[int, ...], stages: int
) -> None:
    """More ranks than heads: objects are heads x layer ranges x pages, whatever the number of ranks."""
    pool, hashes = tiny(heads, 4).pool(2), chain(PAGES, 2)
    for writer_size, reader_size in itertools.product(tp_sizes, repeat=2):
        place, writer = Place(), ParallelSpec(writer_size, stages)
        reports = write_pages(place, pool, writer, hashes)
        assert len(place.objects()) == min(heads, writer_size) * stages * PAGES
        assert sum(report.objects for report in reports) == len(place.objects()), "each written once"
        for rank, report in zip(writer.ranks(), reports, strict=True):
            held = shard(pool, writer, rank)
            for page, state in enumerate(report.states):
                is_elected = elected_replica(hashes[page], held.replicas) == held.replica
                assert state is (PageState.STORED if is_elected else PageState.NOT_ELECTED)
        reader = ParallelSpec(reader_size)
        assert read_pages(place, pool, reader, hashes) == reader_size


def test_a08_heads_that_cannot_be_split_are_refused_naming_both_numbers() -> None:
    with pytest.raises(
        TopologyError, match="3 KV heads cannot be split over tensor-parallel size 2; use 1, 3"
    ):
        attach_rank(Place(), tiny(3).pool(2), "tp2pp1", Rank())
    with pytest.raises(TopologyError, match="8 KV heads cannot be split over tensor-parallel size 3"):
        attach_rank(Place(), tiny(8).pool(2), "tp3pp1", Rank())


def test_every_replica_is_elected_for_its_share_of_the_pages() -> None:
    pool, hashes = ModelKV.mla(num_layers=2, latent_dim=2, rope_dim=1, dtype="bf16").pool(1), chain(256)
    place = Place()
    reports = write_pages(place, pool, "tp8pp1", hashes)
    shares = [report.objects for report in reports]
    assert sum(shares) == 256
    assert min(shares) > 256 // 8 // 2
    assert read_pages(place, pool, "tp2pp2", hashes) == 4


def test_an_engine_that_elects_itself_is_believed() -> None:
    pool, hashes = tiny(1).pool(2), chain(PAGES, 2)
    place = Place()
    (report,) = write_pages(place, pool, "tp4pp1", hashes, ranks=[Rank(tp=3)], writer="caller")
    assert report.states == (PageState.STORED,) * PAGES
    (report,) = write_pages(place, pool, "tp4pp1", hashes, ranks=[Rank(tp=1)], writer="caller")
    assert report.states == (PageState.PRESENT,) * PAGES


def test_an_explicit_head_map_decides_boxes_and_replicas() -> None:
    """Three heads over four ranks in no order: heads 2, 0-2, 2, 0-2."""
    pool, hashes = tiny(3).pool(2), chain(PAGES, 2)
    spec = ParallelSpec(4, 2, head_map=((2, 3), (0, 2), (2, 3), (0, 2)))
    place = Place()
    write_pages(place, pool, spec, hashes)
    assert len(place.objects()) == 2 * 2 * PAGES
    assert read_pages(place, pool, "tp3pp1", hashes) == 3
    other = Place()
    write_pages(other, pool, "tp1pp1", hashes)
    assert read_pages(other, pool, spec, hashes) == 8


CP = 4
COUNT = 10


@pytest.mark.parametrize("base", [0, 3])
def test_a17_context_parallel_ranks_write_in_any_order_and_never_two_contents(
    base: int, tally: Counter[str]
) -> None:
    """Ten pages over four ranks (3, 3, 2, 2): all 24 orders of the ranks, interleaved at random, and
    readers of CP 1, 2 and 8 get every page."""
    pool, hashes = tiny(2, 2).pool(2), chain(COUNT, 2)
    assert sorted(pages_needed(COUNT, base, CP), reverse=True) == [3, 3, 2, 2]
    generator = random.Random(base)
    for order in itertools.permutations(range(CP)):
        recorder: list[CountingConnector] = []

        def record(connector: Connector, recorder: list[CountingConnector] = recorder) -> Connector:
            recorder.append(CountingConnector(connector))
            return recorder[-1]

        place = Place(wrap=record)
        spec = ParallelSpec(2, 1, CP)
        todo = [
            (rank, page)
            for rank in sorted(spec.ranks(), key=lambda rank, order=order: (order.index(rank.cp), rank.tp))
            for page in owned_positions(COUNT, base, CP, rank.cp)
        ]
        if generator.random() < 0.5:  # not rank after rank, but pages of all of them interleaved
            generator.shuffle(todo)
        rigs = {rank: attach_rank(place, pool, spec, rank) for rank in spec.ranks()}
        for rank, page in todo:
            rigs[rank].fill([page])
            report = rigs[rank].store.backup(
                hashes[page : page + 1], rigs[rank].placements[:1], first_page=page
            )
            assert report.states == (PageState.STORED,)
        for rig in rigs.values():
            rig.store.close()
        written = Counter(itertools.chain(*(one.digests for one in recorder)))
        objects = place.objects()
        assert all(count == 1 for key, count in written.items() if key in objects), "one writer an object"
        for one in recorder:
            one.assert_one_content_per_key()
        assert len(objects) == 2 * COUNT
        place.wrap = lambda connector: connector
        for reader_cp in (1, 2, 8):
            for cp in range(reader_cp):
                pages = list(owned_positions(COUNT, 0, reader_cp, cp))
                read_pages(
                    place,
                    pool,
                    ParallelSpec(1, 1, reader_cp),
                    [hashes[page] for page in pages],
                    pages=pages,
                    ranks=[Rank(cp=cp)],
                )
                tally["context-parallel reads after any order of writers"] += 1


def test_a17_two_writers_of_one_page_offer_the_same_bytes() -> None:
    """Ranks of different topologies that do write the same object write the same content."""
    pool, hashes = tiny(2, 4).pool(2), chain(4, 2)
    recorder: list[CountingConnector] = []

    def record(connector: Connector) -> Connector:
        recorder.append(CountingConnector(connector))
        return recorder[-1]

    contents: dict[str, set[str]] = {}
    for spec in ("tp2pp1", "tp4pp1", "tp2pp1cp2", "tp16pp1"):
        place = Place(wrap=record)
        write_pages(place, pool, spec, hashes, form="page_head", writer="caller")
    for one in recorder:
        for key, digests in one.digests.items():
            if key.startswith("v1/"):
                contents.setdefault(key, set()).update(digests)
    assert len(contents) == 2 * 4
    assert all(len(digests) == 1 for digests in contents.values())


def test_a32_every_rank_finds_each_head_it_needs_exactly_once(tally: Counter[str]) -> None:
    """For all head counts and legal sizes on either side: the pieces a reader takes from the writer's
    cuts tile its heads, and no head beyond the model's is ever named."""
    for heads in range(1, 17):
        pool = tiny(heads, 1, 1, "int8").pool(1)
        legal = [tp for tp in range(1, 17) if heads % tp == 0 or tp % heads == 0]
        for writer, reader in itertools.product(legal, repeat=2):
            cuts = own_grid(pool, ParallelSpec(writer), shard(pool, ParallelSpec(writer), Rank()).box)
            chunks = [chunk.heads for chunk in cuts.chunks(1)]
            assert len(chunks) == min(heads, writer)
            assert chunks[-1].stop == heads
            for wanted in head_spans(heads, ParallelSpec(reader)):
                found = [span for chunk in chunks if (span := chunk.intersect(wanted)) is not None]
                heads_found = list(itertools.chain(*(range(span.start, span.stop) for span in found)))
                assert heads_found == list(range(wanted.start, wanted.stop))
            tally["pairs of tensor-parallel sizes mapped"] += 1


def test_a33_tensor_and_pipeline_sizes_need_no_common_factor() -> None:
    """64 layers written by TP4 x PP2; readers of other sizes and of an uneven split hit everything."""
    pool, hashes = tiny(4, 64, 1, "int8").pool(1), chain(3)
    place = Place()
    write_pages(place, pool, "tp4pp2", hashes)
    layers = {ObjectName.parse(key).layers for key in place.objects()}
    assert layers == {Span(0, 32), Span(32, 64)}
    assert len(place.objects()) == 8 * 3
    uneven = ParallelSpec(1, 4, stage_starts=(15, 32, 48))
    assert [len(shard(pool, uneven, Rank(pp=pp)).box.layers) for pp in range(4)] == [15, 17, 16, 16]
    for reader in (ParallelSpec(2, 1), uneven, ParallelSpec(8, 3)):
        assert read_pages(place, pool, reader, hashes) == len(list(reader.ranks()))
    with pytest.raises(TopologyError, match="4 KV heads cannot be split over tensor-parallel size 3"):
        attach_rank(place, pool, "tp3pp1", Rank())


def test_packed_draft_layers_share_the_target_layers_with_plain_deployments() -> None:
    """A speculative writer's page is one layer longer; a plain reader takes the target's layers."""
    model, hashes = tiny(2, 5), chain(3, 2)
    plain, packed = model.pool(2), model.pool(2, draft_layers=1)
    place = Place()
    for rank in ParallelSpec(1, 2).ranks():
        with attach_rank(
            place, packed, "tp1pp2", rank, pages=3, model_layers=5, ns=namespace_of(plain)
        ) as rig:
            for page, placement in enumerate(rig.placements):
                rig.arrays.write_page(placement, page_values(packed, page))
            assert rig.backup(hashes).pages == 3
    assert {ObjectName.parse(key).layers for key in place.objects()} == {Span(0, 3), Span(3, 6)}
    assert read_pages(place, plain, "tp2pp1", hashes) == 2
    for rank in distinct_ranks(plain, "tp1pp3"):
        read_pages(place, plain, "tp1pp3", hashes, ranks=[rank])
