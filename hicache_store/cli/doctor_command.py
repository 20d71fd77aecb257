"""``hicache doctor URL``: does this storage do what the store needs, and if not, what would help."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Final

from hicache_store.cli.doctor_checks import Examination, Finding, way_out_of
from hicache_store.cli.masking import is_secret, masked
from hicache_store.cli.opening import layer_urls, opened, warnings_heard
from hicache_store.cli.output import Output, printable, size_text
from hicache_store.config import StoreUrl, parse_url
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


def examine(url: str, timeout_s: float) -> Iterator[Finding]:
    """The findings about a store; about each layer of a layered one."""
    yield Finding("store", "note", masked(url))
    try:
        parsed = parse_url(url)
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
                yield from Examination(connector, timeout_s).run()
    except (HicacheError, OSError) as error:
        text = str(error).replace(url, masked(url))
        # A configuration error ends with its own way out.
        advice = "" if isinstance(error, ConfigurationError) else way_out_of(text)
        yield Finding("open", "fault", text, advice)
        return
    for name, layer_url in layers:
        for finding in examine(layer_url, timeout_s):
            yield replace(finding, name=f"{name}: {finding.name}")


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
    values = [(name.replace("_", " "), getattr(settings, name)) for name in names]
    text = ", ".join(f"{name} {value}" for name, value in values if value not in (None, ""))
    left = [name for name, value in values if value is None]
    if left:
        text += f"; left to the environment: {', '.join(left)}"
    yield Finding("resolved", "note", text)
