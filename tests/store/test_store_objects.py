"""The same KV gives the same objects, whoever writes them: names and bytes, told by the oracle."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from store_objects_process import digest_of, written_by
from store_rig import Place, chain, namespace_of, page_values, tiny, write_pages

from hicache_store.layout.box import Box
from hicache_store.layout.grid import own_grid
from hicache_store.layout.model import ModelKV, Pool
from hicache_store.layout.names import leaf_of, page_prefix
from hicache_store.layout.namespace import Namespace
from hicache_store.layout.parallel import ParallelSpec, shard
from hicache_store.store import FixedGrid
from hicache_store.testing.oracle import object_bytes

GOLDEN = Path(__file__).parents[1] / "golden" / "objects.json"
POOL = tiny(4, 4, 2).pool(2)
GRID = FixedGrid(heads_per_object=1, layers_per_object=2)
UNIONS = [f"tp{tp}pp{pp}" for tp in (1, 2, 4, 8, 16) for pp in (1, 2)]
"""Topologies whose shards are unions of the grid's cells: heads one by one, layers 0-2 and 2-4."""


def expected(
    pool: Pool, boxes: list[Box], hashes: list[str], ns: Namespace | None = None
) -> dict[str, bytes]:
    """The objects of ``boxes`` of every page, by the oracle."""
    digest = (ns or namespace_of(pool)).digest
    keys = {
        page_prefix(digest, page_hash) + leaf_of(pool.key_name, box): (page, box)
        for page, page_hash in enumerate(hashes)
        for box in boxes
    }
    return {key: object_bytes(page_values(pool, page), box, key) for key, (page, box) in keys.items()}


def cells(pool: Pool, heads: int, layers: int) -> list[Box]:
    """The cells of a grid over the whole page."""
    return [
        Box.of((h, h + heads), (first, first + layers), (0, pool.page_size))
        for h in range(0, pool.num_heads, heads)
        for first in range(0, pool.num_layers, layers)
    ]


@pytest.mark.parametrize("form", ["layer_first", "page_first", "page_unified", "head_token_kv_per_layer"])
@pytest.mark.parametrize("writer", UNIONS)
def test_every_writer_of_a_grid_stores_the_same_objects(writer: str, form: str, tally: Counter[str]) -> None:
    place, hashes = Place(), chain(3, 2)
    write_pages(place, POOL, writer, hashes, grid=GRID, form=form)
    assert place.objects() == expected(POOL, cells(POOL, 1, 2), hashes)
    tally["objects compared byte by byte over writers"] += len(place.objects())


def test_writers_of_one_grid_add_nothing_to_one_another(tally: Counter[str]) -> None:
    place, hashes = Place(), chain(3, 2)
    write_pages(place, POOL, UNIONS[0], hashes, grid=GRID)
    before = place.objects()
    for writer in UNIONS[1:]:
        reports = write_pages(place, POOL, writer, hashes, grid=GRID)
        assert sum(report.objects for report in reports) == 0
    assert place.objects() == before


MODELS = {
    "gqa": tiny(4, 6, 2, "bf16"),
    "fp8_k_wider": tiny(2, 5, 6, "fp8_e4m3", v_width=4),
    "fp4": tiny(2, 3, 2, "fp4_e2m1"),
    "mla": ModelKV.mla(num_layers=7, latent_dim=8, rope_dim=2, dtype="bf16"),
    "padded": ModelKV.dense(num_layers=8, num_kv_heads=2, head_dim=64, dtype="fp16"),
}
PAGE_SIZES = {"gqa": 16, "fp8_k_wider": 3, "fp4": 1, "mla": 64, "padded": 128}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("writer", ["tp1pp1", "tp2pp2", "tp4pp3"])
def test_a_writers_own_grid_is_its_shard(name: str, writer: str) -> None:
    pool = MODELS[name].pool(PAGE_SIZES[name])
    spec, place, hashes = ParallelSpec.parse(writer), Place(), chain(2)
    write_pages(place, pool, spec, hashes)
    boxes = list(dict.fromkeys(shard(pool, spec, rank).box for rank in spec.ranks()))
    assert all(own_grid(pool, spec, box).chunks_within(box) == (box,) for box in boxes)
    assert place.objects() == expected(pool, boxes, hashes)


def golden_namespace(pool: Pool) -> Namespace:
    """A namespace whose record is written here, so that the objects below fix the format alone."""
    kv = {
        "dtype": pool.dtype.name,
        "num_kv_heads": pool.num_heads,
        "num_layers": pool.num_layers,
        "page_size": pool.page_size,
        "parts": [[part.name, part.width] for part in pool.parts],
    }
    return Namespace(namespace_of(pool).kv, json.dumps({"kv": kv}, sort_keys=True).encode())


def golden_objects() -> dict[str, dict[str, dict[str, object]]]:
    """Length and SHA-256 of every object of one page, by model, grid cell and key, by the oracle."""
    found: dict[str, dict[str, dict[str, object]]] = {}
    for name, model in MODELS.items():
        pool = model.pool(PAGE_SIZES[name])
        boxes = [pool.page_box, *cells(pool, pool.num_heads, 1), *cells(pool, 1, pool.num_layers)]
        objects = expected(pool, boxes, chain(1), golden_namespace(pool))
        found[name] = {
            key: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for key, data in sorted(objects.items())
        }
    return found


def test_golden_objects_stay_as_they_are() -> None:
    """Names and bytes of stored objects are forever: a difference is a fault, or a new format."""
    frozen = json.loads(GOLDEN.read_text())
    assert golden_objects() == frozen
    for name, objects in frozen.items():
        pool = MODELS[name].pool(PAGE_SIZES[name])
        per_head = f"tp{pool.num_heads}"
        for writer, grid in (("tp1", None), ("tp1", FixedGrid(pool.num_heads, 1)), (per_head, None)):
            place = Place()
            write_pages(place, pool, writer, chain(1), grid=grid, ns=golden_namespace(pool))
            assert place.objects()
            for key, data in place.objects().items():
                assert objects[key]["sha256"] == hashlib.sha256(data).hexdigest(), (name, key)


def test_five_processes_with_other_hash_seeds_store_the_same_objects() -> None:
    here = Path(__file__).parent
    wanted = digest_of(written_by("tp1pp1"))
    runs = [
        subprocess.Popen(
            [sys.executable, str(here / "store_objects_process.py"), writer],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(here.parents[1])},
            stdout=subprocess.PIPE,
            text=True,
        )
        for writer, seed in zip(UNIONS[1:6], ("0", "1", "2", "4294967295", "random"), strict=True)
    ]
    told = [run.communicate(timeout=120)[0].strip() for run in runs]
    assert [run.returncode for run in runs] == [0] * 5
    assert told == [wanted] * 5


if __name__ == "__main__":
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    fresh = golden_objects()
    merged = {name: {**fresh[name], **known.get(name, {})} for name in fresh}
    GOLDEN.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")
