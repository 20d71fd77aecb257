from __future__ import annotations

import ast
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hicache_store
from hicache_store.errors import ConfigurationError, TopologyError
from hicache_store.layout.box import Box, Span
from hicache_store.layout.dtypes import DType
from hicache_store.layout.model import KVPart, ModelKV, Pool
from hicache_store.layout.ownership import owner
from hicache_store.layout.parallel import (
    ParallelSpec,
    Rank,
    elected_replica,
    head_spans,
    shard,
    stage_layers,
)
from hicache_store.testing.strategies import pools, topologies

HEADS = range(1, 17)
TP = range(1, 17)


def is_legal(heads: int, tp: int) -> bool:
    return heads % tp == 0 or tp % heads == 0


def model(heads: int, layers: int = 4) -> ModelKV:
    return ModelKV.dense(num_layers=layers, num_kv_heads=heads, head_dim=2, dtype="int8")


def test_every_legal_division_of_heads_tiles_them_with_equal_replicas() -> None:
    legal = 0
    for heads, tp in product(HEADS, TP):
        if not is_legal(heads, tp):
            continue
        legal += 1
        spans = head_spans(heads, ParallelSpec(tp))
        assert len(spans) == tp
        held = Counter(head for span in spans for head in range(span.start, span.stop))
        assert held == dict.fromkeys(range(heads), max(1, tp // heads))
        # Ranks take heads in order, so that replicas are neighbours, as engines place them.
        assert list(spans) == sorted(spans)
    assert legal == 84


def test_a08_every_other_division_is_refused_naming_both_numbers_and_each_way_out() -> None:
    """A rank would hold no head, or part of one: heads over ranks rounded down, or beyond the last."""
    for heads, tp in product(HEADS, TP):
        if is_legal(heads, tp):
            continue
        with pytest.raises(TopologyError) as refused:
            head_spans(heads, ParallelSpec(tp))
        message = str(refused.value)
        assert f"{heads} KV heads" in message
        assert f"size {tp};" in message
        for divisor in (d for d in HEADS if heads % d == 0):
            assert f" {divisor}," in message
        assert f"a multiple of {heads}" in message


def test_a32_any_reader_finds_each_head_it_needs_in_exactly_one_distinct_writer_shard() -> None:
    """Mapping a reader's heads to writers by dividing one parallel size by the other addresses past
    the end when heads are replicated; intersection of spans cannot."""
    pairs = 0
    for heads in HEADS:
        legal = [tp for tp in TP if is_legal(heads, tp)]
        for writer, reader in product(legal, legal):
            sources = set(head_spans(heads, ParallelSpec(writer)))
            for wanted in head_spans(heads, ParallelSpec(reader)):
                found = [
                    head
                    for source in sources
                    if (common := source.intersect(wanted)) is not None
                    for head in range(common.start, common.stop)
                ]
                assert sorted(found) == list(range(wanted.start, wanted.stop))
                assert max(found) < heads
            pairs += 1
    assert pairs == 610


def divisions_by_parallel_size(source: str) -> list[str]:
    """Expressions of a module that divide something by a number of ranks."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod | ast.Div):
            right = ast.unparse(node.right)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "divmod":
            right = ast.unparse(node.args[1])
        else:
            continue
        left = ast.unparse(node).removesuffix(right)
        if "head" in left and any(word in right for word in ("tp", "tensor_parallel", "world", "rank")):
            found.append(ast.unparse(node))
    return found


def test_a32_no_other_module_divides_heads_over_ranks() -> None:
    assert divisions_by_parallel_size("width = num_heads // spec.tp_size") == ["num_heads // spec.tp_size"]
    assert divisions_by_parallel_size("a, b = divmod(heads, tp)") == ["divmod(heads, tp)"]
    root = Path(hicache_store.__file__).parent
    offenders = {
        str(path.relative_to(root)): found
        for path in root.rglob("*.py")
        if (found := divisions_by_parallel_size(path.read_text()))
    }
    assert set(offenders) == {"layout/parallel.py"}


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("layers", [8, 9, 13, 61])
def test_even_stages_tile_the_layers_and_differ_by_one_at_most(layers: int, stages: int) -> None:
    spans = [stage_layers(ParallelSpec(pp_size=stages), layers, stage) for stage in range(stages)]
    assert [layer for span in spans for layer in range(span.start, span.stop)] == list(range(layers))
    sizes = [len(span) for span in spans]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_61_layers_over_two_stages_and_given_starts() -> None:
    assert [stage_layers(ParallelSpec(pp_size=2), 61, s) for s in range(2)] == [Span(0, 31), Span(31, 61)]
    uneven = ParallelSpec(pp_size=4, stage_starts=(15, 32, 48))
    assert [len(stage_layers(uneven, 64, s)) for s in range(4)] == [15, 17, 16, 16]


@pytest.mark.parametrize(
    ("spec", "layers", "words"),
    [
        (ParallelSpec(pp_size=5), 4, "4 layers cannot fill 5 .* at most 4"),
        (ParallelSpec(pp_size=3, stage_starts=(2, 2)), 4, r"\[2, 2\] do not ascend inside 1..3"),
        (ParallelSpec(pp_size=3, stage_starts=(3, 1)), 4, r"\[3, 1\]"),
        (ParallelSpec(pp_size=2, stage_starts=(0,)), 4, r"\[0\]"),
        (ParallelSpec(pp_size=2, stage_starts=(4,)), 4, r"\[4\]"),
        (ParallelSpec(pp_size=2, stage_starts=(-1,)), 4, r"\[-1\]"),
    ],
)
def test_stages_that_would_be_empty_are_refused(spec: ParallelSpec, layers: int, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        stage_layers(spec, layers, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp_size": 0}, "tp_size is 0"),
        ({"pp_size": -1}, "pp_size is -1"),
        ({"cp_size": 0}, "cp_size is 0"),
        ({"pp_size": 3, "stage_starts": (1,)}, "need 2 stage_starts, got 1"),
        ({"tp_size": 2, "head_map": ((0, 1),)}, "1 rows for tensor-parallel size 2"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        ParallelSpec(**changes)  # type: ignore[arg-type]


def test_a_head_map_allows_what_the_rule_cannot() -> None:
    spec = ParallelSpec(tp_size=4, head_map=((1, 3), (0, 1), (1, 3), (1, 3)))
    pool = model(3).pool(4)
    shards = [shard(pool, spec, Rank(tp)) for tp in range(4)]
    assert [(s.box.heads, s.replica, s.replicas) for s in shards if s] == [
        (Span(1, 3), 0, 3),
        (Span(0, 1), 0, 1),
        (Span(1, 3), 1, 3),
        (Span(1, 3), 2, 3),
    ]


@pytest.mark.parametrize(
    "head_map",
    [
        ((0, 1), (2, 3)),
        ((0, 2), (1, 3)),
        ((1, 2), (2, 3)),
        ((0, 1), (1, 2)),
        ((0, 2), (2, 4)),
        ((0, 0), (0, 3)),
        ((0, 3), (3, 3)),
        ((0, 3), (0, 2)),
        ((2, 1), (0, 3)),
        ((-1, 2), (2, 3)),
    ],
)
def test_a_head_map_that_does_not_tile_the_heads_is_refused(head_map: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(TopologyError, match="3 KV heads"):
        head_spans(3, ParallelSpec(tp_size=2, head_map=head_map))


def test_labels_parse_to_what_they_name() -> None:
    for spec in (ParallelSpec(4, 2), ParallelSpec(1, 1), ParallelSpec(2, 3, 4)):
        assert ParallelSpec.parse(spec.label) == spec
    assert ParallelSpec.parse(" TP2 ") == ParallelSpec(2)
    for text in ("tp4xpp2", "TP4 x PP2"):
        assert ParallelSpec.parse(text) == ParallelSpec(4, 2)
    assert ParallelSpec.parse("tp4 x pp2 x cp3") == ParallelSpec(4, 2, 3)
    assert ParallelSpec.parse("cp2") == ParallelSpec(cp_size=2)
    assert [Rank(1, 0).label, Rank(1, 2, 3).label] == ["tp1pp0", "tp1pp2cp3"]


@pytest.mark.parametrize("text", ["", " ", "4", "tp", "pp2tp4", "tp-1", "tp2.pp2", "tp2 pp2", "tp2pp2x"])
def test_a_text_that_is_no_topology_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        ParallelSpec.parse(text)


def test_ranks_are_counted_stages_outermost_tensor_parallel_innermost() -> None:
    ranks = list(ParallelSpec(2, 2, 2).ranks())
    assert ranks == [Rank(tp, pp, cp) for pp in range(2) for cp in range(2) for tp in range(2)]


@pytest.mark.parametrize("rank", [Rank(2), Rank(0, 1), Rank(0, 0, 1), Rank(-1)])
def test_a_rank_outside_the_topology_is_refused(rank: Rank) -> None:
    with pytest.raises(TopologyError, match="outside"):
        shard(model(2).pool(4), ParallelSpec(tp_size=2), rank)


PAGE_HASHES = [f"{(page * 0x9E3779B97F4A7C15) % 2**64:064x}" for page in range(6)]


def written(pool: Pool, spec: ParallelSpec, base: int, layers: int | None = None) -> Counter[tuple[int, ...]]:
    """How often each (page, head, layer) is written when every rank writes what it is elected for."""
    times: Counter[tuple[int, ...]] = Counter()
    for rank in spec.ranks():
        held = shard(pool, spec, rank, layers)
        if held is None:
            continue
        for position, page_hash in enumerate(PAGE_HASHES):
            is_owner = owner(position, base, spec.cp_size) == rank.cp
            if not is_owner or elected_replica(page_hash, held.replicas) != held.replica:
                continue
            for head, layer in product(
                range(held.box.heads.start, held.box.heads.stop),
                range(held.box.layers.start, held.box.layers.stop),
            ):
                times[position, head, layer] += 1
    return times


def once(pool: Pool) -> dict[tuple[int, ...], int]:
    return dict.fromkeys(product(range(len(PAGE_HASHES)), range(pool.num_heads), range(pool.num_layers)), 1)


def test_u1_the_boxes_of_all_ranks_tile_every_page_exactly_once_after_election() -> None:
    checked = 0
    stages = [ParallelSpec(), ParallelSpec(pp_size=2), ParallelSpec(pp_size=4)]
    stages.append(ParallelSpec(pp_size=3, stage_starts=(1, 5)))
    for heads, tp in product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 16)):
        if not is_legal(heads, tp):
            continue
        pool = model(heads, layers=7).pool(4)
        for stage, cp in product(stages, (1, 2, 4)):
            spec = ParallelSpec(tp, stage.pp_size, cp, stage.stage_starts)
            assert written(pool, spec, base=cp - 1) == once(pool)
            checked += 1
    assert checked == 276


@given(st.data())
def test_u1_holds_for_any_topology_and_head_map(data: st.DataObject) -> None:
    pool = data.draw(pools())
    spec = data.draw(topologies(pool))
    assert written(pool, spec, data.draw(st.integers(0, spec.cp_size - 1))) == once(pool)


def test_replicas_share_the_writing_of_pages_evenly_and_by_the_page_alone() -> None:
    hashes = [f"{(page * 0x9E3779B97F4A7C15 + 11) % 2**64:064x}" for page in range(4000)]
    elected = Counter(elected_replica(page_hash, 8) for page_hash in hashes)
    assert set(elected) == set(range(8))
    assert max(elected.values()) < 1.3 * min(elected.values())
    fixed = [elected_replica(f"{n:056x}{n:08x}", 3) for n in (0, 1, 2, 3, 0xFFFFFFFF)]
    assert fixed == [0, 1, 2, 0, 0]


def layer_groups() -> tuple[ModelKV, list[Pool]]:
    whole = ModelKV.dense(num_layers=13, num_kv_heads=4, head_dim=192, dtype="bfloat16")
    full_ids = [0, 6, 12]
    window_ids = [layer for layer in range(13) if layer not in full_ids]
    full = [KVPart("k", 128), KVPart("v", 128)]
    window = [KVPart("k", 192), KVPart("v", 128)]
    return whole, [
        whole.group_pool("full", 16, layer_ids=full_ids, num_heads=8, parts=full),
        whole.group_pool("window", 16, layer_ids=window_ids, num_heads=4, parts=window),
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "stages",
    [
        ParallelSpec(),
        ParallelSpec(pp_size=2),
        ParallelSpec(pp_size=3),
        ParallelSpec(pp_size=3, stage_starts=(1, 3)),
    ],
    ids=["pp1", "pp2", "pp3", "pp3 uneven"],
)
def test_a46_groups_of_layers_with_their_own_geometry_follow_the_models_stages(
    tp: int, stages: ParallelSpec
) -> None:
    """Full and window layers differ in heads and widths; a stage may cut inside either group."""
    whole, groups = layer_groups()
    spec = ParallelSpec(tp, stages.pp_size, 1, stages.stage_starts)
    for pool in groups:
        assert written(pool, spec, 0, whole.num_layers) == once(pool)
        assert pool.layer_ids is not None
        for rank in spec.ranks():
            held = shard(pool, spec, rank, whole.num_layers)
            stage = stage_layers(spec, whole.num_layers, rank.pp)
            ids = [] if held is None else pool.layer_ids[held.box.layers.start : held.box.layers.stop]
            assert list(ids) == [layer for layer in pool.layer_ids if layer in stage]


def test_a_stage_without_a_layer_of_the_group_holds_no_box() -> None:
    whole, (full, _) = layer_groups()
    spec = ParallelSpec(pp_size=3, stage_starts=(1, 3))
    assert shard(full, spec, Rank(pp=1), whole.num_layers) is None


def test_a_group_needs_the_number_of_layers_that_the_stages_divide() -> None:
    _, (full, _) = layer_groups()
    with pytest.raises(ConfigurationError, match="model_layers"):
        shard(full, ParallelSpec(pp_size=2), Rank())


def test_packed_draft_layers_belong_to_the_last_stage() -> None:
    pool = Pool("kv", 7, 2, (KVPart("k", 2),), DType.of("int8"), 4)
    spec = ParallelSpec(pp_size=2)
    boxes = [held.box for pp in range(2) if (held := shard(pool, spec, Rank(pp=pp), 6)) is not None]
    assert boxes == [Box.of((0, 2), (0, 3), (0, 4)), Box.of((0, 2), (3, 7), (0, 4))]
