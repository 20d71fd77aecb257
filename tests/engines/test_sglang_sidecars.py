"""Pools beside the anchor: indexers, drafts, sliding windows, recurrent states, and ones nobody knows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang_rig import Model, Rank, attach, fill, host_pool, make_rank, page_bytes, ranks

from hicache_store.errors import ConfigurationError

MODEL = Model()
LATENT = Model(heads=1, k_dim=24, v_dim=24, latent=True)
DRAFT = Model(heads=4, layers=1, k_dim=8, v_dim=8, seed=1)
HASHES = MODEL.hashes(10)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/kv?quota=1GiB"


def mamba_pool(slots: int = 12, layout: str = "page_first") -> Any:
    """A real pool of recurrent states: one slot a state, a temporal and two convolution buffers."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(3, slots, 2, 5), conv=(torch.zeros(3, slots, 7, dtype=torch.bfloat16),) * 2
    )
    pool = MambaPoolHost(info, 1.0, 0, device_capacity=slots, pin_memory=False, layout=layout)
    for buffer in pool.kv_buffer:
        buffer.view(torch.uint8).random_()
    return pool


def indexer_pool(anchor: Any, layers: int, drafts: int = 0) -> Any:
    """A real pool of index keys beside a latent anchor, in the anchor's layout."""
    page = 33 * anchor.page_size
    device = SimpleNamespace(
        store_dtype=torch.uint8, start_layer=0, end_layer=layers, layer_num=layers, layer_shard_enabled=False,
        device="cpu", index_k_with_scale_buffer=[torch.zeros(4, page, dtype=torch.uint8)] * layers,
    )  # fmt: skip
    info = SimpleNamespace(
        dtype=torch.uint8, page_bytes=lambda size: 33 * size, bytes_per_token_per_layer=33,
        host_bytes=lambda page_num, layer_num, page_size: page_num * layer_num * page,
    )  # fmt: skip
    decl = SimpleNamespace(storage_info=info, device_pool=device, owned_device_layers=None)
    draft = SimpleNamespace(index_k_with_scale_buffer=[torch.zeros(4, page, dtype=torch.uint8)])
    pool = DSAIndexerPoolHost(decl, anchor, packed_draft_device_pools=(draft,) * drafts, pin_memory=False)
    pool.index_k_with_scale_buffer.random_()
    return pool


