"""One batched call over one or many servers: lanes work in parallel, and what a server sent elsewhere
or a broken connection lost goes into another round.

A lane is one connection to one server; the lanes of a server share a queue. Rounds are few, and an item
whose connection broke is tried once more only if nothing of it has been handed to or taken from the
caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeAlias, TypeVar

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Outcome, Status
from hicache_store.connectors.batch import Claim, failure
from hicache_store.connectors.redis_pool import Pools
from hicache_store.connectors.redis_settings import Address
from hicache_store.connectors.redis_topology import Topology, key_slot
from hicache_store.connectors.redis_wire import ErrorReply, Reply, Wire, command
from hicache_store.connectors.workers import Workers
from hicache_store.limits import REDIS_LOOKUP_ITEMS, REDIS_ROUNDS_MAX
from hicache_store.metrics import Metrics

ResultT = TypeVar("ResultT")

ASKING = command(b"ASKING")

OTHER_TYPE: Final = "WRONGTYPE"
_WAY_OUT: Final = (
    "another program keeps a list, a hash or the like under this key; remove it there (DEL), "
    "or give the store a prefix of its own"
)
_BUSY = frozenset({"LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY", "MOVED", "ASK", "EXECABORT"})
_REFUSALS = frozenset({"OOM", "READONLY", "MISCONF", "NOREPLICAS"})


@dataclass(frozen=True, slots=True)
class Redo:
    """An item without a result yet; ``outcome`` is the result if there is no further round."""

    outcome: Outcome
    moved: Address | None = None
    ask: Address | None = None
    is_broken: bool = False
    may_repeat: bool = True


_UNSERVED: Final = Redo(Outcome(Status.FAILED, "no server serves the key", is_transient=True), is_broken=True)
_LEFT_OVER: Final = Redo(Outcome(Status.FAILED, "every connection broke", is_transient=True), is_broken=True)

Done: TypeAlias = "list[tuple[int, ResultT | Redo]]"


@dataclass(slots=True)
class Queue:
    """The items that the lanes of one server still have to take."""

    indexes: Sequence[int]
    lanes: int
    _next: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, most: int) -> Sequence[int]:
        """Up to ``most`` items."""
        with self._lock:
            taken = self.indexes[self._next : self._next + most]
            self._next += len(taken)
            return taken

    @property
    def share(self) -> int:
        """Half of what each lane would get of the rest, so that none ends long after the others."""
        return max(1, (len(self.indexes) - self._next) // (2 * self.lanes))


@dataclass(slots=True)
class Lane(Generic[ResultT]):
    """One connection's part of a round."""

    address: Address
    is_asking: bool
    queue: Queue
    taken: list[int] = field(default_factory=list)
    done: Done[ResultT] = field(default_factory=list)

    def take(self, most: int) -> Sequence[int]:
        """Up to ``most`` items, which are this lane's from now on."""
        taken = self.queue.take(most)
        self.taken += taken
        return taken

    def finish(self, index: int, result: ResultT | Redo) -> None:
        """Settle an item."""
        self.done.append((index, result))

    def redo_of(self, error: ErrorReply) -> Redo | None:
        """Where the server sends an item, if the error says so."""
        words = error.text.split(" ")
        if words[0] not in ("MOVED", "ASK") or len(words) < 3:
            return None
        host, _, port = words[2].rpartition(":")
        if not port.isdigit():
            return None
        address = Address(host or self.address.host, int(port))
        outcome = outcome_of(error)
        return Redo(outcome, moved=address) if words[0] == "MOVED" else Redo(outcome, ask=address)

    def break_off(self, error: BaseException, *, takes_rest: bool) -> None:
        """Settle what was taken without a result; ``takes_rest`` when the server cannot be reached."""
        if takes_rest:
            self.take(len(self.queue.indexes))
        settled = {index for index, _ in self.done}
        broken = isinstance(error, OSError)
        for index in self.taken:
            if index not in settled:
                detail = failure(error).detail
                outcome = Outcome(Status.FAILED, detail, is_transient=broken)
                self.finish(index, Redo(outcome, is_broken=True, may_repeat=broken))


Work: TypeAlias = "Callable[[Lane[ResultT], Wire, Claim], None]"


