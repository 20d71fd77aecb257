"""Pages written by one deployment and read by another, bit for bit, through the real classes of SGLang."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_rig import Model, Rank, attach, host_pool, other, ranks

import hicache_store.engines.sglang as adapter
from hicache_store.connectors.registry import open_connector
from hicache_store.engines.identity import RunningModel
from hicache_store.errors import TopologyError

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")
"""The last one SGLang has as a layout of its pools, but no option yet that chooses it."""
LATENT_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_unified")
MODEL = Model()
LATENT = Model(heads=1, k_dim=24, v_dim=24, latent=True)


def _url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/kv?quota=1GiB"


def _share(model: Model, url: str, writer: dict[str, Any], reader: dict[str, Any], pages: int = 5) -> None:
    """Written by all ranks of ``writer``, found, read and compared by all of ``reader``, in other slots."""
    hashes = model.hashes(pages)
    sources, targets = [9, 2, 14, 0, 7][:pages], [3, 12, 1, 8, 5][:pages]
    with ranks(model, url, **writer) as written:
        for rank in written:
            if rank.backend._config.is_storage_writer:
                assert rank.write(hashes, sources) == [True] * pages
    with ranks(model, url, **reader) as read:
        for rank in read:
            assert rank.backend.batch_exists([*hashes, *model.hashes(2, "x")]) == pages
            assert rank.read(hashes, targets) == [True] * pages
            assert rank.holds(hashes, targets)
            assert not rank.holds(hashes[:1], [sources[2]])


@pytest.mark.parametrize(("source", "target"), list(product(LAYOUTS, LAYOUTS)))
def test_every_pair_of_host_layouts(tmp_path: Path, source: str, target: str) -> None:
    _share(MODEL, _url(tmp_path), {"layout": source, "tp_size": 2}, {"layout": target})


@pytest.mark.parametrize(("source", "target"), list(product(LATENT_LAYOUTS, LATENT_LAYOUTS)))
def test_every_pair_of_latent_host_layouts(tmp_path: Path, source: str, target: str) -> None:
    _share(LATENT, _url(tmp_path), {"layout": source}, {"layout": target})


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ({"tp_size": 4, "pp_size": 2}, {"tp_size": 2, "pp_size": 1}),
        ({"tp_size": 2, "pp_size": 1}, {"tp_size": 4, "pp_size": 2}),
        ({"tp_size": 1}, {"tp_size": 8}),
        ({"tp_size": 8}, {"tp_size": 1}),
        ({"tp_size": 16}, {"tp_size": 8}),
        ({"tp_size": 8}, {"tp_size": 16}),
    ],
)
def test_tensor_and_pipeline_sizes(tmp_path: Path, writer: dict[str, int], reader: dict[str, int]) -> None:
    """Sixteen ranks over eight heads replicate each; the elected one writes, all read."""
    _share(MODEL, _url(tmp_path), writer | {"layout": "page_first"}, reader | {"layout": "page_head"})


def test_uneven_stages_of_61_layers(tmp_path: Path) -> None:
    model = other(MODEL, layers=61, heads=2, k_dim=8, v_dim=8)
    writer = {"pp_size": 3, "cuts": (20, 41), "tp_size": 2}
    reader = {"pp_size": 2, "cuts": (31,), "layout": "page_first_direct"}
    _share(model, _url(tmp_path), writer, reader)
    _share(model, _url(tmp_path), writer, {"layout": "page_first"})


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (2, 8), (8, 2)])
def test_a47_latent_pages_are_stored_once_whatever_the_tensor_size(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    """Every rank of a latent model holds the same bytes; one object a page is enough for all sizes."""
    _share(LATENT, _url(tmp_path), {"tp_size": sizes[0]}, {"tp_size": sizes[1]})
    connector = open_connector(_url(tmp_path))
    assert len(list(connector.scan("v1/"))) == 5
    connector.close()


@pytest.mark.parametrize(("source", "target"), list(product(LAYOUTS[1:3], LAYOUTS[1:3])))
def test_keys_and_values_of_different_widths(tmp_path: Path, source: str, target: str) -> None:
    model = other(MODEL, k_dim=24, v_dim=16)
    _share(model, _url(tmp_path), {"layout": source, "tp_size": 4}, {"layout": target, "tp_size": 2})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_dtypes_that_the_pool_tells(tmp_path: Path, dtype: torch.dtype) -> None:
    _share(other(MODEL, dtype=dtype), _url(tmp_path), {"tp_size": 2}, {"layout": "page_head"})


@pytest.mark.parametrize("named", ["float8_e4m3fn", "fp8_e5m2"])
def test_pools_of_bytes_with_their_dtype_named(tmp_path: Path, named: str) -> None:
    model = other(MODEL, dtype=torch.uint8)
    _share(model, _url(tmp_path), {"tp_size": 2, "dtype": named}, {"layout": "page_first", "dtype": named})


def test_packed_drafts_need_their_own_layers_and_share_the_target(tmp_path: Path) -> None:
    """A reader without drafts takes what a writer with drafts stored; one with drafts needs both."""
    hashes, url = MODEL.hashes(3), _url(tmp_path)
    with ranks(MODEL, url, drafts=2, layout="page_first") as (plain_and_draft,):
        assert plain_and_draft.write(hashes, [0, 1, 2]) == [True] * 3
    with ranks(MODEL, url, tp_size=2) as readers:
        for rank in readers:
            assert rank.read(hashes, [4, 5, 6]) == [True] * 3
            assert rank.holds(hashes, [4, 5, 6])


def test_a26_a_reader_with_drafts_is_not_told_of_pages_without(tmp_path: Path) -> None:
    """A writer without a draft model must not make a reader with one believe that its draft KV is there."""
    hashes, url = MODEL.hashes(3), _url(tmp_path)
    with ranks(MODEL, url) as (plain,):
        plain.write(hashes, [0, 1, 2])
    with ranks(MODEL, url, drafts=1) as (drafting,):
        assert drafting.backend.batch_exists(hashes) == 0
        assert drafting.read(hashes, [3, 4, 5]) == [False] * 3
        assert drafting.write(hashes[:2], [6, 7]) == [True, True]
        assert drafting.backend.batch_exists(hashes) == 2
    with ranks(MODEL, url, drafts=1, draft_weights="another") as (other_draft,):
        assert other_draft.backend.batch_exists(hashes) == 0


def test_packed_drafts_come_back_bit_for_bit(tmp_path: Path) -> None:
    hashes, url = MODEL.hashes(2), _url(tmp_path)
    with ranks(MODEL, url, drafts=2, tp_size=2, layout="page_first_direct") as writers:
        saved = []
        for rank in writers:
            rank.pool.kv_buffer.view(torch.uint8).random_()
            saved.append(rank.pool.kv_buffer[:, [3, 1]].clone().view(torch.uint8))
            assert rank.backend.batch_set_v1(hashes, rank.indices([3, 1])) == [True, True]
    with ranks(MODEL, url, drafts=2, tp_size=2, layout="page_first_direct") as readers:
        for rank, before in zip(readers, saved, strict=True):
            assert rank.read(hashes, [5, 2]) == [True, True]
            assert torch.equal(rank.pool.kv_buffer[:, [5, 2]].clone().view(torch.uint8), before)


def test_hybrid_models_count_their_full_attention_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools of such models start at layer 0 on every stage and hold a subset: the model tells which. A stage
    that is all full attention counts in the same way."""
    url, whole = _url(tmp_path), other(MODEL, layers=3)
    hashes = whole.hashes(3)

    def told(pp_rank: int, pp_size: int) -> RunningModel:
        stage = ((0, 1), (1, 12))[pp_rank] if pp_size == 2 else (0, 12)
        return RunningModel(layer_ids=(0, 7, 11), stage=stage, num_layers=12)

    monkeypatch.setattr(adapter, "running_model", told)
    for pp, layers in ((0, slice(0, 1)), (1, slice(1, 3))):
        pool = host_pool(whole, layers=layers.stop - layers.start, start=0)
        backend = attach(pool, whole, url, pp=pp, pp_size=2, num_layers=None)
        writer = Rank(whole, pool, backend, slice(0, 8), layers)
        assert writer.write(hashes, [0, 1, 2]) == [True] * 3
        writer.close()
    with ranks(whole, url, tp_size=2, layout="page_head") as readers:
        for rank in readers:
            assert rank.read(hashes, [5, 6, 7]) == [True] * 3
            assert rank.holds(hashes, [5, 6, 7])
    pool = host_pool(whole, layers=3, start=0)
    with pytest.raises(TopologyError, match="cannot be told apart"):
        attach(pool, whole, url, pp=0, pp_size=2, num_layers=None)
