"""vLLM's offloading on a CPU, where it refuses to run: the copies between its two memories made by hand.

Streams and events are in order by themselves here. Everything else, the scheduler's half, the layouts and the
tiers, is vLLM's own.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from hicache_store.engines.vllm_tier import HiCacheOffloadingConnector


class Order:
    """A stream or an event: what comes later comes later."""

    def __init__(self, **_: object) -> None:
        self.at = 0.0

    def wait_stream(self, _other: object) -> None: ...

    def wait_event(self, _other: object) -> None: ...

    def record(self, _stream: object = None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Order) -> float:
        return 1e3 * (end.at - self.at)


def copy(sources: Any, targets: Any, sizes: Any, **_: object) -> None:
    """Addresses to addresses."""
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


@contextmanager
def passing_for_gpu_memory() -> Any:
    torch.Tensor.is_xpu = property(lambda _: True)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del torch.Tensor.is_xpu


def get_worker(spec: Any, kv_caches: Any) -> Any:
    """Without the question for the platform."""
    if spec._worker is None:
        with passing_for_gpu_memory():
            spec._worker = spec.create_worker(kv_caches)
    return spec._worker


CPUOffloadingSpec.get_worker = get_worker
gpu_worker.current_platform = SimpleNamespace(
    Stream=Order,
    current_stream=Order,
    stream=lambda _: nullcontext(),
    is_xpu=lambda: False,
    is_rocm=lambda: False,
    is_cuda_alike=lambda: False,
)
gpu_worker.torch = SimpleNamespace(**{**vars(torch), "Event": Order})
gpu_worker.ops = SimpleNamespace(swap_blocks_batch=copy)


class OffloadingOnCPU(HiCacheOffloadingConnector):
    """The connector of this package, in a process where the copies are replaced."""
