"""Walks over a store: bounded in memory, ended when the storage stops answering."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, TypeVar

from hicache_store.connectors.base import Connector, Entry
from hicache_store.errors import ConfigurationError, DeadlineExceededError, NameFormatError
from hicache_store.layout.names import FORMAT, META_PREFIX, ObjectName
from hicache_store.limits import (
    CLOSE_JOIN_S,
    LISTING_BATCH,
    LISTING_BATCHES_MAX,
    LISTING_NAMESPACES_MAX,
    LISTING_WAIT_S,
)

T = TypeVar("T")

_DIGEST_DIGITS: Final = 64
_POLL_S: Final = 0.2
"""How long entries are held back, and how soon a walk notices that nobody reads it any more."""

_Handover = list[Entry] | BaseException | None


def walk(connector: Connector, prefix: str, wait_s: float = LISTING_WAIT_S) -> Iterator[Entry]:
    """The entries below ``prefix``.

    Raises :class:`DeadlineExceededError` when the storage gives nothing for ``wait_s``, and whatever
    the connector's own walk raises.
    """
    batches: queue.Queue[_Handover] = queue.Queue(LISTING_BATCHES_MAX)
    stopped = threading.Event()
    thread = threading.Thread(
        target=_fill, args=(connector, prefix, batches, stopped), name="hicache-listing", daemon=True
    )
    thread.start()
    try:
        while True:
            try:
                batch = batches.get(timeout=wait_s)
            except queue.Empty:
                raise DeadlineExceededError(f"listing {prefix!r}: no answer within {wait_s:g} s") from None
            if batch is None:
                return
            if isinstance(batch, BaseException):
                raise batch
            yield from batch
    finally:
        stopped.set()
        thread.join(CLOSE_JOIN_S)


def _fill(
    connector: Connector, prefix: str, batches: queue.Queue[_Handover], stopped: threading.Event
) -> None:
    def give(item: _Handover) -> None:
        while not stopped.is_set():
            try:
                batches.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return

    try:
        batch: list[Entry] = []
        given_at = time.monotonic()
        for entry in connector.scan(prefix):
            batch.append(entry)
            if len(batch) >= LISTING_BATCH or time.monotonic() - given_at > _POLL_S:
                give(batch)
                batch, given_at = [], time.monotonic()
            if stopped.is_set():
                return
        give(batch)
        give(None)
    except BaseException as error:  # raised again by whoever reads the walk
        give(error)


def object_name(entry: Entry) -> ObjectName | None:
    """The name of an entry, ``None`` when it is not an object of this package."""
    try:
        return ObjectName.parse(entry.key)
    except NameFormatError:
        return None


def objects(
    connector: Connector, namespace: str = "", wait_s: float = LISTING_WAIT_S
) -> Iterator[tuple[Entry, ObjectName]]:
    """The objects of the namespaces that start with ``namespace``; other keys are passed over."""
    for entry in walk(connector, f"{FORMAT}/{namespace}", wait_s):
        name = object_name(entry)
        if name is not None:
            yield entry, name


def known_namespaces(connector: Connector, prefix: str = "") -> list[str]:
    """The namespaces that have a manifest or a marker, sorted."""
    found: set[str] = set()
    for entry in walk(connector, f"{META_PREFIX}/{prefix}"):
        digest = entry.key.removeprefix(f"{META_PREFIX}/").partition("/")[0]
        if len(digest) == _DIGEST_DIGITS and len(found) < LISTING_NAMESPACES_MAX:
            found.add(digest)
    return sorted(found)


def the_namespace(connector: Connector, prefix: str) -> str:
    """The one namespace that starts with ``prefix``; raises :class:`ConfigurationError` unless it is one.

    A whole digest is taken as given.
    """
    if len(prefix) == _DIGEST_DIGITS:
        return prefix
    found = set(known_namespaces(connector, prefix))
    for _, name in objects(connector, prefix):
        found.add(name.namespace)
        if len(found) > 1:
            break
    if not found:
        raise ConfigurationError(f"no namespace starts with {prefix}; `hicache stat` lists them")
    if len(found) > 1:
        raise ConfigurationError(
            f"{prefix} is the start of {' and '.join(sorted(found)[:2])}; give more digits"
        )
    return found.pop()


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of ``size`` consecutive items; the last may be shorter."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch
