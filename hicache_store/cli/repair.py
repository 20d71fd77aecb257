"""What ``hicache verify --repair`` puts in the place of bad objects: another layer's copy, or nothing."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hicache_store.cli.listing import batched
from hicache_store.cli.scrub import Finding, Scrub
from hicache_store.clock import Deadline
from hicache_store.connectors.base import BufferSource, Connector, Outcome, Status, Write
from hicache_store.limits import REMOVE_BATCH


class Repair(enum.StrEnum):
    """What became of a bad object."""

    RESTORED = "restored"
    """The sound copy of another layer lies in its place."""
    REMOVED = "removed"
    """It is gone; whoever misses it writes it again."""
    CHANGED = "changed since"
    """It is not the one that was found bad any more, and was left alone."""
    FAILED = "failed"
    """It is still there: the storage did not take the repair."""


@dataclass(frozen=True, slots=True)
class Repairer:
    """Repairs ``connector``; ``others`` read the layers that may have sound copies, the best one first."""

    connector: Connector
    others: Sequence[Scrub]
    timeout_s: float

    def settle(self, findings: Iterator[Finding]) -> Iterator[tuple[Finding, Repair | None]]:
        """Each finding with what was done; ``None`` where it is not proven bad and nothing was."""
        for batch in batched(findings, REMOVE_BATCH):
            left = {found.key: found for found in batch if found.is_removable}
            done: dict[str, Repair] = {}
            for other in self.others:
                for copies in other.sound(list(left)):
                    done |= self._restore(copies, left)
                left = {key: found for key, found in left.items() if key not in done}
            done |= self._remove(list(left.values()))
            yield from ((found, done.get(found.key)) for found in batch)

    def _restore(self, copies: Mapping[str, memoryview], bad: Mapping[str, Finding]) -> dict[str, Repair]:
        """Put copies in the place of bad objects, by version: what another writer replaced stays."""
        unnamed = [key for key in copies if bad[key].version is None]
        if unnamed:  # an object without a version can only be made anew
            self.connector.delete(unnamed, self._soon())
        writes = [
            Write(key, len(view), BufferSource.of(view), replace=bad[key].version)
            for key, view in copies.items()
        ]
        outcomes = self.connector.write_from(writes, self._soon()) if writes else []
        return {
            key: Repair.CHANGED if outcome.status is Status.CONFLICT else Repair.RESTORED
            for key, outcome in zip(copies, outcomes, strict=True)
            if outcome.is_ok or outcome.status is Status.CONFLICT
        }

    def _remove(self, bad: Sequence[Finding]) -> dict[str, Repair]:
        keys, versions = [found.key for found in bad], [found.version for found in bad]
        outcomes = self.connector.delete(keys, self._soon(), versions) if keys else []
        return {key: _removal(outcome) for key, outcome in zip(keys, outcomes, strict=True)}

    def _soon(self) -> Deadline:
        return Deadline.after(self.timeout_s)


def _removal(outcome: Outcome) -> Repair:
    if outcome.is_ok or outcome.status is Status.ABSENT:
        return Repair.REMOVED
    return Repair.CHANGED if outcome.status is Status.CONFLICT else Repair.FAILED
