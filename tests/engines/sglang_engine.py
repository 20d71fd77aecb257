"""SGLang's real cache controller on a CPU, with its prefetch, backup and acknowledgement threads.

What stands in for a GPU is the device pool: it has a device name and a number of layers, and no memory,
because nothing between host and storage looks at it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang_rig import Model, storage_config

WAIT_S = 60


class NoDevicePool:
    """A device pool without a device."""

    device = "cpu"

    def __init__(self, layers: int) -> None:
        self.layer_num = layers

    def register_layer_transfer_counter(self, counter: Any) -> None:
        """Nothing waits for layers here."""


@dataclass
class Fetched:
    """What a prefetch came to: the agreed hit, and what the ACKs said."""

    hit_pages: int
    completed_pages: int
    acks: int
    pool_hits: dict[str, int]
    host_indices: torch.Tensor


class Engine:
    """The controller of one rank, driven as the scheduler drives it."""

    def __init__(
        self,
        model: Model,
        pool: Any,
        sidecars: dict[PoolName, Any] | None = None,
        group: Any = None,
        pp_group: Any = None,
    ) -> None:
        self.model, self.pool = model, pool
        device = NoDevicePool(model.layers)
        entries = [PoolEntry(PoolName.KV, pool, device, lambda layer: layer, is_primary_index_anchor=True)]
        for name, side in (sidecars or {}).items():
            entries.append(PoolEntry(name, side, device, lambda layer: layer))
        self.group = HostPoolGroup(entries)
        allocator = SimpleNamespace(get_kvcache=lambda: device)
        self.controller = HybridCacheController(
            allocator, self.group, model.page, group or dist.group.WORLD, threading.Event(),
            pp_group=pp_group, io_backend="kernel",
        )  # fmt: skip

    def attach(self, url: str, **keys: Any) -> None:
        extra = storage_config(self.model, url, **keys).extra_config
        self.controller.attach_storage_backend(
            "dynamic", prefetch_threshold=self.model.page, model_name="served",
            storage_backend_extra_config=extra, host_pools=self.group.entries,
        )  # fmt: skip

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def hashes(self, tokens: Sequence[int], last: str | None = None) -> list[str]:
        return get_storage_hash_str(list(tokens), last, page_size=self.model.page)

    def backup(
        self, tokens: Sequence[int], indices: torch.Tensor, extra: list[PoolTransfer] | None = None
    ) -> int:
        """Pages that the controller counts as stored after its backup thread has acknowledged."""
        self.controller.write_storage(
            indices, list(tokens), self.hashes(tokens), prefix_keys=[], extra_pools=extra
        )
        operation = self.controller.ack_backup_queue.get(timeout=WAIT_S)
        return operation.completed_tokens // self.model.page

    def prefetch(
        self,
        tokens: Sequence[int],
        extra: list[PoolTransfer] | None = None,
        before_read: Callable[[Any], None] = lambda operation: None,
    ) -> Fetched:
        """Query, allocate, read and wait for all acknowledgements, as the scheduler does."""
        controller = self.controller
        controller.prefetch(SimpleNamespace(rid="request"), list(tokens), None, [], extra_pools=extra)
        operation = controller.prefetch_hit_queue.get(timeout=WAIT_S)
        hit = operation.storage_hit_count
        operation.host_indices = controller.alloc_prefetch_host_buffers(operation, hit)
        assert operation.host_indices is not None, "the host pool is full"
        if extra:
            controller._resolve_sidecar_kv_derived_pool_transfers(operation)
        before_read(operation)
        controller.prefetch_buffer.put(operation)
        completed, acks, pool_hits = 0, 0, {}
        while True:
            ack = controller.ack_prefetch_queue.get(timeout=WAIT_S)
            if ack.pool_hits is not None:
                pool_hits = {name: pages for name, pages in ack.pool_hits.items() if pages}
            if ack.completed_tokens is not None:
                completed, acks = ack.completed_tokens // self.model.page, acks + 1
            if ack.completed_req:
                break
        return Fetched(hit // self.model.page, completed, acks, pool_hits, operation.host_indices)

    def free(self, indices: torch.Tensor) -> None:
        self.pool.free(indices)

    def detach(self) -> None:
        self.controller.detach_storage_backend()

    def threads(self) -> list[threading.Thread]:
        controller = self.controller
        return [
            controller.prefetch_thread, controller.prefetch_io_aux_thread,
            controller.prefetch_sync_thread, controller.backup_thread,
        ]  # fmt: skip


@contextmanager
def topology(**sizes: int) -> Iterator[None]:
    """SGLang's own record of who this process is."""
    names = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0,
        **sizes,
    }  # fmt: skip
    names |= {"attn_tp_rank": names["tp_rank"], "attn_tp_size": names["tp_size"]}
    with get_parallel().override(**names):
        yield
