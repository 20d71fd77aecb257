from __future__ import annotations

import pytest
from cli_place import StorePlace

from hicache_store.config import parse_url
from hicache_store.connectors import local, memory


@pytest.fixture(params=["memory", "file"])
def place(request, tmp_path):
    """An empty store behind a URL; in memory it lives as long as the handle that fills it."""
    if request.param == "memory":
        url = f"memory://{tmp_path}"
        connector = memory.connect(parse_url(url))
    else:
        url = f"file://{tmp_path}/store"
        connector = local.connect(parse_url(f"{url}?sweep=0&quota=1GiB"))
    yield StorePlace(url, connector)
    connector.close()
