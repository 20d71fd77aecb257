"""The connector contract as tests that any connector can inherit.

A third party writes::

    from hicache_store.testing.connector_contract import ConnectorContract

    class TestMine(ConnectorContract):
        @pytest.fixture
        def connect(self, tmp_path):
            return lambda: open_connector(f"mine://{tmp_path}")

and runs pytest. ``connect`` opens another handle on one and the same place, at first empty, each
time it is called. Two more fixtures may be overridden: ``connect_writer``, when those handles are
read-only, opens one on the same place that is not; ``connect_bounded``, a callable that takes a quota
in bytes and opens a fresh place, must be given by a connector that orders eviction. Where a capability
is absent a test asks for what remains; none is skipped.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "hicache_store.testing.contract_base",
    "hicache_store.testing.contract_lifecycle",
    "hicache_store.testing.contract_names",
    "hicache_store.testing.contract_races",
    "hicache_store.testing.contract_reads",
    "hicache_store.testing.contract_writes",
)

from hicache_store.testing.contract_base import Connect, ConnectBounded  # noqa: E402
from hicache_store.testing.contract_lifecycle import LifecycleContract  # noqa: E402
from hicache_store.testing.contract_names import NameContract  # noqa: E402
from hicache_store.testing.contract_races import RaceContract  # noqa: E402
from hicache_store.testing.contract_reads import ReadContract  # noqa: E402
from hicache_store.testing.contract_writes import WriteContract  # noqa: E402

__all__ = ["Connect", "ConnectBounded", "ConnectorContract"]


class ConnectorContract(ReadContract, WriteContract, NameContract, RaceContract, LifecycleContract):
    """Everything that :mod:`hicache_store.connectors.base` promises."""
