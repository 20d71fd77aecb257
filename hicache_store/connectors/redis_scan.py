"""Listing what a Redis store holds, for tools."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Entry
from hicache_store.connectors.redis_compare import version_request
from hicache_store.connectors.redis_pool import Dialer
from hicache_store.connectors.redis_settings import Address
from hicache_store.connectors.redis_wire import VERSION_BYTES, ErrorReply, Wire, command
from hicache_store.errors import HicacheError
from hicache_store.limits import DEFAULT_TIMEOUT_S, REDIS_SCAN_COUNT, REDIS_SCAN_SEEN_MAX

_NO_TOUCH: Final = command(b"CLIENT", b"NO-TOUCH", b"ON")
_SPECIAL: Final = frozenset(b"\\*?[]^-")


def pattern(prefix: bytes) -> bytes:
    """The glob that matches exactly the keys that begin with ``prefix``."""
    escaped = b"".join(b"\\" + bytes((byte,)) if byte in _SPECIAL else bytes((byte,)) for byte in prefix)
    return escaped + b"*"


def scan(
    dialer: Dialer,
    nodes: Sequence[Address],
    store_prefix: bytes,
    prefix: bytes,
    require_usable: Callable[[], None],
) -> Iterator[Entry]:
    """The objects below ``prefix``, server by server, each once.

    Raises :class:`HicacheError` when a server cannot be asked: a listing that is not complete must not
    look like one. A store of more than REDIS_SCAN_SEEN_MAX objects may show one twice while the server
    makes its table smaller.
    """
    seen: set[bytes] = set()
    for node in nodes:
        try:
            wire = dialer.open(node, Deadline.after(DEFAULT_TIMEOUT_S))
            try:
                wire.ask(_NO_TOUCH, 1, Deadline.after(DEFAULT_TIMEOUT_S))  # or listing makes all look used
                for keys in _pages(wire, pattern(store_prefix + prefix), require_usable):
                    fresh = [key for key in dict.fromkeys(keys) if key not in seen]
                    if len(seen) > REDIS_SCAN_SEEN_MAX:
                        seen.clear()
                    seen.update(fresh)
                    yield from _entries(wire, fresh, len(store_prefix))
            finally:
                wire.channel.close()
        except OSError as error:
            raise HicacheError(f"listing {node} broke off: {error}") from error


def _pages(wire: Wire, matching: bytes, require_usable: Callable[[], None]) -> Iterator[list[bytes]]:
    cursor = b"0"
    while True:
        require_usable()
        words = command(b"SCAN", cursor, b"MATCH", matching, b"COUNT", b"%d" % REDIS_SCAN_COUNT)
        (reply,) = wire.ask(words, 1, Deadline.after(DEFAULT_TIMEOUT_S))
        if not isinstance(reply, list) or len(reply) != 2:
            text = reply.text if isinstance(reply, ErrorReply) else "SCAN is answered by something else"
            raise HicacheError(f"the server does not list its keys: {text}")
        found, keys = reply
        assert isinstance(found, bytes)
        assert isinstance(keys, list)
        yield [key for key in keys if isinstance(key, bytes)]
        cursor = found
        if cursor == b"0":
            return


def _entries(wire: Wire, keys: Sequence[bytes], prefix_bytes: int) -> Iterator[Entry]:
    if not keys:
        return
    # The idle time first: measuring an object is a use of it, where the server cannot be told otherwise.
    words = [
        command(b"OBJECT", b"IDLETIME", key) + command(b"STRLEN", key) + version_request(key) for key in keys
    ]
    replies = wire.ask(b"".join(words), 3 * len(keys), Deadline.after(DEFAULT_TIMEOUT_S))
    now_s = time.time()
    for index, key in enumerate(keys):
        idle_s, length, version = replies[3 * index : 3 * index + 3]
        if not isinstance(length, int) or not length or not isinstance(version, bytes):
            continue  # gone meanwhile, or not a string: not an object of ours
        try:
            name = key[prefix_bytes:].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            continue
        used_s = now_s - idle_s if isinstance(idle_s, int) else now_s
        yield Entry(name, max(0, length - VERSION_BYTES), used_s, version.hex())
