"""Attaching to a root: its options, its safety, and what its file system can do.

Attaching never walks the store; everything is found out with a few files of its own.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from dataclasses import dataclass
from typing import Final, Literal

from hicache_store.clock import Clock
from hicache_store.config import (
    StoreUrl,
    bool_option,
    choice_option,
    duration_option,
    int_option,
    redacted,
    size_option,
)
from hicache_store.connectors.local_io import DIRECTORY_MODE, PosixIO
from hicache_store.connectors.local_names import OBJECTS_DIR
from hicache_store.connectors.local_publish import Publisher, is_full
from hicache_store.connectors.local_root import NANO, PROBE_DIRECTORY, Root, StorageClock, used_at_ns
from hicache_store.connectors.local_transfer import DirectMover, takes_direct_io
from hicache_store.connectors.local_tree import DirectoryTree
from hicache_store.connectors.workers import usable_cpus
from hicache_store.errors import ConfigurationError
from hicache_store.limits import KIB, LOCAL_THREADS_MAX, MAINTENANCE_INTERVAL_S, WORKERS_MAX
from hicache_store.metrics import Metrics

_LOG = logging.getLogger(__name__)

OPTIONS: Final = (
    size_option("quota", minimum=1),
    size_option("min_free"),
    duration_option("ttl", minimum=1.0),
    int_option("threads", None, 1, WORKERS_MAX),
    choice_option("io", "auto", ("auto", "direct", "bounce")),
    bool_option("direct_io", False),
    bool_option("fsync", False),
    bool_option("readonly", False),
    size_option("request_cost", 64 * KIB),
    duration_option("sweep", MAINTENANCE_INTERVAL_S),
)

_LOCAL_FILESYSTEMS: Final = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        0x9123683E,  # btrfs
        0x01021994,  # tmpfs
        0x858458F6,  # ramfs
        0x2FC12FC1,  # zfs
        0x794C7630,  # overlay
        0xF2F52010,  # f2fs
        0xCA451A4E,  # bcachefs
        0x3153464A,  # jfs
        0x73717368,  # squashfs
        0xE0F5E1E2,  # erofs
    }
)
"""``f_type`` of file systems whose calls end by themselves; any other may hang with its server."""

_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one ``file://`` URL, typed. ``None`` leaves a choice to what is found."""

    path: str
    quota_bytes: int | None
    min_free_bytes: int | None
    ttl_s: float | None
    threads: int
    io: Literal["auto", "direct", "bounce"]
    wants_direct_io: bool
    syncs: bool
    is_read_only: bool
    request_cost_bytes: int
    sweep_interval_s: float


def read_settings(url: StoreUrl) -> Settings:
    """The settings of ``url``; raises :class:`ConfigurationError` naming what is not right."""
    path = url.location
    normal = f"/{os.path.normpath(path).lstrip('/')}"  # two leading slashes would stay
    if not path.startswith("/") or normal == "/" or "\0" in path:
        raise ConfigurationError(
            f"{redacted(f'file:{path}')!r} is not the absolute path of a directory below /; "
            "write file:///var/cache/kv"
        )
    values = url.options(OPTIONS)
    threads = values.optional("threads", int)
    io = values.get("io", str)
    return Settings(
        path=normal,
        quota_bytes=values.optional("quota", int),
        min_free_bytes=values.optional("min_free", int),
        ttl_s=values.optional("ttl", float),
        threads=min(usable_cpus(), LOCAL_THREADS_MAX) if threads is None else threads,
        io="direct" if io == "direct" else "bounce" if io == "bounce" else "auto",
        wants_direct_io=values.get("direct_io", bool),
        syncs=values.get("fsync", bool),
        is_read_only=values.get("readonly", bool),
        request_cost_bytes=values.get("request_cost", int),
        sweep_interval_s=values.get("sweep", float),
    )


