"""Writing one object of the file connector: what is there already, the bytes, the publication."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from hicache_store.connectors.base import META_PREFIX, OK, TIMED_OUT, Outcome, Status, Write
from hicache_store.connectors.batch import Claim
from hicache_store.connectors.local_io import is_absent
from hicache_store.connectors.local_publish import Draft
from hicache_store.connectors.local_root import Place, Root, place_of, used_at_ns, version_of
from hicache_store.connectors.local_transfer import Scratch, gather
from hicache_store.connectors.local_tree import Directory

T = TypeVar("T")
_PUBLISH_TRIES = 3
_EXISTS = Outcome(Status.EXISTS)


class WriteBatch:
    """What the items of one call share: the second of their use and the bytes they added."""

    def __init__(self, second: int) -> None:
        self.second = second
        self._lock = threading.Lock()
        self._stored_bytes = 0

    def add(self, n_bytes: int) -> None:
        """Count ``n_bytes`` more, or fewer if negative."""
        with self._lock:
            self._stored_bytes += n_bytes

    @property
    def stored_bytes(self) -> int:
        """The sum so far, net of what was replaced."""
        with self._lock:
            return self._stored_bytes


class Writer:
    """Writes objects: :meth:`inspect` decides what needs no bytes, :meth:`write` does the rest.

    ``bounces``: a claimed item's source is copied into memory of the worker and given back before
    any I/O. Otherwise the bytes go straight from the source into the file.
    """

    def __init__(self, root: Root, bounces: bool) -> None:
        self._root = root
        self._scratch = Scratch() if bounces else None

    def inspect(self, write: Write, second: int) -> Outcome | Place:
        """What becomes of ``write`` by what is there now, or the place where its bytes are to go."""
        if write.size_bytes <= 0:
            return Outcome(Status.REFUSED, "an object has at least one byte")

        def action() -> Outcome | Place:
            place = place_of(write.key)
            return judge(self._root, write, place, second) or place

        return self._root.guarded("write", action)

    def write(self, write: Write, place: Place, claim: Claim, batch: WriteBatch) -> Outcome:
        """Store the bytes of one object; nothing is raised."""
        root = self._root

        def action() -> Outcome:
            return _Creation(root, write, place, claim, batch).run(self._scratch)

        return root.guarded("write", action)


class _Creation:
    """One object on its way into the store."""

    def __init__(self, root: Root, write: Write, place: Place, claim: Claim, batch: WriteBatch) -> None:
        self._root = root
        self._write = write
        self._path, self._name = place
        self._claim = claim
        self._batch = batch
        self._publisher = root.publisher()
        self._published: os.stat_result | None = None

    def run(self, scratch: Scratch | None) -> Outcome:
        """Store the object. With ``scratch``, a claim that was lost leaves no object behind."""
        if scratch is None:
            return self._store(None)
        memory = scratch.take(self._write.size_bytes)[: self._write.size_bytes]
        if not self._claim.enter():
            return TIMED_OUT
        try:
            self._use_source(lambda views: gather(views, memory))
        finally:
            self._claim.leave()
        return self._store(memory)

    def _store(self, memory: memoryview | None) -> Outcome:
        """Write the bytes of ``memory``, or of the source itself, and publish them."""
        directory, draft = self._begin()
        try:
            outcome = self._fill_and_publish(draft, memory)
            published = self._published
            if memory is not None and published is not None and not self._claim.enter():
                self._withdraw(directory.fd, published)
                return TIMED_OUT
            return outcome
        finally:
            self._root.tree.give_back(directory)

    def _fill_and_publish(self, draft: Draft, memory: memoryview | None) -> Outcome:
        root, write, is_cancelled = self._root, self._write, self._claim.is_cancelled

        def move(views: Sequence[memoryview]) -> int:
            return root.mover.write(draft.fd, views, is_cancelled)

        try:
            written = self._use_source(move) if memory is None else move([memory])
            if written != write.size_bytes:
                if is_cancelled():
                    return TIMED_OUT
                root.metrics.add("file.write_short")
                return Outcome(Status.FAILED, f"only {written} of {write.size_bytes} bytes were written")
            found = self._publisher.finish(draft, used_at_ns(self._batch.second, write.depth))
            return TIMED_OUT if is_cancelled() else self._publish(draft, found)
        finally:
            try:
                self._publisher.discard(draft)
            except OSError:
                root.metrics.add("file.discard_failed")

    def _use_source(self, action: Callable[[Sequence[memoryview]], T]) -> T:
        """Run ``action`` on the views of the source, which must hold exactly the object."""
        source, size_bytes = self._write.source, self._write.size_bytes
        try:
            views = source.buffers()
            given = sum(view.nbytes for view in views)
            if given != size_bytes:
                raise ValueError(f"the source gave {given} bytes, not {size_bytes}")
            return action(views)
        finally:
            source.release()

    def _begin(self) -> tuple[Directory, Draft]:
        """The directory, lent, and the new file; again if the directory had been removed behind us."""
        tree = self._root.tree
        for is_last in (False, True):
            directory = tree.borrow(self._path, creates=True)
            try:
                return directory, self._publisher.draft(directory.fd, self._root.mover.open_flags)
            except BaseException as error:
                is_gone = isinstance(error, OSError) and is_absent(error) and tree.is_gone(directory)
                tree.give_back(directory)
                if is_last or not is_gone:
                    raise
        raise AssertionError("the second turn returns or raises")

    def _publish(self, draft: Draft, found: os.stat_result) -> Outcome:
        place = (self._path, self._name)
        for _ in range(_PUBLISH_TRIES):
            if self._write.replace is not None:
                return self._replace(draft, found, self._root.look(place))
            if self._publisher.publish(draft, self._name):
                return self._stored(found, found.st_size)
            if self._claim.is_cancelled():
                return TIMED_OUT  # nobody hears of it, so it must not pass for a use of the object
            outcome = judge(self._root, self._write, place, self._batch.second)
            if outcome is not None:
                return outcome
        return Outcome(Status.FAILED, f"the name was taken and freed {_PUBLISH_TRIES} times over")

    def _replace(self, draft: Draft, found: os.stat_result, there: os.stat_result | None) -> Outcome:
        mismatch = _mismatch(self._write, there)
        if mismatch is not None:
            return mismatch
        assert there is not None
        self._publisher.replace(draft, self._name)
        # A file that grew behind our back was counted at its right size: never take off more.
        return self._stored(found, max(0, found.st_size - there.st_size))

    def _stored(self, found: os.stat_result, added_bytes: int) -> Outcome:
        self._published = found
        self._batch.add(added_bytes)
        return OK

    def _withdraw(self, directory_fd: int, published: os.stat_result) -> None:
        """Take back an object that came after its call had returned without it, unless it was used."""
        io = self._root.io
        try:
            there = io.stat(self._name, dir_fd=directory_fd)
            if (there.st_ino, there.st_mtime_ns) != (published.st_ino, published.st_mtime_ns):
                return
            io.unlink(self._name, dir_fd=directory_fd)
        except OSError:
            self._root.metrics.add("file.late_object")
            return
        self._batch.add(-there.st_size)


def judge(root: Root, write: Write, place: Place, second: int) -> Outcome | None:
    """What the file that is there means for ``write``; ``None`` when the way is free."""
    found = root.look(place)
    if write.replace is not None:
        return _mismatch(write, found)
    if found is None:
        return None
    if found.st_size != write.size_bytes:
        detail = f"there are {found.st_size} bytes, not {write.size_bytes}"
        return Outcome(Status.CONFLICT, detail, version_of(found))
    if write.key.startswith(META_PREFIX):
        return _EXISTS
    return _refresh(root, write, place, found, used_at_ns(second, write.depth))


def _refresh(root: Root, write: Write, place: Place, found: os.stat_result, mtime_ns: int) -> Outcome | None:
    """The object is there, so it was used now; ``None`` when it has gone since it was seen."""
    path, name = place
    try:
        root.within(path, lambda fd: root.io.utime(name, mtime_ns, dir_fd=fd))
    except OSError as error:
        if is_absent(error):
            return None
        if root.is_expired(write.key, found):
            raise
        root.metrics.add("file.touch_failed")
    return _EXISTS


def _mismatch(write: Write, found: os.stat_result | None) -> Outcome | None:
    if found is None:
        return Outcome(Status.CONFLICT, "the object to replace is gone")
    version = version_of(found)
    if version != write.replace:
        return Outcome(Status.CONFLICT, "the object is of another version", version)
    return None
