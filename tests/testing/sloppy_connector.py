"""A connector over the in-memory table that breaks its contract in named ways."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hicache_store.clock import Deadline
from hicache_store.connectors.base import (
    ABSENT,
    OK,
    TIMED_OUT,
    Capabilities,
    Entry,
    Outcome,
    Read,
    Status,
    Touch,
    Write,
)
from hicache_store.connectors.memory import MemoryConnector, MemoryTable
from hicache_store.errors import HandleError
from hicache_store.limits import MIB


class World:
    """What all handles on one sloppy place share."""

    def __init__(self, quota_bytes: int = 1 << 30) -> None:
        self.table = MemoryTable(quota_bytes)
        self.seen: dict[str, threading.Event] = {}
        self.half_was_seen = False
        self.meeting = threading.Condition()
        self.arrivals: Counter[str] = Counter()
        self.late: list[tuple[Any, bytes]] = []
        self.fds: list[int] = []
        self.leaked = threading.Event()
        self.references: dict[str, list[memoryview]] = {}

    def dispose(self) -> None:
        self.leaked.set()
        for fd in self.fds:
            os.close(fd)


class SloppyConnector:
    """Keeps the contract except for ``faults``; without any it is a connector like others."""

    def __init__(self, world: World, *faults: str) -> None:
        self.world = world
        self.table = world.table
        self.faults = faults
        self.inner = MemoryConnector(world.table)
        self.is_closed = False
        self.pid = os.getpid()
        if "leaks descriptors" in faults:
            world.fds.append(os.open("/dev/null", os.O_RDONLY))
        if "leaks threads" in faults:
            threading.Thread(target=world.leaked.wait, args=(60.0,), daemon=True).start()

    def has(self, fault: str) -> bool:
        return fault in self.faults

    @property
    def capabilities(self) -> Capabilities:
        said = self.inner.capabilities
        if self.has("odd alignment"):
            said = dataclasses.replace(said, alignment_bytes=3)
        if self.has("writes though read-only"):
            said = dataclasses.replace(said, is_read_only=True)
        return said

    def _enter(self, batch: Sequence[object]) -> None:
        if self.is_closed and not self.has("lives after close"):
            raise HandleError("closed")
        if self.pid != os.getpid() and not self.has("lies after fork"):
            raise HandleError("forked")
        if not batch and self.has("empty batch raises"):
            raise IndexError("nothing to do")

    def _key(self, key: str) -> str:
        if self.has("hostile names raise") and "\0" in key:
            raise ValueError("embedded null byte")
        return key[:150] if self.has("cuts names") else key

    def _find(self, key: str) -> tuple[bytes, str] | None:
        self.world.seen.setdefault(key, threading.Event()).set()
        found = self.table.find(self._key(key))
        if found is not None and key in self.world.references:
            found = (b"".join(self.world.references[key]), found[1])
        if found is not None and self.has("versions repeat"):
            found = (found[0], f"v{len(found[0])}")
        if found is not None and self.pid != os.getpid():
            found = (bytes(len(found[0])), found[1])
        return found

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        self._enter(keys)
        self._land_late()
        if self.has("late sizes"):
            deadline = Deadline.after(60.0)
        found = [None if deadline.is_past else self._find(key) for key in keys]
        cut = 1_000 if self.has("caps sizes") else len(keys)
        return [None if one is None or i >= cut else len(one[0]) for i, one in enumerate(found)]

    # Reads

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        self._enter(reads)
        outcomes = []
        for index, read in enumerate(reads):
            if self.has("one target a key") and read.key in [other.key for other in reads[:index]]:
                outcomes.append(OK)
            elif deadline.is_past and not self.has("late reads"):
                if self.has("lands after return") and (found := self._find(read.key)):
                    self.world.late.append((read.target, found[0]))
                outcomes.append(TIMED_OUT)
            else:
                outcomes.append(self._read_one(read))
        return outcomes[::-1] if self.has("reverses outcomes") else outcomes

    def _read_one(self, read: Read) -> Outcome:
        if self.has("asks for parts first"):
            read.target.parts()
        found = self._find(read.key)
        if found is None:
            if self.has("absent raises"):
                raise KeyError(read.key)
            return ABSENT
        data, version = found
        if len(data) != read.size_bytes and not self.has("ignores size"):
            return Outcome(Status.WRONG_SIZE, version=None if self.has("hides versions") else version)
        released = False
        try:
            try:
                complaint = self._deliver(read, data)
            except Exception:
                released = self.has("no release on error")
                raise
            finally:
                if not released and not self.has("forgets release"):
                    read.target.release()
                if self.has("releases twice"):
                    read.target.release()
        except Exception as error:
            if self.has("errors escape"):
                raise
            return Outcome(Status.FAILED, str(error))
        if complaint is not None and not self.has("ignores refusals"):
            return Outcome(Status.REJECTED, complaint, None if self.has("hides versions") else version)
        return Outcome(Status.OK, version=version)

    def _deliver(self, read: Read, data: bytes) -> str | None:
        target = read.target
        parts = target.parts()
        if self.has("skips empty reads") and not sum(v.nbytes for _, views in parts for v in views):
            return None
        if self.has("cuts at 16 MiB"):
            data = data[: 16 * MIB] + bytes(max(0, len(data) - 16 * MIB))
        early = target.check() if self.has("checks first") else None
        for offset, views in parts:
            if self.has("ignores offsets"):
                offset = 0  # noqa: PLW2901
            end = offset + sum(view.nbytes for view in views)
            if (offset < 0 or end > len(data)) and not self.has("short reads pass"):
                raise ValueError("beyond the object")
            at = max(offset, 0)
            for view in views[:1] if self.has("first view only") else views:
                self._copy(view, data[at : at + view.nbytes])
                at += view.nbytes
                if self.has("torn reads"):
                    data = (self._find(read.key) or (data, ""))[0]
        if self.has("writes beside views"):
            target.memory[0] ^= 1  # type: ignore[attr-defined]
        if self.has("no check"):
            return None
        if self.has("checks twice"):
            target.check()
        return early if self.has("checks first") else target.check()

    def _copy(self, view: memoryview, data: bytes) -> None:
        if self.has("copies strided views") and not view.c_contiguous:
            bytearray(view.nbytes)[:] = data
            return
        if self.has("copies read-only views") and view.readonly:
            return
        if self.has("plain views only") and view.format != "B":
            raise TypeError("not bytes")
        if not view.nbytes:
            return
        flat = view.cast("B")
        if self.has("short reads pass") or self.has("ignores size"):
            flat = flat[: len(data)]
        flat[:] = data

    # Writes

    def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        self._enter(writes)
        outcomes = []
        for index, write in enumerate(writes):
            if self.has("refuses duplicates") and write.key in [other.key for other in writes[:index]]:
                outcomes.append(Outcome(Status.FAILED, "twice in a batch"))
            elif deadline.is_past and not self.has("late writes"):
                if self.has("reads after return"):
                    self.world.late.append((write, b""))
                outcomes.append(TIMED_OUT)
            else:
                outcomes.append(self._write_one(write))
        return outcomes

    def _write_one(self, write: Write) -> Outcome:
        if self.has("shallow only") and write.depth > 1_000:
            return Outcome(Status.FAILED, "too deep")
        write = write._replace(key=self._key(write.key))
        if not write.size_bytes and self.has("drops empty objects"):
            return OK
        decided = self._judge(write)
        if decided is not None:
            return decided
        released = False
        try:
            try:
                data = self._gather(write)
            except Exception:
                released = self.has("no release on error")
                raise
            finally:
                if not released and not self.has("forgets release"):
                    write.source.release()
        except Exception as error:
            if self.has("errors escape"):
                raise
            return Outcome(Status.FAILED, str(error))
        return self._publish(write, data)

    def _judge(self, write: Write) -> Outcome | None:
        found = self._find(write.key)
        if write.replace is not None:
            if found is None and self.has("replace creates"):
                return None
            if found is None or (found[1] != write.replace and not self.has("replaces anything")):
                return Outcome(Status.CONFLICT)
            if self.has("replaces equal sizes only") and len(found[0]) != write.size_bytes:
                return Outcome(Status.CONFLICT)
            return None
        if found is None or self.has("overwrites"):
            return None
        if len(found[0]) != write.size_bytes:
            return None if self.has("overwrites other sizes") else Outcome(Status.CONFLICT)
        return Outcome(Status.EXISTS)

    def _gather(self, write: Write) -> bytes:
        if self.has("publishes zeros first"):
            self._force(write.key, bytes(write.size_bytes), write.depth)
        if self.has("asks sources twice"):
            write.source.buffers()
        views = write.source.buffers()
        if self.has("keeps views"):
            self.world.references[write.key] = list(views)
        if self.has("plain views only") and any(view.format != "B" for view in views):
            raise TypeError("not bytes")
        if self.has("ignores source strides"):
            data = b"".join([np.asarray(view).base.obj.base.tobytes()[: view.nbytes] for view in views])
        else:
            data = b"".join([view.cast("B") for view in views if view.nbytes])
        if len(data) < write.size_bytes and self.has("pads sources"):
            data += bytes(write.size_bytes - len(data))
        if len(data) > write.size_bytes and self.has("cuts sources"):
            data = data[: write.size_bytes]
        if len(data) != write.size_bytes:
            raise ValueError("the source has another length")
        return data

    def _publish(self, write: Write, data: bytes) -> Outcome:
        if self.has("publishes half first") and len(data) > 100_000:
            seen = self.world.seen[write.key] = threading.Event()
            self._force(write.key, data[: len(data) // 2], write.depth)
            if not self.world.half_was_seen:
                self.world.half_was_seen = seen.wait(2.0)
            return self._force(write.key, data, write.depth)
        if self.has("checks, then writes"):
            with self.world.meeting:  # widen the gap until another writer is in it as well
                self.world.arrivals[write.key] += 1
                mine = self.world.arrivals[write.key]
                self.world.meeting.notify_all()
                self.world.meeting.wait_for(lambda: self.world.arrivals[write.key] > mine, 0.15)
            return self._force(write.key, data, write.depth)
        forcing = ("overwrites", "overwrites other sizes", "publishes zeros first")
        is_forced = write.replace is not None or any(self.has(fault) for fault in forcing)
        if not is_forced or self.faults == ():
            depth = -write.depth if self.has("evicts heads first") else write.depth
            return self.table.put(write._replace(depth=depth), data)
        return self._force(write.key, data, write.depth)

    def _force(self, key: str, data: bytes, depth: int) -> Outcome:
        self.table.remove(key, None)
        self.table.put(Write(key, len(data), None, depth), data)  # type: ignore[arg-type]
        return OK

    # Names and life

    def delete(
        self, keys: Sequence[str], deadline: Deadline, versions: Sequence[str | None] | None = None
    ) -> list[Outcome]:
        self._enter(keys)
        if deadline.is_past and not self.has("late deletes"):
            return [TIMED_OUT] * len(keys)
        outcomes = []
        for key, version in zip(keys, versions or [None] * len(keys), strict=True):
            found = self._find(key)
            if found is None:
                outcomes.append(ABSENT)
            elif version not in (None, found[1]) and not self.has("deletes any version"):
                outcomes.append(Outcome(Status.CONFLICT))
            else:
                below = [entry.key for entry in self.table.entries(key)]
                for name in below if self.has("deletes by prefix") else [self._key(key)]:
                    if not self.has("deletes nothing"):
                        self.table.remove(name, None)
                outcomes.append(OK)
        return outcomes

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        self._enter(touches)
        if deadline.is_past:
            return [TIMED_OUT] * len(touches)
        outcomes = []
        for touch in touches:
            depth = -touch.depth if self.has("evicts heads first") else touch.depth
            outcome = self.table.touch(Touch(self._key(touch.key), depth))
            if outcome is ABSENT and self.has("touch creates"):
                self._force(touch.key, b"\0", 0)
                outcome = OK
            outcomes.append(outcome)
        return outcomes

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        self._enter([prefix])
        if self.has("scans whole parts") and prefix:
            prefix = prefix.rstrip("/") + "/"
        return iter(self.table.entries(prefix))

    def close(self) -> None:
        if self.is_closed and self.has("close once"):
            raise HandleError("closed already")
        self.is_closed = True
        self._land_late()
        if self.has("close clears the place"):
            for entry in self.table.entries(""):
                self.table.remove(entry.key, None)

    def _land_late(self) -> None:
        late, self.world.late = self.world.late, []
        for use, data in late:
            if isinstance(use, Write):
                self.table.put(use, b"".join(use.source.buffers()))
            else:
                for _, views in use.parts():
                    for view in views:
                        view[:] = data[: len(view)]
