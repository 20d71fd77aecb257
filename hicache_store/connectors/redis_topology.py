"""Which server holds which key: one server, the master that sentinels name, or a cluster's slots.

A topology is learned by one command on a connection of its own and replaced as a whole.
"""

from __future__ import annotations

import binascii
import threading
from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias

from hicache_store.clock import Deadline
from hicache_store.connectors.redis_pool import Pools
from hicache_store.connectors.redis_settings import Address, RedisSettings
from hicache_store.connectors.redis_wire import ErrorReply, ProtocolError, Reply, command
from hicache_store.limits import REDIS_NODES_MAX, REDIS_REFRESH_S
from hicache_store.metrics import Metrics

SLOTS: Final = 16_384
_UNSERVED: Final = 0xFFFF

Groups: TypeAlias = "dict[Address, list[int]]"


class UnservedError(OSError):
    """A slot that no server serves, or a service without a master."""


def key_slot(key: bytes) -> int:
    """The slot of a key: CRC16 (XMODEM) of it, or of what stands in its first braces, if anything."""
    start = key.find(b"{")
    if start >= 0:
        stop = key.find(b"}", start + 1)
        if stop > start + 1:
            key = key[start + 1 : stop]
    return binascii.crc_hqx(key, 0) % SLOTS


class Topology:
    """The servers of a store. ``is_cluster`` may be set once, when the first server says so."""

    def __init__(self, settings: RedisSettings, pools: Pools, metrics: Metrics) -> None:
        self.is_cluster = settings.kind == "cluster"
        self._settings = settings
        self._pools = pools
        self._metrics = metrics
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._fresh_until: float | None = None
        self._nodes: list[Address] = [] if settings.kind == "sentinel" else [settings.addresses[0]]
        self._owners = array("H", [_UNSERVED] * SLOTS)

    @property
    def nodes(self) -> list[Address]:
        """The servers that hold keys."""
        with self._lock:
            return list(self._nodes)

    def groups(self, keys: Sequence[bytes], indexes: Sequence[int]) -> tuple[Groups, list[int]]:
        """``indexes`` of ``keys`` by server, and those that nobody serves."""
        with self._lock:
            nodes, owners = self._nodes, self._owners
            if not nodes:
                return {}, list(indexes)
            if not self.is_cluster:
                return {nodes[0]: list(indexes)}, []
            by_node: list[list[int]] = [[] for _ in nodes]
            unserved: list[int] = []
            for index in indexes:
                owner = owners[key_slot(keys[index])]
                (unserved if owner == _UNSERVED else by_node[owner]).append(index)
        return {node: found for node, found in zip(nodes, by_node, strict=True) if found}, unserved

    def learn(self, slot: int, address: Address) -> None:
        """Take a server's word for where a slot is now."""
        with self._lock:
            if not self.is_cluster:
                return
            if address not in self._nodes:
                if len(self._nodes) >= REDIS_NODES_MAX:
                    return
                self._nodes = [*self._nodes, address]
            owners = array("H", self._owners)
            owners[slot] = self._nodes.index(address)
            self._owners = owners

    def refresh(self, deadline: Deadline, *, must: bool = False) -> None:
        """Ask where everything is, unless somebody did within REDIS_REFRESH_S; ``must`` asks and raises.

        Raises ``OSError`` or ``TimeoutError`` with ``must`` when nobody can tell.
        """
        if not self.is_cluster and self._settings.kind != "sentinel":
            return
        if not self._refreshing.acquire(timeout=min(deadline.remaining_s(), threading.TIMEOUT_MAX)):
            return
        try:
            now = deadline.clock.monotonic()
            if not must and self._fresh_until is not None and now < self._fresh_until:
                return
            self._fresh_until = now + REDIS_REFRESH_S
            self._metrics.add("redis.topology_refreshed")
            try:
                if self.is_cluster:
                    self._ask_cluster(deadline)
                else:
                    self._ask_sentinels(deadline)
            except OSError:
                self._metrics.add("redis.topology_failed")
                if must:
                    raise
        finally:
            self._refreshing.release()

    def _ask_cluster(self, deadline: Deadline) -> None:
        asked: list[Address] = []
        error: OSError = UnservedError("no server of the cluster can be reached")
        for address in [*self.nodes, *self._settings.addresses]:
            if address in asked:
                continue
            asked.append(address)
            try:
                with self._pools.of(address).lent(deadline) as wire:
                    (reply,) = wire.ask(command(b"CLUSTER", b"SLOTS"), 1, deadline)
                nodes, owners = _parse_slots(reply, address)
            except OSError as failed:
                error = failed
                continue
            with self._lock:
                self._nodes, self._owners = nodes, owners
            self._pools.keep_only(frozenset([*nodes, *self._settings.addresses]))
            return
        raise error

    def _ask_sentinels(self, deadline: Deadline) -> None:
        settings = self._settings
        words = command(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", settings.service.encode())
        error: OSError = UnservedError("no sentinel can be reached")
        for address in settings.addresses:
            try:
                wire = self._pools.dialer.open(address, deadline, settings.sentinel_login, 0)
                try:
                    (reply,) = wire.ask(words, 1, deadline)
                finally:
                    wire.channel.close()
                master = _parse_master(reply, settings.service)
            except OSError as failed:
                error = failed
                continue
            with self._lock:
                self._nodes = [master]
            self._pools.keep_only(frozenset([master]))
            return
        raise error


def _parse_slots(reply: Reply, asked: Address) -> tuple[list[Address], array[int]]:
    """Servers and the index of the one that serves each slot, out of CLUSTER SLOTS."""
    if isinstance(reply, ErrorReply):
        raise UnservedError(f"{asked} does not tell the slots: {reply.text}")
    nodes: list[Address] = []
    owners = array("H", [_UNSERVED] * SLOTS)
    try:
        for row in reply:  # type: ignore[union-attr]
            first, last, master = row[0], row[1], row[2]  # type: ignore[index]
            address = Address(_host(master[0], asked), int(master[1]))  # type: ignore[index, arg-type]
            if address not in nodes:
                nodes.append(address)
            index = nodes.index(address)
            for slot in range(first, last + 1):  # type: ignore[operator, arg-type]
                owners[slot] = index
    except (TypeError, ValueError, IndexError) as error:
        raise ProtocolError(f"{asked} tells the slots in a form that is not known") from error
    if not 1 <= len(nodes) <= REDIS_NODES_MAX:
        raise UnservedError(f"{asked} names {len(nodes)} servers; there must be 1 to {REDIS_NODES_MAX}")
    return nodes, owners


def _host(told: object, asked: Address) -> str:
    """The host of a server; one that does not know its own name is where it was asked."""
    text = told.decode() if isinstance(told, bytes) else ""
    return asked.host if text in ("", "?") else text


def _parse_master(reply: Reply, service: str) -> Address:
    if isinstance(reply, list) and len(reply) == 2:
        host, port = reply
        if isinstance(host, bytes) and isinstance(port, bytes) and port.isdigit():
            return Address(host.decode(), int(port))
    if isinstance(reply, ErrorReply):
        raise UnservedError(f"the sentinel does not tell the master of {service!r}: {reply.text}")
    raise UnservedError(f"the sentinel knows no master of {service!r}")
