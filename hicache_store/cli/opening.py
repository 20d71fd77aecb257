"""Opening a store for tools, which look at it but do not take part in its upkeep."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable
from urllib.parse import urlencode

from hicache_store.cli.output import Output
from hicache_store.config import StoreUrl, parse_url
from hicache_store.connectors.base import Connector
from hicache_store.connectors.local_names import OBJECTS_DIR
from hicache_store.connectors.registry import open_connector
from hicache_store.metrics import Metrics

_READ_ONLY_SCHEMES: Final = (
    *("file", "s3", "unix"),
    *("redis", "rediss", "redis+cluster", "redis+sentinel", "valkey", "valkeys"),
)
_LOOKING: Final = dict.fromkeys(_READ_ONLY_SCHEMES, (("readonly", "1"),))
_CHANGING: Final = {"file": (("sweep", "0"),)}
"""Options a scheme is opened with. A handle that sweeps in the background would evict by the quota
of the tool's URL, which need not be that of the engines."""

_LAYERS: Final = ("fast", "slow")


@dataclass(frozen=True, slots=True)
class Layer:
    """One store of a URL, opened by itself. ``name`` is empty, or says which layer, such as ``slow``."""

    name: str
    url: str
    connector: Connector


@contextmanager
def opened(url: str, *, changes: bool = False) -> Iterator[Connector]:
    """The connector of ``url``, closed at the end; without ``changes`` one that alters nothing.

    Raises :class:`~hicache_store.errors.ConfigurationError` when it cannot be opened. A store is never
    made by looking at it, nor by removing from it.
    """
    looking = _adapted(url, _LOOKING)
    if changes and looking != url:
        open_connector(looking).close()
    connector = open_connector(_adapted(url, _CHANGING) if changes else looking)
    try:
        yield connector
    finally:
        connector.close()


@contextmanager
def opened_layers(url: str, *, changes: bool = False) -> Iterator[list[Layer]]:
    """Each store that holds objects of ``url``, the fastest first: of ``layered:`` its layers, else one.

    A tool must see every copy, where a layered connector shows the first that is good. A fast layer that
    the URL declares read-only is opened so whatever ``changes`` says. Raises as :func:`opened`.
    """
    with ExitStack() as stack:
        if parse_url(url).scheme == "layered":  # which checks what the layers by themselves do not show
            open_connector(_adapted(url, _LOOKING)).close()
        layers = [
            Layer(name, one, stack.enter_context(opened(one, changes=may_change)))
            for name, one, may_change in _stores(url, "", changes)
        ]
        yield layers


def _stores(url: str, name: str, changes: bool) -> Iterator[tuple[str, str, bool]]:
    parsed = parse_url(url)
    if parsed.scheme != "layered":
        yield name, url, changes
        return
    is_fast_fixed = ("mode", "read-only-fast") in parsed.query
    for layer, layer_url in layer_urls(parsed):
        may_change = changes and not (layer == "fast" and is_fast_fixed)
        yield from _stores(layer_url, f"{name} {layer}".lstrip(), may_change)


def layer_urls(parsed: StoreUrl) -> list[tuple[str, str]]:
    """The layers of a ``layered:`` URL by name, the fast one first; nothing for other URLs."""
    given = dict(parsed.query) if parsed.scheme == "layered" else {}
    return [(name, given[name]) for name in _LAYERS if name in given]


def _adapted(url: str, options: Mapping[str, tuple[tuple[str, str], ...]]) -> str:
    """``url``, and the URLs of its layers, with what their schemes are opened with."""
    parsed = parse_url(url)
    if parsed.scheme != "layered":
        return with_options(url, options.get(parsed.scheme, ()))
    pairs = [(name, _adapted(value, options) if name in _LAYERS else value) for name, value in parsed.query]
    return f"layered:?{urlencode(pairs)}"


def with_options(url: str, options: tuple[tuple[str, str], ...]) -> str:
    """``url`` with options it does not give itself."""
    given = {name for name, _ in parse_url(url).query}
    for name, value in options:
        if name not in given:
            url += f"{'&' if '?' in url else '?'}{name}={value}"
    return url


@contextmanager
def warnings_heard() -> Iterator[list[str]]:
    """What the package warns of meanwhile, each once: at attach, of what will surprise the operator."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() not in heard:
                heard.append(record.getMessage())

    listener, package = Listener(logging.WARNING), logging.getLogger("hicache_store")
    package.addHandler(listener)
    try:
        yield heard
    finally:
        package.removeHandler(listener)


def warn_of_no_store(url: str, out: Output) -> None:
    """Say of each directory that a ``file:`` URL names and that holds no store."""
    parsed = parse_url(url)
    for _, layer_url in layer_urls(parsed):
        warn_of_no_store(layer_url, out)
    if parsed.scheme == "file" and not os.path.isdir(os.path.join(parsed.location, OBJECTS_DIR)):
        out.note(f"{parsed.location} is no store: it has no directory {OBJECTS_DIR!r}; check the path")


@runtime_checkable
class _Counted(Protocol):
    @property
    def metrics(self) -> Metrics: ...


def storage_faults(connector: Connector) -> dict[str, int]:
    """What the connector counted as failed since it was opened, such as directories it could not read."""
    if not isinstance(connector, _Counted):
        return {}
    return {name: n for name, n in connector.metrics.snapshot().items() if n and name.endswith("_failed")}


def warn_of_faults(connector: Connector, out: Output) -> None:
    """Say beside the result that it may be short."""
    faults = storage_faults(connector)
    if faults:
        what = ", ".join(f"{name} {n}" for name, n in faults.items())
        out.note(f"parts of the store could not be read, so the result is incomplete: {what}")
