"""The collectives of one rank: gloo process groups, with a name and a deadline on every wait.

A rank is numbered stage by stage, tensor-parallel ranks innermost. Between stages, rank t of one stage
sends to rank t of the next. A group of one process uses no gloo at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from hicache_store.errors import HicacheError
from hicache_store.layout.parallel import ParallelSpec, Rank

JOIN_S: Final = 120.0
"""Longest wait for all ranks to meet and connect, which takes seconds on a busy machine."""


class FabricError(HicacheError, RuntimeError):
    """A collective failed: a peer is gone, or did not come within the deadline."""


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise FabricError(f"{what}: {str(error).splitlines()[0]}") from error


class Fabric:
    """The groups of one rank. Every call is made by all ranks of the group it names."""

    def __init__(self, spec: ParallelSpec, rank: Rank, rendezvous: Path | None, timeout_s: float) -> None:
        self.spec, self.rank = spec, rank
        self._timeout = timedelta(seconds=timeout_s)
        self._sending: tuple[dist.Work, torch.Tensor] | None = None
        self._tensor_group: dist.ProcessGroup | None = None
        size = spec.tp_size * spec.pp_size
        if size == 1:
            return
        if rendezvous is None:
            raise FabricError(f"{spec.label} needs a rendezvous file for its {size} ranks")
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        timeout = timedelta(seconds=JOIN_S)
        with _named("joining the process group"):
            dist.init_process_group(
                "gloo",
                init_method=f"file://{rendezvous}",
                rank=self._number(rank),
                world_size=size,
                timeout=timeout,
            )
            for stage in range(spec.pp_size):
                members = [self._number(Rank(tp, stage)) for tp in range(spec.tp_size)]
                group = dist.new_group(members, timeout=timeout, backend="gloo")
                if stage == rank.pp and isinstance(group, dist.ProcessGroup):
                    self._tensor_group = group

    def _number(self, rank: Rank) -> int:
        return rank.pp * self.spec.tp_size + rank.tp

    def sum(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """The sum over the tensor-parallel group; reuses ``tensor``."""
        if self.spec.tp_size > 1:
            self._finish(what, lambda: dist.all_reduce(tensor, group=self._tensor_group, async_op=True))
        return tensor

    def gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Everyone's ``tensor`` in the tensor-parallel group, by rank."""
        if self.spec.tp_size == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.spec.tp_size)]
        self._finish(what, lambda: dist.all_gather(found, tensor, self._tensor_group, async_op=True))
        return found

    def send(self, tensor: torch.Tensor, what: str) -> None:
        """Hand ``tensor`` to the next stage; at most one hand-over is under way."""
        self.flush(what)
        with _named(what):
            work = dist.isend(tensor, self._number(Rank(self.rank.tp, self.rank.pp + 1)))
        assert work is not None
        self._sending = (work, tensor)

    def flush(self, what: str) -> None:
        """Wait until the last hand-over was taken."""
        if self._sending is not None:
            work, _ = self._sending
            self._finish(what, lambda: work)
            self._sending = None

    def receive(self, rows: int, columns: int, what: str) -> torch.Tensor:
        """Float32 (rows, columns) from the stage before."""
        tensor = torch.empty(rows, columns)
        source = self._number(Rank(self.rank.tp, self.rank.pp - 1))
        self._finish(what, lambda: dist.irecv(tensor, source))
        return tensor

    def from_last_stage(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Every rank gets the last stage's ``tensor``; the others give one of the same shape."""
        if self.spec.pp_size > 1:
            source = self._number(Rank(0, self.spec.pp_size - 1))
            self._finish(what, lambda: dist.broadcast(tensor, source, async_op=True))
        return tensor

    def minimum(self, value: int, what: str) -> int:
        """The least ``value`` of all ranks."""
        if self.spec.tp_size * self.spec.pp_size == 1:
            return value
        tensor = torch.tensor([value])
        self._finish(what, lambda: dist.all_reduce(tensor, dist.ReduceOp.MIN, async_op=True))
        return int(tensor)

    def _finish(self, what: str, start: Callable[[], dist.Work | None]) -> None:
        with _named(what):
            work = start()
            assert work is not None
            work.wait(self._timeout)

    def close(self) -> None:
        """Leave the groups."""
        if dist.is_initialized():
            dist.destroy_process_group()
