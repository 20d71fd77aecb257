"""Judging objects in memory of our own, where nothing else writes."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Connector, Part, Read, Status
from hicache_store.layout.format import NameSeed, ObjectFormat
from hicache_store.store.staging import Block, StagingPool


class ProofTarget:
    """Reads a whole object into staging and checks every cell of it, for no one."""

    def __init__(self, key: str, shape: ObjectFormat, staging: StagingPool, deadline: Deadline) -> None:
        self._name = NameSeed.of(key)
        self._format = shape
        self._staging = staging
        self._deadline = deadline
        self._block: Block | None = None

    def parts(self) -> Sequence[Part]:
        """The whole object."""
        self._block = self._staging.acquire(self._format.object_bytes, self._deadline)
        return [(0, [self._block.view])]

    def check(self) -> str | None:
        """What is wrong with it."""
        assert self._block is not None
        shape, view = self._format, self._block.view
        payload, trailer = view[: shape.payload_bytes], view[shape.payload_bytes :]
        verdict = shape.check_trailer(self._name, trailer)
        if verdict is None:
            verdict = shape.check_cells(self._name, trailer, range(shape.cells), [payload])
        return None if verdict is None else verdict.value

    def release(self) -> None:
        """Give the memory back."""
        if self._block is not None:
            self._staging.release(self._block)
            self._block = None


def prove(
    connector: Connector,
    staging: StagingPool,
    objects: Sequence[tuple[str, ObjectFormat]],
    deadline: Deadline,
) -> set[str]:
    """The keys of the objects that are sound; one that cannot be read or does not fit is not."""
    reads = [
        Read(key, shape.object_bytes, ProofTarget(key, shape, staging, deadline))
        for key, shape in objects
        if shape.object_bytes <= staging.capacity_bytes
    ]
    if not reads:
        return set()
    outcomes = connector.read_into(reads, deadline)
    return {read.key for read, outcome in zip(reads, outcomes, strict=True) if outcome.status is Status.OK}
