"""What ``hicache doctor`` tries on one connector, with objects of its own that it removes again."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from hicache_store.cli.output import size_text
from hicache_store.clock import Deadline
from hicache_store.connectors.base import (
    META_PREFIX,
    BufferSource,
    BufferTarget,
    Connector,
    Outcome,
    Read,
    Status,
    Write,
)
from hicache_store.errors import HicacheError
from hicache_store.limits import KIB, MIB

Grade: TypeAlias = Literal["ok", "note", "warning", "fault"]

SMALL_BYTES: Final = 4 * KIB
LARGE_BYTES: Final = MIB
_LATENCY_READS: Final = 20
_LARGE_OBJECTS: Final = 8
_CLOCK_GRAIN_S: Final = 1.0
"""Times of use are kept in whole seconds by some storages, so that less cannot be told apart."""
_SKEW_WARNING_S: Final = 5.0
"""Ages are judged by the storage's clock, so that only tools see skew; far beyond the second that file
systems round to."""

_WAYS_OUT: Final = (
    (
        ("denied", "forbidden", "403", "not permitted"),
        "let this account read, write, list and delete below the prefix; with wrong credentials it may be "
        "another account than you mean",
    ),
    (("credential", "token", "signature", "auth", "password"), "check the credentials and the clock"),
    (("bucket",), "make the bucket, or correct its name and region"),
    (("refused", "connect", "resolve", "unreachable"), "check that the server runs at this address and port"),
    (("certificate", "tls", "ssl"), "give the certificate authority, or check the server's certificate"),
    (("timed_out", "did not answer"), "check the network, or give more --timeout"),
    (("quota", "space", "oom", "memory"), "give the storage more room, or lower what others keep in it"),
    (("read-only", "readonly", "only be read"), "use a handle and an account that may write"),
    (("no such file", "not a directory"), "check the path; engines make a directory that is missing"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``way_out`` says what to do about a warning or a fault."""

    name: str
    grade: Grade
    text: str
    way_out: str = ""


class _FaultError(Exception):
    """A check that found a fault; says what, and what to do."""

    def __init__(self, text: str, way_out: str = "") -> None:
        super().__init__(text)
        self.way_out = way_out or way_out_of(text)


def way_out_of(text: str) -> str:
    """What usually helps against a failure with these words."""
    lowered = text.lower()
    for words, advice in _WAYS_OUT:
        if any(word in lowered for word in words):
            return advice
    return "see the log of the storage for this time"


def said(outcome: Outcome) -> str:
    """An outcome in words."""
    return f"{outcome.status}: {outcome.detail}" if outcome.detail else str(outcome.status)


