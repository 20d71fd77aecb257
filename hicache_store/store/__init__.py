"""The store: pages of KV in canonical objects over a connector."""

from hicache_store.store.binding import FixedGrid, PoolBuffers
from hicache_store.store.facade import Store
from hicache_store.store.reports import (
    BackupReport,
    EndReason,
    LookupReport,
    PageState,
    PrefixEnd,
    RestoreReport,
)
from hicache_store.store.ticket import Ticket, TicketState

__all__ = [
    "BackupReport",
    "EndReason",
    "FixedGrid",
    "LookupReport",
    "PageState",
    "PoolBuffers",
    "PrefixEnd",
    "RestoreReport",
    "Store",
    "Ticket",
    "TicketState",
]
