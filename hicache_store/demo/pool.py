"""Paged KV memory of one rank, laid out as serving engines lay it out: layer first."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hicache_store.errors import ConfigurationError
from hicache_store.layout.box import Box


class PoolExhaustedError(ConfigurationError):
    """More pages are wanted than are free."""


class KVPool:
    """``slots`` page-sized places of K and V for the heads and layers of one rank.

    ``data`` is bfloat16 (2, layers, slots * page_size, heads, head_dim): K then V, each layer's rows
    together. The free list is shuffled by ``seed``, so that two pools place one sequence differently.
    """

    def __init__(self, box: Box, head_dim: int, slots: int, seed: int) -> None:
        self.page_size = len(box.tokens)
        self.slots = slots
        shape = (2, len(box.layers), slots * self.page_size, len(box.heads), head_dim)
        # Filled with NaN: a row that is read before it was written cannot pass for a small number.
        self.data = torch.full(shape, float("nan"), dtype=torch.bfloat16)
        self._free = list(range(slots))
        random.Random(seed).shuffle(self._free)  # noqa: S311  (no secret)

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def bytes_view(self) -> memoryview:
        """The pool's memory as writable bytes."""
        raw: npt.NDArray[np.uint8] = self.data.view(torch.uint8).numpy().reshape(-1)
        return raw.data

    def acquire(self, count: int) -> list[int]:
        """Take ``count`` slots; :class:`PoolExhaustedError` when fewer are free."""
        if count > len(self._free):
            raise PoolExhaustedError(
                f"{count} pages are wanted, {len(self._free)} of {self.slots} are free; give more slots"
            )
        taken = self._free[:count]
        del self._free[:count]
        return taken

    def release(self, slots: Sequence[int]) -> None:
        """Give slots back; a slot that is free already is an error of the caller.

        What they held is overwritten with NaN: the next sequence cannot profit from it unseen.
        """
        assert len({*slots, *self._free}) == len(slots) + len(self._free), "a slot was released twice"
        self._free.extend(slots)
        if slots:
            self.data[:, :, self.rows(slots, 0, len(slots) * self.page_size)] = float("nan")

    def rows(self, slots: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Row indices (int64) of tokens ``start`` to ``stop`` of a sequence that fills ``slots``."""
        tokens = torch.arange(start, stop)
        table = torch.tensor(slots, dtype=torch.int64)
        return table[tokens // self.page_size] * self.page_size + tokens % self.page_size

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Round K and V (tokens, heads, head_dim) to bfloat16 into ``rows`` of a local layer."""
        self.data[0, layer].index_copy_(0, rows, keys.to(torch.bfloat16))
        self.data[1, layer].index_copy_(0, rows, values.to(torch.bfloat16))

    def read(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of ``rows`` of a local layer, as float32 (heads, tokens, head_dim)."""
        keys, values = (self.data[part, layer].index_select(0, rows) for part in (0, 1))
        return keys.float().transpose(0, 1), values.float().transpose(0, 1)
