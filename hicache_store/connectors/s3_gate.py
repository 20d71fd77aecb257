"""How many requests of one S3 handle are in flight, and how many bytes they may hold.

A gate that is told of throttled requests lets fewer in: each time the server says "slow down" the places
are halved, each answered request gives back a part of one, a whole one for every round of answers. Requests
that were let in before the last halving say nothing new. So the load settles below what the server
takes, and comes back within a few hundred requests once it takes more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hicache_store.connectors.s3_plane import FaultKind, PlaneFault
from hicache_store.metrics import Metrics


class Gate:
    """Lets in at most ``items`` requests of at most ``size_bytes`` of bodies together, in order.

    A body larger than all that is let in alone. With ``metrics`` the places follow what the server bears,
    between one and ``items``; each halving is counted as ``s3.slowed_down``.
    """

    def __init__(self, items: int, size_bytes: int, metrics: Metrics | None = None) -> None:
        self._most = items
        self._places = float(items)
        self._inside = 0
        self._halvings = 0
        self._metrics = metrics
        self._bytes = size_bytes
        self._capacity_bytes = size_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def places(self) -> int:
        """Requests that may be inside at present."""
        return int(self._places)

    @asynccontextmanager
    async def hold(self, size_bytes: int) -> AsyncIterator[None]:
        """Wait for a place for ``size_bytes`` and keep it for the block."""
        wanted = min(size_bytes, self._capacity_bytes)
        if self._waiting or not self._fits(wanted):
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((wanted, place))
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():
                    self._give_back(wanted)
                raise
        else:
            self._take(wanted)
        halvings = self._halvings
        try:
            yield
            self._widen()
        except PlaneFault as fault:
            if fault.kind is FaultKind.THROTTLED and halvings == self._halvings:
                self._narrow()
            raise
        finally:
            self._give_back(wanted)

    def _narrow(self) -> None:
        if self._metrics is not None:
            self._places = max(1.0, self._places / 2)
            self._halvings += 1
            self._metrics.add("s3.slowed_down")

    def _widen(self) -> None:
        self._places = min(float(self._most), self._places + 1 / self._places)

    def _fits(self, wanted: int) -> bool:
        return self._inside < self.places and wanted <= self._bytes

    def _take(self, wanted: int) -> None:
        self._inside += 1
        self._bytes -= wanted

    def _give_back(self, wanted: int) -> None:
        self._inside -= 1
        self._bytes += wanted
        while self._waiting:
            next_wanted, place = self._waiting[0]
            if place.done():
                self._waiting.popleft()
            elif self._fits(next_wanted):
                self._waiting.popleft()
                self._take(next_wanted)
                place.set_result(None)
            else:
                return
