"""Bounds on what one handle has in flight, and hedged reads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from hicache_store.clock import Deadline
from hicache_store.connectors.base import TIMED_OUT, Connector, Outcome, Part, Read, Status
from hicache_store.connectors.wrapping import Forward, Items, Verb, WrappedConnector, metrics_of
from hicache_store.errors import ConfigurationError
from hicache_store.limits import HEDGED_CALLS_MAX
from hicache_store.metrics import Metrics


def limited(inner: Connector, items_max: int, bytes_max: int | None = None) -> WrappedConnector:
    """``inner`` with at most ``items_max`` reads and writes, of ``bytes_max`` together, under way.

    Further items wait for those before them, within their deadline. An object larger than ``bytes_max``
    goes alone.
    """
    return WrappedConnector(inner, _Limited(items_max, bytes_max), metrics_of(inner))


class _Limited:
    def __init__(self, items_max: int, bytes_max: int | None) -> None:
        self._free_items = items_max
        self._free_bytes = bytes_max
        self._out = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._line: deque[object] = deque()

    def call(self, verb: Verb, items: Items, deadline: Deadline, forward: Forward) -> list[Any]:
        """The results, got in as many calls as there is room for."""
        if verb not in ("read", "write") or not items:
            return forward(items, deadline)
        results: list[Any] = []
        while len(results) < len(items):
            rest = items[len(results) :]
            number, n_bytes = self._take(rest, deadline)
            if not number:
                return results + [TIMED_OUT] * len(rest)
            try:
                results += forward(rest[:number], deadline)
            finally:
                self._give_back(number, n_bytes)
        return results

    def _take(self, items: Items, deadline: Deadline) -> tuple[int, int]:
        place = object()
        with self._changed:
            self._line.append(place)  # first come, first served: a busy caller must not starve the others
            try:
                while True:
                    is_first = self._line[0] is place or self._is_closed
                    number, n_bytes = self._fitting(items) if is_first else (0, 0)
                    left_s = deadline.remaining_s()
                    if number or left_s <= 0.0:
                        self._move(number, n_bytes)
                        return number, n_bytes
                    self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            finally:
                self._line.remove(place)
                self._changed.notify_all()

    def _fitting(self, items: Items) -> tuple[int, int]:
        number = n_bytes = 0
        if self._is_closed:  # let the inner connector say so
            return len(items), 0
        for item in items[: self._free_items]:
            wanted = n_bytes + item.size_bytes
            is_alone = self._out == 0 and number == 0
            if self._free_bytes is not None and wanted > self._free_bytes and not is_alone:
                break
            number, n_bytes = number + 1, wanted
        return number, n_bytes

    def _move(self, number: int, n_bytes: int) -> None:
        self._out += number
        self._free_items -= number
        if self._free_bytes is not None:
            self._free_bytes -= n_bytes

    def _give_back(self, number: int, n_bytes: int) -> None:
        with self._changed:
            self._move(-number, -n_bytes)
            self._changed.notify_all()

    def close(self) -> None:
        """Let everyone through, to be told by the inner connector."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


# -- hedging -----------------------------------------------------------------------------------


def hedged(inner: Connector, delay_s: float) -> WrappedConnector:
    """``inner`` whose reads start a second time when they take longer than ``delay_s``.

    The first to ask a target for its parts has it; the other's bytes are dropped, and the call returns
    without waiting for it. Raises :class:`ConfigurationError` for a connector that reads straight into
    the caller's memory, where the slower read would have to be waited for.
    """
    if inner.capabilities.stop != "abandons":
        raise ConfigurationError(
            f"{inner.capabilities.scheme}: hedge needs reads that work in memory of their own; "
            "leave it out, or for files give io=bounce"
        )
    metrics = metrics_of(inner)
    return WrappedConnector(inner, _Hedged(delay_s, metrics), metrics)


class _LostError(Exception):
    """This read was slower than the other one."""


class _Race:
    """The two reads of one item. All state is guarded by the condition of the call."""

    def __init__(self, read: Read, changed: threading.Condition) -> None:
        self.read = read
        self.changed = changed
        self.winner: int | None = None
        self.is_released = False
        self.is_sealed = False
        self.complaint: str | None = "not checked"
        self.outcomes: dict[int, Outcome] = {}

    def outcome(self, started: int) -> Outcome | None:
        """What became of the item, once that is certain."""
        if self.winner is not None:
            if self.is_released and self.complaint is None:
                return Outcome(Status.OK)
            return self.outcomes.get(self.winner)
        attempts = list(self.outcomes.values())
        answer = next((one for one in attempts if one.status in (Status.ABSENT, Status.WRONG_SIZE)), None)
        return attempts[0] if answer is None and len(attempts) == started else answer


