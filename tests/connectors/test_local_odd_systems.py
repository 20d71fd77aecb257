"""File systems that lack what ext4 has: the store works with what is left, or names what it needs."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from local_faults import FaultyIO, failing, is_tmpfile, open_at

from hicache_store.connectors.base import Status
from hicache_store.errors import ConfigurationError
from hicache_store.testing.contract_base import assert_absent, assert_holds, page_key, soon, store
from hicache_store.testing.probes import content, write_of

SIZES = (1, 4_095, 4_096, 300_000)


def is_direct(name: str, flags: int, *_: object, **__: object) -> bool:
    return bool(flags & os.O_DIRECT)


def refusing_directories(real: Callable[[int], None], fd: int) -> None:
    if Path(f"/proc/self/fd/{fd}").is_dir():
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    real(fd)


LACKS: dict[str, Callable[[FaultyIO], None]] = {
    "files without a name": lambda io: io.hooks.update(open=failing(errno.EOPNOTSUPP, is_tmpfile)),
    "unbuffered files": lambda io: io.hooks.update(open=failing(errno.EINVAL, is_direct)),
    "hard links": lambda io: io.hooks.update(link=failing(errno.EPERM), link_fd=failing(errno.EPERM)),
    "links across directories": lambda io: io.hooks.update(
        link=failing(errno.EXDEV), link_fd=failing(errno.EXDEV)
    ),
    "locks": lambda io: io.hooks.update(flock=failing(errno.ENOLCK)),
    "flushing of directories": lambda io: io.hooks.update(fsync=refusing_directories),
}


@pytest.mark.parametrize("options", ["", "direct_io=1", "fsync=1", "io=bounce"])
@pytest.mark.parametrize("lack", LACKS)
def test_d20_it_works_without(tmp_path: Path, lack: str, options: str) -> None:
    """A parallel file system without one of these made other stores fail at the start, or at every put.
    What was asked for by name and cannot be had is refused at attach."""
    io = FaultyIO()
    LACKS[lack](io)
    query = f"quota=1GiB&{options}".rstrip("&")
    if lack == "flushing of directories" and options == "fsync=1":
        with pytest.raises(
            ConfigurationError, match=r"cannot be used as a store.*fsync=1 asks; leave the option out"
        ):
            open_at(tmp_path, io, query)
        return
    handle = open_at(tmp_path, io, query)
    objects = {page_key(f"odd {size}"): content(page_key(f"odd {size}"), size) for size in SIZES}
    store(handle, objects)
    assert_holds(handle, objects)
    key = next(iter(objects))
    assert handle.write_from([write_of(key, objects[key])], soon())[0].status is Status.EXISTS
    assert {entry.key for entry in handle.scan()} == set(objects)
    assert all(one.is_ok for one in handle.delete(list(objects), soon()))
    assert_absent(handle, list(objects))
    handle.close()
