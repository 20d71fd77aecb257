"""How many requests of one S3 handle are in flight, and how many bytes they may hold."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Lets in at most ``items`` requests of at most ``size_bytes`` of bodies together, in order.

    A body larger than all that is let in alone.
    """

    def __init__(self, items: int, size_bytes: int) -> None:
        self._items = items
        self._bytes = size_bytes
        self._capacity_bytes = size_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

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
        try:
            yield
        finally:
            self._give_back(wanted)

    def _fits(self, wanted: int) -> bool:
        return self._items > 0 and wanted <= self._bytes

    def _take(self, wanted: int) -> None:
        self._items -= 1
        self._bytes -= wanted

    def _give_back(self, wanted: int) -> None:
        self._items += 1
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
