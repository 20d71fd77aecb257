"""Manifests and markers as tools read them: what is there, whether it is sound, and at which version."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from hicache_store.clock import SYSTEM_CLOCK, Deadline
from hicache_store.connectors.base import BufferTarget, Connector, Read, Status
from hicache_store.errors import ConfigurationError
from hicache_store.layout.grid import Grid
from hicache_store.layout.names import manifest_key, marker_key
from hicache_store.layout.records import decode_grid, unframe
from hicache_store.limits import MARKER_SLOTS, METADATA_MAX_BYTES
from hicache_store.metrics import Metrics
from hicache_store.store.grids import GridDirectory, Slot

MANIFEST: Final = manifest_key("").rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class RecordRead:
    """One record. ``body`` is ``None`` when it is absent or damaged; ``detail`` says which and why."""

    body: bytes | None
    is_present: bool
    version: str | None = None
    detail: str = ""


def read_record(connector: Connector, key: str, deadline: Deadline) -> RecordRead:
    """The record under ``key``."""
    (size,) = connector.sizes([key], deadline)
    if size is None:
        return RecordRead(None, is_present=False, detail="absent")
    if size > METADATA_MAX_BYTES:
        return RecordRead(None, is_present=True, detail=f"{size} bytes are no record")
    raw = bytearray(size)
    (outcome,) = connector.read_into([Read(key, size, BufferTarget.whole(raw))], deadline)
    if not outcome.is_ok:
        is_present = outcome.status is not Status.ABSENT
        detail = f"{outcome.status.value} {outcome.detail}".strip()
        return RecordRead(None, is_present, outcome.version, detail)
    body = unframe(key, bytes(raw))
    return RecordRead(
        body, True, outcome.version, "" if body is not None else "damaged, or of a later version"
    )


@dataclass(frozen=True, slots=True)
class ManifestRead:
    """A namespace's own record, ``None`` when it is absent or damaged; ``detail`` says which."""

    record: dict[str, Any] | None
    detail: str = ""


def read_manifest(connector: Connector, namespace: str, deadline: Deadline) -> ManifestRead:
    """The manifest of ``namespace``; one whose digest is not the namespace counts as damaged."""
    found = read_record(connector, manifest_key(namespace), deadline)
    if found.body is None:
        return ManifestRead(None, found.detail)
    if hashlib.sha256(found.body).hexdigest() != namespace:
        return ManifestRead(None, "it is the manifest of another namespace")
    try:
        record = json.loads(found.body)
    except ValueError:
        record = None
    return ManifestRead(record) if isinstance(record, dict) else ManifestRead(None, "it is not JSON")


def read_grids(connector: Connector, namespace: str, deadline: Deadline) -> list[Slot]:
    """All marker slots of ``namespace``, in one batch."""
    return GridDirectory(connector, namespace, SYSTEM_CLOCK, Metrics()).read_slots(deadline)


def record_fault(connector: Connector, key: str, deadline: Deadline) -> str | None:
    """What is wrong with the manifest or marker under ``key``; ``None`` when it is sound or gone.

    Raises :class:`ConfigurationError` for a key that is neither.
    """
    parts = key.split("/")
    namespace, leaf = (parts[2], parts[3]) if len(parts) == 4 else ("", "")
    if key == manifest_key(namespace):
        manifest = read_manifest(connector, namespace, deadline)
        return None if manifest.record is not None or manifest.detail == "absent" else manifest.detail
    slot = leaf.removeprefix("grid-")
    if (
        slot.isascii()
        and slot.isdigit()
        and int(slot) < MARKER_SLOTS
        and key == marker_key(namespace, int(slot))
    ):
        found = read_record(connector, key, deadline)
        if found.body is not None:
            return None if decode_grid(found.body) is not None else "it tells no grid"
        return found.detail if found.is_present else None
    raise ConfigurationError(f"{key} is no manifest and no marker")


def marker_to_retire(
    connector: Connector, namespace: str, slot: int, deadline: Deadline
) -> tuple[Grid | None, str | None]:
    """The grid of a marker slot and its version; raises :class:`ConfigurationError` when it is free."""
    if slot >= MARKER_SLOTS:
        raise ConfigurationError(f"slot {slot} is outside 0..{MARKER_SLOTS - 1}")
    found = read_record(connector, marker_key(namespace, slot), deadline)
    if not found.is_present:
        raise ConfigurationError(f"slot {slot} of namespace {namespace} holds no marker: {found.detail}")
    return (None if found.body is None else decode_grid(found.body)), found.version
