"""A store without put-if-absent, made from one that has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from hicache_store.clock import Deadline
from hicache_store.connectors.base import (
    BufferSource,
    BufferTarget,
    Capabilities,
    Connector,
    Entry,
    Outcome,
    Read,
    Status,
    Touch,
    Write,
)

_ATTEMPTS: Final = 100


class OverwritingConnector:
    """``inner`` as a store without put-if-absent: the last complete write of a key stays.

    ``inner`` must have exact versions.
    """

    def __init__(self, inner: Connector) -> None:
        self._inner = inner

    @property
    def capabilities(self) -> Capabilities:
        """Those of the inner connector, less what is taken away."""
        return dataclasses.replace(self._inner.capabilities, create_only=False)

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        """As the inner connector."""
        return self._inner.sizes(keys, deadline)

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        """As the inner connector."""
        return self._inner.read_into(reads, deadline)

    def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        """Store every object over whatever is there."""
        return [self._write(write, deadline) for write in writes]

    def delete(
        self, keys: Sequence[str], deadline: Deadline, versions: Sequence[str | None] | None = None
    ) -> list[Outcome]:
        """As the inner connector."""
        return self._inner.delete(keys, deadline, versions)

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        """As the inner connector."""
        return self._inner.touch(touches, deadline)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """As the inner connector."""
        return self._inner.scan(prefix)

    def close(self) -> None:
        """Close the inner connector."""
        self._inner.close()

    def _write(self, write: Write, deadline: Deadline) -> Outcome:
        if write.replace is not None or deadline.is_past:
            return self._inner.write_from([write], deadline)[0]
        try:
            try:
                data = bytearray().join([view.cast("B") for view in write.source.buffers() if view.nbytes])
            finally:
                write.source.release()
        except Exception as error:
            return Outcome(Status.FAILED, str(error))
        for _ in range(_ATTEMPTS):
            size = self._inner.sizes([write.key], deadline)[0]
            version = None
            if size is not None:
                probe = Read(write.key, size, BufferTarget([]))
                version = self._inner.read_into([probe], deadline)[0].version
            attempt = write._replace(source=BufferSource.of(data), replace=version)
            outcome = self._inner.write_from([attempt], deadline)[0]
            if outcome.status not in (Status.EXISTS, Status.CONFLICT):
                return outcome
        return Outcome(Status.FAILED, f"the object changed {_ATTEMPTS} times in a row")
