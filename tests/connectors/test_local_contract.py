"""The shipped contract on ``file://``: both ways of stopping, with and without O_DIRECT."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from hicache_store.connectors.registry import open_connector
from hicache_store.testing.connector_contract import Connect, ConnectBounded, ConnectorContract

OPTIONS = {
    "direct": "io=direct&threads=3",
    "bounce": "io=bounce&threads=3",
    "O_DIRECT": "io=direct&threads=2&direct_io=1",
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys(), scope="class")
class TestLocal(ConnectorContract):
    @pytest.fixture
    def connect(self, tmp_path: Path, options: str) -> Connect:
        return lambda: open_connector(f"file://{tmp_path}/store?{options}&sweep=0")

    @pytest.fixture
    def connect_bounded(self, tmp_path: Path, options: str) -> ConnectBounded:
        serial = itertools.count()
        return lambda quota: open_connector(
            f"file://{tmp_path}/bounded-{next(serial)}?{options}&sweep=0&quota={quota}B&min_free=0"
        )


class TestLocalReadOnly(ConnectorContract):
    """A handle that may only read, beside writers of the same root."""

    @pytest.fixture
    def connect_writer(self, tmp_path: Path) -> Connect:
        return lambda: open_connector(f"file://{tmp_path}/store?threads=2&sweep=0")

    @pytest.fixture
    def connect(self, tmp_path: Path, connect_writer: Connect) -> Connect:
        connect_writer().close()  # a root that is not there cannot be opened read-only
        return lambda: open_connector(f"file://{tmp_path}/store?readonly=1&threads=2")

    @pytest.fixture
    def connect_bounded(self, tmp_path: Path) -> ConnectBounded:
        bounded = f"file://{tmp_path}/bounded?sweep=0&min_free=0&quota="
        return lambda quota: open_connector(f"{bounded}{quota}B")
