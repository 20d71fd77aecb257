"""Write pages of KV as TP4 x PP2, read them back as TP2 x PP1: one process, local files, no GPU."""

from __future__ import annotations

import tempfile

import numpy as np

from hicache_store import (
    ModelKV,
    ParallelSpec,
    PoolBuffers,
    Rank,
    Store,
    WeightsIdentity,
    engine_layout,
    namespace,
    page_hashes,
    placement_of_slot,
    shard,
)

PAGE = 64
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "rope_theta": 10000.0,
}


def attach(url: str, topology: str, rank: Rank, layout_name: str) -> tuple[Store, np.ndarray]:
    """A store for one rank, over a fresh host pool of eight page slots."""
    model = ModelKV.dense(num_layers=8, num_kv_heads=8, head_dim=32, dtype="bfloat16", num_query_heads=32)
    weights = WeightsIdentity.hub_commit("example/model", "0123456789abcdef0123456789abcdef01234567")
    name = namespace(CONFIG, weights, model.facts(PAGE), tenant="quickstart")
    pool = model.pool(PAGE)
    parallel = ParallelSpec.parse(topology)
    box = shard(pool, parallel, rank).box
    layout = engine_layout(layout_name, pool, box, slots=8)
    (size,) = layout.buffer_bytes(pool.unit_bytes)
    memory = np.zeros(size, np.uint8)
    store = Store.attach(url, name, [PoolBuffers(pool, layout, [memory])], parallel, rank)
    return store, memory


def main() -> None:
    """Back up four pages from eight ranks, restore them on two."""
    hashes = page_hashes(range(4 * PAGE), PAGE)
    with tempfile.TemporaryDirectory() as root:
        url = f"file://{root}/kv?quota=1GiB"
        for rank in ParallelSpec.parse("tp4pp2").ranks():
            store, memory = attach(url, "tp4pp2", rank, "layer_first")
            with store:
                memory[:] = np.random.default_rng(rank.tp + 10 * rank.pp).integers(0, 256, memory.size)
                report = store.backup(hashes, [placement_of_slot(slot, PAGE) for slot in (3, 0, 6, 1)])
                print(f"writer {rank.label}: {report.pages} pages in {report.objects} objects")
        for rank in ParallelSpec.parse("tp2pp1").ranks():
            store, memory = attach(url, "tp2pp1", rank, "page_first")
            with store:
                print(
                    f"reader {rank.label}: {store.contains(hashes).pages} of {len(hashes)} pages are stored"
                )
                report = store.restore(hashes, [placement_of_slot(slot, PAGE) for slot in (7, 2, 5, 4)])
                print(f"reader {rank.label}: {report.pages} pages from {report.objects} objects, verified")


if __name__ == "__main__":
    main()
