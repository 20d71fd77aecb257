"""The open connections of one handle, by server: bounded, reused newest first, never reused unclean.

Connections are opened by threads of their own that may be left behind, because looking up a name and
shaking hands can hang where no socket option reaches; they touch no memory of a caller.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Outcome, Status
from hicache_store.connectors.batch import Claim
from hicache_store.connectors.redis_channel import open_channel
from hicache_store.connectors.redis_dial import DialError, dial
from hicache_store.connectors.redis_settings import Address, Login, RedisSettings
from hicache_store.connectors.redis_wire import Wire
from hicache_store.connectors.workers import Workers
from hicache_store.limits import REDIS_CONNECTIONS_MAX, REDIS_DIAL_THREADS
from hicache_store.metrics import Metrics


class Dialer:
    """Opens connections within a deadline."""

    def __init__(self, settings: RedisSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._workers = Workers(REDIS_DIAL_THREADS, f"dialing {settings.place}", "abandons", metrics)

    def open(
        self, address: Address, deadline: Deadline, login: Login | None = None, db: int | None = None
    ) -> Wire:
        """A new connection; raises :class:`DialError`, or ``TimeoutError`` when it took too long.

        ``login`` and ``db`` override those of the settings, as a sentinel needs.
        """
        settings = self._settings
        who = settings.login if login is None else login
        where = settings.db if db is None else db

        limit = Deadline.after(settings.connect_timeout_s)
        sooner = deadline if deadline.remaining_s() < limit.remaining_s() else limit

        def step(to: Address, claim: Claim) -> Wire | DialError:
            try:
                wire = Wire(open_channel(dial(to, who, settings.tls, where, settings.connect_timeout_s)))
            except DialError as error:
                return error
            try:
                wire.measure(sooner)
            except OSError as error:
                wire.channel.close()
                return DialError(f"{to} refuses the connection: {error}")
            if not claim.enter():
                wire.channel.close()
            return wire

        (result,) = self._workers.run([address], step, sooner)
        if isinstance(result, DialError):
            self._metrics.add("redis.dial_failed")
            raise result
        if isinstance(result, Outcome):
            self._metrics.add("redis.dial_failed")
            if result.status is Status.TIMED_OUT:
                hint = "" if settings.tls is None else "; does it speak TLS there?"
                raise TimeoutError(f"{address} did not answer in time{hint}")
            raise DialError(f"{address} cannot be reached: {result.detail}")
        self._metrics.add("redis.connections_opened")
        return result

    def close(self) -> None:
        """End what is being opened."""
        self._workers.close()


class Pool:
    """The connections to one server."""

    def __init__(self, address: Address, dialer: Dialer, metrics: Metrics) -> None:
        self.address = address
        self._dialer = dialer
        self._metrics = metrics
        self._changed = threading.Condition()
        self._idle: list[Wire] = []
        self._used: set[Wire] = set()
        self._opening = 0
        self._is_closed = False

    @contextlib.contextmanager
    def lent(self, deadline: Deadline) -> Iterator[Wire]:
        """A connection for one thread. It is closed unless the block ends well and leaves it clean.

        Raises :class:`DialError`, ``OSError`` when the pool is closed, or ``TimeoutError``.
        """
        wire = self._take(deadline)
        is_good = False
        try:
            yield wire
            is_good = wire.is_clean
        finally:
            self._give_back(wire, is_good)

    def _take(self, deadline: Deadline) -> Wire:
        while True:
            wire = self._reserve(deadline)
            if wire is None:
                break
            if wire.channel.is_fresh():
                return wire
            self._metrics.add("redis.connections_stale")
            self._give_back(wire, False)
        try:
            opened = self._dialer.open(self.address, deadline)
        except BaseException:
            with self._changed:
                self._opening -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._opening -= 1
            self._used.add(opened)
            if not self._is_closed:
                return opened
        self._give_back(opened, False)
        raise ConnectionAbortedError("the handle is closed")

    def _reserve(self, deadline: Deadline) -> Wire | None:
        """An idle connection, or ``None`` with room reserved for a new one."""
        with self._changed:
            while True:
                if self._is_closed:
                    raise ConnectionAbortedError("the handle is closed")
                if self._idle:
                    wire = self._idle.pop()
                    self._used.add(wire)
                    return wire
                if len(self._used) + self._opening < REDIS_CONNECTIONS_MAX:
                    self._opening += 1
                    return None
                left_s = deadline.remaining_s()
                if left_s <= 0.0:
                    raise TimeoutError(
                        f"all {REDIS_CONNECTIONS_MAX} connections to {self.address} are in use"
                    )
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))

    def _give_back(self, wire: Wire, is_good: bool) -> None:
        with self._changed:
            self._used.discard(wire)
            keeps = is_good and not self._is_closed
            if keeps:
                self._idle.append(wire)
            self._changed.notify()
        if not keeps:
            wire.channel.close()

    def close(self) -> None:
        """Close the idle connections and end the others under whoever uses them."""
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for wire in self._used:
                wire.channel.interrupt()
            self._changed.notify_all()
        for wire in idle:
            wire.channel.close()


class Pools:
    """A pool for every server that was ever asked."""

    def __init__(self, settings: RedisSettings, metrics: Metrics) -> None:
        self.dialer = Dialer(settings, metrics)
        self._metrics = metrics
        self._lock = threading.Lock()
        self._by_address: dict[Address, Pool] = {}
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether no connection can be had any more."""
        with self._lock:
            return self._is_closed

    def of(self, address: Address) -> Pool:
        """The pool of one server."""
        with self._lock:
            pool = self._by_address.get(address)
            if pool is None:
                pool = self._by_address[address] = Pool(address, self.dialer, self._metrics)
                if self._is_closed:
                    pool.close()
            return pool

    def keep_only(self, addresses: frozenset[Address]) -> None:
        """Close the pools of servers that are no longer part of the store."""
        with self._lock:
            gone = [address for address in self._by_address if address not in addresses]
            pools = [self._by_address.pop(address) for address in gone]
        for pool in pools:
            pool.close()

    def close(self) -> None:
        """Close every connection; idempotent."""
        with self._lock:
            self._is_closed = True
            pools = list(self._by_address.values())
        for pool in pools:
            pool.close()
        self.dialer.close()
