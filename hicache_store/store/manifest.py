"""The manifest of a namespace: stored once, compared at attach."""

from __future__ import annotations

import logging

from hicache_store.clock import Deadline
from hicache_store.connectors.base import BufferSource, BufferTarget, Connector, Read, Status, Write
from hicache_store.errors import ConfigurationError, IdentityError
from hicache_store.layout.model import MAIN_POOL, Pool
from hicache_store.layout.names import manifest_key
from hicache_store.layout.namespace import Namespace
from hicache_store.layout.records import frame, unframe
from hicache_store.limits import METADATA_MAX_BYTES
from hicache_store.metrics import Metrics

log = logging.getLogger("hicache_store")


def ensure(connector: Connector, namespace: Namespace, deadline: Deadline, metrics: Metrics) -> None:
    """Put the manifest if it is absent, and compare it if it is there.

    A damaged or unreachable manifest never stops an attach: it is counted, and replaced where the
    storage lets us. A sound one that says something else raises :class:`IdentityError`.
    """
    key = manifest_key(namespace.digest)
    record = frame(key, namespace.encoded)
    if len(record) > METADATA_MAX_BYTES:
        raise ConfigurationError(
            f"the manifest has {len(record)} bytes, at most {METADATA_MAX_BYTES} are kept; "
            "give fewer or shorter identity fields"
        )
    version: str | None = None
    (size,) = connector.sizes([key], deadline)
    if size is not None:
        raw = bytearray(size if size <= METADATA_MAX_BYTES else 0)
        target = BufferTarget.whole(raw) if raw else BufferTarget([])  # of a huge one only the version
        (outcome,) = connector.read_into([Read(key, size, target)], deadline)
        stored = unframe(key, bytes(raw)) if outcome.is_ok else None
        if stored == namespace.encoded:
            return
        if stored is not None:
            raise IdentityError(
                f"namespace {namespace.digest} has a manifest that says something else; the root is "
                "corrupted or was tampered with: use another root, or remove this namespace"
            )
        version = outcome.version
        metrics.add("manifest.damaged")
    if connector.capabilities.is_read_only:
        return
    write = Write(key, len(record), BufferSource.of(record), replace=version)
    (written,) = connector.write_from([write], deadline)
    if not written.is_ok and written.status is not Status.CONFLICT:
        metrics.add("manifest.write_failed")
        log.warning("the namespace manifest could not be written: %s %s", written.status, written.detail)


def check_pool(namespace: Namespace, pool: Pool) -> None:
    """Raise :class:`IdentityError` when the main pool is not the one the namespace speaks of."""
    if pool.name != MAIN_POOL:
        return
    kv = namespace.record["kv"]
    parts = [[part.name, part.width] for part in pool.parts]
    facts = {
        "KV heads": (kv["num_kv_heads"], pool.num_heads),
        "kv parts": (kv["parts"], parts),
        "dtype": (kv["dtype"], pool.dtype.name),
        "page size": (kv["page_size"], pool.page_size),
    }
    for what, (named, given) in facts.items():
        if named != given:
            raise IdentityError(
                f"the namespace says {what} {named}, the pool has {given}; build both from one ModelKV"
            )
    if pool.num_layers < kv["num_layers"]:
        raise IdentityError(
            f"the namespace says {kv['num_layers']} layers, pool {pool.name} has {pool.num_layers}; "
            "give the pool all target layers, drafts behind them"
        )
