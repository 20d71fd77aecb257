"""Bit-exact round trips, one axis of the problem at a time on six fixed pairs of topologies."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from store_rig import Place, attach_rank, chain, distinct_ranks, read_pages, tiny, write_pages

from hicache_store.layout.box import Box, Span
from hicache_store.layout.dtypes import ALL_DTYPES
from hicache_store.layout.model import Attention, ModelKV, Pool
from hicache_store.layout.parallel import ParallelSpec, Rank, shard
from hicache_store.layout.plan import Placement, placement_of_blocks
from hicache_store.store import EndReason, FixedGrid
from hicache_store.testing.engine_forms import ENGINE_FORMS

UNEVEN = ParallelSpec(1, 3, stage_starts=(1, 2))
PAIRS: tuple[tuple[ParallelSpec, ParallelSpec], ...] = tuple(
    (ParallelSpec.parse(writer), UNEVEN if reader == "uneven" else ParallelSpec.parse(reader))
    for writer, reader in (
        ("tp4pp2", "tp2pp1"),
        ("tp1pp1", "tp4pp2"),
        ("tp2pp1", "uneven"),
        ("tp8pp1", "tp1pp1"),
        ("tp1pp4", "tp2pp2"),
        ("tp2pp2", "tp2pp2"),
    )
)
"""Legal for 1 and for 4 heads, over at least 4 layers."""

pairs = pytest.mark.parametrize(("writer", "reader"), PAIRS, ids=lambda spec: spec.label)


def round_trip(pool: Pool, writer: ParallelSpec, reader: ParallelSpec, count: int = 2) -> int:
    """Write from every rank, read on every distinct one; how many readers there were."""
    place = Place()
    hashes = chain(count, pool.page_size)
    write_pages(place, pool, writer, hashes)
    return read_pages(place, pool, reader, hashes, ranks=distinct_ranks(pool, reader))


@pairs
@pytest.mark.parametrize("dtype", [dtype.name for dtype in ALL_DTYPES])
def test_every_dtype(writer: ParallelSpec, reader: ParallelSpec, dtype: str, tally: Counter[str]) -> None:
    tally["restores over dtypes"] += round_trip(tiny(4, 4, 4, dtype).pool(2), writer, reader)


@pairs
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("is_mla", [False, True])
def test_every_page_size(
    writer: ParallelSpec, reader: ParallelSpec, page_size: int, is_mla: bool, tally: Counter[str]
) -> None:
    model = ModelKV.mla(num_layers=4, latent_dim=4, rope_dim=2, dtype="bf16") if is_mla else tiny()
    tally["restores over page sizes"] += round_trip(model.pool(page_size), writer, reader)


KINDS = {
    "mha": ModelKV.dense(num_layers=4, num_kv_heads=4, num_query_heads=4, head_dim=3, dtype="bf16"),
    "gqa": ModelKV.dense(num_layers=4, num_kv_heads=4, num_query_heads=16, head_dim=128, dtype="fp8_e4m3"),
    "mqa": ModelKV.dense(num_layers=4, num_kv_heads=1, num_query_heads=8, head_dim=64, dtype="fp16"),
    "k_wider": ModelKV.dense(num_layers=4, num_kv_heads=4, head_dim=192, v_head_dim=128, dtype="bf16"),
    "v_wider": ModelKV.dense(num_layers=4, num_kv_heads=4, head_dim=1, v_head_dim=5, dtype="fp32"),
    "mla": ModelKV.mla(num_layers=4, latent_dim=512, rope_dim=64, dtype="bf16"),
    "mla_fp8": ModelKV.mla(num_layers=4, latent_dim=5, rope_dim=2, dtype="fp8_e5m2"),
}


@pairs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["layer_first", "page_first_direct_kv_apart", "canonical", "head_token_kv"])
def test_every_width_and_attention_kind(
    writer: ParallelSpec, reader: ParallelSpec, kind: str, form: str, tally: Counter[str]
) -> None:
    pool = KINDS[kind].pool(3)
    place, hashes = Place(), chain(1, 3)
    write_pages(place, pool, writer, hashes, form=form)
    readers = distinct_ranks(pool, reader)
    tally["restores over widths and kinds"] += read_pages(place, pool, reader, hashes, ranks=readers)
    tally["restores over widths and kinds"] += read_pages(
        place, pool, reader, hashes, ranks=readers, form=form
    )


def test_the_kinds_are_what_they_are_called() -> None:
    assert [KINDS[kind].attention for kind in ("mha", "gqa", "mla")] == list(Attention)


@pairs
@pytest.mark.parametrize("is_mla", [False, True], ids=["gqa", "mla"])
def test_every_pair_of_host_layouts(
    writer: ParallelSpec, reader: ParallelSpec, is_mla: bool, tally: Counter[str]
) -> None:
    """Page i is written from the i-th form; every form reads them all, and so meets every other."""
    model = ModelKV.mla(num_layers=4, latent_dim=2, rope_dim=1, dtype="bf16") if is_mla else tiny(v_width=3)
    pool = model.pool(3)
    place, hashes = Place(), chain(len(ENGINE_FORMS), 3)
    for page, form in enumerate(ENGINE_FORMS):
        write_pages(place, pool, writer, hashes[page : page + 1], pages=[page], form=form)
    for form in ENGINE_FORMS:
        read = read_pages(place, pool, reader, hashes, ranks=distinct_ranks(pool, reader), form=form)
        tally["pages restored over pairs of host layouts"] += read * len(hashes)


def block_placements(count: int, page_size: int, block: int) -> tuple[int, list[Placement]]:
    """Pages of a sequence whose tokens fill shuffled blocks, and the number of blocks there are."""
    blocks = -(-count * page_size // block) + 1
    order = sorted(range(blocks), key=lambda number: (number * 7 + 3) % blocks)
    return blocks, [placement_of_blocks(order, page, page_size, block) for page in range(count)]


@pairs
@pytest.mark.parametrize("form", ["layer_first", "page_first_direct", "page_unified", "k_and_v_per_layer"])
def test_every_pair_of_block_sizes(
    writer: ParallelSpec, reader: ParallelSpec, form: str, tally: Counter[str]
) -> None:
    pool = tiny(4, 4, 1, "int8").pool(64)
    blocks = (16, 32, 64, 128)
    place, hashes = Place(), chain(2 * len(blocks), 64)
    for index, block in enumerate(blocks):
        pages = [2 * index, 2 * index + 1]
        write_pages(
            place,
            pool,
            writer,
            [hashes[page] for page in pages],
            pages=pages,
            form=form,
            placements=block_placements(2, 64, block),
            slot_tokens=block,
        )
    for block in blocks:
        done = read_pages(
            place,
            pool,
            reader,
            hashes,
            ranks=distinct_ranks(pool, reader),
            form=form,
            placements=block_placements(len(hashes), 64, block),
            slot_tokens=block,
        )
        tally["pages restored over pairs of block sizes"] += done * len(hashes)


@pytest.mark.parametrize("writer", ["tp1pp2", "tp2pp2", "tp4pp2"])
@pytest.mark.parametrize("is_mla", [False, True], ids=["gqa", "mla"])
def test_61_layers_over_two_stages(writer: str, is_mla: bool, tally: Counter[str]) -> None:
    """31 and 30 layers, read by stages of other lengths."""
    if is_mla:
        pool = ModelKV.mla(num_layers=61, latent_dim=6, rope_dim=2, dtype="bf16").pool(2)
    else:
        pool = tiny(4, 61, 2, "fp8_e4m3").pool(2)
    assert [len(shard(pool, ParallelSpec(1, 2), Rank(pp=pp)).box.layers) for pp in (0, 1)] == [31, 30]
    place, hashes = Place(), chain(2, 2)
    write_pages(place, pool, writer, hashes)
    uneven = [ParallelSpec(2, 4, stage_starts=(15, 31, 46)), ParallelSpec(1, 2, stage_starts=(30,))]
    for reader in (ParallelSpec(1, 1), ParallelSpec(2, 2), ParallelSpec(1, 3), ParallelSpec(4, 8), *uneven):
        done = read_pages(place, pool, reader, hashes, ranks=distinct_ranks(pool, reader))
        tally["restores of 61 layers over two stages"] += done


def covered(box: Box, held: Sequence[Box]) -> bool:
    """Whether every (head, layer) of ``box`` lies in some held box, counted one by one."""
    return all(
        any(head in one.heads and layer in one.layers for one in held)
        for head in range(box.heads.start, box.heads.stop)
        for layer in range(box.layers.start, box.layers.stop)
    )


@pytest.mark.parametrize("second", ["tp2pp2", "tp4pp1", "tp1pp4"])
def test_partial_writers_give_exactly_what_they_cover(second: str, tally: Counter[str]) -> None:
    """Any subset of the ranks of one topology, each with one rank of another: a reader hits exactly
    when what they wrote covers its box."""
    pool = tiny().pool(1)
    first = ParallelSpec(2, 2)
    hashes = chain(1)
    others = list(ParallelSpec.parse(second).ranks())
    readers = [ParallelSpec(1, 1), ParallelSpec(4, 4), ParallelSpec(2, 1), ParallelSpec(1, 2)]
    for bits, subset in enumerate(itertools.product((False, True), repeat=4)):
        place = Place()
        ranks = list(itertools.compress(first.ranks(), subset))
        write_pages(place, pool, first, hashes, ranks=ranks)
        other = others[bits % len(others)]
        write_pages(place, pool, second, hashes, ranks=[other])
        held = [shard(pool, first, rank).box for rank in ranks]
        held.append(shard(pool, ParallelSpec.parse(second), other).box)
        for spec in readers:
            for rank in distinct_ranks(pool, spec):
                with attach_rank(place, pool, spec, rank) as rig:
                    looked, report = rig.store.contains(hashes), rig.restore(hashes)
                    expected = int(covered(rig.box, held))
                    assert (looked.pages, report.pages) == (expected, expected)
                    rig.assert_holds(range(expected))
                    if not expected:
                        assert report.end is not None
                        assert (report.end.page, report.end.reason) == (0, EndReason.ABSENT)
                    tally["restores of what partial writers left"] += 1


@pytest.mark.parametrize("heads_per_object", [1, 2])
@pytest.mark.parametrize("layers_per_object", [1, 2, 3, 5])
def test_a_fixed_grid_is_read_by_those_who_were_never_told(
    heads_per_object: int, layers_per_object: int, tally: Counter[str]
) -> None:
    pool = tiny(4, 7).pool(2)
    place, hashes = Place(), chain(2, 2)
    grid = FixedGrid(heads_per_object, layers_per_object)
    write_pages(place, pool, "tp2pp2", hashes, grid=grid)
    stages = (Span(0, 4), Span(4, 7))
    in_stage = [{layer // layers_per_object for layer in range(stage.start, stage.stop)} for stage in stages]
    assert len(place.objects()) == 2 * (4 // heads_per_object) * sum(map(len, in_stage))
    for reader in (ParallelSpec(1), ParallelSpec(8, 7), ParallelSpec(2, 3, stage_starts=(1, 6))):
        tally["restores from grids nobody told of"] += read_pages(
            place, pool, reader, hashes, ranks=distinct_ranks(pool, reader)
        )
