"""One writer or reader of a shared root, to be killed at any instant.

Every object describes itself: its first 8 bytes are the xxh3_64 of its name and of the rest. A worker
that sees a wrong byte, or any status that the connector must not give here, ends with FAULT.
"""

from __future__ import annotations

import errno
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

import xxhash

from hicache_store.clock import Deadline
from hicache_store.config import parse_url
from hicache_store.connectors.base import BufferSource, BufferTarget, Read, Status, Touch, Write
from hicache_store.connectors.local import LocalConnector, open_local
from hicache_store.connectors.local_attach import read_settings
from hicache_store.connectors.local_io import PosixIO

FAULT = 3
SIZE = 16 * 1024
BATCH = 4
CHAINS = 60
QUOTA = 48 * SIZE

_GOOD_WRITES = {Status.OK, Status.EXISTS, Status.CONFLICT, Status.REFUSED}
_GOOD_READS = {Status.OK, Status.ABSENT, Status.WRONG_SIZE}
_TRUNCATED = "while it was read"  # by the test, just after the file was found to be of the right size


class NamedDraftsIO(PosixIO):
    """A slow file system without O_TMPFILE: unfinished files have names, half of each is written at a
    time, and most kills come between the halves."""

    def open(self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
        return super().open(name, flags, mode, dir_fd=dir_fd)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        if sum(view.nbytes for view in views) < SIZE:
            return super().pwritev(fd, views, offset)
        done = super().pwritev(fd, [views[0][: SIZE // 2]], offset)
        time.sleep(0.003)
        return done


def key_of(chain: int, depth: int) -> str:
    return f"v1/{'5e' * 16}/{chain:02x}/{chain:032x}/kv.H000-002.L000-{depth:03d}"


def content_of(key: str) -> bytes:
    rest = random.Random(key).randbytes(SIZE - 8)
    return xxhash.xxh3_64_digest(key.encode() + rest) + rest


def is_genuine(key: str, data: bytes | bytearray) -> bool:
    return len(data) == SIZE and xxhash.xxh3_64_digest(key.encode() + bytes(data[8:])) == bytes(data[:8])


def connect(root: str, io: PosixIO) -> LocalConnector:
    url = f"file://{root}?quota={QUOTA}B&min_free=0&threads=2&sweep=100ms"
    return open_local(read_settings(parse_url(url)), io)


def _expect(statuses: list[Status], good: set[Status], what: object) -> None:
    if not set(statuses) <= good:
        raise AssertionError(f"{what}: {statuses}")


def write_some(connector: LocalConnector, rng: random.Random) -> Counter[Status]:
    chain = rng.randrange(CHAINS)
    keys = [key_of(chain, depth) for depth in range(BATCH)]
    writes = [Write(key, SIZE, BufferSource.of(content_of(key)), depth) for depth, key in enumerate(keys)]
    outcomes = connector.write_from(writes, Deadline.after(30))
    _expect([outcome.status for outcome in outcomes], _GOOD_WRITES, outcomes)
    bad = [
        write._replace(replace=outcome.version)
        for write, outcome in zip(writes, outcomes, strict=True)
        if outcome.status is Status.CONFLICT
    ]
    if bad:
        again = connector.write_from(bad, Deadline.after(30))
        _expect([outcome.status for outcome in again], _GOOD_WRITES, again)
    return Counter(outcome.status for outcome in outcomes)


def read_some(connector: LocalConnector, rng: random.Random) -> Counter[Status]:
    chain = rng.randrange(CHAINS)
    keys = [key_of(chain, depth) for depth in range(BATCH)]
    buffers = [bytearray(SIZE) for _ in keys]
    reads = [Read(key, SIZE, BufferTarget.whole(buffer)) for key, buffer in zip(keys, buffers, strict=True)]
    outcomes = connector.read_into(reads, Deadline.after(30))
    whole = [outcome for outcome in outcomes if _TRUNCATED not in outcome.detail]
    _expect([outcome.status for outcome in whole], _GOOD_READS, outcomes)
    for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
        if outcome.status is Status.OK and not is_genuine(key, buffer):
            raise AssertionError(f"wrong bytes of {key}")
    if rng.random() < 0.3:
        connector.touch([Touch(key, depth) for depth, key in enumerate(keys)], Deadline.after(30))
    return Counter(outcome.status for outcome in outcomes)


def run(root: str, io: PosixIO, is_writer: bool, seed: int, tally: memoryview) -> NoReturn:
    """Work until killed. ``tally`` takes the number of objects written, read and refused."""
    rng = random.Random(seed)
    try:
        connector = connect(root, io)
        while True:
            counts = (write_some if is_writer else read_some)(connector, rng)
            tally[0 if is_writer else 1] += counts[Status.OK]
            tally[2] += counts[Status.REFUSED]
            if not is_writer:
                time.sleep(0.001)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(FAULT)
