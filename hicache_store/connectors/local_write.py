"""Writing one object of the file connector: what is there already, the bytes, the publication."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from hicache_store.connectors.base import META_PREFIX, TIMED_OUT, Outcome, Status, Write
from hicache_store.connectors.batch import Claim
from hicache_store.connectors.local_io import is_absent
from hicache_store.connectors.local_publish import Draft
from hicache_store.connectors.local_root import Place, Root, used_at_ns, version_of
from hicache_store.connectors.local_transfer import Scratch, gather
from hicache_store.connectors.local_tree import Directory

_PUBLISH_TRIES = 3


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

    def inspect(self, write: Write, second: int) -> Outcome | None:
        """What becomes of ``write`` by what is there now; ``None`` when its bytes are to be written."""
        if write.size_bytes <= 0:
            return Outcome(Status.REFUSED, "an object has at least one byte")
        return self._root.guarded("write", write.key, lambda place: judge(self._root, write, place, second))

    def write(self, write: Write, claim: Claim, batch: WriteBatch) -> Outcome:
        """Store the bytes of one object; nothing is raised."""
        root = self._root

        def action(place: Place) -> Outcome:
            return _Creation(root, write, place, claim, batch).run(self._scratch)

        return root.guarded("write", write.key, action)


class _Creation:
    """One object on its way into the store."""

    def __init__(self, root: Root, write: Write, place: Place, claim: Claim, batch: WriteBatch) -> None:
        self._root = root
        self._write = write
        self._path, self._name = place
        self._claim = claim
        self._batch = batch
        self._publisher = root.publisher()

    def run(self, scratch: Scratch | None) -> Outcome:
        """Store the object. With ``scratch``, a claim that was lost leaves no object behind."""
        if scratch is None:
            return self._store(_lent(self._write))
        memory = scratch.take(self._write.size_bytes)[: self._write.size_bytes]
        if not self._claim.enter():
            return TIMED_OUT
        try:
            with _lent(self._write) as views:
                gather(views, memory)
        finally:
            self._claim.leave()
        return self._store(contextlib.nullcontext([memory]), may_be_lost=True)

    def _store(
        self, source: AbstractContextManager[Sequence[memoryview]], may_be_lost: bool = False
    ) -> Outcome:
        directory, draft = self._begin()
        try:
            outcome = self._fill_and_publish(draft, source)
            if may_be_lost and outcome.status is Status.OK and not self._claim.enter():
                self._withdraw(directory.fd, outcome)
                return TIMED_OUT
            return outcome
        finally:
            self._root.tree.give_back(directory)

    def _fill_and_publish(
        self, draft: Draft, source: AbstractContextManager[Sequence[memoryview]]
    ) -> Outcome:
        root, write = self._root, self._write
        try:
            with source as views:
                written = root.mover.write(draft.fd, views, self._claim.is_cancelled)
            if written != write.size_bytes:
                if self._claim.is_cancelled():
                    return TIMED_OUT
                root.metrics.add("file.write_short")
                return Outcome(Status.FAILED, f"only {written} of {write.size_bytes} bytes were written")
            found = self._publisher.finish(draft, used_at_ns(self._batch.second, write.depth))
            return TIMED_OUT if self._claim.is_cancelled() else self._publish(draft, found)
        finally:
            try:
                self._publisher.discard(draft)
            except OSError:
                root.metrics.add("file.discard_failed")

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
                self._batch.add(found.st_size)
                return Outcome(Status.OK, version=version_of(found))
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
        self._batch.add(max(0, found.st_size - there.st_size))
        return Outcome(Status.OK, version=version_of(found))

    def _withdraw(self, directory_fd: int, outcome: Outcome) -> None:
        """Take back an object that came after its call had returned without it."""
        io = self._root.io
        try:
            there = io.stat(self._name, dir_fd=directory_fd)
            if version_of(there) != outcome.version:
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
        return Outcome(Status.EXISTS, version=version_of(found))
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
        return Outcome(Status.EXISTS, version=version_of(found))
    return Outcome(Status.EXISTS, version=f"{found.st_ino:x}-{mtime_ns:x}")


def _mismatch(write: Write, found: os.stat_result | None) -> Outcome | None:
    if found is None:
        return Outcome(Status.CONFLICT, "the object to replace is gone")
    version = version_of(found)
    if version != write.replace:
        return Outcome(Status.CONFLICT, "the object is of another version", version)
    return None


@contextlib.contextmanager
def _lent(write: Write) -> Iterator[Sequence[memoryview]]:
    """The views of the source, which hold exactly the object; given back at the end."""
    try:
        views = write.source.buffers()
        given = sum(view.nbytes for view in views)
        if given != write.size_bytes:
            raise ValueError(f"the source gave {given} bytes, not {write.size_bytes}")
        yield views
    finally:
        write.source.release()
