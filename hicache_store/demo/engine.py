"""One rank's serving loop for one sequence: chunked prefill over the pipeline, greedy decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hicache_store.demo.fabric import Fabric
from hicache_store.demo.model import LlamaPart
from hicache_store.demo.pool import KVPool
from hicache_store.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Choice:
    """The greedy token after some position, and the logits of the best and the second best."""

    token: int
    best: float
    second: float


class Engine:
    """The sequence a rank is working on: which pool slots hold it, and the steps that extend it.

    All ranks of a group make the same calls in the same order.
    """

    def __init__(self, part: LlamaPart, pool: KVPool, fabric: Fabric, chunk_tokens: int) -> None:
        self.pool = pool
        self.slots: list[int] = []
        self._part, self._fabric, self._chunk_tokens = part, fabric, chunk_tokens

    def open(self, tokens: int) -> None:
        """Begin a sequence of at most ``tokens`` tokens, in slots of its own."""
        if tokens > self._part.config.context:
            raise ConfigurationError(f"{tokens} tokens do not fit the context of {self._part.config.context}")
        self.reset()
        self.slots = self.pool.acquire(-(-tokens // self.pool.page_size))

    def reset(self) -> None:
        """Give all slots back."""
        self.pool.release(self.slots)
        self.slots = []

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], start: int) -> Choice:
        """Compute ``tokens[start:]``, whose earlier positions are in the pool; the choice after the last."""
        if not 0 <= start < len(tokens):
            raise ConfigurationError(f"prefill from {start} leaves none of {len(tokens)} tokens to compute")
        hidden = torch.empty(0)
        for first, last in self._chunks(start, len(tokens)):
            hidden = self._stages(tokens[first:last], first)
        return self._choose(hidden)

    @torch.inference_mode()
    def step(self, token: int, position: int) -> Choice:
        """Add one token at ``position``; the choice after it."""
        return self._choose(self._stages([token], position))

    def _chunks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        for first in range(start, stop, self._chunk_tokens):
            yield first, min(first + self._chunk_tokens, stop)

    def _stages(self, tokens: Sequence[int], start: int) -> torch.Tensor:
        cut, fabric = self._part.cut, self._fabric
        if cut.is_first_stage:
            hidden = self._part.embed(tokens)
        else:
            hidden = fabric.receive(len(tokens), self._part.config.hidden, f"stage input at {start}")
        hidden = self._part.forward(hidden, self.pool, self.slots, start)
        if not cut.is_last_stage:
            fabric.send(hidden, f"stage output at {start}")
        return hidden

    def _choose(self, hidden: torch.Tensor) -> Choice:
        """The two best tokens of the whole vocabulary, known to every rank; ties go to the lower id."""
        if self._part.cut.is_last_stage:
            values, indices = self._part.logits(hidden).topk(2)
            mine = torch.stack([values.double(), (indices + self._part.cut.vocab.start).double()], dim=1)
            found = torch.cat(self._fabric.gather(mine, "best tokens")).tolist()
            found.sort(key=lambda pair: (-pair[0], pair[1]))
            best = torch.tensor(found[:2], dtype=torch.float64)
        else:
            self._fabric.flush("stage output")
            best = torch.empty(2, 2, dtype=torch.float64)
        (first, token), (second, _) = self._fabric.from_last_stage(best, "chosen token").tolist()
        return Choice(int(token), first, second)
