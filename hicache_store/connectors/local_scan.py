"""Walks of the file connector for tools: every object, and temporary files beside the metadata."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hicache_store.connectors.base import META_PREFIX, Entry
from hicache_store.connectors.local_io import is_absent
from hicache_store.connectors.local_ledger import is_dead
from hicache_store.connectors.local_names import (
    META_DIR,
    directory_of,
    is_temporary,
    key_of,
    object_directories,
)
from hicache_store.connectors.local_root import NANO, Root, version_of
from hicache_store.limits import TEMPORARY_GRACE_S


def scan(root: Root, prefix: str) -> Iterator[Entry]:
    """Every object whose key starts with ``prefix``, directory by directory; strays are skipped.

    ``last_used_s`` is a whole second: the rest of the file's time holds the depth.
    """
    if prefix.startswith(META_PREFIX) or META_PREFIX.startswith(prefix):
        yield from _scan_directory(root, (META_DIR,), prefix)
    if not prefix.startswith(META_PREFIX):
        for path in object_directories():
            yield from _scan_directory(root, path, prefix)


def remove_dead_metadata_drafts(root: Root) -> int:
    """Remove temporary files of dead writers beside the metadata; returns how many."""
    dead_before_s = root.clock.now_s() - TEMPORARY_GRACE_S

    def remove(fd: int) -> int:
        drafts = [name for name in root.io.listdir(fd) if is_temporary(name)]
        return sum(_remove_dead(root, fd, name, dead_before_s) for name in drafts)

    try:
        return root.within((META_DIR,), remove)
    except OSError as error:
        if is_absent(error):
            return 0
        raise


def _scan_directory(root: Root, path: tuple[str, ...], prefix: str) -> Iterator[Entry]:
    try:
        names = root.within(path, root.io.listdir)
    except OSError as error:
        if not is_absent(error):
            root.metrics.add("file.scan_failed")
        return
    for name in sorted(names):
        key = key_of(name)
        if key is None or not key.startswith(prefix) or directory_of(key) != path:
            continue
        try:
            found = root.look((path, name))
        except OSError:
            continue
        if found is not None and not root.is_expired(key, found):
            yield Entry(key, found.st_size, float(found.st_mtime_ns // NANO), version_of(found))


def _remove_dead(root: Root, directory_fd: int, name: str, dead_before_s: float) -> bool:
    try:
        fd = root.io.open(name, os.O_RDWR | os.O_NONBLOCK, dir_fd=directory_fd)
        try:
            if not is_dead(root.io, fd, dead_before_s):
                return False
            root.io.unlink(name, dir_fd=directory_fd)
            return True
        finally:
            root.io.close(fd)
    except OSError:
        root.metrics.add("file.sweep_failed")
        return False