def attach(settings: Settings, io: PosixIO, clock: Clock, metrics: Metrics) -> Root:
    """Open the root and find out what it can do; the caller closes ``root.tree``.

    Raises :class:`ConfigurationError` for a root that cannot be used or is open to everybody.
    """
    root_fd = _open_root(settings)
    tree = DirectoryTree(root_fd, io, settings.syncs)
    try:
        root = Root(io, tree, StorageClock(clock), settings.ttl_s, metrics)
        root.is_local = io.filesystem_type(root_fd) in _LOCAL_FILESYSTEMS
        root.syncs = "all" if settings.syncs else "nothing" if root.is_local else "data"
        _require_own(settings.path, io.fstat(root_fd))
        if settings.is_read_only:
            _become_read_only(root, "", settings)
        else:
            _find_out(root, settings, clock)
    except OSError as error:
        tree.close()
        raise ConfigurationError(f"file: {settings.path} cannot be used as a store: {error}") from error
    except BaseException:
        tree.close()
        raise
    return root


def _open_root(settings: Settings) -> int:
    path = settings.path
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            if settings.is_read_only:
                raise
            _make_path(path)
            return os.open(path, flags)
    except OSError as error:
        raise ConfigurationError(f"file: {path} cannot be opened: {error.strerror}") from error


def _make_path(path: str) -> None:
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        _make_path(parent)
    try:
        os.mkdir(path, DIRECTORY_MODE)
        os.chmod(path, DIRECTORY_MODE)
    except FileExistsError:  # another process was faster
        return


def _require_own(path: str, found: os.stat_result) -> None:
    if os.path.samestat(found, os.stat("/")):
        raise ConfigurationError(f"file: {path} is the root of the file system; give a directory below it")
    mode = found.st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigurationError(
            f"file: {path} has mode {stat.S_IMODE(mode):o}: everybody may remove and replace what is in it; "
            f"take that away (chmod o-w) or use a directory of your own"
        )
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        _LOG.warning("%s has mode %o: others may write to it", path, stat.S_IMODE(mode))


def _become_read_only(root: Root, why: str, settings: Settings) -> None:
    root.is_read_only = True
    if why:
        _LOG.warning("%s can only be read: %s", settings.path, why)
    if settings.wants_direct_io:
        _refuse_direct_io(root, "it is not tried out on a root that is only read")


def _find_out(root: Root, settings: Settings, clock: Clock) -> None:
    try:
        for path in ((OBJECTS_DIR,), PROBE_DIRECTORY):
            root.tree.give_back(root.tree.borrow(path, creates=True))
        publisher = root.publisher()
        root.within(PROBE_DIRECTORY, lambda fd: _probe_clock(root, publisher, fd, clock))
        if settings.wants_direct_io:
            if root.within(PROBE_DIRECTORY, lambda fd: takes_direct_io(root.io, publisher, fd)):
                root.mover = DirectMover(root.io)
            else:
                _refuse_direct_io(root, "the file system refuses it")
        if not publisher.creates_only:
            _LOG.warning("%s has no hard links: a second writer may overwrite an object", settings.path)
    except OSError as error:
        if error.errno in _READ_ONLY:
            _become_read_only(root, error.strerror or str(error), settings)
        elif is_full(error):
            _LOG.warning("%s is full: %s", settings.path, error.strerror or error)
        else:
            raise


def _refuse_direct_io(root: Root, why: str) -> None:
    root.metrics.add("file.direct_io_refused")
    _LOG.warning("direct_io=1 has no effect, I/O goes through the page cache: %s", why)


def _probe_clock(root: Root, publisher: Publisher, directory_fd: int, clock: Clock) -> None:
    """The storage's clock against ours, and whether it keeps nanoseconds, which order eviction."""
    io = root.io
    draft = publisher.draft(directory_fd)
    try:
        before_s = clock.time()
        io.utime_fd(draft.fd, None)
        after_s = clock.time()
        root.clock.offset_s = io.fstat(draft.fd).st_mtime_ns / NANO - (before_s + after_s) / 2
        exact_ns = used_at_ns(root.clock.second(), 1)
        io.utime_fd(draft.fd, exact_ns)
        root.keeps_order = io.fstat(draft.fd).st_mtime_ns == exact_ns
    finally:
        publisher.discard(draft)