class StrangePool:
    """A pool of a class that this package has never seen, with SGLang's flat pages and nothing else."""

    page_size = 4
    dtype = torch.float16
    layout = "layer_first"

    def __init__(self, slots: int = 16) -> None:
        self.data = torch.rand(slots, 50).to(torch.float16)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(50, dtype=self.dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        assert flat
        return self.data[index // self.page_size].clone()

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.data[index // self.page_size] = page


def transfer(name: PoolName, keys: list[str], indices: torch.Tensor | None, **more: Any) -> PoolTransfer:
    return PoolTransfer(name=name, keys=keys, host_indices=indices, **more)


def tokens(slots: list[int], page: int) -> torch.Tensor:
    return torch.cat([torch.arange(slot * page, (slot + 1) * page) for slot in slots])


def test_recurrent_states_come_back_bit_for_bit(url: str) -> None:
    source, target = mamba_pool(), mamba_pool()
    with ranks(MODEL, url) as (rank,):
        rank.backend.register_mem_host_pool_v2(source, PoolName.MAMBA)
        assert rank.backend.batch_set_v2([transfer(PoolName.MAMBA, HASHES[:3], torch.tensor([4, 0, 9]))]) == {
            PoolName.MAMBA: [True] * 3
        }
    with ranks(MODEL, url) as (rank,):
        rank.backend.register_mem_host_pool_v2(target, PoolName.MAMBA)
        assert rank.backend.batch_get_v2(
            [transfer(PoolName.MAMBA, [*HASHES[:3], HASHES[7]], torch.tensor([1, 2, 3, 5]))]
        ) == {PoolName.MAMBA: [True, True, True, False]}
    for written, read in ((4, 1), (0, 2), (9, 3)):
        assert torch.equal(source.get_data_page(written), target.get_data_page(read))


@pytest.mark.parametrize(
    ("place", "hits"), [({"tp": 0, "tp_size": 2}, 1), ({"tp": 1, "tp_size": 2}, 0), ({"tp_size": 1}, 0)]
)
def test_recurrent_states_belong_to_the_rank_that_wrote_them(
    url: str, place: dict[str, int], hits: int
) -> None:
    """Their heads cannot be told apart, so another rank or another size finds none, and takes no other's."""
    first = make_rank(MODEL, url, tp=0, tp_size=2)
    first.backend.register_mem_host_pool_v2(mamba_pool(), PoolName.MAMBA)
    first.backend.batch_set_v2([transfer(PoolName.MAMBA, HASHES[:1], torch.tensor([0]))])
    first.close()
    reader = make_rank(MODEL, url, **place)
    reader.backend.register_mem_host_pool_v2(mamba_pool(), PoolName.MAMBA)
    assert reader.backend._store("mamba").leading(HASHES[:1]) == hits
    reader.close()


@pytest.mark.parametrize(
    ("source", "target"), [("layer_first", "page_first"), ("page_first_direct", "layer_first")]
)
def test_a39_index_keys_of_a_latent_model_are_shared_by_all_tensor_sizes(
    url: str, source: str, target: str
) -> None:
    """Without its index keys a sparse model restores KV that it cannot attend to."""
    writer = make_rank(LATENT, url, layout=source, tp_size=2)
    indexer = indexer_pool(writer.pool, LATENT.layers)
    writer.backend.register_mem_host_pool_v2(indexer, PoolName.INDEXER)
    hashes = LATENT.hashes(4)
    writer.write(hashes, [0, 1, 2, 3])
    page = LATENT.page
    sidecar = transfer(PoolName.INDEXER, hashes[:3], tokens([0, 1, 2], page), indices_from_pool=PoolName.KV)
    assert writer.backend.batch_set_v2([sidecar]) == {PoolName.INDEXER: [True] * 3}
    saved = [indexer.get_data_page(slot * page).clone() for slot in range(3)]
    writer.close()
    for tp in range(4):
        reader = make_rank(LATENT, url, layout=target, tp=tp, tp_size=4)
        other = indexer_pool(reader.pool, LATENT.layers)
        reader.backend.register_mem_host_pool_v2(other, PoolName.INDEXER)
        result = reader.backend.batch_exists_v2(hashes, [transfer(PoolName.INDEXER, hashes, None)])
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (3, [1, 2, 3])
        assert result.extra_pool_hit_pages == {PoolName.KV: 4, PoolName.INDEXER: 3}
        back = transfer(PoolName.INDEXER, hashes[:3], tokens([5, 6, 7], page))
        assert reader.backend.batch_get_v2([back]) == {PoolName.INDEXER: [True] * 3}
        for slot, before in zip((5, 6, 7), saved, strict=True):
            assert torch.equal(other.get_data_page(slot * page), before)
        reader.close()


def test_a39_index_keys_are_shared_by_pipeline_sizes(url: str) -> None:
    """Two stages write, one stage of all layers reads, in another layout and with other slots."""
    hashes, page = LATENT.hashes(3), LATENT.page
    saved: list[torch.Tensor] = []
    for pp in range(2):
        writer = make_rank(LATENT, url, layout="page_first", pp=pp, pp_size=2, cuts=(2,))
        indexer = indexer_pool(writer.pool, (2, 4)[pp])
        writer.backend.register_mem_host_pool_v2(indexer, PoolName.INDEXER)
        writer.write(hashes, [0, 1, 2])
        sidecar = transfer(PoolName.INDEXER, hashes, tokens([2, 0, 1], page))
        assert writer.backend.batch_set_v2([sidecar]) == {PoolName.INDEXER: [True] * 3}
        saved.append(indexer.index_k_with_scale_buffer[[2, 0, 1], :, 0].clone())
        writer.close()
    reader = make_rank(LATENT, url, layout="layer_first", tp=1, tp_size=2)
    other = indexer_pool(reader.pool, LATENT.layers)
    reader.backend.register_mem_host_pool_v2(other, PoolName.INDEXER)
    back = transfer(PoolName.INDEXER, hashes, tokens([7, 8, 9], page))
    assert reader.backend.batch_get_v2([back]) == {PoolName.INDEXER: [True] * 3}
    assert torch.equal(other.index_k_with_scale_buffer[:, [7, 8, 9]].transpose(0, 1), torch.cat(saved, 1))
    reader.close()


def test_packed_draft_layers_of_index_keys_come_back_too(url: str) -> None:
    hashes, page = LATENT.hashes(2), LATENT.page
    rank = make_rank(LATENT, url, drafts=1)
    indexer = indexer_pool(rank.pool, LATENT.layers, drafts=1)
    rank.backend.register_mem_host_pool_v2(indexer, PoolName.INDEXER)
    before = indexer.index_k_with_scale_buffer[:, [0, 1]].clone()
    stored = transfer(PoolName.INDEXER, hashes, tokens([0, 1], page))
    assert rank.backend.batch_set_v2([stored]) == {PoolName.INDEXER: [True] * 2}
    back = transfer(PoolName.INDEXER, hashes, tokens([4, 5], page))
    assert rank.backend.batch_get_v2([back]) == {PoolName.INDEXER: [True] * 2}
    assert torch.equal(indexer.index_k_with_scale_buffer[:, [4, 5]], before)
    rank.close()
    plain = make_rank(LATENT, url)
    plain.backend.register_mem_host_pool_v2(indexer_pool(plain.pool, LATENT.layers), PoolName.INDEXER)
    assert plain.backend._store("indexer").leading(hashes) == 2
    plain.close()


def test_index_keys_of_a_draft_model_belong_to_its_weights(url: str) -> None:
    """A draft's pool of index keys: for every tensor size, and never in place of another draft's."""
    hashes, page, name = LATENT.hashes(2), LATENT.page, PoolName.DRAFT_INDEXER
    writer = make_rank(LATENT, url, layout="page_first", tp_size=2, draft_weights="d1")
    source = indexer_pool(writer.pool, 1)
    writer.backend.register_mem_host_pool_v2(source, name)
    writer.write(hashes, [0, 1])
    sidecar = transfer(name, hashes, tokens([0, 1], page), indices_from_pool=PoolName.KV)
    assert writer.backend.batch_set_v2([sidecar]) == {name: [True] * 2}
    writer.close()
    for draft_weights, found in (("d1", 2), ("d2", 0)):
        reader = make_rank(LATENT, url, layout="layer_first", tp=3, tp_size=4, draft_weights=draft_weights)
        target = indexer_pool(reader.pool, 1)
        reader.backend.register_mem_host_pool_v2(target, name)
        asked = reader.backend.batch_exists_v2(hashes, [transfer(name, hashes, None)])
        assert asked.kv_hit_pages == found
        back = transfer(name, hashes, tokens([5, 6], page))
        assert reader.backend.batch_get_v2([back]) == {name: [found > 0] * 2}
        for slot, taken in zip((0, 1), (5, 6), strict=True):
            same = torch.equal(source.get_data_page(slot * page), target.get_data_page(taken * page))
            assert same == (found > 0)
        reader.close()


def test_index_keys_of_some_layers_belong_to_their_stage(url: str) -> None:
    """Where only some layers have an index, no rank tells which: kept whole, for equal stages."""
    rank = make_rank(LATENT, url)
    sparse = indexer_pool(rank.pool, LATENT.layers - 2)
    rank.backend.register_mem_host_pool_v2(sparse, PoolName.INDEXER)
    hashes = LATENT.hashes(2)
    before = [sparse.get_data_page(slot * LATENT.page).clone() for slot in (0, 1)]
    stored = transfer(PoolName.INDEXER, hashes, tokens([0, 1], LATENT.page))
    assert rank.backend.batch_set_v2([stored]) == {PoolName.INDEXER: [True] * 2}
    back = transfer(PoolName.INDEXER, hashes, tokens([4, 5], LATENT.page))
    assert rank.backend.batch_get_v2([back]) == {PoolName.INDEXER: [True] * 2}
    for slot, page in zip((4, 5), before, strict=True):
        assert torch.equal(sparse.get_data_page(slot * LATENT.page), page)
    rank.close()


def test_a39_a_pool_that_cannot_be_taken_apart_refuses_by_name(url: str) -> None:
    """A pool that is left out would be restored as whatever was in its slots."""
    rank = make_rank(MODEL, url)
    with pytest.raises(ConfigurationError, match="pool auxiliary_swa"):
        rank.backend.register_mem_host_pool_v2(SimpleNamespace(page_size=4), PoolName.AUXILIARY_SWA)
    # SGLang's threads stay behind after a refusal this late: they find nothing and store nothing.
    assert rank.backend.batch_exists(HASHES) == 0
    assert rank.backend.batch_set_v1(HASHES[:1], rank.indices([0])) == [False]
    rank.close()


def test_a_strange_pool_is_kept_whole_and_for_its_own_rank(url: str) -> None:
    rank = make_rank(MODEL, url, tp_size=2)
    source = StrangePool()
    rank.backend.register_mem_host_pool_v2(source, PoolName.DEEPSEEK_V4_C4_INDEXER_SCALE)
    name = PoolName.DEEPSEEK_V4_C4_INDEXER_SCALE
    assert rank.backend.batch_set_v2([transfer(name, HASHES[:3], tokens([2, 0, 1], 4))]) == {name: [True] * 3}
    before = source.data[[2, 0, 1]].clone()
    source.data.zero_()
    assert rank.backend.batch_get_v2([transfer(name, HASHES[:3], tokens([5, 6, 7], 4))]) == {name: [True] * 3}
    assert torch.equal(source.data[[5, 6, 7]], before)
    rank.close()
    other = make_rank(MODEL, url, tp=1, tp_size=2)
    other.backend.register_mem_host_pool_v2(StrangePool(), name)
    assert other.backend._store(str(name)).leading(HASHES[:3]) == 0
    other.close()


def test_a_damaged_page_of_a_sidecar_is_a_miss_and_is_written_anew(url: str, tmp_path: Path) -> None:
    rank = make_rank(MODEL, url)
    source = StrangePool()
    rank.backend.register_mem_host_pool_v2(source, PoolName.SWA)
    stored = transfer(PoolName.SWA, HASHES[:3], tokens([0, 1, 2], 4))
    assert rank.backend.batch_set_v2([stored]) == {PoolName.SWA: [True] * 3}
    (path,) = (path for path in tmp_path.rglob("*") if HASHES[1] in path.name and path.is_file())
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    back = transfer(PoolName.SWA, HASHES[:3], tokens([5, 6, 7], 4))
    assert rank.backend.batch_get_v2([back]) == {PoolName.SWA: [True, False, False]}
    assert rank.backend.batch_set_v2([stored]) == {PoolName.SWA: [True] * 3}
    assert rank.backend.batch_get_v2([back]) == {PoolName.SWA: [True] * 3}
    assert torch.equal(source.data[[5, 6, 7]], source.data[[0, 1, 2]])
    rank.close()


def test_more_pages_than_scratch_memory_holds(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sidecars are written without the bound of 128 pages a call."""
    monkeypatch.setattr("hicache_store.engines.sglang_stores.ENGINE_SCRATCH_BYTES", 700)
    rank = make_rank(MODEL, url)
    source = StrangePool(64)
    rank.backend.register_mem_host_pool_v2(source, PoolName.SWA)
    hashes = MODEL.hashes(30, "many")
    everything = transfer(PoolName.SWA, hashes, tokens(list(range(30)), 4))
    assert rank.backend.batch_set_v2([everything]) == {PoolName.SWA: [True] * 30}
    before = source.data[:30].clone()
    back = transfer(PoolName.SWA, hashes, tokens(list(range(30, 60)), 4))
    assert rank.backend.batch_get_v2([back]) == {PoolName.SWA: [True] * 30}
    assert torch.equal(source.data[30:60], before)
    rank.close()


def _with_draft(rank: Rank, model: Model, heads: slice, layout: str) -> Any:
    pool = host_pool(model, layout=layout, heads=heads.stop - heads.start)
    rank.backend.register_mem_host_pool_v2(pool, PoolName.DRAFT)
    return pool


def test_a26_a_draft_pool_gates_the_prefix_and_is_shared_by_tensor_sizes(url: str) -> None:
    """Target and draft come back together, up to where both are stored."""
    hashes = HASHES[:6]
    values = [DRAFT.page_values(page_hash) for page_hash in hashes]
    for tp in range(2):
        writer = make_rank(MODEL, url, tp=tp, tp_size=2)
        heads = slice(2 * tp, 2 * tp + 2)
        pool = _with_draft(writer, DRAFT, heads, "layer_first")
        for slot, page in enumerate(values):
            for part, rows in enumerate(page):
                fill(pool, part, slot, rows[heads])
        writer.write(hashes, range(6))
        stored = transfer(PoolName.DRAFT, hashes[:4], tokens([0, 1, 2, 3], 4), indices_from_pool=PoolName.KV)
        assert writer.backend.batch_set_v2([stored]) == {PoolName.DRAFT: [True] * 4}
        writer.close()
    reader = make_rank(MODEL, url, layout="page_first")
    pool = _with_draft(reader, DRAFT, slice(0, 4), "page_head")
    result = reader.backend.batch_exists_v2(hashes, [transfer(PoolName.DRAFT, hashes, None)])
    assert result.kv_hit_pages == 4
    back = transfer(PoolName.DRAFT, hashes[:4], tokens([7, 8, 9, 10], 4))
    assert reader.backend.batch_get_v2([back]) == {PoolName.DRAFT: [True] * 4}
    for slot, page in zip((7, 8, 9, 10), values[:4], strict=True):
        for part, rows in enumerate(page):
            assert np.array_equal(page_bytes(pool, part, slot), rows)
    reader.close()
    retrained = make_rank(MODEL, url, draft_weights="another draft")
    _with_draft(retrained, DRAFT, slice(0, 4), "layer_first")
    assert (
        retrained.backend.batch_exists_v2(hashes, [transfer(PoolName.DRAFT, hashes, None)]).kv_hit_pages == 0
    )
    retrained.close()


def test_windows_leave_a_sparse_set_of_lengths(url: str) -> None:
    """A sliding window needs its last two pages only, which are stored at two places of the chain."""
    rank = make_rank(MODEL, url, layout="page_first")
    window = host_pool(MODEL, layout="page_first")
    rank.backend.register_mem_host_pool_v2(window, PoolName.SWA)
    rank.write(HASHES, range(10))
    for pages in ([2, 3, 4], [8, 9]):
        keys = [HASHES[page] for page in pages]
        assert all(rank.backend.batch_set_v2([transfer(PoolName.SWA, keys, tokens(pages, 4))])[PoolName.SWA])
    asked = transfer(PoolName.SWA, ["", ""], None, hit_policy=PoolHitPolicy.TRAILING_PAGES)
    result = rank.backend.batch_exists_v2(HASHES, [asked])
    assert result.restorable_prefix_pages == [4, 5, 10]
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (10, {PoolName.KV: 10, PoolName.SWA: 10})
    short = rank.backend.batch_exists_v2(HASHES[:9], [asked])
    assert (short.kv_hit_pages, short.restorable_prefix_pages) == (5, [4, 5])
    rank.close()


def test_states_and_windows_together_allow_what_both_allow(url: str) -> None:
    rank = make_rank(MODEL, url, layout="page_first")
    rank.backend.register_mem_host_pool_v2(mamba_pool(), PoolName.MAMBA)
    rank.backend.register_mem_host_pool_v2(host_pool(MODEL, layout="page_first"), PoolName.SWA)
    rank.write(HASHES, range(10))
    rank.backend.batch_set_v2([transfer(PoolName.MAMBA, [HASHES[3], HASHES[7]], torch.tensor([0, 1]))])
    rank.backend.batch_set_v2([transfer(PoolName.SWA, HASHES[2:5], tokens([2, 3, 4], 4))])
    asked = [
        transfer(PoolName.MAMBA, [""], None, hit_policy=PoolHitPolicy.TRAILING_PAGES),
        transfer(PoolName.SWA, ["", ""], None, hit_policy=PoolHitPolicy.TRAILING_PAGES),
    ]
    result = rank.backend.batch_exists_v2(HASHES, asked)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (4, [4])
    assert result.extra_pool_hit_pages == {PoolName.KV: 10, PoolName.MAMBA: 8, PoolName.SWA: 5}
    rank.close()


def test_an_anchor_that_only_numbers_slots(url: str) -> None:
    """DeepSeek-V4: every byte is in sidecar pools, and the anchor holds nothing that could be missing."""
    anchor = LogicalHostPool(64, 4)
    backend = attach(anchor, LATENT, url, dtype="bfloat16", num_layers=6)
    backend.register_mem_host_pool_v2(anchor, PoolName.KV)
    source = StrangePool()
    backend.register_mem_host_pool_v2(source, PoolName.DEEPSEEK_V4_C4)
    assert backend.batch_set_v1(HASHES[:3], tokens([0, 1, 2], 4)) == [True] * 3
    assert backend.batch_get_v1(HASHES[:3], tokens([0, 1, 2], 4)) == [True] * 3
    backend.batch_set_v2([transfer(PoolName.DEEPSEEK_V4_C4, HASHES[:2], tokens([0, 1], 4))])
    result = backend.batch_exists_v2(HASHES, [transfer(PoolName.DEEPSEEK_V4_C4, HASHES, None)])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages[PoolName.KV]) == (2, 10)
    backend.close()


def test_dense_drafts_beside_a_latent_target_are_said_to_be_of_no_use(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang has rank 0 alone write them, so the other ranks' heads are never stored: misses, not mixes."""
    hashes = LATENT.hashes(2)
    for tp in range(2):
        rank = make_rank(LATENT, url, tp=tp, tp_size=2)
        pool = host_pool(DRAFT, heads=2)
        rank.backend.register_mem_host_pool_v2(pool, PoolName.DRAFT)
        if tp == 0:
            rank.write(hashes, [0, 1])
            rank.backend.batch_set_v2([transfer(PoolName.DRAFT, hashes, tokens([0, 1], 4))])
        hit = rank.backend.batch_exists_v2(hashes, [transfer(PoolName.DRAFT, hashes, None)]).kv_hit_pages
        assert hit == (2 if tp == 0 else 0)
        rank.close()
    assert "rank 0 alone" in caplog.text
