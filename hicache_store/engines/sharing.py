"""What the adapters share: one connector under several stores, and a topology that is known in part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Capabilities, Connector, Entry, Lister, Outcome, Read, Touch, Write
from hicache_store.layout.box import Span
from hicache_store.layout.parallel import ParallelSpec


class BorrowedConnector:
    """Forwards to ``owner``, which outlives it: closing it closes nothing."""

    def __init__(self, owner: Connector) -> None:
        self._owner = owner

    @property
    def capabilities(self) -> Capabilities:
        """Those of the owner."""
        return self._owner.capabilities

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        """Length of each object."""
        return self._owner.sizes(keys, deadline)

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        """Fetch each object's parts into its target."""
        return self._owner.read_into(reads, deadline)

    def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        """Store each object, all or nothing."""
        return self._owner.write_from(writes, deadline)

    def delete(
        self, keys: Sequence[str], deadline: Deadline, versions: Sequence[str | None] | None = None
    ) -> list[Outcome]:
        """Remove objects; with a version, only if it is still that one."""
        return self._owner.delete(keys, deadline, versions)

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        """Mark objects as used now."""
        return self._owner.touch(touches, deadline)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """Every object below a prefix."""
        return self._owner.scan(prefix)

    def listing(self, prefix: str, deadline: Deadline) -> list[str] | None:
        """Every key below a prefix, where the owner knows them by one request."""
        return self._owner.listing(prefix, deadline) if isinstance(self._owner, Lister) else None

    def close(self) -> None:
        """Nothing: the owner is closed by whoever opened it."""


def spec_of(tp_size: int, layers: Span, total: int) -> tuple[ParallelSpec, int]:
    """A topology that has a stage of exactly ``layers`` of ``total``, and that stage's number.

    Engines do not tell a rank the other stages' cuts, and nothing that is stored depends on them.
    """
    cuts = sorted({0, layers.start, layers.stop, total})
    spec = ParallelSpec(tp_size, len(cuts) - 1, stage_starts=tuple(cuts[1:-1]) if len(cuts) > 2 else None)
    return spec, cuts.index(layers.start)
