"""Page-sized slots in host memory between the store and vLLM's blocks, and the copies on both sides.

A slot holds this rank's part of a page in the order of the stored object, so that the store reads and
writes it in one piece. On a GPU the slots are pinned and pages go through a small device buffer, on
streams of their own; on the CPU the same copies go straight between slots and blocks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hicache_store.clock import Deadline
from hicache_store.engines.vllm_codec import LayerCache
from hicache_store.engines.vllm_messages import BlockTables
from hicache_store.errors import ConfigurationError
from hicache_store.layout.box import Box
from hicache_store.layout.layouts import Layout, engine_layout
from hicache_store.layout.model import Pool
from hicache_store.limits import ENGINE_DEVICE_STAGING_BYTES

NULL_BLOCK = 0
"""vLLM's block that stands for tokens which a layer keeps no longer."""


class Slots:
    """Free slots of one direction. Thread-safe."""

    def __init__(self, slots: range) -> None:
        self._free = list(slots)
        self._changed = threading.Condition()

    def take(self, count: int) -> list[int]:
        """As many of ``count`` slots as are free now."""
        with self._changed:
            taken, self._free = self._free[:count], self._free[count:]
        return taken

    def wait(self, count: int, deadline: Deadline) -> list[int]:
        """At least one and at most ``count`` slots, none where the deadline passed before."""
        with self._changed:
            while not self._free:
                if deadline.is_past:
                    return []
                self._changed.wait(min(deadline.remaining_s(), 0.1))
            return self.take(count)  # before another thread can

    def give_back(self, slots: Sequence[int]) -> None:
        """Free slots again."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Units:
    """Runs of ``tokens`` tokens that lie whole in one slot and in one block, one index array an axis."""

    tokens: int
    page: Any
    page_unit: Any
    block: Any
    block_unit: Any


def units_of(
    table: Sequence[int], start: int, stop: int, page_size: int, block_tokens: int, split: int
) -> Units:
    """Where the tokens from ``start`` to ``stop`` lie, for blocks of ``split`` times ``block_tokens`` tokens.

    ``page`` counts from the page of ``start`` on. Tokens in vLLM's null block are left out.
    """
    unit = math.gcd(page_size, block_tokens)
    tokens = np.arange(start, stop, unit)
    whole = np.asarray(table, np.int64)[tokens // (block_tokens * split)]
    is_real = whole != NULL_BLOCK
    tokens, whole = tokens[is_real], whole[is_real]
    inside = tokens % (block_tokens * split)
    return Units(
        unit,
        torch.from_numpy(tokens // page_size - start // page_size),
        torch.from_numpy(tokens % page_size // unit),
        torch.from_numpy(whole * split + inside // block_tokens),
        torch.from_numpy(inside % block_tokens // unit),
    )


class Staging:
    """``inbound`` and ``outbound`` slots over one host buffer, and the copies to and from ``caches``."""

    def __init__(self, pool: Pool, box: Box, caches: Sequence[LayerCache], budget_bytes: int) -> None:
        self.page_bytes = pool.payload_bytes(box)
        count = budget_bytes // self.page_bytes
        if count < 2:
            raise ConfigurationError(
                f"staging_bytes={budget_bytes} holds {count} pages of {self.page_bytes} bytes; give at least "
                f"{2 * self.page_bytes}, or fewer tokens a page (page_size)"
            )
        self._page_size, self._box = pool.page_size, box
        self._widths = tuple(int(part.shape[3]) for part in caches[0].parts)
        self._dtype = caches[0].parts[0].dtype
        self._device = caches[0].parts[0].device
        self._moved = self._element_of(caches)
        self._caches = [
            replace(
                cache,
                parts=tuple(part.view(kind) for part, kind in zip(cache.parts, self._moved, strict=True)),
            )
            for cache in caches
        ]
        self.inbound, self.outbound = Slots(range(count // 2)), Slots(range(count // 2, count))
        is_host = self._device.type == "cpu"
        self._host = torch.empty(count * self.page_bytes, dtype=torch.uint8, pin_memory=not is_host)
        self.layout: Layout = engine_layout("canonical", pool, box, slots=count)
        self._lanes: Lanes = HostLanes(self._host) if is_host else CudaLanes(self._host, self)

    def _element_of(self, caches: Sequence[LayerCache]) -> tuple[Any, ...]:
        """What each kv part is moved by: elements of 16 bytes where its rows allow, which a CPU moves two to
        three times as fast, else the part's own."""
        wide, share = torch.complex128, torch.complex128.itemsize // self._dtype.itemsize
        is_aligned = self._page_size * sum(self._widths) % share == 0
        offsets = [self._page_size * sum(self._widths[:index]) for index in range(len(self._widths))]

        def is_wide(index: int) -> bool:
            views = [cache.parts[index] for cache in caches]
            return (
                is_aligned
                and offsets[index] % share == 0
                and self._widths[index] % share == 0
                and all(view.stride(3) == 1 for view in views)
                and all(
                    number % share == 0
                    for view in views
                    for number in (*view.stride()[:3], view.storage_offset())
                )
            )

        return tuple(wide if is_wide(index) else self._dtype for index in range(len(self._widths)))

    @property
    def buffer(self) -> Any:
        """The memory of all slots, for the store."""
        return self._host.numpy()

    @property
    def device(self) -> Any:
        """Where the engine's blocks are."""
        return self._device

    def mark(self) -> object:
        """The present point of the engine's own stream: what was queued before it is done first."""
        return self._lanes.mark()

    def gather(self, slots: Sequence[int], first_token: int, blocks: BlockTables) -> object:
        """Queue copies of the pages from ``first_token`` on out of the engine's blocks, one page a slot.

        They read what the engine's stream has computed so far, and nothing that it computes later: the
        blocks are the engine's own again when this returns. The result is for :meth:`finish`.
        """
        return self._lanes.gather(self, slots, first_token, blocks)

    def finish(self, mark: object) -> None:
        """Wait until what :meth:`gather` queued is in the slots."""
        self._lanes.finish(mark)

    def scatter(self, slots: Sequence[int], start: int, stop: int, blocks: BlockTables, mark: object) -> None:
        """Copy tokens from ``start`` to ``stop`` out of ``slots`` into the engine's blocks, and wait for it.

        ``slots[0]`` holds the page of ``start``. The copies come after ``mark`` in time.
        """
        self._lanes.scatter(self, slots, start, stop, blocks, mark)

    def copy(
        self, stage: Any, places: Sequence[int], span: tuple[int, int], blocks: BlockTables, *, is_load: bool
    ) -> None:
        """The copies between pages at ``places`` of ``stage`` and the blocks of tokens of ``span``."""
        with torch.inference_mode():
            self._copy(stage, torch.tensor(places, dtype=torch.int64), span, blocks, is_load=is_load)

    def _copy(
        self, stage: Any, at: Any, span: tuple[int, int], blocks: BlockTables, *, is_load: bool
    ) -> None:
        page = self._page_size
        known: dict[tuple[int, int, int], Units] = {}
        views = [self._part(stage, index) for index in range(len(self._widths))]
        for cache in self._caches:
            key = (cache.described.group, cache.block_tokens, cache.split)
            if key not in known:
                units = units_of(blocks[key[0]], *span, page, cache.block_tokens, cache.split)
                known[key] = Units(
                    units.tokens,
                    at[units.page].to(stage.device),
                    *(axis.to(stage.device) for axis in (units.page_unit, units.block, units.block_unit)),
                )
            units = known[key]
            layer = cache.described.layer - self._box.layers.start
            for view, part in zip(views, cache.parts, strict=True):
                pages = view[:, :, layer].unflatten(2, (page // units.tokens, units.tokens))
                rows = part.unflatten(2, (cache.block_tokens // units.tokens, units.tokens))
                if is_load:
                    rows[units.block, :, units.block_unit] = pages[units.page, :, units.page_unit]
                else:
                    pages[units.page, :, units.page_unit] = rows[units.block, :, units.block_unit]

    def _part(self, stage: Any, index: int) -> Any:
        """One kv part of all pages of ``stage``, shaped (page, head, layer, token, dim)."""
        heads, layers = len(self._box.heads), len(self._box.layers)
        tokens, widths = self._page_size, self._widths
        block = tokens * sum(widths)
        shape = (stage.numel() // self.page_bytes, heads, layers, tokens, widths[index])
        strides = (heads * layers * block, layers * block, block, widths[index], 1)
        part = stage.view(self._dtype).as_strided(shape, strides, tokens * sum(widths[:index]))
        return part.view(self._moved[index])

    def step_pages(self) -> int:
        """Pages that the device buffer of one direction holds."""
        return max(1, ENGINE_DEVICE_STAGING_BYTES // self.page_bytes)

    def span(self, first_token: int, start: int, stop: int) -> tuple[int, int]:
        """The tokens of pages ``start`` to ``stop`` behind ``first_token``, which begins a page."""
        return first_token + start * self._page_size, first_token + stop * self._page_size

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._page_size


class HostLanes:
    """Copies where the blocks are host memory: at once, between slots and blocks."""

    def __init__(self, host: Any) -> None:
        self._host = host

    def mark(self) -> object:
        """Nothing is ever queued."""
        return None

    def gather(self, staging: Staging, slots: Sequence[int], first_token: int, blocks: BlockTables) -> object:
        """Copy now."""
        span = staging.span(first_token, 0, len(slots))
        staging.copy(self._host, slots, span, blocks, is_load=False)
        return None

    def finish(self, mark: object) -> None:
        """Nothing is left to wait for."""

    def scatter(
        self,
        staging: Staging,
        slots: Sequence[int],
        start: int,
        stop: int,
        blocks: BlockTables,
        mark: object,  # noqa: ARG002
    ) -> None:
        """Copy now."""
        staging.copy(self._host, slots, (start, stop), blocks, is_load=True)


class CudaLanes:
    """Copies where the blocks are on a GPU: pinned slots, a device buffer and a stream a direction."""

    def __init__(self, host: Any, staging: Staging) -> None:
        self._host, self._device = host, staging.device
        self._step = staging.step_pages()
        size = self._step * staging.page_bytes
        self._inbound = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._outbound = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._load_stream, self._save_stream = _stream(self._device), _stream(self._device)
        self._load_lock = threading.Lock()
        self._copied_out: Any = None

    def mark(self) -> object:
        """An event on the engine's stream."""
        event = _event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def gather(self, staging: Staging, slots: Sequence[int], first_token: int, blocks: BlockTables) -> object:
        """Into the device buffer on the engine's stream, where later steps cannot overtake it, and from
        there to the slots beside it."""
        engine = torch.cuda.current_stream(self._device)
        size = staging.page_bytes
        for start in range(0, len(slots), self._step):
            part = slots[start : start + self._step]
            if self._copied_out is not None:
                engine.wait_event(self._copied_out)
            span = staging.span(first_token, start, start + len(part))
            staging.copy(self._outbound, range(len(part)), span, blocks, is_load=False)
            gathered = _event()
            gathered.record(engine)
            self._save_stream.wait_event(gathered)
            with torch.cuda.stream(self._save_stream):
                for place, slot in enumerate(part):
                    target = self._host[slot * size : (slot + 1) * size]
                    target.copy_(self._outbound[place * size : (place + 1) * size], non_blocking=True)
                self._copied_out = _event()
                self._copied_out.record(self._save_stream)
        return self._copied_out

    def finish(self, mark: object) -> None:
        """Wait for the event."""
        if isinstance(mark, torch.cuda.Event):
            mark.synchronize()

    def scatter(
        self,
        staging: Staging,
        slots: Sequence[int],
        start: int,
        stop: int,
        blocks: BlockTables,
        mark: object,
    ) -> None:
        """To the device buffer and from there to the blocks, on a stream of its own."""
        page, size = staging.page_size, staging.page_bytes
        with self._load_lock, torch.cuda.device(self._device), torch.cuda.stream(self._load_stream):
            if isinstance(mark, torch.cuda.Event):
                self._load_stream.wait_event(mark)
            token = start
            while token < stop:
                index = token // page - start // page
                part = slots[index : index + self._step]
                for place, slot in enumerate(part):
                    target = self._inbound[place * size : (place + 1) * size]
                    target.copy_(self._host[slot * size : (slot + 1) * size], non_blocking=True)
                end = min(stop, (token // page + len(part)) * page)
                staging.copy(self._inbound, range(len(part)), (token, end), blocks, is_load=True)
                token = end
            done = _event()
            done.record(self._load_stream)
            done.synchronize()


def _stream(device: Any) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


Lanes = HostLanes | CudaLanes
