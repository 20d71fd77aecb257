"""What may go wrong with an item of a call, and plans that say with which.

The plans are deterministic whatever the order of threads: a fault depends on the operation, the key
and how often that pair was seen, or on the index of the call, never on time.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Operation: TypeAlias = Literal["sizes", "read", "write", "delete", "touch"]


@dataclass(frozen=True, slots=True)
class Fail:
    """The item fails after ``share`` of its bytes: a target is filled so far, a source read so far.

    Nothing becomes visible and no check runs.
    """

    detail: str = "injected failure"
    share: float = 0.6


@dataclass(frozen=True, slots=True)
class TimeOut:
    """The item times out, untouched; with ``lands``, a change is made all the same, as servers do."""

    lands: bool = False


@dataclass(frozen=True, slots=True)
class Vanish:
    """Sizes and reads find nothing; a write, delete or touch is acknowledged and lost."""


@dataclass(frozen=True, slots=True)
class FlipBit:
    """One bit of the object, modulo its length, is wrong in what a write stores or a read delivers."""

    bit: int


@dataclass(frozen=True, slots=True)
class Truncate:
    """The object ends after ``size_bytes``: sizes and reads see that, a write stores no more."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class ServeOther:
    """A read gets the bytes of ``key``, an object of equal size."""

    key: str


@dataclass(frozen=True, slots=True)
class Hold:
    """The item waits for ``until``, and says in ``entered`` that it does.

    At the deadline it times out, untouched. With ``ignores_deadline`` it waits on, as a hung system
    call does, and the call with it; after that it times out if the deadline has passed.
    """

    until: threading.Event
    entered: threading.Event = field(default_factory=threading.Event)
    ignores_deadline: bool = False


Fault: TypeAlias = Fail | TimeOut | Vanish | FlipBit | Truncate | ServeOther | Hold


@dataclass(frozen=True, slots=True)
class Attempt:
    """One item that a plan judges."""

    operation: Operation
    key: str
    call: int
    """Which call of this operation it is part of, from 0."""
    nth: int
    """How often this operation met this key before."""


Plan: TypeAlias = Callable[[Attempt], Fault | None]


def no_faults(attempt: Attempt) -> Fault | None:
    """The plan that lets everything pass."""
    del attempt
    return None


def on_keys(
    matches: Callable[[str], bool],
    fault: Fault,
    operations: Sequence[Operation] = ("read",),
    times: int | None = None,
) -> Plan:
    """``fault`` for the first ``times`` attempts, or all, of each key that matches."""

    def plan(attempt: Attempt) -> Fault | None:
        is_due = times is None or attempt.nth < times
        return fault if attempt.operation in operations and is_due and matches(attempt.key) else None

    return plan


def on_calls(operation: Operation, faults: Mapping[int, Fault]) -> Plan:
    """The fault of each call by its index, for all its items."""
    return lambda attempt: faults.get(attempt.call) if attempt.operation == operation else None


def seeded(seed: int, rates: Sequence[tuple[Operation, float, Fault]]) -> Plan:
    """Each fault with its rate, drawn from a digest of seed, operation, key and repetition."""

    def plan(attempt: Attempt) -> Fault | None:
        text = f"{seed}/{attempt.operation}/{attempt.nth}/{attempt.key}".encode("utf-8", "surrogatepass")
        draw = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2**64
        for operation, rate, fault in rates:
            if operation == attempt.operation:
                if draw < rate:
                    return fault
                draw -= rate
        return None

    return plan


def first_of(*plans: Plan) -> Plan:
    """The first plan with a fault decides."""

    def plan(attempt: Attempt) -> Fault | None:
        return next((fault for one in plans if (fault := one(attempt)) is not None), None)

    return plan
