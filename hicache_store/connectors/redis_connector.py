"""The Redis and Valkey connector: one value an object, on one server, a cluster, or what sentinels name.

A value is the object followed by 16 random bytes, its version. Reads and writes move bytes straight
between the socket and the caller's memory, ``bounded``: every system call has the deadline, so a call
returns on time and nothing is left running. See :mod:`hicache_store.connectors.redis_settings` for URLs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from hicache_store.clock import Deadline
from hicache_store.config import StoreUrl
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
from hicache_store.connectors.local_transfer import Scratch
from hicache_store.connectors.redis_compare import DeleteWork, unlinked, version_request
from hicache_store.connectors.redis_dial import require_client
from hicache_store.connectors.redis_pool import Pools
from hicache_store.connectors.redis_read import ReadWork
from hicache_store.connectors.redis_rounds import Rounds, outcome_of
from hicache_store.connectors.redis_scan import scan
from hicache_store.connectors.redis_settings import RedisSettings, read_settings
from hicache_store.connectors.redis_survey import Survey, survey, warn
from hicache_store.connectors.redis_topology import Topology
from hicache_store.connectors.redis_wire import VERSION_BYTES, ErrorReply, Reply, command, lengths_differ
from hicache_store.connectors.redis_write import WriteWork, lifetime_ms
from hicache_store.connectors.workers import Workers
from hicache_store.errors import ConfigurationError
from hicache_store.limits import REDIS_ATTACH_S, REDIS_CLUSTER_THREADS_MAX
from hicache_store.metrics import Metrics

_READ_ONLY: Final = Outcome(Status.REFUSED, "the store can only be read")
_LOOKED_UP: Final = b"STRLEN"


def connect(url: StoreUrl) -> RedisConnector:
    """Open the store at ``url``.

    Raises :class:`ConfigurationError`, which never tells a password, when an option is not right or the
    server cannot be used.
    """
    settings = read_settings(url)
    require_client()
    metrics = Metrics()
    pools = Pools(settings, metrics)
    topology = Topology(settings, pools, metrics)
    try:
        found = _attach(settings, pools, topology)
    except OSError as error:
        pools.close()
        raise ConfigurationError(f"{settings.place} cannot be used as a store: {error}") from error
    except BaseException:
        pools.close()
        raise
    return RedisConnector(settings, pools, topology, found, metrics)


def _attach(settings: RedisSettings, pools: Pools, topology: Topology) -> Survey:
    deadline = Deadline.after(REDIS_ATTACH_S)
    topology.refresh(deadline, must=True)
    with pools.of(topology.nodes[0]).lent(deadline) as wire:
        found = survey(wire, settings.prefix, deadline)
    if found.is_cluster and not topology.is_cluster and settings.is_cluster is None:
        if settings.kind == "sentinel":
            raise ConfigurationError(f"{settings.place} is a node of a cluster; use redis+cluster://")
        topology.is_cluster = True
        topology.refresh(deadline, must=True)
    warn(found, settings)
    return found


class RedisConnector:
    """The connector of one attached store; made by :func:`connect`. ``metrics`` counts its faults."""

    def __init__(
        self,
        settings: RedisSettings,
        pools: Pools,
        topology: Topology,
        found: Survey,
        metrics: Metrics,
    ) -> None:
        self.metrics = metrics
        self._pid = os.getpid()
        self._settings = settings
        self._pools = pools
        self._topology = topology
        self._watches = found.watches
        self._threads = settings.threads
        if topology.is_cluster and not settings.is_threads_given:
            self._threads = max(self._threads, min(REDIS_CLUSTER_THREADS_MAX, 2 * len(topology.nodes)))
        self._workers = Workers(self._threads, settings.place, "bounded", metrics)
        self._scratch = Scratch()
        self._capabilities = Capabilities(
            scheme="redis",
            stop="bounded",
            create_only=True,
            conditional_versions=found.watches,
            request_cost_bytes=settings.request_cost_bytes,
            concurrency=self._threads,
            is_read_only=settings.is_read_only or found.is_replica,
        )

    @property
    def capabilities(self) -> Capabilities:
        """What this server guarantees."""
        return self._capabilities

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        """Length of each object, ``None`` where it is absent, expired or cannot be told."""
        encoded = [self._encode(key) for key in keys]
        rounds = self._rounds(encoded, deadline)
        found = rounds.ask(range(len(keys)), lambda index: command(_LOOKED_UP, encoded[index]))
        lengths = [found.get(index) for index in range(len(keys))]
        failed = sum(isinstance(each, (ErrorReply, Outcome)) for each in lengths)
        if failed:
            self.metrics.add("redis.look_failed", failed)
        return [max(0, n - VERSION_BYTES) if isinstance(n, int) and n else None for n in lengths]

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        """Fetch each object's parts into its target."""
        keys = [self._encode(read.key) for read in reads]
        rounds = self._rounds(keys, deadline)
        found = rounds.run(range(len(reads)), ReadWork(reads, keys, self._scratch, deadline))
        return self._counted("read", [found.get(index, TIMED_OUT) for index in range(len(reads))])

    def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        """Store each object, all or nothing."""
        self._workers.require_usable()
        if self._capabilities.is_read_only:
            return [_READ_ONLY] * len(writes)
        keys = [self._encode(write.key) for write in writes]
        rounds = self._rounds(keys, deadline)
        outcomes = {index: each for index, write in enumerate(writes) if (each := self._refused(write))}
        todo = [index for index in range(len(writes)) if index not in outcomes]
        outcomes |= self._inspect(rounds, writes, keys, todo)
        todo = [index for index in todo if index not in outcomes]
        if todo and not deadline.is_past:
            work = WriteWork(writes, keys, self._settings.ttl_s, self._watches, deadline)
            outcomes |= rounds.run(todo, work)
        return self._counted("write", [outcomes.get(index, TIMED_OUT) for index in range(len(writes))])

    def delete(
        self, keys: Sequence[str], deadline: Deadline, versions: Sequence[str | None] | None = None
    ) -> list[Outcome]:
        """Remove objects; with a version, only if it is still that one (else ``CONFLICT``)."""
        self._workers.require_usable()
        if self._capabilities.is_read_only:
            return [_READ_ONLY] * len(keys)
        wanted = [None] * len(keys) if versions is None else versions
        assert len(wanted) == len(keys)
        encoded = [self._encode(key) for key in keys]
        rounds = self._rounds(encoded, deadline)
        plain = [index for index, version in enumerate(wanted) if version is None]
        named = [index for index, version in enumerate(wanted) if version is not None]
        replies = rounds.ask(plain, lambda index: command(b"UNLINK", encoded[index]))
        outcomes = {index: _settled(reply, unlinked) for index, reply in replies.items()}
        if named:
            outcomes |= rounds.run(named, DeleteWork(encoded, wanted, self._watches, deadline))
        return self._counted("delete", [outcomes.get(index, TIMED_OUT) for index in range(len(keys))])

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        """Mark objects as used now, the last one first, so that the head of a chain is the newest."""
        self._workers.require_usable()
        if self._capabilities.is_read_only:
            return [_READ_ONLY] * len(touches)
        keys = [self._encode(touch.key) for touch in touches]
        replies = self._touch(self._rounds(keys, deadline), touches, keys)
        outcomes = {index: _settled(reply, _touched) for index, reply in replies.items()}
        return self._counted("touch", [outcomes.get(index, TIMED_OUT) for index in range(len(touches))])

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key starts with ``prefix``; raises :class:`HicacheError` if it breaks off."""
        self._workers.require_usable()
        encoded = prefix.encode("utf-8", "surrogatepass")
        return scan(
            self._pools.dialer,
            self._topology.nodes,
            self._settings.prefix,
            encoded,
            self._workers.require_usable,
        )

    def close(self) -> None:
        """Stop the threads and close the connections; idempotent. Calls that run end at once."""
        if os.getpid() != self._pid:
            return
        self._pools.close()
        self._workers.close()

    # -- parts of calls --------------------------------------------------------------------

    def _encode(self, key: str) -> bytes:
        return self._settings.prefix + key.encode("utf-8", "surrogatepass")

    def _rounds(self, keys: Sequence[bytes], deadline: Deadline) -> Rounds:
        self._workers.require_usable()
        return Rounds(self._topology, self._pools, self._workers, self.metrics, self._threads, keys, deadline)

    def _refused(self, write: Write) -> Outcome | None:
        if write.size_bytes <= 0:
            return Outcome(Status.REFUSED, "an object has at least one byte")
        most = self._settings.value_bytes_max
        if write.size_bytes > most:
            detail = f"{write.size_bytes} bytes exceed max_value={most}; cut objects smaller or raise it"
            return Outcome(Status.REFUSED, detail)
        return None

    def _inspect(
        self, rounds: Rounds, writes: Sequence[Write], keys: Sequence[bytes], todo: Sequence[int]
    ) -> dict[int, Outcome]:
        """The outcomes of creations that what is there decides; no byte of them is sent."""
        asked = [index for index in todo if writes[index].replace is None]
        lengths = rounds.ask(asked, lambda index: command(_LOOKED_UP, keys[index]))
        outcomes: dict[int, Outcome] = {index: TIMED_OUT for index in asked if index not in lengths}
        found: list[int] = []
        other: list[int] = []
        for index, reply in lengths.items():
            if isinstance(reply, Outcome):
                outcomes[index] = reply
            elif isinstance(reply, ErrorReply):
                outcomes[index] = outcome_of(reply)
            elif reply == writes[index].size_bytes + VERSION_BYTES:
                found.append(index)
            elif reply:
                other.append(index)
        if found and self._settings.ttl_s is not None:
            self._touch(rounds, [Touch(write.key, write.depth) for write in writes], keys, found)
        outcomes |= {index: Outcome(Status.EXISTS) for index in found}
        versions = rounds.ask(other, lambda index: version_request(keys[index])) if other else {}
        for index in other:
            version = versions.get(index)
            length = lengths[index]
            assert isinstance(length, int)
            detail = lengths_differ(length, writes[index].size_bytes)
            known = version.hex() if isinstance(version, bytes) and version else None
            outcomes[index] = Outcome(Status.CONFLICT, detail, known)
        return outcomes

    def _touch(
        self,
        rounds: Rounds,
        touches: Sequence[Touch],
        keys: Sequence[bytes],
        indexes: Sequence[int] | None = None,
    ) -> dict[int, Reply | Outcome]:
        def build(index: int) -> bytes:
            lifetime = lifetime_ms(touches[index].key, touches[index].depth, self._settings.ttl_s)
            if lifetime is None:
                return command(b"TOUCH", keys[index])
            return command(b"PEXPIRE", keys[index], b"%d" % lifetime)

        chosen = range(len(touches)) if indexes is None else indexes
        return rounds.ask(chosen[::-1], build)

    def _counted(self, verb: str, outcomes: list[Outcome]) -> list[Outcome]:
        for outcome in outcomes:
            if not outcome.is_ok and outcome.status is not Status.ABSENT:
                self.metrics.add(f"redis.{verb}_{outcome.status.value}")
        return outcomes


def _settled(reply: Reply | Outcome, judge: Callable[[Reply], Outcome]) -> Outcome:
    return reply if isinstance(reply, Outcome) else judge(reply)


def _touched(reply: Reply) -> Outcome:
    if isinstance(reply, ErrorReply):
        return outcome_of(reply)
    return OK if reply else ABSENT
