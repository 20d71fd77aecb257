"""What the first server says of itself at attach, and what that means for a cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from hicache_store.clock import Deadline
from hicache_store.connectors.base import META_PREFIX
from hicache_store.connectors.redis_settings import RedisSettings
from hicache_store.connectors.redis_wire import ErrorReply, Reply, Wire, command

_LOG = logging.getLogger(__name__)

_REFUSALS: Final = frozenset({"ERR", "NOPERM"})


@dataclass(frozen=True, slots=True)
class Survey:
    """A server's own account. ``None`` where it would not tell."""

    is_cluster: bool | None
    is_replica: bool
    watches: bool
    memory_limit_bytes: int | None
    policy: str | None


def survey(wire: Wire, prefix: bytes, deadline: Deadline) -> Survey:
    """Ask; raises ``OSError`` or ``TimeoutError``."""
    probe = prefix + META_PREFIX.encode() + b"probe"
    words = command(b"INFO") + command(b"WATCH", probe) + command(b"UNWATCH")
    info, watched, unwatched = wire.ask(words, 3, deadline)
    said = _lines(info)
    limit, cluster = said.get("maxmemory"), said.get("cluster_enabled")
    return Survey(
        is_cluster=None if cluster is None else cluster == "1",
        is_replica=said.get("role") == "slave",
        watches=not any(isinstance(r, ErrorReply) and r.kind in _REFUSALS for r in (watched, unwatched)),
        memory_limit_bytes=int(limit) if limit is not None and limit.isdigit() else None,
        policy=said.get("maxmemory_policy"),
    )


def _lines(info: Reply) -> dict[str, str]:
    if not isinstance(info, bytes):
        return {}
    pairs = (line.partition(":") for line in info.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in pairs if colon}


def warn(found: Survey, settings: RedisSettings) -> None:
    """Say once what will surprise the operator of a cache."""
    place = settings.place
    if found.memory_limit_bytes == 0:
        _LOG.warning(
            "%s has no memory limit and grows until the machine is out of memory; "
            "set maxmemory and an eviction policy such as allkeys-lru",
            place,
        )
    elif found.policy == "noeviction":
        _LOG.warning(
            "%s evicts nothing (maxmemory-policy noeviction): once %s bytes are used, writes fail; "
            "set allkeys-lru, or volatile-lru with the option ttl",
            place,
            found.memory_limit_bytes,
        )
    elif found.policy is not None and found.policy.startswith("volatile-") and settings.ttl_s is None:
        _LOG.warning(
            "%s evicts only keys with a time to live (%s), and this store gives them none: "
            "add the option ttl, or set allkeys-lru",
            place,
            found.policy,
        )
    if found.is_replica and not settings.is_read_only:
        _LOG.warning("%s is a replica and can only be read", place)
    if not found.watches:
        _LOG.warning("%s forbids WATCH: repairs and deletions of a named version may lose a race", place)
