"""What vLLM calls in each of its processes where this package is installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CONNECTORS: Final[Mapping[str, str]] = {
    "HiCacheConnector": "hicache_store.engines.vllm",
    "HiCacheOffloadingConnector": "hicache_store.engines.vllm_tier",
}
"""Class to module."""


def register() -> None:
    """Make the connectors known by their names alone.

    Without it ``kv_connector_module_path`` does as much, but not inside vLLM's ``MultiConnector``, which
    knows statistics of registered connectors only. Nothing of the connectors is imported here.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:  # it has no other way to ask
            KVConnectorFactory.register_connector(name, module, name)
