"""Connectors around connectors: one class that forwards, and policies that say how.

A :class:`WrappedConnector` hands each call of its inner connector to a :class:`Policy`, which may
forward all items, some of them, or the same ones again. A target or a source may thus be taken through
its whole protocol more than once, ``release`` always before the next ``parts`` or ``buffers``.

The options of :data:`OPTIONS` may stand in the URL of any scheme; :func:`split_options` takes them
out before the connector reads the rest, and :func:`wrapped` applies them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

from hicache_store.clock import Deadline
from hicache_store.config import (
    Option,
    OptionValues,
    StoreUrl,
    duration_option,
    int_option,
    parse_bool,
    read_options,
    size_option,
)
from hicache_store.connectors.base import Capabilities, Connector, Entry, Lister, Outcome, Read, Touch, Write
from hicache_store.errors import HandleError
from hicache_store.limits import IN_FLIGHT_MAX, RETRIES_MAX
from hicache_store.metrics import Metrics

Verb: TypeAlias = Literal["sizes", "read", "write", "delete", "touch"]
Items: TypeAlias = Sequence[Any]
"""Keys for ``sizes``, pairs of key and version for ``delete``, else the items of the verb."""
Forward: TypeAlias = Callable[[Items, Deadline], list[Any]]
"""The call of the inner connector: items and deadline to results, in the order of the items."""


class Policy(Protocol):
    """What a wrapper does with a call."""

    def call(self, verb: Verb, items: Items, deadline: Deadline, forward: Forward) -> list[Any]:
        """The results of ``items``, got by any number of calls of ``forward``."""
        ...

    def close(self) -> None:
        """Wake whoever waits in :meth:`call`; the inner connector is closed next."""
        ...


@runtime_checkable
class Counted(Protocol):
    """A connector that counts."""

    @property
    def metrics(self) -> Metrics:
        """Its counters."""
        ...


def metrics_of(connector: Connector) -> Metrics:
    """The counters of ``connector``, or fresh ones where it has none."""
    return connector.metrics if isinstance(connector, Counted) else Metrics()


class WrappedConnector:
    """``inner`` under ``policy``; owns ``inner``. In a forked child every call raises HandleError."""

    def __init__(self, inner: Connector, policy: Policy, metrics: Metrics) -> None:
        self.inner: Final = inner
        self.metrics: Final = metrics
        self._policy = policy
        self._pid = os.getpid()
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        """Those of the inner connector."""
        return self.inner.capabilities

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        """Length of each object."""
        return self._call("sizes", keys, deadline, self.inner.sizes)

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        """Fetch each object's parts into its target."""
        return self._call("read", reads, deadline, self.inner.read_into)

    def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        """Store each object."""
        return self._call("write", writes, deadline, self.inner.write_from)

    def delete(
        self, keys: Sequence[str], deadline: Deadline, versions: Sequence[str | None] | None = None
    ) -> list[Outcome]:
        """Remove objects."""

        def forward(pairs: Items, until: Deadline) -> list[Outcome]:
            return self.inner.delete([key for key, _ in pairs], until, [version for _, version in pairs])

        wanted = [None] * len(keys) if versions is None else versions
        return self._call("delete", list(zip(keys, wanted, strict=True)), deadline, forward)

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        """Mark objects as used now."""
        return self._call("touch", touches, deadline, self.inner.touch)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """What the inner connector holds."""
        return self.inner.scan(prefix)

    def listing(self, prefix: str, deadline: Deadline) -> list[str] | None:
        """What the inner connector says; ``None`` where it cannot tell by one request."""
        self._require_usable()
        return self.inner.listing(prefix, deadline) if isinstance(self.inner, Lister) else None

    def close(self) -> None:
        """Close the inner connector; idempotent."""
        if os.getpid() == self._pid:
            self._is_closed = True
            self._policy.close()
        self.inner.close()

    def _call(self, verb: Verb, items: Items, deadline: Deadline, forward: Forward) -> list[Any]:
        self._require_usable()
        return self._policy.call(verb, items, deadline, forward)

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise HandleError(
                f"a {self.capabilities.scheme} connector was opened by process {self._pid} and is used in "
                f"its forked child {os.getpid()}; open the store again in the child"
            )
        if self._is_closed:  # a policy may answer without asking the inner connector
            raise HandleError(f"the {self.capabilities.scheme} connector is closed; open the store again")


def unwrapped(connector: Connector) -> Connector:
    """The connector inside all wrappers, for what the protocol does not cover."""
    while isinstance(connector, WrappedConnector):
        connector = connector.inner
    return connector


# -- options -----------------------------------------------------------------------------------

OPTIONS: Final = (
    int_option("retries", None, 0, RETRIES_MAX),
    Option("breaker", parse_bool, "1 or 0"),
    duration_option("hedge", minimum=0.001),
    int_option("in_flight", None, 1, IN_FLIGHT_MAX),
    size_option("in_flight_bytes", minimum=1),
    Option("metered", parse_bool, "1 or 0"),
)
"""Options of every scheme."""

_NAMES: Final = frozenset(option.name for option in OPTIONS)
_LOCAL: Final = frozenset(("memory", "file", "layered"))
_DEFAULT_RETRIES: Final = 2


def split_options(url: StoreUrl, is_own: bool) -> tuple[StoreUrl, OptionValues]:
    """``url`` without the options of this module, and these.

    ``is_own`` says that the scheme is one of this package: those that go over a network retry and
    have a breaker by default. Raises :class:`ConfigurationError` for an option that is not right.
    """
    mine = [pair for pair in url.query if pair[0] in _NAMES]
    rest = tuple(pair for pair in url.query if pair[0] not in _NAMES)
    is_remote = is_own and url.scheme not in _LOCAL
    defaults = {"retries": _DEFAULT_RETRIES if is_remote else 0, "breaker": is_remote, "metered": False}
    known = [replace(option, default=defaults.get(option.name)) for option in OPTIONS]
    return replace(url, query=rest), read_options(url.scheme, mine, known)


def wrapped(connector: Connector, options: OptionValues) -> Connector:
    """``connector`` with what ``options`` ask for; as it is when they ask for nothing.

    From the inside out: limits, hedging, retries, breaker, metering: retries count against the limits,
    and the breaker sees what is left after them. Raises :class:`ConfigurationError`, with the connector
    closed, when it cannot be hedged.
    """
    from hicache_store.connectors.breaker import breaking  # noqa: PLC0415 (they build on this module)
    from hicache_store.connectors.limited import hedged, limited  # noqa: PLC0415
    from hicache_store.connectors.metered import metered  # noqa: PLC0415
    from hicache_store.connectors.retrying import retrying  # noqa: PLC0415

    items, n_bytes = options.optional("in_flight", int), options.optional("in_flight_bytes", int)
    hedge_s, retries = options.optional("hedge", float), options.get("retries", int)
    try:
        if items is not None or n_bytes is not None:
            connector = limited(connector, items or IN_FLIGHT_MAX, n_bytes)
        if hedge_s is not None:
            connector = hedged(connector, hedge_s)
        if retries:
            connector = retrying(connector, retries)
        if options.get("breaker", bool):
            connector = breaking(connector)
        if options.get("metered", bool):
            connector = metered(connector)
    except BaseException:
        connector.close()
        raise
    return connector
