"""How a complete file gets its name, so that a killed writer leaves nothing that looks like an object.

Three ways, the best one that the file system has:

* ``tmpfile``: O_TMPFILE and ``linkat``; the file has no name before it is published.
* ``link``: a temporary file, locked while its writer lives so that a sweeper can tell it from one
  left behind, linked to its final name. Network file systems may report the failure of a link that
  happened (the answer was lost, the repeated call found the name taken), so the link count judges.
* ``rename``: where there are no hard links. Then a second writer may overwrite the first.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from hicache_store.connectors.local_io import FILE_MODE, PosixIO, flush_directory, is_absent
from hicache_store.connectors.local_names import temporary_name

Method: TypeAlias = Literal["tmpfile", "link", "rename"]
METHODS: Final[tuple[Method, ...]] = ("tmpfile", "link", "rename")

Syncs: TypeAlias = Literal["nothing", "data", "all"]
"""What is on the disk before a name is given: ``data`` so that network file systems report now what
they could not write; ``all`` so that power may fail, the name included."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_DRAFT_TRIES: Final = 4
_O_TMPFILE: Final[int] = getattr(os, "O_TMPFILE", 0)


def is_full(error: OSError) -> bool:
    """Whether the file system, or the user's share of it, has no room."""
    return error.errno in _FULL


@dataclass(slots=True)
class Draft:
    """A file that is being written. ``name`` is its temporary name while it has one."""

    fd: int
    directory_fd: int
    name: str | None


class Publisher:
    """Opens drafts and publishes them by one method."""

    def __init__(self, io: PosixIO, method: Method, syncs: Syncs = "nothing") -> None:
        self._io = io
        self.method: Method = method
        self._syncs: Syncs = syncs

    @property
    def creates_only(self) -> bool:
        """Whether of two writers of one name the first stays."""
        return self.method != "rename"

    def draft(self, directory_fd: int, extra_flags: int = 0) -> Draft:
        """A new empty file of mode 0600; end it with :meth:`discard`."""
        if self.method == "tmpfile":
            fd = self._io.open(".", os.O_RDWR | _O_TMPFILE | extra_flags, dir_fd=directory_fd)
            return Draft(fd, directory_fd, None)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | extra_flags
        for _ in range(_DRAFT_TRIES):
            name = temporary_name()
            draft = Draft(self._io.open(name, flags, dir_fd=directory_fd), directory_fd, name)
            if self._keeps(draft):
                return draft
            self.discard(draft)
        raise OSError(errno.EAGAIN, "a sweeper took every temporary file before it could be locked")

    def finish(self, draft: Draft, mtime_ns: int) -> os.stat_result:
        """The last words before publishing: mode, time, and the data on the disk if asked for."""
        self._io.utime_fd(draft.fd, mtime_ns)
        stat = self._io.fstat(draft.fd)
        if stat.st_mode & 0o7777 != FILE_MODE:
            self._io.chmod(draft.fd, FILE_MODE)
        if self._syncs != "nothing":
            self._io.fsync(draft.fd)
        return stat

    def publish(self, draft: Draft, name: str) -> bool:
        """Give the draft its name; ``False`` when the name is taken."""
        if self.method == "rename":
            return self._publish_by_rename(draft, name)
        try:
            self._link(draft, name)
        except OSError as error:
            if self._io.fstat(draft.fd).st_nlink < (1 if draft.name is None else 2):
                if isinstance(error, FileExistsError):
                    return False
                raise
        self._sync_directory(draft)
        return True

    def replace(self, draft: Draft, name: str) -> None:
        """Give the draft its name in place of the file that has it now."""
        if draft.name is None:
            self._keeps(draft)
            temporary = temporary_name()
            self._io.link_fd(draft.fd, temporary, dir_fd=draft.directory_fd)
            draft.name = temporary
        self._io.rename(draft.name, name, dir_fd=draft.directory_fd)
        draft.name = None
        self._sync_directory(draft)

    def discard(self, draft: Draft) -> None:
        """Close the draft and remove its temporary name; what was published stays."""
        try:
            if draft.name is not None:
                self._io.unlink(draft.name, dir_fd=draft.directory_fd)
        except OSError as error:
            if not is_absent(error):
                raise
        finally:
            self._io.close(draft.fd)

    def _link(self, draft: Draft, name: str) -> None:
        if draft.name is None:
            self._io.link_fd(draft.fd, name, dir_fd=draft.directory_fd)
        else:
            self._io.link(draft.name, name, dir_fd=draft.directory_fd)

    def _publish_by_rename(self, draft: Draft, name: str) -> bool:
        try:
            self._io.stat(name, dir_fd=draft.directory_fd)
        except OSError as error:
            if not is_absent(error):
                raise
        else:
            return False
        self.replace(draft, name)
        return True

    def _keeps(self, draft: Draft) -> bool:
        """Whether the draft is locked; a sweeper that came between open and lock may have removed it."""
        try:
            self._io.flock(draft.fd)
        except BlockingIOError:
            return False
        except OSError:  # no locks here: a sweeper goes by the age of the file
            return True
        return self._io.fstat(draft.fd).st_nlink > 0 or self.method == "tmpfile"

    def _sync_directory(self, draft: Draft) -> None:
        if self._syncs == "all":
            flush_directory(self._io, draft.directory_fd)


def probe_method(io: PosixIO, directory_fd: int) -> Method:
    """The first of METHODS that works in this directory; leaves nothing there.

    Raises the ``OSError`` of the last one when none does, and at once when the file system is full,
    read-only or out of reach, because then the others prove nothing.
    """
    for method in METHODS[:-1]:
        try:
            if _works(Publisher(io, method), directory_fd):
                return method
        except OSError as error:
            if is_full(error) or error.errno in (errno.EROFS, errno.EIO, errno.ESTALE):
                raise
    _works(Publisher(io, "rename"), directory_fd)
    return "rename"


def _works(publisher: Publisher, directory_fd: int) -> bool:
    io = publisher._io
    name = temporary_name()
    draft = publisher.draft(directory_fd)
    try:
        try:
            if not publisher.publish(draft, name):
                return False
            stat = io.stat(name, dir_fd=directory_fd)
            return stat.st_ino == io.fstat(draft.fd).st_ino
        finally:
            _remove(io, name, directory_fd)
    finally:
        publisher.discard(draft)


def _remove(io: PosixIO, name: str, directory_fd: int) -> None:
    try:
        io.unlink(name, dir_fd=directory_fd)
    except OSError as error:
        if not is_absent(error):
            raise
