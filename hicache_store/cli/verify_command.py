"""``hicache verify``: check every byte of a store, in each of its layers, and repair it if told to."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain

from hicache_store.cli.listing import walk
from hicache_store.cli.masking import masked
from hicache_store.cli.opening import Layer, opened_layers, storage_faults, warn_of_faults, warn_of_no_store
from hicache_store.cli.output import Column, Output, Progress, count_text, size_text
from hicache_store.cli.repair import Repair, Repairer
from hicache_store.cli.scrub import Fault, Finding, Scrub
from hicache_store.connectors.base import Connector, Entry
from hicache_store.layout.names import FORMAT, META_PREFIX

_COLUMNS = (
    Column("fault"),
    Column("size", is_number=True),
    Column("repair"),
    Column("key"),
    Column("detail"),
)
_LAYER = Column("layer")


@dataclass(slots=True)
class _Account:
    """What was found in one layer, and what was done about it."""

    layer: Layer
    scrub: Scrub
    faults: Counter[Fault] = field(default_factory=Counter)
    repairs: Counter[Repair] = field(default_factory=Counter)

    def totals(self) -> dict[str, int]:
        """Its counts by name."""
        tally = asdict(self.scrub.tally)
        return {
            "bytes": tally.pop("size_bytes"),
            **tally,
            **{fault.value: self.faults[fault] for fault in Fault},
            **{repair.name.lower(): self.repairs[repair] for repair in Repair},
        }


def run(args: Namespace, out: Output) -> int:
    """Scrub; exit code 1 when a key of this package was not good, or part of the store was missed."""
    with opened_layers(args.url, changes=args.repair) as layers:
        # Metadata lies in the slowest layer.
        records = layers[-1].connector
        accounts = [_Account(one, Scrub(one.connector, args.timeout, manifests=records)) for one in layers]
        total = _total_bytes(layers, args.namespace) if out.shows_progress else None
        columns = (_LAYER, *_COLUMNS) if len(layers) > 1 else _COLUMNS
        with (
            out.table(columns) as row,
            out.array({"url": masked(args.url)}, "faults") as items,
            out.progress("verifying", total) as progress,
        ):
            for account in accounts:
                others = [one.scrub for one in accounts if one is not account] if args.repair else None
                for found, repair in _checked(account, others, args.namespace, progress):
                    row(*_cells(account.layer, found, repair))
                    items.add(_described(account.layer, found, repair))
            faults = sum((Counter(storage_faults(one.connector)) for one in layers), Counter[str]())
            items.tail = {**_summed(accounts), "storage_faults": dict(faults)}
        for account in accounts:
            _print(account, out)
            warn_of_faults(account.layer.connector, out)
            warn_of_no_store(account.layer.url, out)
    found_any = any(fault is not Fault.STRAY for one in accounts for fault in one.faults)
    return 1 if faults or found_any else 0


def _checked(
    account: _Account, others: Sequence[Scrub] | None, namespace: str | None, progress: Progress
) -> Iterator[tuple[Finding, Repair | None]]:
    """The findings about a layer, counted, each with its repair; none is tried where ``others`` is None."""
    scrub = account.scrub
    findings = scrub.run(_watched(_entries(scrub.connector, namespace), progress))
    settled: Iterator[tuple[Finding, Repair | None]] = ((found, None) for found in findings)
    if others is not None:
        settled = Repairer(scrub.connector, others, scrub.timeout_s).settle(findings)
    for found, repair in settled:
        account.faults[found.fault] += 1
        if repair is not None:
            account.repairs[repair] += 1
        yield found, repair


def _total_bytes(layers: Sequence[Layer], namespace: str | None) -> int:
    return sum(entry.size_bytes for one in layers for entry in _entries(one.connector, namespace))


def _entries(connector: Connector, namespace: str | None) -> Iterator[Entry]:
    if namespace is None:
        return walk(connector, "")
    return chain(walk(connector, f"{META_PREFIX}/{namespace}"), walk(connector, f"{FORMAT}/{namespace}"))


def _watched(entries: Iterable[Entry], progress: Progress) -> Iterator[Entry]:
    for number, entry in enumerate(entries, 1):
        yield entry
        progress.advance(entry.size_bytes, count_text(number, "key"))


def _cells(layer: Layer, found: Finding, repair: Repair | None) -> tuple[str, ...]:
    done = "no" if repair is None else repair.value
    cells = (found.fault.value, size_text(found.size_bytes), done, found.key, found.detail)
    return (layer.name, *cells) if layer.name else cells


def _described(layer: Layer, found: Finding, repair: Repair | None) -> dict[str, object]:
    return {
        **({"layer": layer.name} if layer.name else {}),
        "key": found.key,
        "fault": found.fault.value,
        "bytes": found.size_bytes,
        "detail": found.detail,
        "repair": None if repair is None else repair.value,
    }


def _summed(accounts: Sequence[_Account]) -> dict[str, object]:
    """The counts of all layers together, and of each where there are several."""
    counts: Counter[str] = Counter()
    for account in accounts:
        counts.update(account.totals())
    layers = [{"layer": one.layer.name, **one.totals()} for one in accounts]
    return {**counts, **({"layers": layers} if len(accounts) > 1 else {})}


def _print(account: _Account, out: Output) -> None:
    tally, faults = account.scrub.tally, account.faults
    name = f"{account.layer.name}: " if account.layer.name else ""
    out.line(
        f"{name}{count_text(tally.objects, 'object')}, {size_text(tally.size_bytes)}: {tally.good:,} good, "
        + ", ".join(f"{faults[fault]:,} {fault.value.replace('_', ' ')}" for fault in Fault)
    )
    if tally.gone:
        out.line(f"{name}{count_text(tally.gone, 'object')} went or changed meanwhile")
    for repair, number in account.repairs.items():
        out.line(f"{name}{count_text(number, 'object')} {repair.value}")
