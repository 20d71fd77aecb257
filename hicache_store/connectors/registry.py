"""From a store URL to an open connector.

The schemes of this package are known by a table, so that a source tree works without being
installed; any other distribution adds one through the entry-point group ``hicache_store.connectors``,
whose name is the scheme and whose value is ``module:connect``, a callable from a
:class:`~hicache_store.config.StoreUrl` to a :class:`~hicache_store.connectors.base.Connector`.
A connector's module, and with it any SDK, is imported only when its scheme is opened.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Final, TypeAlias

from hicache_store.config import StoreUrl, parse_url
from hicache_store.connectors.base import Connector
from hicache_store.connectors.wrapping import split_options, wrapped
from hicache_store.errors import ConfigurationError

Factory: TypeAlias = Callable[[StoreUrl], Connector]

GROUP: Final = "hicache_store.connectors"

_BUILT_IN: Final = {
    scheme: EntryPoint(scheme, value, GROUP)
    for scheme, value in {
        "memory": "hicache_store.connectors.memory:connect",
        "file": "hicache_store.connectors.local:connect",
        "layered": "hicache_store.connectors.layered:connect",
        "s3": "hicache_store.connectors.s3:connect",
        **dict.fromkeys(
            ("redis", "rediss", "redis+cluster", "redis+sentinel", "unix", "valkey", "valkeys"),
            "hicache_store.connectors.redis_connector:connect",
        ),
    }.items()
}


def known_schemes() -> list[str]:
    """The schemes that :func:`open_connector` takes in this environment, sorted."""
    return sorted({*_BUILT_IN, *entry_points(group=GROUP).names})


def open_connector(url: str) -> Connector:
    """Open the connector of ``url``.

    The options of :data:`~hicache_store.connectors.wrapping.OPTIONS` are taken on any scheme. Raises
    :class:`ConfigurationError` when the scheme is unknown, when what it needs is not installed, or
    when the connector refuses an option.
    """
    parsed = parse_url(url)
    factory = _load(_find(parsed.scheme))
    parsed, options = split_options(parsed, is_own=parsed.scheme in _BUILT_IN)
    return wrapped(factory(parsed), options)


def _find(scheme: str) -> EntryPoint:
    if scheme in _BUILT_IN:
        return _BUILT_IN[scheme]
    found = {point.value: point for point in entry_points(group=GROUP, name=scheme)}
    if not found:
        known = known_schemes()
        close = difflib.get_close_matches(scheme, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigurationError(f"no connector for scheme {scheme!r}; {hint}known: {', '.join(known)}")
    if len(found) > 1:
        givers = ", ".join(f"{point.value} of {_distribution(point)}" for point in found.values())
        raise ConfigurationError(f"scheme {scheme!r} is claimed by {givers}; uninstall all but one")
    return next(iter(found.values()))


def _load(point: EntryPoint) -> Factory:
    try:
        factory = point.load()
    except ModuleNotFoundError as error:
        message = f"scheme {point.name!r} needs the module {error.name!r}, which is not installed"
        extra = _extra(point)
        if extra is not None:
            message += f"; install '{_distribution(point)}[{extra}]'"
        raise ConfigurationError(message) from error
    except (ImportError, AttributeError) as error:
        message = f"the connector of scheme {point.name!r}, {point.value}, does not load: {error}"
        raise ConfigurationError(message) from error
    if not callable(factory):
        raise ConfigurationError(f"the connector of scheme {point.name!r}, {point.value}, is not callable")
    return factory  # type: ignore[no-any-return]


def _distribution(point: EntryPoint) -> str:
    return "hicache-store" if point.dist is None else point.dist.name


def _extra(point: EntryPoint) -> str | None:
    """The extra that brings what a scheme needs: the one it names, else the one named like it."""
    if point.extras:
        return point.extras[0]
    provided = [] if point.dist is None else point.dist.metadata.get_all("Provides-Extra") or []
    return point.name if point.name in provided else None
