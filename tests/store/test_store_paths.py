"""Objects large enough for every path between connector and slot: direct or staged, whole or in part."""

from __future__ import annotations

from collections import Counter

import pytest
from store_rig import Place, attach_rank, chain, distinct_ranks, read_pages, tiny, write_pages

from hicache_store.layout.box import Box
from hicache_store.layout.model import ModelKV, Pool
from hicache_store.layout.names import ObjectName
from hicache_store.layout.parallel import ParallelSpec, shard
from hicache_store.layout.plan import Segment, placement_of_slot
from hicache_store.layout.reading import plan_piece
from hicache_store.store.transfer import PiecePlan
from hicache_store.testing.faults import CountingConnector
from hicache_store.testing.oracle import EnginePool

PAGE_SIZE = 64
GQA = ModelKV.dense(num_layers=8, num_kv_heads=2, head_dim=128, dtype="bf16").pool(PAGE_SIZE)
"""A layer of a head is 32 KiB, a cell 128 KiB (4 layers), a page 512 KiB."""
MLA = ModelKV.mla(num_layers=8, latent_dim=512, rope_dim=64, dtype="bf16").pool(PAGE_SIZE)
"""A layer is 72 KiB, a cell two of them."""
POOLS = {"gqa": GQA, "mla": MLA}

CASES = [
    (kind, writer, reader, form)
    for kind in POOLS
    for writer, reader in (
        ("tp1pp1", "tp1pp1"),
        ("tp2pp1", "tp1pp2"),
        ("tp1pp1", "tp2pp4"),
        ("tp2pp4", "tp1pp1"),
        ("tp1pp2", "tp2pp3"),
    )
    for form in ("layer_first", "layer_first_kv_apart", "page_first_direct", "canonical", "page_head")
]


def paths_of(pool: Pool, writer: ParallelSpec, reader: ParallelSpec, form: str) -> set[str]:
    """The ways bytes take, told by the plans themselves."""
    placement = placement_of_slot(0, pool.page_size)
    found: set[str] = set()
    for rank in distinct_ranks(pool, writer):
        box = shard(pool, writer, rank).box
        plan = PiecePlan(pool, EnginePool(pool, box, form).layout(), whole(pool, box))
        found.add("written straight" if plan.is_direct(placement) else "written through staging")
    for rank in distinct_ranks(pool, reader):
        box = shard(pool, reader, rank).box
        layout = EnginePool(pool, box, form).layout()
        for writer_rank in distinct_ranks(pool, writer):
            held = shard(pool, writer, writer_rank).box
            piece = held.intersect(box)
            if piece is None:
                continue
            read = plan_piece(pool, held, piece, request_cost_bytes=4096)
            plan = PiecePlan(pool, layout, read)
            part = "whole" if piece == held else "part"
            found.add(f"{part} read {'straight' if plan.is_direct(placement) else 'through staging'}")
            if plan.cuts is not None and sum(run is not None for cuts in plan.cuts for _, run in cuts) > 1:
                found.add("many runs read straight")
            found |= {"two requests"} if len(read.fetches) > 1 else set()
            found |= {"widened to whole cells"} if not read.is_exact else set()
    return found


def whole(pool: Pool, box: Box):
    return plan_piece(pool, box, box, request_cost_bytes=4096)


def test_the_cases_take_every_path() -> None:
    taken: Counter[str] = Counter()
    for kind, writer, reader, form in CASES:
        taken.update(paths_of(POOLS[kind], ParallelSpec.parse(writer), ParallelSpec.parse(reader), form))
    assert set(taken) == {
        "written straight",
        "written through staging",
        "whole read straight",
        "whole read through staging",
        "part read straight",
        "part read through staging",
        "many runs read straight",
        "two requests",
        "widened to whole cells",
    }, taken


@pytest.mark.parametrize(("kind", "writer", "reader", "form"), CASES)
@pytest.mark.parametrize("verify", [True, False])
def test_every_path_restores_every_bit(
    kind: str, writer: str, reader: str, form: str, verify: bool, tally: Counter[str]
) -> None:
    pool = POOLS[kind]
    place, hashes = Place(), chain(1, PAGE_SIZE)
    write_pages(place, pool, writer, hashes, form=form, verify=verify)
    tally["restores over direct and staged paths"] += read_pages(
        place, pool, reader, hashes, ranks=distinct_ranks(pool, reader), form=form, verify=verify
    )


@pytest.mark.parametrize(("kind", "writer", "reader", "form"), CASES)
def test_every_path_finds_a_page_inside_a_larger_block(
    kind: str, writer: str, reader: str, form: str, tally: Counter[str]
) -> None:
    """Pages in the first, the second or the middle of the 128 tokens of a block."""
    pool = POOLS[kind]
    place, hashes = Place(), chain(3, PAGE_SIZE)
    there = (3, [(Segment(slot, token, PAGE_SIZE),) for slot, token in ((2, 64), (0, 0), (1, 40))])
    here = (3, [(Segment(slot, token, PAGE_SIZE),) for slot, token in ((1, 0), (2, 33), (0, 64))])
    write_pages(place, pool, writer, hashes, form=form, placements=there, slot_tokens=128)
    tally["restores over direct and staged paths"] += read_pages(
        place,
        pool,
        reader,
        hashes,
        ranks=distinct_ranks(pool, reader),
        form=form,
        placements=here,
        slot_tokens=128,
    )


@pytest.mark.parametrize(("kind", "writer", "reader", "form"), CASES)
def test_verification_costs_at_most_one_request_an_object(
    kind: str, writer: str, reader: str, form: str
) -> None:
    """The same restore with and without verification: the trailer rides along or is one part more."""
    pool = POOLS[kind]
    watchers: list[CountingConnector] = []

    def watch(connector):
        watchers.append(CountingConnector(connector))
        return watchers[-1]

    place, hashes = Place(), chain(1, PAGE_SIZE)
    write_pages(place, pool, writer, hashes, form=form)
    place.wrap = watch
    for rank in distinct_ranks(pool, reader):
        counts, ends = {}, {}
        for verify in (True, False):
            with attach_rank(place, pool, reader, rank, form=form, verify=verify) as rig:
                watchers[-1].reset()
                report = rig.restore(hashes)
                assert report.pages == 1
                reads = [record for record in watchers[-1].reads if record.key.startswith("v1/")]
                counts[verify] = {record.key: len(record.ranges) for record in reads}
                ends[verify] = {record.key: sum(record.ranges[-1]) for record in reads}
                assert report.objects == len(reads)
                assert report.requests == sum(counts[verify].values())
                assert report.read_bytes == sum(size for record in reads for _, size in record.ranges)
        assert counts[True].keys() == counts[False].keys()
        for key, end in ends[False].items():
            name = ObjectName.parse(key)
            payload = pool.payload_bytes(Box(name.heads, name.layers, pool.page_box.tokens))
            is_near = payload - end <= place.open().capabilities.request_cost_bytes
            assert counts[True][key] - counts[False][key] == (0 if is_near else 1)
            assert ends[True][key] == len(place.objects()[key])


def test_objects_of_several_sizes_share_one_place() -> None:
    """A range off a cell bound is read whole into staging, and only the slot's own rows change."""
    pool = tiny(2, 8, 128).pool(PAGE_SIZE)
    place, hashes = Place(), chain(2, PAGE_SIZE)
    write_pages(place, pool, "tp1pp1", hashes)
    spec = ParallelSpec(1, 3, stage_starts=(3, 5))
    assert read_pages(place, pool, spec, hashes, form="canonical") == 3