class Rounds:
    """One call on ``keys``. It remembers which keys are on their way from one server to another."""

    def __init__(
        self,
        topology: Topology,
        pools: Pools,
        workers: Workers,
        metrics: Metrics,
        threads: int,
        keys: Sequence[bytes],
        deadline: Deadline,
    ) -> None:
        self._topology = topology
        self._pools = pools
        self._workers = workers
        self._metrics = metrics
        self._threads = threads
        self._keys = keys
        self._deadline = deadline
        self._asking: dict[int, Address] = {}

    def run(self, indexes: Sequence[int], work: Work[ResultT]) -> dict[int, ResultT | Outcome]:
        """The results of ``work`` on ``indexes``; those that the deadline cut off are missing."""
        results: dict[int, ResultT | Outcome] = {}
        broken: set[int] = set()
        pending = indexes
        for turn in range(1, REDIS_ROUNDS_MAX + 1):
            redo = self._round(pending, work, results)
            pending = self._sort_out(redo, results, broken, is_last=turn == REDIS_ROUNDS_MAX)
            if not pending or self._deadline.is_past:
                break
        return results

    def ask(self, indexes: Sequence[int], build: Callable[[int], bytes]) -> dict[int, Reply | Outcome]:
        """The short replies to one command an item; those that the deadline cut off are missing."""

        def work(lane: Lane[Reply], wire: Wire, claim: Claim) -> None:
            while not claim.is_cancelled() and (taken := lane.take(REDIS_LOOKUP_ITEMS)):
                replies = self._ask_some(lane, wire, [build(index) for index in taken])
                for index, reply in zip(taken, replies, strict=True):
                    redo = lane.redo_of(reply) if isinstance(reply, ErrorReply) else None
                    lane.finish(index, reply if redo is None else redo)

        return self.run(indexes, work)

    def _ask_some(self, lane: Lane[Reply], wire: Wire, commands: list[bytes]) -> list[Reply]:
        if not lane.is_asking:
            return wire.ask(b"".join(commands), len(commands), self._deadline)
        sent = b"".join([ASKING + each for each in commands])
        return wire.ask(sent, 2 * len(commands), self._deadline)[1::2]

    # -- one round -------------------------------------------------------------------------

    def _round(
        self, indexes: Sequence[int], work: Work[ResultT], results: dict[int, ResultT | Outcome]
    ) -> Done[ResultT]:
        lanes: list[Lane[ResultT]]
        lanes, unserved = self._lanes(indexes)

        def step(lane: Lane[ResultT], claim: Claim) -> None:
            self._drive(lane, work, claim)

        self._workers.run(lanes, step, self._deadline)
        redo: Done[ResultT] = []
        for lane in lanes:
            for index, result in lane.done:
                if isinstance(result, Redo):
                    redo.append((index, result))
                else:
                    results[index] = result
        redo += [(index, _UNSERVED) for index in unserved]
        if not self._deadline.is_past:  # else what nobody took is out of time
            redo += [(index, _LEFT_OVER) for lane in lanes for index in lane.queue.take(len(indexes))]
        return redo

    def _lanes(self, indexes: Sequence[int]) -> tuple[list[Lane[ResultT]], list[int]]:
        asking: dict[Address, list[int]] = {}
        plain: Sequence[int] = indexes
        if self._asking:
            plain = [index for index in indexes if index not in self._asking]
            for index in indexes:
                if index in self._asking:
                    asking.setdefault(self._asking[index], []).append(index)
        groups, unserved = self._topology.groups(self._keys, plain) if plain else ({}, [])
        parts = [(address, False, part) for address, part in groups.items()]
        parts += [(address, True, part) for address, part in asking.items()]
        each = max(1, -(-self._threads // max(1, len(parts))))
        rows: list[list[Lane[ResultT]]] = []
        for address, is_asking, part in parts:
            count = min(each, len(part))
            queue = Queue(part, count)
            rows.append([Lane(address, is_asking, queue) for _ in range(count)])
        # In turn, so that a server that hangs holds up no more than its share of the workers.
        lanes = [row[turn] for turn in range(each) for row in rows if turn < len(row)]
        return lanes, unserved

    def _drive(self, lane: Lane[ResultT], work: Work[ResultT], claim: Claim) -> None:
        """Work a lane off on one connection; whatever happens, its items are settled or out of time."""
        is_connected = False
        try:
            with self._pools.of(lane.address).lent(self._deadline) as wire:
                is_connected = True
                work(lane, wire, claim)
        except TimeoutError as error:
            if not claim.is_cancelled():  # not ours: the server took too long to answer at all
                self._metrics.add("redis.connections_broken")
                lane.break_off(error, takes_rest=not is_connected)
        except OSError as error:
            if not claim.is_cancelled():
                self._metrics.add("redis.connections_broken")
                lane.break_off(error, takes_rest=not is_connected)
        except Exception as error:
            lane.break_off(error, takes_rest=False)

    def _sort_out(
        self,
        redo: Done[ResultT],
        results: dict[int, ResultT | Outcome],
        broken: set[int],
        *,
        is_last: bool,
    ) -> list[int]:
        """Settle what is not tried again; the others, with what the servers said about them taken in."""
        again: list[int] = []
        for index, item in redo:
            assert isinstance(item, Redo)
            self._learn(index, item)
            repeats = item.may_repeat and not is_last and not self._pools.is_closed
            if item.is_broken:
                repeats = repeats and index not in broken
                broken.add(index)
            elif not self._topology.is_cluster:
                repeats = False
            if repeats:
                again.append(index)
            else:
                results[index] = item.outcome
        if any(item.is_broken or item.moved is not None for _, item in redo if isinstance(item, Redo)):
            self._topology.refresh(self._deadline)
        return again

    def _learn(self, index: int, item: Redo) -> None:
        self._asking.pop(index, None)
        if item.ask is not None:
            self._metrics.add("redis.asked_elsewhere")
            self._asking[index] = item.ask
        elif item.moved is not None:
            self._metrics.add("redis.moved")
            self._topology.learn(key_slot(self._keys[index]), item.moved)


def outcome_of(error: ErrorReply) -> Outcome:
    """What an error reply means for its item."""
    if error.kind in _REFUSALS:
        return Outcome(Status.REFUSED, error.text, is_transient=True)
    if error.kind == OTHER_TYPE:
        return Outcome(Status.FAILED, f"{error.text}; {_WAY_OUT}")
    return Outcome(Status.FAILED, error.text, is_transient=error.kind in _BUSY)


def damaged(error: ErrorReply) -> Outcome:
    """What a read met that found a list, a hash or the like: nothing that could ever be an object, and
    without a version that would let anybody replace what another program keeps there."""
    return Outcome(Status.WRONG_SIZE, outcome_of(error).detail)
