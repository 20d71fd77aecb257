"""``hicache doctor URL``: does this storage do what the store needs, and if not, what would help."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlencode

from hicache_store.cli.doctor_checks import Examination, Finding, way_out_of
from hicache_store.cli.masking import is_secret, masked
from hicache_store.cli.opening import layer_urls, opened, warnings_heard
from hicache_store.cli.output import Output, printable, size_text
from hicache_store.config import StoreUrl, parse_bool, parse_url
from hicache_store.connectors.base import Capabilities, Connector
from hicache_store.connectors.registry import known_schemes
from hicache_store.connectors.wrapping import split_options, unwrapped
from hicache_store.errors import ConfigurationError, HicacheError

_MARKS: Final = {"ok": "ok", "note": "note", "warning": "WARN", "fault": "FAULT"}


def run(args: Namespace, out: Output) -> int:
    """Examine; exit code 1 when a fault was found."""
    findings: list[Finding] = []
    for finding in examine(args.url, args.timeout):
        findings.append(finding)
        out.line(f"{_MARKS[finding.grade]:<6}{finding.name:<16} {printable(finding.text)}")
        if finding.way_out:
            out.line(f"{'':<23}-> {finding.way_out}")
    is_sound = all(finding.grade != "fault" for finding in findings)
    out.document({"url": masked(args.url), "sound": is_sound, "findings": [asdict(one) for one in findings]})
    return 0 if is_sound else 1


def examine(url: str, timeout_s: float, *, may_be_read_only: bool = False) -> Iterator[Finding]:
    """The findings about a store; about each layer of a layered one."""
    yield Finding("store", "note", masked(url))
    try:
        parsed = parse_url(url)
        if _will_be_created(parsed):
            yield from _of_a_place_to_be(parsed, timeout_s)
            return
        with ExitStack() as stack:
            with warnings_heard() as heard:
                connector = stack.enter_context(opened(url, changes=True))
            yield from _settings(parsed, connector.capabilities)
            yield from _resolved(connector)
            # Layers are looked at one by one: metadata, which an examination writes, only lies in the slow
            # one, and each warns of itself.
            layers = layer_urls(parsed)
            if not layers:
                yield from (Finding("attach", "warning", text) for text in heard)
                is_asked_for = may_be_read_only or _declares_read_only(parsed)
                yield from Examination(connector, timeout_s, is_asked_for).run()
    except (HicacheError, OSError) as error:
        text = str(error).replace(url, masked(url))
        # Most configuration errors end with their own way out.
        has_way_out = isinstance(error, ConfigurationError) and ";" in text
        yield Finding("open", "fault", text, "" if has_way_out else way_out_of(text))
        return
    for name, layer_url in layers:
        is_fixed = name == "fast" and ("mode", "read-only-fast") in parsed.query
        for finding in examine(layer_url, timeout_s, may_be_read_only=is_fixed):
            yield replace(finding, name=f"{name}: {finding.name}")


def _will_be_created(parsed: StoreUrl) -> bool:
    if parsed.scheme != "file" or not parsed.location.startswith("/"):
        return False
    return not (_declares_read_only(parsed) or Path(parsed.location).exists())


def _declares_read_only(parsed: StoreUrl) -> bool:
    return any(name == "readonly" and _is_yes(value) for name, value in parsed.query)


def _is_yes(value: str) -> bool:
    try:
        return parse_bool(value)
    except ValueError:
        return False


def _of_a_place_to_be(parsed: StoreUrl, timeout_s: float) -> Iterator[Finding]:
    """What a directory that is not there yet will be able to do: a neighbour of it is examined."""
    parent = Path(parsed.location).parent
    while not parent.exists():
        parent = parent.parent
    text = f"{parsed.location} is not there yet; it will be created below {parent} by the first that attaches"
    with tempfile.TemporaryDirectory(prefix=".hicache-doctor-", dir=parent) as place:
        yield Finding("open", "note", text)
        url = f"file://{quote(place)}?{urlencode(parsed.query)}"
        for finding in examine(url, timeout_s):
            if finding.name != "store":
                yield replace(finding, text=finding.text.replace(place, parsed.location))


def _settings(parsed: StoreUrl, has: Capabilities) -> Iterator[Finding]:
    _, options = split_options(parsed, is_own=parsed.scheme in known_schemes())
    retries, breaker = options.get("retries", int), options.get("breaker", bool)
    yield Finding("settings", "note", f"retries {retries}, breaker {'on' if breaker else 'off'}")
    words = [
        "reads end at their deadline"
        if has.stop == "abandons"
        else "reads land in place and end by themselves",
        f"{has.concurrency} at a time",
        f"a request costs as much as {size_text(has.request_cost_bytes)}",
        "read-only" if has.is_read_only else "read and write",
        "evicts a chain's tail first" if has.orders_eviction else "evicts in the storage's own order",
    ]
    yield Finding("capabilities", "note", "; ".join(words))


def _resolved(connector: Connector) -> Iterator[Finding]:
    """The options in force, defaults among them, of a connector that shows its settings."""
    settings = getattr(unwrapped(connector), "settings", None)
    if not is_dataclass(settings):
        return
    names = [one.name for one in fields(settings) if not is_secret(one.name)]
    values = [(name, getattr(settings, name)) for name in names]
    text = ", ".join(_setting_text(name, value) for name, value in values if value not in (None, ""))
    left = [name.replace("_", " ") for name, value in values if value is None]
    if left:
        text += f"; left to the environment: {', '.join(left)}"
    yield Finding("resolved", "note", text)


def _setting_text(name: str, value: object) -> str:
    """A setting in words; the unit stands in its name."""
    if isinstance(value, bool):
        words = name.removeprefix("is_").replace("_", " ").replace("tls", "TLS")
        return f"{words}: {'yes' if value else 'no'}"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{name.removesuffix('_bytes').replace('_', ' ')} {size_text(value)}"
    if name.endswith("_s") and isinstance(value, (int, float)):
        return f"{name.removesuffix('_s').replace('_', ' ')} {value:g} s"
    return f"{name.replace('_', ' ')} {value}"
