"""A shared L3 store of canonical KV-cache objects for LLM serving engines.

The public surface. Importing the package imports nothing heavy: each name is loaded when it is
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_store.config import parse_url
    from hicache_store.connectors.registry import open_connector
    from hicache_store.errors import (
        ConfigurationError,
        DeadlineExceededError,
        HandleError,
        HicacheError,
        IdentityError,
        NameFormatError,
        TopologyError,
    )
    from hicache_store.layout.box import Box, Span
    from hicache_store.layout.dtypes import DType
    from hicache_store.layout.hashing import ChainKind, RequestIdentity, chain_seed, page_hashes
    from hicache_store.layout.layouts import Field, Layout, axes_layout, engine_layout
    from hicache_store.layout.model import Attention, KVPart, ModelKV, Pool
    from hicache_store.layout.names import ObjectName
    from hicache_store.layout.namespace import KVFacts, Namespace, namespace
    from hicache_store.layout.parallel import ParallelSpec, Rank, shard
    from hicache_store.layout.plan import Placement, Segment, placement_of_blocks, placement_of_slot
    from hicache_store.layout.weights import WeightsIdentity
    from hicache_store.store import (
        BackupReport,
        EndReason,
        FixedGrid,
        LookupReport,
        PageState,
        PoolBuffers,
        PrefixEnd,
        RestoreReport,
        Store,
        Ticket,
        TicketState,
    )

__version__ = "0.1.0"

_HOMES = {
    "config": "parse_url",
    "connectors.registry": "open_connector",
    "errors": (
        "ConfigurationError DeadlineExceededError HandleError HicacheError IdentityError NameFormatError "
        "TopologyError"
    ),
    "layout.box": "Box Span",
    "layout.dtypes": "DType",
    "layout.hashing": "ChainKind RequestIdentity chain_seed page_hashes",
    "layout.layouts": "Field Layout axes_layout engine_layout",
    "layout.model": "Attention KVPart ModelKV Pool",
    "layout.names": "ObjectName",
    "layout.namespace": "KVFacts Namespace namespace",
    "layout.parallel": "ParallelSpec Rank shard",
    "layout.plan": "Placement Segment placement_of_blocks placement_of_slot",
    "layout.weights": "WeightsIdentity",
    "store": (
        "BackupReport EndReason FixedGrid LookupReport PageState PoolBuffers PrefixEnd RestoreReport Store "
        "Ticket TicketState"
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})


__all__ = [
    "Attention",
    "BackupReport",
    "Box",
    "ChainKind",
    "ConfigurationError",
    "DType",
    "DeadlineExceededError",
    "EndReason",
    "Field",
    "FixedGrid",
    "HandleError",
    "HicacheError",
    "IdentityError",
    "KVFacts",
    "KVPart",
    "Layout",
    "LookupReport",
    "ModelKV",
    "NameFormatError",
    "Namespace",
    "ObjectName",
    "PageState",
    "ParallelSpec",
    "Placement",
    "Pool",
    "PoolBuffers",
    "PrefixEnd",
    "Rank",
    "RequestIdentity",
    "RestoreReport",
    "Segment",
    "Span",
    "Store",
    "Ticket",
    "TicketState",
    "TopologyError",
    "WeightsIdentity",
    "axes_layout",
    "chain_seed",
    "engine_layout",
    "namespace",
    "open_connector",
    "page_hashes",
    "parse_url",
    "placement_of_blocks",
    "placement_of_slot",
    "shard",
]
