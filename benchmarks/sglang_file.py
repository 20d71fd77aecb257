"""``python -m benchmarks.sglang_file``: the adapter against SGLang's own file backend, in one run.

Both are called as SGLang's controller calls them, by its own methods: the file backend page by page
through flat copies, the adapter by the host indices of a batch. Same host pool, same pages, same file
system, rounds in turn; what is written is new in every round. Needs the environment of `make test-engines`.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "engines"))
import placeholders

placeholders.install()

import torch  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageExtraInfo  # noqa: E402
from sglang_rig import Model, attach, host_pool, storage_config  # noqa: E402

BATCH = 128


@dataclass(frozen=True)
class Figure:
    """One direction of one backend: MB/s and CPU-seconds per GB, the best round of each."""

    megabytes_s: float
    cpu_s_per_gb: float


@dataclass
class Side:
    """A backend behind the controller's own methods."""

    name: str
    put: Callable[[Any, list[str], torch.Tensor, HiCacheStorageExtraInfo], bool]
    get: Callable[[Any, Any, list[str], torch.Tensor, HiCacheStorageExtraInfo], int]
    controller: Any
    seconds: dict[str, list[float]]
    cpu: dict[str, list[float]]


def _side(name: str, backend: Any, pool: Any, *, is_zero_copy: bool) -> Side:
    controller = SimpleNamespace(storage_backend=backend, storage_host_pool=pool, page_size=pool.page_size)
    kind = HiCacheController
    put = kind._page_set_zero_copy if is_zero_copy else kind._generic_page_set
    get = kind._page_get_zero_copy if is_zero_copy else kind._generic_page_get
    return Side(name, put, get, controller, {"put": [], "get": []}, {"put": [], "get": []})


def _timed(side: Side, verb: str, call: Callable[[], Any]) -> Any:
    started, cpu = time.perf_counter(), time.process_time()
    result = call()
    side.seconds[verb].append(time.perf_counter() - started)
    side.cpu[verb].append(time.process_time() - cpu)
    return result


def _indices(pool: Any, slots: Sequence[int]) -> torch.Tensor:
    page = pool.page_size
    return torch.cat([torch.arange(slot * page, (slot + 1) * page) for slot in slots])


def _round(side: Side, pool: Any, number: int) -> None:
    hashes = [hashlib.sha256(f"{side.name}/{number}/{i}".encode()).hexdigest() for i in range(BATCH)]
    sources, targets = _indices(pool, range(BATCH)), _indices(pool, range(BATCH, 2 * BATCH))
    info = HiCacheStorageExtraInfo(prefix_keys=[])
    assert _timed(side, "put", lambda: side.put(side.controller, hashes, sources, info))
    operation = SimpleNamespace(request_id="benchmark", is_terminated=lambda: False)
    got = _timed(side, "get", lambda: side.get(side.controller, operation, hashes, targets, info))
    assert got == BATCH, f"{side.name} read {got} of {BATCH} pages"
    for slot in (0, BATCH // 2, BATCH - 1):
        written, read = (pool.get_data_page(place * pool.page_size) for place in (slot, slot + BATCH))
        assert torch.equal(written.view(torch.uint8), read.view(torch.uint8)), f"{side.name} read other bytes"


def compare(
    model: Model, heads: int, layout: str, directory: Path, rounds: int
) -> dict[str, dict[str, Figure]]:
    """Both backends on one rank's pool of ``heads`` heads in ``layout``, in turn for ``rounds`` rounds."""
    pool = host_pool(model, layout=layout, heads=heads, slots=2 * BATCH)
    pool.kv_buffer.view(torch.uint8).random_()
    where = {"tp": 0, "tp_size": model.heads // heads}
    theirs_root, ours_root = directory / "theirs", directory / "ours"
    config = storage_config(model, "file:///unused", **where, file_storage_path=str(theirs_root))
    theirs = _side("HiCacheFile", HiCacheFile(config), pool, is_zero_copy=False)
    url = f"file://{ours_root}?quota=64GiB"
    ours_backend = attach(pool, model, url, **where, timeout_s=60)
    ours = _side("HiCacheL3", ours_backend, pool, is_zero_copy=True)
    try:
        for number in range(rounds + 1):
            for side in (theirs, ours) if number % 2 else (ours, theirs):
                _round(side, pool, number)
            for root in (theirs_root, ours_root):
                for path in [
                    path for path in root.rglob("*") if path.is_file() and path.stat().st_size > 65_536
                ]:
                    path.unlink()
    finally:
        ours_backend.close()
    size = BATCH * pool.page_size * pool.size_per_token
    return {
        side.name: {
            verb: Figure(
                size / 1e6 / min(side.seconds[verb][1:]),
                min(side.cpu[verb][1:]) / (size / 1e9),
            )
            for verb in ("put", "get")
        }
        for side in (theirs, ours)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", default="/dev/shm", help="where both keep their files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--heads", type=int, nargs="+", default=[2, 1], help="KV heads of the rank, of 8")
    parser.add_argument("--layouts", nargs="+", default=["page_first", "layer_first"])
    parser.add_argument("--layers", type=int, default=32)
    given = parser.parse_args()
    for heads in given.heads:
        for layout in given.layouts:
            model = Model(heads=8, layers=given.layers, k_dim=128, v_dim=128, page=64)
            directory = Path(tempfile.mkdtemp(dir=given.directory))
            try:
                figures = compare(model, heads, layout, directory, given.rounds)
            finally:
                shutil.rmtree(directory)
            size = heads * given.layers * 64 * 512 / 2**20
            print(
                f"\n{layout}, {heads} of 8 KV heads, {given.layers} layers, {BATCH} pages of {size:.1f} MiB"
            )
            for verb in ("get", "put"):
                theirs, ours = figures["HiCacheFile"][verb], figures["HiCacheL3"][verb]
                sides = "   ".join(
                    f"{name} {figure.megabytes_s:7.0f} MB/s {figure.cpu_s_per_gb:5.2f} CPU-s/GB"
                    for name, figure in (("HiCacheFile", theirs), ("HiCacheL3", ours))
                )
                print(f"  {verb}  {sides}   {ours.megabytes_s / theirs.megabytes_s:.2f} times")


if __name__ == "__main__":
    main()
