"""``hicache gc``: have the storage clean itself up, by the options of the URL, or by a rule of its server."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Protocol, runtime_checkable

from hicache_store.cli.masking import masked
from hicache_store.cli.opening import Layer, opened_layers, warnings_heard
from hicache_store.cli.output import Output, count_text, size_text
from hicache_store.clock import Deadline
from hicache_store.config import parse_url
from hicache_store.connectors.local_sweep import SweepReport
from hicache_store.connectors.wrapping import unwrapped
from hicache_store.errors import ConfigurationError, HicacheError


@runtime_checkable
class _Sweeps(Protocol):
    def sweep(self, deadline: Deadline) -> SweepReport:
        """Clean up."""
        ...


@runtime_checkable
class _Expires(Protocol):
    def set_expiry(self, days: int | None, deadline: Deadline) -> None:
        """Have the server remove objects so long after they were written; ``None``: no longer."""
        ...


def run(args: Namespace, out: Output) -> int:
    """Sweep, or set the rule; exit code 1 when a sweep could not finish."""
    with warnings_heard() as heard, opened_layers(args.url, changes=True) as layers:
        at_attach = tuple(heard)
        for text in at_attach:
            out.note(text)
        if args.lifecycle is not None:
            done = _set_lifecycle(layers, args.lifecycle, args.timeout, out)
        else:
            done = [_clean(layer, args.timeout, out) for layer in layers]
        for text in heard[len(at_attach) :]:  # such as the quota of a store that was first counted now
            out.note(text)
    shown = masked(args.url)
    if len(layers) > 1:
        out.document({"url": shown, "layers": done})
    else:
        out.document({**done[0], "url": shown})
    return 1 if any(one.get("is_complete") is False for one in done) else 0


# -- sweeping ----------------------------------------------------------------------------------


def _clean(layer: Layer, timeout_s: float, out: Output) -> dict[str, object]:
    connector = unwrapped(layer.connector)
    if layer.name:
        out.line(f"{layer.name}: {masked(layer.url)}")
    if not isinstance(connector, _Sweeps):
        text = _upkeep_of(layer)
        out.line(text)
        return {**_named(layer), "swept": False, "upkeep": text}
    if connector.capabilities.is_read_only:
        text = "the store can only be read, so that nothing was removed; use an account that may write"
        out.note(text)
        return {**_named(layer), "swept": False, "is_complete": False, "upkeep": text}
    with out.progress("sweeping"):
        report = connector.sweep(Deadline.after(timeout_s))
    _print(report, out)
    if not report.is_complete:
        out.note(f"the sweep is incomplete: {report.reason or 'unknown reason'}")
    return {**_named(layer), "swept": True, **asdict(report)}


def _named(layer: Layer) -> dict[str, object]:
    url = masked(layer.url)
    return {"layer": layer.name, "url": url} if layer.name else {"url": url}


def _upkeep_of(layer: Layer) -> str:
    """Who removes objects where there is nothing to sweep."""
    scheme = unwrapped(layer.connector).capabilities.scheme
    match scheme:
        case "memory":
            return "memory storage keeps to quota and ttl as it is used, and ends with its process"
        case "redis":
            ttl = dict(parse_url(layer.url).query).get("ttl")
            by_age = f"objects not used for {ttl}" if ttl else "none by age (the URL gives no ttl)"
            return f"the Redis server removes {by_age}, and others by its maxmemory-policy once it is full"
        case "s3":
            return (
                "an S3 server removes objects only by a lifecycle rule of its bucket; "
                "--lifecycle 30d sets one, by the time of writing"
            )
        case _:
            return f"{scheme} storage has no upkeep that could be done from here"


def _print(report: SweepReport, out: Output) -> None:
    for label, number, n_bytes in (
        ("expired", report.expired_objects, report.expired_bytes),
        ("evicted", report.evicted_objects, report.evicted_bytes),
        ("left", report.objects, report.bytes),
    ):
        out.line(f"{label:<10} {count_text(number, 'object')}, {size_text(n_bytes)}")
    out.line(f"{'removed':<10} {count_text(report.temp_files_removed, 'temporary file')}")
    if report.strays:
        out.line(f"{'strays':<10} {count_text(report.strays, 'entry', 'entries')} of others, left alone")
    if report.failures:
        out.line(f"{'failures':<10} {count_text(report.failures, 'system call')}")


# -- rules of a server -------------------------------------------------------------------------


def _set_lifecycle(
    layers: Sequence[Layer], days: int, timeout_s: float, out: Output
) -> list[dict[str, object]]:
    """Set the rule of every layer that can have one; raises :class:`ConfigurationError` when none can."""
    able = [(layer, one) for layer in layers if isinstance(one := unwrapped(layer.connector), _Expires)]
    if not able:
        schemes = " and ".join(unwrapped(layer.connector).capabilities.scheme for layer in layers)
        raise ConfigurationError(
            f"{schemes} storage has no lifecycle rules; they are for s3://. `hicache gc` without --lifecycle "
            "does, or says, what there is instead"
        )
    for layer, connector in able:
        place = masked(layer.url)
        if layer.connector.capabilities.is_read_only:
            raise ConfigurationError(f"{place} can only be read; use a handle and an account that may write")
        try:
            connector.set_expiry(days or None, Deadline.after(timeout_s))
        except HicacheError as error:
            raise ConfigurationError(
                f"the lifecycle rule of {place} was not changed: {error}; let this account do "
                "s3:GetLifecycleConfiguration and s3:PutLifecycleConfiguration, or let tools of the server "
                "expire what lies below v1/ of the store's prefix, and nothing else"
            ) from error
        what = f"{count_text(days, 'day')} after they were written" if days else "by no rule of this store"
        out.line(f"{place}: the server removes objects {what}; manifests and markers stay")
    changed = [layer.name for layer, _ in able]
    rule = {"lifecycle_days": days or None}
    return [{**_named(layer), **(rule if layer.name in changed else {})} for layer in layers]
