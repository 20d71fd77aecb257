"""What vLLM calls in each of its processes where this package is installed."""

from __future__ import annotations

from typing import Final

CONNECTOR: Final = "HiCacheConnector"
MODULE: Final = "hicache_store.engines.vllm"


def register() -> None:
    """Make the connector known by its name alone.

    Without it ``kv_connector_module_path`` does as much, but not inside vLLM's ``MultiConnector``, which
    knows statistics of registered connectors only. Nothing of the connector is imported here.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    if CONNECTOR not in KVConnectorFactory._registry:  # it has no other way to ask
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