class _RacingTarget:
    """The target of a read, as one of two attempts sees it.

    An attempt that had the parts may take them again, as layers and retries do: each landing is waited
    for and judged by itself, and none begins once the race is sealed.
    """

    def __init__(self, race: _Race, number: int) -> None:
        self._race = race
        self._number = number
        self._is_held = False

    def parts(self) -> Sequence[Part]:
        """The parts, for the first who asks."""
        race = self._race
        with race.changed:
            if race.is_sealed or race.winner not in (None, self._number):
                raise _LostError("the other read of the pair was faster, or the call is over")
            race.winner = self._number
            race.is_released, race.complaint = False, "not checked"
        self._is_held = True
        return race.read.target.parts()

    def check(self) -> str | None:
        """The target's word."""
        complaint = self._race.read.target.check()
        self._race.complaint = complaint
        return complaint

    def release(self) -> None:
        """Give back the parts, if this attempt has them."""
        race = self._race
        if not self._is_held:
            return
        self._is_held = False
        try:
            race.read.target.release()
        finally:
            with race.changed:
                race.is_released = True
                race.changed.notify_all()


class _Hedged:
    def __init__(self, delay_s: float, metrics: Metrics) -> None:
        self._delay_s = delay_s
        self._metrics = metrics
        self._room = threading.BoundedSemaphore(HEDGED_CALLS_MAX)

    def call(self, verb: Verb, items: Items, deadline: Deadline, forward: Forward) -> list[Any]:
        """The results, those of reads by whichever attempt was first."""
        if verb != "read" or not items or deadline.is_past or not self._room.acquire(blocking=False):
            return forward(items, deadline)
        return _HedgedCall(items, deadline, forward, self._room, self._metrics).run(self._delay_s)

    def close(self) -> None:
        """The attempts end with the inner connector."""


class _HedgedCall:
    def __init__(
        self,
        reads: Sequence[Read],
        deadline: Deadline,
        forward: Forward,
        room: threading.BoundedSemaphore,
        metrics: Metrics,
    ) -> None:
        self._changed: Final = threading.Condition()
        self._races = [_Race(read, self._changed) for read in reads]
        self._deadline = deadline
        self._forward = forward
        self._room = room
        self._metrics = metrics
        self._running = 0
        self._error: BaseException | None = None

    def run(self, delay_s: float) -> list[Outcome]:
        """Start one attempt, a second one for what is not done in time, and wait for the first of both."""
        started = dict.fromkeys(self._races, 1)
        try:
            self._start(0, self._races)
            self._wait(started, delay_s)
            late = [race for race in self._races if race.winner is None and race.outcome(1) is None]
            if late and self._error is None and not self._deadline.is_past:
                self._metrics.add("hedge.second_reads", len(late))
                started.update(dict.fromkeys(late, 2))
                self._start(1, late)
            self._wait(started, self._deadline.remaining_s())
        finally:
            outcomes = self._end(started)
        if self._error is not None:
            raise self._error
        self._metrics.add("hedge.second_won", sum(race.winner == 1 for race in self._races))
        return outcomes

    def _start(self, number: int, races: list[_Race]) -> None:
        with self._changed:
            self._running += 1
        thread = threading.Thread(target=self._attempt, args=(number, races), daemon=True)
        thread.name = f"hedged read {number + 1}"
        try:
            thread.start()
        except RuntimeError:  # the process may have no more threads
            self._attempt(number, races)

    def _attempt(self, number: int, races: list[_Race]) -> None:
        reads = [race.read._replace(target=_RacingTarget(race, number)) for race in races]
        outcomes: list[Outcome] = []
        error: BaseException | None = None
        try:
            outcomes = self._forward(reads, self._deadline)
        except BaseException as caught:  # raised where the call is waited for
            error = caught
        with self._changed:
            self._error = self._error or error
            for race, outcome in zip(races, outcomes, strict=False):
                race.outcomes[number] = outcome
            self._running -= 1
            if self._running == 0:
                self._room.release()
            self._changed.notify_all()

    def _wait(self, started: dict[_Race, int], longest_s: float) -> None:
        def is_over() -> bool:
            return self._error is not None or all(race.outcome(n) is not None for race, n in started.items())

        with self._changed:
            self._changed.wait_for(is_over, min(longest_s, threading.TIMEOUT_MAX))

    def _end(self, started: dict[_Race, int]) -> list[Outcome]:
        """Let no attempt begin to land any more, and wait for those that do: they only copy memory."""
        with self._changed:
            for race in self._races:
                race.is_sealed = True
            self._changed.wait_for(lambda: all(r.winner is None or r.is_released for r in self._races))
            return [race.outcome(started[race]) or TIMED_OUT for race in self._races]
