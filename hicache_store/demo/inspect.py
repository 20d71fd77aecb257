"""What a store holds of one prompt, seen from outside any rank, and the control that falsifies it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hicache_store.clock import Deadline
from hicache_store.connectors.base import BufferSource, BufferTarget, Connector, Entry, Read, Status, Write
from hicache_store.errors import ConfigurationError, HicacheError
from hicache_store.layout.box import Box
from hicache_store.layout.model import Pool
from hicache_store.layout.names import FORMAT, META_PREFIX, ObjectName


def stored_objects(connector: Connector, namespace: str, hashes: Sequence[str]) -> list[Entry]:
    """Every object of the pages ``hashes``, under whatever grid, by listing the namespace."""
    wanted = set(hashes)
    found = connector.scan(f"{FORMAT}/{namespace}/")
    return [entry for entry in found if ObjectName.parse(entry.key).page_hash in wanted]


def remove_namespace(connector: Connector, namespace: str, deadline: Deadline) -> None:
    """Remove every object of ``namespace``, then its manifest and markers.

    Raises :class:`HicacheError` when something stays.
    """
    for prefix in (f"{FORMAT}/{namespace}/", f"{META_PREFIX}/{namespace}/"):
        keys = [entry.key for entry in connector.scan(prefix)]
        for key, outcome in zip(keys, connector.delete(keys, deadline), strict=True):
            if not outcome.is_ok and outcome.status is not Status.ABSENT:
                raise HicacheError(f"{key} could not be removed: {outcome.status.value} {outcome.detail}")


def negate(connector: Connector, pool: Pool, entries: Sequence[Entry], deadline: Deadline) -> None:
    """Flip the sign of every stored K and V element, leaving lengths, names and sums as they are.

    The elements must be bfloat16. Raises :class:`HicacheError` when an object cannot be replaced.
    """
    if pool.dtype.name != "bfloat16":
        raise ConfigurationError(f"elements of {pool.dtype.name} are not negated here; use bfloat16")
    for entry in entries:
        name = ObjectName.parse(entry.key)
        payload_bytes = pool.payload_bytes(Box(name.heads, name.layers, pool.page_box.tokens))
        raw = bytearray(entry.size_bytes)
        read = Read(entry.key, entry.size_bytes, BufferTarget.whole(raw))
        (outcome,) = connector.read_into([read], deadline)
        if outcome.is_ok:
            np.frombuffer(raw, "<u2", payload_bytes // 2)[:] ^= 0x8000
            write = Write(entry.key, entry.size_bytes, BufferSource.of(raw), replace=entry.version)
            (outcome,) = connector.write_from([write], deadline)
        if not outcome.is_ok:
            raise HicacheError(f"{entry.key} could not be altered: {outcome.status.value} {outcome.detail}")