@dataclass(slots=True)
class Examination:
    """The checks of one connector; ``timeout_s`` is the deadline of each call."""

    connector: Connector
    timeout_s: float
    may_be_read_only: bool = False
    """Whether it was asked for: else a store that cannot be written does not work."""
    keys: list[str] = field(default_factory=list)
    _place: str = field(default_factory=lambda: f"{META_PREFIX}v1/{secrets.token_hex(32)}/")

    def run(self) -> Iterator[Finding]:
        """Every check, each as far as the ones before it allow."""
        can_look = yield from self._check("look-up", self._look_up)
        if not can_look:
            return
        if self.connector.capabilities.is_read_only:
            if self.may_be_read_only:
                yield Finding("write", "note", "the handle can only read, so nothing was written")
            else:
                way_out = (
                    "use an account and a place that may be written, or give readonly=1 if reading is enough"
                )
                yield Finding("write", "fault", "the store can only be read", way_out)
            return
        try:
            if (yield from self._check("write and read", self._round_trip)):
                yield from self._check("create-only", self._create_only)
                yield from self._check("versions", self._versions)
                yield from self._check("clock", self._clock)
                yield from self._check("latency", self._latency)
                yield from self._check("throughput", self._throughput)
        except BaseException:  # nobody listens any more
            with suppress(_FaultError, HicacheError, OSError):
                self._remove()
            raise
        yield from self._check("removal", self._remove)

    def _check(self, name: str, action: Callable[[], Finding | str]) -> Generator[Finding, None, bool]:
        try:
            found = action()
        except _FaultError as fault:
            yield Finding(name, "fault", str(fault), fault.way_out)
            return False
        except (HicacheError, OSError) as error:
            text = getattr(error, "strerror", None) or str(error)  # without the names of temporary files
            yield Finding(name, "fault", f"{type(error).__name__}: {text}", way_out_of(str(error)))
            return False
        yield found if isinstance(found, Finding) else Finding(name, "ok", found)
        return True

    # -- one check each --------------------------------------------------------------------

    def _look_up(self) -> str:
        key = f"{self._place}absent"
        if self.connector.sizes([key], self._soon()) != [None]:
            raise _FaultError(
                "an object that was never written has a size", "check what answers at this address"
            )
        outcome = self._read(key, bytearray(1))
        if outcome.status is not Status.ABSENT:
            raise _FaultError(f"reading an absent object gave {said(outcome)}")
        return "an absent object is told to be absent"

    def _round_trip(self) -> str:
        key, data = self._key("object"), os.urandom(SMALL_BYTES)
        self._require(self._write(key, data), Status.OK, "writing an object")
        sizes = self.connector.sizes([key], self._soon())
        if sizes != [SMALL_BYTES]:
            raise _FaultError(
                f"after writing {SMALL_BYTES} bytes the size is {sizes[0]}", way_out_of("denied")
            )
        got = bytearray(SMALL_BYTES)
        self._require(self._read(key, got), Status.OK, "reading it back")
        part = bytearray(100)
        target = BufferTarget([(1_000, [memoryview(part)])])
        read = Read(key, SMALL_BYTES, target, ((1_000, 1_100),))
        self._require(self.connector.read_into([read], self._soon())[0], Status.OK, "reading a part of it")
        if got != data or part != data[1_000:1_100]:
            raise _FaultError(
                "the bytes read are not those written", "do not use this storage; check its disks"
            )
        return f"{size_text(SMALL_BYTES)} came back bit for bit, whole and in part"

    def _create_only(self) -> Finding | str:
        key = self._key("object")
        again = self._write(key, os.urandom(SMALL_BYTES))
        other = self._write(key, os.urandom(SMALL_BYTES // 2))
        promised = self.connector.capabilities.create_only
        if again.status is Status.EXISTS and other.status is Status.CONFLICT and promised:
            return "the first complete object stays"
        if promised:
            raise _FaultError(
                f"a second write of a key gave {said(again)}, one of another size {said(other)}",
                "report the storage's name and version; it does not keep what was found at attach",
            )
        text = "two writers of one key may overwrite each other; equal names hold equal bytes"
        return Finding("create-only", "warning", text, "use a version of the server with conditional writes")

    def _versions(self) -> Finding | str:
        key, data = self._key("replaced"), os.urandom(SMALL_BYTES)
        self._require(self._write(key, data), Status.OK, "writing an object")
        wrong = self._write(key, data, replace="no such version")
        if wrong.is_ok:
            raise _FaultError(
                "a version that never was could be replaced", "report the storage's name and version"
            )
        version = self._read(key, bytearray(1)).version  # of the wrong length: a bad object
        if version is None:
            text = "the storage tells no versions; bad objects are remembered, not replaced"
            return Finding("versions", "note", text)
        self._require(
            self._write(key, data, replace=version), Status.OK, "replacing a bad object by its version"
        )
        if not self.connector.capabilities.conditional_versions:
            text = "bad objects are replaced by version at best effort; a lost race costs a miss"
            return Finding("versions", "note", text)
        return "a bad object is replaced by its version, and only by that"

    def _clock(self) -> Finding | str:
        key = self._key("clock")
        before_s = time.time()
        self._require(self._write(key, b"what time is it?"), Status.OK, "writing an object")
        after_s = time.time()
        entries = [entry for entry in self.connector.scan(key) if entry.key == key]
        if not entries:
            raise _FaultError("a listing does not show an object just written", way_out_of("denied"))
        if entries[0].last_used_s <= 0.0:
            return Finding("clock", "note", "the storage does not tell when an object was used")
        skew_s = entries[0].last_used_s - (before_s + after_s) / 2
        if abs(skew_s) < _CLOCK_GRAIN_S + 0.1:
            return "the storage's clock is within 1 s of this machine's"
        text = f"the storage's clock is {skew_s:+.1f} s from this machine's"
        if abs(skew_s) > _SKEW_WARNING_S:
            return Finding(
                "clock", "warning", text, "run a time service on both; request signatures need it too"
            )
        return text

    def _latency(self) -> str:
        key, buffer = self._key("object"), bytearray(SMALL_BYTES)
        reads, looks = [], []
        for _ in range(_LATENCY_READS):
            start = time.perf_counter()
            self._require(self._read(key, buffer), Status.OK, "reading a small object")
            middle = time.perf_counter()
            self.connector.sizes([key], self._soon())
            reads.append(1e3 * (middle - start))
            looks.append(1e3 * (time.perf_counter() - middle))
        kinds = (("read of 4 KiB", reads), ("look-up", looks))
        return "; ".join(
            f"{name} p50 {statistics.median(t):.2f} ms, max {max(t):.2f} ms" for name, t in kinds
        )

    def _throughput(self) -> str:
        data = os.urandom(LARGE_BYTES)
        keys = [self._key(f"large-{index}") for index in range(_LARGE_OBJECTS)]
        writes = [Write(key, LARGE_BYTES, BufferSource.of(data)) for key in keys]
        start = time.perf_counter()
        self._require_all(self.connector.write_from(writes, self._soon()), "writing objects of 1 MiB")
        middle = time.perf_counter()
        buffers = [bytearray(LARGE_BYTES) for _ in keys]
        reads = [Read(key, LARGE_BYTES, BufferTarget.whole(b)) for key, b in zip(keys, buffers, strict=True)]
        self._require_all(self.connector.read_into(reads, self._soon()), "reading objects of 1 MiB")
        stop = time.perf_counter()
        if any(buffer != data for buffer in buffers):
            raise _FaultError(
                "the bytes read are not those written", "do not use this storage; check its disks"
            )
        rates = [_LARGE_OBJECTS * LARGE_BYTES / 1e6 / s for s in (middle - start, stop - middle)]
        return f"{_LARGE_OBJECTS} x 1 MiB: write {rates[0]:.0f} MB/s, read {rates[1]:.0f} MB/s"

    def _remove(self) -> str:
        keys = list(dict.fromkeys(self.keys))
        outcomes = self.connector.delete(keys, self._soon())
        bad = [said(one) for one in outcomes if not one.is_ok and one.status is not Status.ABSENT]
        left = [key for key, size in zip(keys, self.connector.sizes(keys, self._soon()), strict=True) if size]
        if bad or left:
            what = f"; left behind below {self._place}: {len(left)}" if left else ""
            raise _FaultError(
                f"removing {len(keys)} objects: {bad[0] if bad else 'they are still there'}{what}"
            )
        return f"the {len(keys)} objects of this examination are gone again"

    # -- calls -----------------------------------------------------------------------------

    def _soon(self) -> Deadline:
        return Deadline.after(self.timeout_s)

    def _key(self, leaf: str) -> str:
        key = self._place + leaf
        self.keys.append(key)
        return key

    def _write(self, key: str, data: bytes, replace: str | None = None) -> Outcome:
        write = Write(key, len(data), BufferSource.of(data), replace=replace)
        return self.connector.write_from([write], self._soon())[0]

    def _read(self, key: str, buffer: bytearray) -> Outcome:
        read = Read(key, len(buffer), BufferTarget.whole(buffer))
        return self.connector.read_into([read], self._soon())[0]

    def _require(self, outcome: Outcome, status: Status, what: str) -> None:
        if outcome.status is not status:
            raise _FaultError(f"{what} gave {said(outcome)}")

    def _require_all(self, outcomes: Sequence[Outcome], what: str) -> None:
        for outcome in outcomes:
            self._require(outcome, Status.OK, what)
