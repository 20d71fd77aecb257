"""The shipped contract on layered connectors and on every wrapper."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Connector
from hicache_store.connectors.breaker import breaking
from hicache_store.connectors.layered import LayeredConnector
from hicache_store.connectors.limited import hedged, limited
from hicache_store.connectors.metered import metered
from hicache_store.connectors.registry import open_connector
from hicache_store.connectors.retrying import retrying
from hicache_store.connectors.wrapping import Forward, Verb, WrappedConnector
from hicache_store.testing.connector_contract import Connect, ConnectBounded, ConnectorContract

LAYERS = {
    "memory before memory": ("memory://{tag}-fast", "memory://{tag}-slow", "seen"),
    "file before memory": ("file://{path}/fast?io=bounce&threads=2&sweep=0", "memory://{tag}-slow", "whole"),
}


class Flushing:
    """Waits after each write until the fast layer has its copies, so that a test knows its content."""

    def __init__(self, layered: LayeredConnector) -> None:
        self._layered = layered

    def call(self, verb: Verb, items: Sequence[Any], deadline: Deadline, forward: Forward) -> list[Any]:
        results = forward(items, deadline)
        if verb == "write":
            assert self._layered.flush(Deadline.after(60.0))
        return results

    def close(self) -> None:
        pass


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS.keys(), scope="class")
class TestLayered(ConnectorContract):
    attempts_max = 3  # an own copy, the fast one, the slow one

    @pytest.fixture
    def connect(self, tmp_path: Path, layers: tuple[str, str, str]) -> Connect:
        fast, slow = (quote(url.format(tag=tmp_path, path=tmp_path), safe="") for url in layers[:2])
        return lambda: open_connector(f"layered:?fast={fast}&slow={slow}&fill={layers[2]}")

    @pytest.fixture(autouse=True)
    def places_stay(self, tmp_path: Path) -> Iterator[None]:
        """A named place in memory is gone with its last handle."""
        handles = [open_connector(f"memory://{tmp_path}-{layer}") for layer in ("fast", "slow")]
        yield
        for handle in handles:
            handle.close()

    @pytest.fixture
    def connect_bounded(self) -> ConnectBounded:
        """A quarter of the quota before three quarters: together they keep no more than the quota."""

        def bounded(quota: int) -> Connector:
            fast, slow = (
                open_connector(f"memory:?quota={quota // 4}B"),
                open_connector(f"memory:?quota={quota * 3 // 4}B"),
            )
            layered = LayeredConnector(fast, slow)
            return WrappedConnector(layered, Flushing(layered), layered.metrics)

        return bounded


class TestWriteBack(ConnectorContract):
    attempts_max = 3

    @pytest.fixture
    def connect(self, tmp_path: Path) -> Connect:
        fast, slow = (quote(f"memory://{tmp_path}-{layer}", safe="") for layer in ("fast", "slow"))
        return lambda: open_connector(f"layered:?fast={fast}&slow={slow}&mode=write-back")

    @pytest.fixture(autouse=True)
    def places_stay(self, tmp_path: Path) -> Iterator[None]:
        handles = [open_connector(f"memory://{tmp_path}-{layer}") for layer in ("fast", "slow")]
        yield
        for handle in handles:
            handle.close()


WRAPPERS = {
    "retrying, breaker, metered": lambda inner: metered(breaking(retrying(inner, 2))),
    "limited": lambda inner: limited(inner, 3, 100_000),
    "hedged": lambda inner: hedged(inner, 0.001),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys(), scope="class")
class TestWrapped(ConnectorContract):
    @pytest.fixture
    def connect(self, tmp_path: Path, wrap: Any) -> Connect:
        return lambda: wrap(open_connector(f"file://{tmp_path}/store?io=bounce&threads=2&sweep=0"))

    @pytest.fixture
    def connect_bounded(self, tmp_path: Path, wrap: Any) -> ConnectBounded:
        serial = itertools.count()
        url = f"file://{tmp_path}/bounded-"
        options = "io=bounce&threads=2&sweep=0&min_free=0"
        return lambda quota: wrap(open_connector(f"{url}{next(serial)}?{options}&quota={quota}B"))


DEFAULTS = "retries=2&breaker=1"
"""What a URL of network storage brings when it says nothing."""


@pytest.mark.parametrize("scheme", ["memory", "file"], scope="class")
class TestDefaultWrappers(ConnectorContract):
    """Eight workers, so that one call has enough items to weigh on a breaker."""

    @pytest.fixture
    def connect(self, tmp_path: Path, scheme: str) -> Connect:
        if scheme == "memory":
            return lambda: open_connector(f"memory://{tmp_path}-wrapped?{DEFAULTS}")
        return lambda: open_connector(f"file://{tmp_path}/store?threads=8&sweep=0&{DEFAULTS}")

    @pytest.fixture(autouse=True)
    def place_stays(self, tmp_path: Path) -> Iterator[None]:
        handle = open_connector(f"memory://{tmp_path}-wrapped")
        yield
        handle.close()

    @pytest.fixture
    def connect_bounded(self, tmp_path: Path, scheme: str) -> ConnectBounded:
        if scheme == "memory":
            return lambda quota: open_connector(f"memory:?quota={quota}B&{DEFAULTS}")
        serial = itertools.count()
        url, options = f"file://{tmp_path}/bounded-", f"threads=8&sweep=0&min_free=0&{DEFAULTS}"
        return lambda quota: open_connector(f"{url}{next(serial)}?{options}&quota={quota}B")
