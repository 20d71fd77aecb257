"""The engine of one process against a naive model, and against itself with restored pages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from hicache_store.demo.cut import cut_of
from hicache_store.demo.engine import Choice, Engine
from hicache_store.demo.fabric import Fabric
from hicache_store.demo.gguf import GgufFile
from hicache_store.demo.model import LlamaPart
from hicache_store.demo.pool import KVPool, PoolExhaustedError
from hicache_store.demo.tokenizer import BpeTokenizer
from hicache_store.demo.weights import ModelConfig, ModelSource, Weights, random8, smollm2
from hicache_store.errors import ConfigurationError, TopologyError
from hicache_store.layout.parallel import ParallelSpec, Rank

PAGE = 16


def solo(model: ModelSource, seed: int = 0, slots: int = 24, chunk_tokens: int = 48) -> Engine:
    config, weights = model.open()
    spec, rank = ParallelSpec(), Rank()
    cut = cut_of(config, config.kv().pool(PAGE), spec, rank)
    fabric = Fabric(spec, rank, None, 1.0)
    pool = KVPool(cut.kv.box, config.head_dim, slots, seed)
    return Engine(LlamaPart(config, weights, cut, fabric), pool, fabric, chunk_tokens)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


def greedy(engine: Engine, tokens: Sequence[int], count: int, start: int = 0) -> list[Choice]:
    choices = [engine.prefill(tokens, start)]
    while len(choices) < count:
        choices.append(engine.step(choices[-1].token, len(tokens) + len(choices) - 1))
    return choices


def pages_of(engine: Engine, count: int) -> torch.Tensor:
    data = engine.pool.data
    by_slot = data.view(2, data.shape[1], engine.pool.slots, PAGE, *data.shape[3:])
    return by_slot[:, :, engine.slots[:count]]


def naive_logits(config: ModelConfig, weights: Weights, tokens: Sequence[int]) -> np.ndarray:
    """The definition, in float64, one head and one position at a time; K and V rounded to bfloat16."""

    def read(name: str) -> np.ndarray:
        return weights.read(name).astype(np.float64)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + config.norm_eps) * weight[0]

    def rope(x: np.ndarray, position: int) -> np.ndarray:
        out = x.copy()
        for i in range(config.head_dim // 2):
            angle = position * config.rope_theta ** (-2 * i / config.head_dim)
            a, b = x[2 * i], x[2 * i + 1]
            out[2 * i] = a * np.cos(angle) - b * np.sin(angle)
            out[2 * i + 1] = a * np.sin(angle) + b * np.cos(angle)
        return out

    def rounded(x: np.ndarray) -> np.ndarray:
        return torch.from_numpy(x.astype(np.float32)).bfloat16().double().numpy()

    dim, group = config.head_dim, config.num_query_heads // config.num_kv_heads
    states = [read("token_embd.weight")[token] for token in tokens]
    for layer in range(config.num_layers):
        w = {
            name: read(f"blk.{layer}.{name}.weight")
            for name in (
                *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
                *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
            )
        }
        cache: list[tuple[np.ndarray, np.ndarray]] = []
        for position, x in enumerate(states):
            y = norm(x, w["attn_norm"])
            q, k, v = (w[f"attn_{part}"] @ y for part in "qkv")
            heads = [slice(h * dim, (h + 1) * dim) for h in range(config.num_kv_heads)]
            keys = np.stack([rope(k[h], position) for h in heads])
            cache.append((rounded(keys), rounded(np.stack([v[h] for h in heads]))))
            found = []
            for h in range(config.num_query_heads):
                query = rope(q[h * dim : (h + 1) * dim], position)
                scores = np.array([query @ past[0][h // group] for past in cache]) / np.sqrt(dim)
                shares = np.exp(scores - scores.max())
                shares /= shares.sum()
                found.append(sum(s * past[1][h // group] for s, past in zip(shares, cache, strict=True)))
            attended = x + w["attn_output"] @ np.concatenate(found)
            y = norm(attended, w["ffn_norm"])
            gate = w["ffn_gate"] @ y
            states[position] = attended + w["ffn_down"] @ (gate / (1 + np.exp(-gate)) * (w["ffn_up"] @ y))
    return read("output.weight") @ norm(states[-1], read("output_norm.weight"))


@pytest.mark.parametrize("length", [1, 2, 17, 53])
def test_logits_are_those_of_a_naive_model(tiny: ModelSource, length: int) -> None:
    config, weights = tiny.open()
    tokens = prompt(length)
    expected = naive_logits(config, weights, tokens)
    engine = solo(tiny, chunk_tokens=16)
    engine.open(length)
    choice = engine.prefill(tokens, 0)
    order = np.argsort(-expected)
    assert choice.token == order[0]
    # Where float32 and float64 differ, rounding to bfloat16 may fall either way.
    np.testing.assert_allclose([choice.best, choice.second], expected[order[:2]], atol=0.05)


def test_places_in_the_pool_do_not_matter(tiny: ModelSource) -> None:
    tokens = prompt(100)
    first, second = solo(tiny, seed=1), solo(tiny, seed=2)
    for engine in (first, second):
        engine.open(140)
    assert first.slots != second.slots
    assert greedy(first, tokens, 12) == greedy(second, tokens, 12)
    assert torch.equal(pages_of(first, 6).view(torch.int16), pages_of(second, 6).view(torch.int16))


@pytest.mark.parametrize("pages", [1, 3, 6])
def test_a_restored_prefix_replaces_its_prefill(tiny: ModelSource, pages: int) -> None:
    tokens = prompt(100)
    writer, reader = solo(tiny, seed=1), solo(tiny, seed=2)
    writer.open(140)
    reader.open(140)
    expected = greedy(writer, tokens, 12)
    data = reader.pool.data
    by_slot = data.view(2, data.shape[1], reader.pool.slots, PAGE, *data.shape[3:])
    by_slot[:, :, reader.slots[:pages]] = pages_of(writer, pages)
    found = greedy(reader, tokens, 12, start=pages * PAGE)
    assert [choice.token for choice in found] == [choice.token for choice in expected]
    # The tokens agree by a margin, not by luck: rounding moves the logits far less than it would take.
    noise = max(abs(a.best - b.best) for a, b in zip(found, expected, strict=True))
    assert 3 * noise < min(choice.best - choice.second for choice in expected)


def test_rows_that_were_never_written_show(tiny: ModelSource) -> None:
    engine = solo(tiny)
    engine.open(40)
    assert np.isnan(engine.prefill(prompt(40), 16).best)


def test_altered_pages_change_the_tokens(tiny: ModelSource) -> None:
    tokens = prompt(100)
    writer = solo(tiny)
    writer.open(140)
    expected = greedy(writer, tokens, 12)
    data = writer.pool.data
    by_slot = data.view(2, data.shape[1], writer.pool.slots, PAGE, *data.shape[3:])
    by_slot[:, :, writer.slots[:6]] *= -1
    found = greedy(writer, tokens, 12, start=96)
    assert [choice.token for choice in found] != [choice.token for choice in expected]


def test_the_pool_counts_its_slots(tiny: ModelSource) -> None:
    engine = solo(tiny, slots=4)
    engine.open(4 * PAGE)
    assert engine.pool.free_slots == 0
    assert sorted(engine.slots) == [0, 1, 2, 3]
    engine.open(PAGE + 1)
    assert engine.pool.free_slots == 2
    with pytest.raises(PoolExhaustedError, match="5 pages are wanted, 4 of 4 are free"):
        engine.open(4 * PAGE + 1)
    assert engine.pool.free_slots == 4
    with pytest.raises(AssertionError, match="twice"):
        engine.pool.release([0])


def test_requests_that_cannot_work_are_refused(tiny: ModelSource) -> None:
    engine = solo(tiny)
    with pytest.raises(ConfigurationError, match="513 tokens do not fit the context of 512"):
        engine.open(513)
    engine.open(16)
    with pytest.raises(ConfigurationError, match="prefill from 16 leaves none of 16"):
        engine.prefill(prompt(16), 16)


def test_cuts_tile_heads_features_and_words() -> None:
    config, _ = random8().open()
    for text in ("tp1", "tp2", "tp4pp2", "tp8", "tp16"):
        spec = ParallelSpec.parse(text)
        cuts = [cut_of(config, config.kv().pool(PAGE), spec, rank) for rank in spec.ranks() if rank.pp == 0]
        heads = [head for cut in cuts for head in cut.query_heads]
        assert heads == list(range(config.num_query_heads))
        for cut in cuts:
            kv = range(cut.kv.box.heads.start, cut.kv.box.heads.stop)
            assert {head // config.group for head in cut.query_heads} == set(kv)
        for part, total in (("ffn", config.ffn), ("vocab", config.vocab)):
            spans = [getattr(cut, part) for cut in cuts]
            assert [s.start for s in spans] + [total] == [0] + [s.stop for s in spans]


@pytest.mark.parametrize(
    ("kv_heads", "group", "sizes"), [(3, 3, [1, 3, 9]), (8, 2, [1, 2, 4, 8, 16]), (1, 6, [1, 2, 3, 6])]
)
def test_the_sizes_that_are_advised_are_those_that_work(kv_heads: int, group: int, sizes: list[int]) -> None:
    config, _ = random8().open()
    config = replace(config, num_kv_heads=kv_heads, num_query_heads=kv_heads * group)
    pool = config.kv().pool(PAGE)
    for tp in range(1, 33):
        if tp in sizes:
            cuts = [cut_of(config, pool, ParallelSpec(tp), rank) for rank in ParallelSpec(tp).ranks()]
            assert sorted(h for cut in cuts for h in cut.query_heads) == list(range(kv_heads * group))
        else:
            with pytest.raises(TopologyError, match=f"use a tensor-parallel size of {str(sizes)[1:-1]}$"):
                cut_of(config, pool, ParallelSpec(tp), Rank())


def test_models_are_not_cut_beyond_their_query_heads() -> None:
    config, _ = random8().open()
    pool = config.kv().pool(PAGE)
    with pytest.raises(TopologyError, match="4 ranks share one KV head and cannot divide its 2 query heads"):
        cut_of(config, pool, ParallelSpec(32), Rank())
    with pytest.raises(TopologyError, match="8 KV heads cannot be split over tensor-parallel size 3"):
        cut_of(config, pool, ParallelSpec(3), Rank())
    with pytest.raises(TopologyError, match="no context parallelism"):
        cut_of(config, pool, ParallelSpec(1, 1, 2), Rank())


def test_random_weights_depend_on_seed_and_name_only() -> None:
    config, weights = random8().open()
    again = random8().open()[1]
    other = ModelSource("other", config=config, seed=9).open()[1]
    queries = weights.read("blk.3.attn_q.weight")
    assert np.array_equal(queries, again.read("blk.3.attn_q.weight"))
    assert not np.array_equal(queries, other.read("blk.3.attn_q.weight"))
    assert not np.array_equal(queries, weights.read("blk.4.attn_q.weight"))
    rows = np.array([5, 1])
    assert np.array_equal(weights.read("blk.3.attn_q.weight", rows), queries[rows])


def test_smollm2_knows_its_capital(smollm2_file: GgufFile, smollm2_tokenizer: BpeTokenizer) -> None:
    config, weights = smollm2().open()
    kv = config.kv()
    assert (kv.num_layers, kv.num_kv_heads, [p.width for p in kv.parts]) == (30, 3, [64, 64])
    assert weights.has("token_embd.weight")
    assert not weights.has("output.weight")
    engine = solo(smollm2())
    tokens = smollm2_tokenizer.encode("The capital of France is")
    engine.open(PAGE)
    (choice,) = greedy(engine, tokens, 1)
    assert smollm2_tokenizer.decode([choice.token]) == " Paris"
    assert choice.best - choice.second > 0.1
