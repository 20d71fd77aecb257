"""One rank of two, in a process of its own; prints what each scenario came to as the last line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import placeholders

placeholders.install()
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import torch.distributed as dist  # noqa: E402
from sglang_engine import Engine, topology  # noqa: E402
from sglang_rig import Model, fill, host_pool, shard, stage  # noqa: E402

MODEL = Model(heads=2, layers=2, k_dim=8, v_dim=8)
PAGES = 300
TOKENS = range(PAGES * MODEL.page)


def _objects_of(url: str, hashes: list[str], head: int) -> list[Path]:
    """The files of one head's objects of some pages."""
    return _files(url, hashes, f".H{head:03d}-{head + 1:03d}.")


def _files(url: str, hashes: list[str], leaf: str) -> list[Path]:
    root = Path(url.removeprefix("file://").partition("?")[0])
    files = [path for path in root.rglob("*") if leaf in path.name and path.is_file()]
    return [path for path in files if any(page_hash in path.name for page_hash in hashes)]


def _back_up(engine: Engine, heads: slice, layers: slice = slice(None), pages: int = PAGES) -> list[str]:
    tokens = TOKENS[: pages * MODEL.page]
    indices = engine.pool.alloc(len(tokens))
    hashes = engine.hashes(tokens)
    for page_hash, token in zip(hashes, indices[:: MODEL.page].tolist(), strict=True):
        for part, values in enumerate(MODEL.page_values(page_hash)):
            fill(engine.pool, part, token // MODEL.page, values[heads, layers])
    assert engine.backup(tokens, indices) == pages
    engine.free(indices)
    return hashes


def _lacking(engine: Engine, rank: int, url: str, hashes: list[str], heads: slice) -> dict[str, Any]:
    if rank == 1:
        for path in _objects_of(url, hashes[40:], 1):
            path.unlink()
    dist.barrier()
    local = engine.backend.batch_exists(hashes)
    fetched = engine.prefetch(TOKENS)
    engine.free(fetched.host_indices)
    _back_up(engine, heads)
    dist.barrier()
    return {
        "local_hits": local, "agreed_hit": fetched.hit_pages, "completed": fetched.completed_pages,
        "healed": engine.prefetch(TOKENS).completed_pages,
    }  # fmt: skip


def _corrupt(engine: Engine, rank: int, url: str, hashes: list[str], heads: slice) -> dict[str, Any]:
    def damage(_: Any) -> None:
        if rank == 0:
            (path,) = _objects_of(url, hashes[200:201], 0)
            data = bytearray(path.read_bytes())
            data[5] ^= 1
            path.write_bytes(data)
        dist.barrier()

    fetched = engine.prefetch(TOKENS, before_read=damage)
    return {"agreed_hit": fetched.hit_pages, "acks": fetched.acks, "completed": fetched.completed_pages}


def _aborted_on_one(engine: Engine, rank: int, url: str, hashes: list[str], heads: slice) -> dict[str, Any]:
    free = engine.pool.available_size()

    def abort(operation: Any) -> None:
        if rank == 1:
            operation.mark_terminate()

    fetched = engine.prefetch(TOKENS, before_read=abort)
    engine.free(fetched.host_indices)
    return {
        "acks": fetched.acks, "completed": fetched.completed_pages, "free_before": free,
        "free_after": engine.pool.available_size(),
    }  # fmt: skip


def _skipped(engine: Engine, rank: int, url: str) -> dict[str, Any]:
    """Rank 1 has no host memory for most of a backup that rank 0 makes whole, and makes it up later."""
    heads = shard(MODEL, rank, 2)
    engine.pool.clear()
    engine.attach(url)
    _back_up(engine, heads, pages=40 if rank == 1 else PAGES)
    dist.barrier()
    fetched = engine.prefetch(TOKENS)
    engine.free(fetched.host_indices)
    dist.barrier()
    _back_up(engine, heads)
    dist.barrier()
    whole = engine.prefetch(TOKENS)
    dist.barrier()
    engine.detach()
    return {
        "agreed_hit": fetched.hit_pages, "completed": fetched.completed_pages, "acks": fetched.acks,
        "made_up": whole.completed_pages,
    }  # fmt: skip


def _stages(rank: int, world: int, url: str) -> dict[str, Any]:
    """The same two processes as pipeline stages: stage 1 lacks pages 40 and on, and has less host memory."""
    alone = [dist.new_group([one]) for one in range(world)][rank]
    layers = stage(MODEL, rank, world, None)
    with topology(pp_rank=rank, pp_size=world):
        slots = (2 - rank) * PAGES + 8
        pool = host_pool(MODEL, layers=1, start=layers.start, slots=slots, layout="page_first")
        engine = Engine(MODEL, pool, group=alone, pp_group=dist.group.WORLD)
        engine.attach(url, num_layers=MODEL.layers)
        namespace = engine.backend.namespace.digest
        dist.barrier()
        hashes = _back_up(engine, slice(0, MODEL.heads), layers)
        dist.barrier()
        if rank == 1:
            for path in _files(url, hashes[40:], ".L001-002"):
                path.unlink()
        dist.barrier()
        local = engine.backend.batch_exists(hashes)
        fetched = engine.prefetch(TOKENS)
        dist.barrier()
        engine.detach()
    return {
        "local_hits": local, "agreed_hit": fetched.hit_pages, "completed": fetched.completed_pages,
        "host_pages": pool.page_num, "namespace": namespace,
    }  # fmt: skip


SCENARIOS = {"lacking": _lacking, "corrupt": _corrupt, "aborted_on_one": _aborted_on_one}


def main() -> None:
    rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world)
    reports = {}
    with topology(tp_rank=rank, tp_size=world):
        heads = shard(MODEL, rank, world)
        pool = host_pool(MODEL, heads=heads.stop - heads.start, slots=2 * PAGES + 8, layout="page_first")
        engine = Engine(MODEL, pool)
        for name, scenario in SCENARIOS.items():
            pool.clear()
            url = f"file://{directory}/{name}?quota=1GiB"
            engine.attach(url)
            dist.barrier()
            hashes = _back_up(engine, heads)
            dist.barrier()
            reports[name] = scenario(engine, rank, url, hashes, heads)
            dist.barrier()
            engine.detach()
        reports["skipped"] = _skipped(engine, rank, f"file://{directory}/skipped?quota=1GiB")
    reports["stages"] = _stages(rank, world, f"file://{directory}/stages?quota=1GiB")
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
