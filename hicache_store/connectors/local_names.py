"""How keys become file names, and where below the root they lie.

``root/objects/<a>/<b>/<file>`` with two hexadecimal digits of the key's xxh3_64, and
``root/meta/<file>`` for keys that start with ``meta/``. The file is the key with ``/`` written as
``+``, a character no key may hold, so that the mapping is exact both ways. Names that start with
``~`` are temporary: no key gives one.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Iterator
from typing import Final

import xxhash

from hicache_store.connectors.base import META_PREFIX
from hicache_store.errors import NameFormatError

OBJECTS_DIR: Final = "objects"
META_DIR: Final = "meta"
TEMPORARY_PREFIX: Final = "~"
FILE_NAME_MAX_BYTES: Final = 255
"""NAME_MAX of every file system in use."""

_SEPARATOR = "+"
_HEX = "0123456789abcdef"
_PART = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*")
_temporary_counter = itertools.count()
_temporary_lock = threading.Lock()


def file_name(key: str) -> str:
    """The file name of ``key``; :class:`NameFormatError` when it cannot be one."""
    if len(key) > FILE_NAME_MAX_BYTES:
        raise NameFormatError(
            f"key {key[:40]!r}... is {len(key)} bytes long; a file name holds {FILE_NAME_MAX_BYTES}"
        )
    if _KEY.fullmatch(key) is None:
        raise NameFormatError(
            f"{key!r} is not a key; use parts of letters, digits, '.', '_' and '-' joined by '/', "
            "none of them empty, '.' or '..'"
        )
    return key.replace("/", _SEPARATOR)


def key_of(name: str) -> str | None:
    """The key whose file is called ``name``; ``None`` for a name that is not ours."""
    key = name.replace(_SEPARATOR, "/")
    return key if _KEY.fullmatch(key) is not None and "/" not in name else None


def directory_of(key: str) -> tuple[str, ...]:
    """The directories, from the root down, in which the file of ``key`` lies."""
    if key.startswith(META_PREFIX):
        return (META_DIR,)
    digest = xxhash.xxh3_64_hexdigest(key.encode())
    return OBJECTS_DIR, digest[0], digest[1]


def object_directories() -> Iterator[tuple[str, ...]]:
    """All directories that may hold objects, in order."""
    for first in _HEX:
        for second in _HEX:
            yield OBJECTS_DIR, first, second


def temporary_name() -> str:
    """A name for an unpublished file that no other writer of any process or host uses."""
    with _temporary_lock:
        serial = next(_temporary_counter)
    return f"{TEMPORARY_PREFIX}{os.getpid():x}.{serial:x}.{os.urandom(8).hex()}"


def is_temporary(name: str) -> bool:
    """Whether ``name`` is that of an unpublished file, live or left behind."""
    return name.startswith(TEMPORARY_PREFIX)
