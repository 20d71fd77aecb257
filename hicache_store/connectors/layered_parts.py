"""What the look-ups, reads and writes of two layers share."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_store.connectors.base import Connector
from hicache_store.connectors.layered_backlog import Backlog
from hicache_store.connectors.layered_memory import SlowMemory
from hicache_store.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Layers:
    """Two layers and what lies between them.

    ``fills`` are copies on their way to the fast layer, ``pending`` objects on their way to the slow one:
    both are the newest there is. ``memory`` is what the slow layer was lately seen to hold. ``is_back`` tells
    that writes reach the fast layer first, ``changes_fast`` that the fast layer is written at all.
    """

    fast: Connector
    slow: Connector
    fills: Backlog
    pending: Backlog
    memory: SlowMemory
    metrics: Metrics
    is_back: bool
    changes_fast: bool

    @property
    def may_heal(self) -> bool:
        """Whether what the slow layer lost can be written again."""
        return self.changes_fast and not self.slow.capabilities.is_read_only
