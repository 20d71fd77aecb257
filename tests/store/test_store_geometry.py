"""Pages of which not every byte belongs to one head of one layer, and models whose layers differ."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from store_rig import (
    CONFIG,
    Place,
    attach_rank,
    chain,
    namespace_of,
    page_values,
    read_pages,
    tiny,
    write_pages,
)

from hicache_store.errors import ConfigurationError
from hicache_store.layout.box import Box, Span
from hicache_store.layout.layouts import engine_layout
from hicache_store.layout.model import KVPart, ModelKV, Pool
from hicache_store.layout.namespace import namespace
from hicache_store.layout.parallel import ParallelSpec, Rank, shard
from hicache_store.layout.plan import placement_of_slot
from hicache_store.layout.weights import WeightsIdentity
from hicache_store.store import PageState, PoolBuffers, Store
from hicache_store.testing.oracle import Dense, EnginePool, dense_page, layout_of_views

POOL = tiny(4, 4).pool(2)
NS = namespace_of(POOL)


def test_a30_bytes_of_no_single_head_are_refused_under_any_split() -> None:
    """A pool whose pages carry, say, one scale for all heads cannot be cut."""
    pool = dataclasses.replace(POOL, is_shardable=False)
    attach_rank(Place(), pool, "tp1pp1", Rank()).store.close()
    for spec in ("tp2pp1", "tp1pp2", "tp4pp2"):
        with pytest.raises(ConfigurationError, match=f"no single head, so it cannot be cut for {spec}"):
            attach_rank(Place(), pool, spec, Rank())


def test_a30_separate_scales_travel_as_parts_of_their_heads() -> None:
    """A scale for each token and head is a kv part of its own, and moves with its head at any TP."""
    parts = (KVPart("k", 4), KVPart("v", 4), KVPart("k_scale", 1), KVPart("v_scale", 1))
    model = dataclasses.replace(tiny(4, 4, 4), parts=parts)
    assert_round_trip(model.pool(2), "tp1pp1", "tp4pp2")
    assert_round_trip(model.pool(2), "tp4pp2", "tp2pp1")


def test_a30_token_shards_are_refused() -> None:
    """Decode context parallelism keeps every other token on a rank: no box of a page holds that."""
    half = Box(POOL.page_box.heads, POOL.page_box.layers, Span(0, 1))
    given = engine_layout("layer_first", POOL, half, slots=4, slot_tokens=1)
    pools = [PoolBuffers(POOL, given, [np.zeros(size, np.uint8) for size in given.buffer_bytes(2)])]
    with pytest.raises(ConfigurationError, match="tokens 0-1, the rank holds"):
        Store.attach(Place().open(), NS, pools, ParallelSpec(), Rank())


def test_a30_padding_between_rows_and_slots_is_never_stored() -> None:
    """Views into larger arrays: padded rows, padded slots, a gap before the first; other TP reads it."""
    place, hashes = Place(), chain(2, 2)
    placements = [placement_of_slot(slot, 2) for slot in (2, 0)]
    outcomes = []
    for filler in (0x00, 0xEE):
        for tp in range(2):
            box = shard(POOL, ParallelSpec(2), Rank(tp=tp)).box
            base = np.full(4096, filler, np.uint8)
            shape = (len(box.heads), len(box.layers), 3, 2, 2)
            views = []
            for part, start in enumerate((96, 2048)):
                strides = (16, 256, 80, 40, 2)
                view = np.ndarray(shape, "<u2", base.data, start, strides)
                for page, placement in enumerate(placements):
                    values = page_values(POOL, page).part_of(box).parts[part]
                    view[:, :, placement[0].slot] = values
                views.append((0, view))
            given = layout_of_views(box, [base], views)
            pools = [PoolBuffers(POOL, given, [base])]
            with Store.attach(place.open(), NS, pools, ParallelSpec(2), Rank(tp=tp)) as store:
                outcomes += store.backup(hashes, placements).states
    assert Counter(outcomes) == {PageState.STORED: 4, PageState.PRESENT: 4}
    assert read_pages(place, POOL, "tp4pp2", hashes) == 8


def test_a30_padding_survives_a_restore() -> None:
    place, hashes = Place(), chain(1, 2)
    write_pages(place, POOL, "tp4pp1", hashes)
    base = np.full(4096, 0xEE, np.uint8)
    views = []
    for start in (96, 2048):
        views.append((0, np.ndarray((4, 4, 3, 2, 2), "<u2", base.data, start, (8, 256, 80, 40, 2))))
    pools = [PoolBuffers(POOL, layout_of_views(POOL.page_box, [base], views), [base])]
    with Store.attach(place.open(), NS, pools, ParallelSpec(), Rank()) as store:
        assert store.restore(hashes, [placement_of_slot(1, 2)]).pages == 1
    held = Dense(POOL.page_box, tuple(view[:, :, 1].copy() for _, view in views))
    assert held.equals(page_values(POOL, 0))
    for _, view in views:
        view[:, :, 1].view(np.uint8)[...] = 0xEE
    assert bool(np.all(base == 0xEE)), "nothing beside the rows was written"


def assert_round_trip(pool: Pool, writer: str, reader: str) -> None:
    place, hashes = Place(), chain(2, pool.page_size)
    write_pages(place, pool, writer, hashes)
    read_pages(place, pool, reader, hashes)


def strided_forms(box: Box, slots: int) -> dict[str, tuple[np.ndarray, tuple[int, ...], int]]:
    """Ways a (head, layer, slot, token, dim) array of 2-byte elements may lie in 16 KiB: base, strides
    in elements, first element."""
    heads, layers, tokens, width = len(box.heads), len(box.layers), 2, 2
    sizes = dict(zip("hlstd", (heads, layers, slots, tokens, width), strict=True))

    def packed(order: str, pad: int = 0) -> tuple[int, ...]:
        strides, at = {}, 1
        for axis in reversed(order):
            strides[axis] = at
            at = at * sizes[axis] + pad
        return tuple(strides[axis] for axis in "hlstd")

    base = np.full(16 << 10, 0xCD, np.uint8)
    return {
        "contiguous": (base, packed("hlstd"), 0),
        "layer-strided": (base, packed("slthd"), 0),
        "head-strided": (base, packed("lsthd", 3), 0),
        "transposed": (base, packed("dtslh"), 0),
        "dim outermost but one": (base, packed("sdhlt"), 8),
        "off by one element": (base, packed("slthd"), 1),
        "padded everywhere": (base, packed("hlstd", 5), 7),
    }


@pytest.mark.parametrize("form", strided_forms(POOL.page_box, 3))
@pytest.mark.parametrize("writer", ["tp1pp1", "tp4pp2"])
def test_a35_every_strided_destination_is_filled_in_place(form: str, writer: str) -> None:
    """K and V are views in one array: what was asked for arrives in the caller's own memory, not in a
    copy that is thrown away, and nothing else changes there."""
    place, hashes = Place(), chain(2, 2)
    write_pages(place, POOL, writer, hashes)
    base, strides, first = strided_forms(POOL.page_box, 3)[form]
    shape, in_bytes = (4, 4, 3, 2, 2), tuple(2 * stride for stride in strides)
    views = [np.ndarray(shape, "<u2", base.data, 2 * first + start, in_bytes) for start in (0, 8 << 10)]
    given = layout_of_views(POOL.page_box, [base], [(0, view) for view in views])
    placements = [placement_of_slot(slot, 2) for slot in (2, 0)]
    pools = [PoolBuffers(POOL, given, [base])]
    with Store.attach(place.open(), NS, pools, ParallelSpec(), Rank()) as store:
        assert store.restore(hashes, placements).pages == 2
    for page, slot in enumerate((2, 0)):
        held = Dense(POOL.page_box, tuple(view[:, :, slot].copy() for view in views))
        assert held.equals(page_values(POOL, page))
        for view in views:
            view[:, :, slot] = 0xCDCD
    assert bool(np.all(base == 0xCD))


GROUPED = ModelKV.dense(num_layers=13, num_kv_heads=8, head_dim=4, dtype="bf16")
FULL = (0, 6, 12)
GROUPS = {
    "full": GROUPED.group_pool(
        "full", 2, layer_ids=FULL, num_heads=8, parts=[KVPart("k", 4), KVPart("v", 4)]
    ),
    "window": GROUPED.group_pool(
        "window",
        2,
        layer_ids=[layer for layer in range(13) if layer not in FULL],
        num_heads=4,
        parts=[KVPart("k", 6), KVPart("v", 4)],
    ),
}


@pytest.mark.parametrize("writer", ["tp1pp1", "tp2pp2", "tp4pp3"])
@pytest.mark.parametrize("reader", ["tp1pp2", "tp2pp1", "tp4pp2", "tp8pp1"])
def test_a46_groups_of_layers_with_their_own_geometry_are_pools_of_their_own(
    writer: str, reader: str
) -> None:
    """Full and window layers differ in heads and widths; stages cut inside both groups."""
    place, hashes = Place(), chain(2, 2)
    for rank in ParallelSpec.parse(writer).ranks():
        move_groups(place, writer, rank, hashes, is_writer=True)
    held = sum(
        move_groups(place, reader, rank, hashes, is_writer=False)
        for rank in ParallelSpec.parse(reader).ranks()
    )
    assert held >= 2
    layers = {key.rsplit("/", 1)[1].split(".")[0] for key in place.objects()}
    assert layers == {GROUPS["full"].key_name, GROUPS["window"].key_name}


def move_groups(place: Place, label: str, rank: Rank, hashes: list[str], *, is_writer: bool) -> int:
    spec = ParallelSpec.parse(label)
    ns = namespace({**CONFIG, "num_hidden_layers": 13}, WeightsIdentity.operator("w"), GROUPED.facts(2), "t")
    held = {name: shard(pool, spec, rank, 13) for name, pool in GROUPS.items()}
    arrays = {name: EnginePool(GROUPS[name], one.box) for name, one in held.items() if one is not None}
    placements = [placement_of_slot(slot, 2) for slot in (3, 1)]
    pools = [PoolBuffers(GROUPS[name], one.layout(), one.buffers()) for name, one in arrays.items()]
    with Store.attach(place.open(), ns, pools, spec, rank, model_layers=13) as store:
        for name, one in arrays.items():
            values = [dense_page(GROUPS[name], page) for page in range(2)]
            if is_writer:
                for placement, dense in zip(placements, values, strict=True):
                    one.write_page(placement, dense)
                states = store.backup(hashes, placements, pool=name).states
                assert set(states) <= {PageState.STORED, PageState.NOT_ELECTED, PageState.PRESENT}
                continue
            assert store.restore(hashes, placements, pool=name).pages == 2
            for placement, dense in zip(placements, values, strict=True):
                assert one.read_page(placement).equals(dense.part_of(one.box))
            assert one.is_poison_outside(placements)
    return len(arrays)


def test_a46_pools_of_other_geometry_or_origin_never_meet() -> None:
    """Equal names of a pool beside the main one say nothing: its geometry and origin do."""
    base = GROUPS["full"]
    variants = [
        base,
        dataclasses.replace(base, num_heads=4, parts=(KVPart("k", 8), KVPart("v", 8))),
        dataclasses.replace(base, parts=(KVPart("k", 5), KVPart("v", 3))),
        dataclasses.replace(base, layer_ids=(0, 5, 12)),
        dataclasses.replace(base, identity="another draft model"),
    ]
    assert len({variant.key_name for variant in variants}) == len(variants)
    place, hashes = Place(), chain(1, 2)
    ns = namespace({**CONFIG, "num_hidden_layers": 13}, WeightsIdentity.operator("w"), GROUPED.facts(2), "t")
    for variant in variants:
        with attach_rank(place, variant, "tp1pp1", Rank(), ns=ns, model_layers=13) as rank:
            assert rank.restore(hashes).pages == 0
            rank.fill([0])
            assert rank.backup(hashes).objects == 1
    assert len(place.objects()) == len(variants)
