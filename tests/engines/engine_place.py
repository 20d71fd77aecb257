"""Runs a real SGLang engine on a CPU and obeys one JSON command a line; ``engine_client`` starts it.

What is replaced, in this process and in the schedulers that it spawns, which import this file too:

* packages that exist for GPUs only, by names without behaviour, see ``placeholders``; of Triton's names
  two need some: the driver, which says that there is none, and ``Config``, which takes arguments;
* registering host memory with CUDA, by nothing: no device needs it pinned;
* the copies of pages between the model's KV cache and the host pool, which are CUDA kernels, by the
  indexing of :func:`_rows`, for keys and values of equal width.

The scheduler, the radix cache, the cache controller with its threads and groups of ranks, the host
pools, page hashes, and how a backend is loaded, attached and detached are SGLang's own.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import placeholders

LIFE_S = 1_500
"""After this an engine ends by itself, should whoever asks it be gone."""


class NoDriver:
    """Triton's driver where there is no GPU: asking which one is active fails, and so SGLang knows."""

    @property
    def active(self) -> Any:
        raise RuntimeError("0 active drivers")


def place_names() -> None:
    """Make what exists for GPUs only importable."""
    placeholders.install()
    triton: Any = importlib.import_module("triton")
    triton.Config = placeholders.Anything("triton.Config")
    runtime: Any = importlib.import_module("triton.runtime")
    runtime.driver = NoDriver()


def _rows(pool: Any, part: int, layer: int, tokens: Any) -> tuple[Any, tuple[Any, ...]]:
    """The buffer of keys (0) or values (1), and the index that gives (token, head, dim) of one layer."""
    page, offset = tokens // pool.page_size, tokens % pool.page_size
    index: dict[str, tuple[Any, ...]] = {
        "layer_first": (layer, tokens),
        "page_first": (tokens, layer),
        "page_first_direct": (page, layer, offset),
        "page_head": (page, slice(None), offset, layer),
    }
    return pool.kv_buffer[part], index[pool.layout]


def _load(
    pool: Any, _device_pool: Any, host: Any, device: Any, layer: int, _io: str, *, is_draft: bool = False
) -> None:
    if not is_draft and not 0 <= layer < pool.target_layer_num:
        return
    for part, layers in enumerate((pool.device_k_buffers, pool.device_v_buffers)):
        buffer, index = _rows(pool, part, layer, host)
        layers[layer][device] = buffer[index]


def _save(pool: Any, _device_pool: Any, host: Any, device: Any, _io: str) -> None:
    for part, layers in enumerate((pool.device_k_buffers, pool.device_v_buffers)):
        for layer, source in enumerate(layers):
            buffer, index = _rows(pool, part, layer, host)
            buffer[index] = source[device]


def replace_what_needs_cuda() -> None:
    """Pinning and page copies, see the head of this file."""
    common: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    mha: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.mha")
    common._cuda_host_register = lambda *_args, **_kwargs: None
    mha.MHATokenToKVPoolHost.load_to_device_per_layer = _load
    mha.MHATokenToKVPoolHost.backup_from_device_all_layer = _save


class Place:
    """An engine and what can be asked of it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._engine: Any = importlib.import_module("sglang").Engine(**options)

    def generate(self, given: dict[str, Any]) -> Any:
        return [
            self._engine.generate(input_ids=ids, sampling_params=given["sampling"])
            for ids in given["input_ids"]
        ]

    def generate_at_once(self, given: dict[str, Any]) -> Any:
        return self._engine.generate(input_ids=given["input_ids"], sampling_params=given["sampling"])

    def flush(self, _given: object) -> Any:
        return _told(self._engine.flush_cache())

    def attach(self, given: dict[str, Any]) -> Any:
        return self._settled(
            self._engine.tokenizer_manager.attach_hicache_storage(
                hicache_storage_backend="dynamic",
                hicache_storage_backend_extra_config_json=json.dumps(given),
            )
        )

    def detach(self, _given: object) -> Any:
        return self._settled(self._engine.tokenizer_manager.detach_hicache_storage())

    def stop(self, _given: object) -> None:
        self._engine.shutdown()

    def _settled(self, question: Coroutine[Any, Any, Any]) -> dict[str, Any]:
        return _told(self._engine.loop.run_until_complete(question))


def _told(answer: Any) -> dict[str, Any]:
    return {"success": bool(answer.success), "message": str(answer.message)}


def serve(commands: int, answers: int) -> None:
    """Obey until ``stop`` or the end of the pipe; what a command raises is its answer."""
    signal.alarm(LIFE_S)
    place: Place | None = None
    with os.fdopen(commands) as lines, os.fdopen(answers, "w") as out:
        for line in lines:
            command, given = json.loads(line)
            try:
                if command == "start":
                    place, result = Place(given), None
                else:
                    result = getattr(place, command)(given)
                answer = {"result": result}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=out, flush=True)
            if command == "stop":
                return


place_names()
replace_what_needs_cuda()

if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
