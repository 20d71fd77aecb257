"""``hicache grids``: the announced chunk grids, and how a marker slot is freed."""

from __future__ import annotations

from argparse import Namespace

from hicache_store.cli.listing import known_namespaces, the_namespace
from hicache_store.cli.masking import masked
from hicache_store.cli.opening import opened
from hicache_store.cli.output import Column, Output
from hicache_store.cli.records import marker_to_retire, read_grids
from hicache_store.clock import Deadline
from hicache_store.connectors.base import Connector
from hicache_store.errors import ConfigurationError
from hicache_store.layout.grid import Grid
from hicache_store.layout.names import marker_key
from hicache_store.limits import MARKER_RECHECK_S
from hicache_store.store.grids import Slot

_COLUMNS = (
    Column("namespace"),
    Column("slot", is_number=True),
    Column("pool"),
    Column("heads cut at"),
    Column("layers cut at"),
    Column("objects a page", is_number=True),
)


def run(args: Namespace, out: Output) -> int:
    """List, or retire one."""
    with opened(args.url, changes=args.retire is not None) as connector:
        if args.retire is not None:
            return _retire(connector, args, out)
        _list(connector, args, out)
    return 0


def _list(connector: Connector, args: Namespace, out: Output) -> None:
    entries = []
    with out.table(_COLUMNS) as row:
        for namespace in known_namespaces(connector, args.namespace or ""):
            for number, slot in enumerate(read_grids(connector, namespace, Deadline.after(args.timeout))):
                if slot.is_free:
                    continue
                entries.append({"namespace": namespace, "slot": number, **_described(slot)})
                row(out.namespace(namespace), number, *_texts(slot))
    out.document({"url": masked(args.url), "grids": entries})


def _described(slot: Slot) -> dict[str, object]:
    grid = slot.grid
    if grid is None:
        return {"fault": _fault(slot)}
    cuts = {"pool": grid.pool, "head_cuts": grid.head_cuts, "layer_cuts": grid.layer_cuts}
    return {**cuts, "objects": _objects(grid)}


def _texts(slot: Slot) -> tuple[str | int, ...]:
    grid = slot.grid
    if grid is None:
        return f"({_fault(slot)})", "", "", ""
    return grid.pool, ",".join(map(str, grid.head_cuts)), ",".join(map(str, grid.layer_cuts)), _objects(grid)


def _fault(slot: Slot) -> str:
    return "damaged" if slot.is_damaged else "cannot be read"


def _objects(grid: Grid) -> int:
    return (len(grid.head_cuts) - 1) * (len(grid.layer_cuts) - 1)


def _retire(connector: Connector, args: Namespace, out: Output) -> int:
    known = [] if args.namespace else known_namespaces(connector)
    if not args.namespace and len(known) != 1:
        raise ConfigurationError(f"the store has {len(known)} namespaces; give --namespace with the slot")
    namespace = the_namespace(connector, args.namespace) if args.namespace else known[0]
    grid, version = marker_to_retire(connector, namespace, args.retire, Deadline.after(args.timeout))
    what = (
        "a damaged marker"
        if grid is None
        else f"heads {list(grid.head_cuts)} x layers {list(grid.layer_cuts)}"
    )
    question = (
        f"Slot {args.retire} of namespace {namespace} announces {what}. Once it is free, ranks that are cut "
        "otherwise do not find the objects of this grid until one of its writers announces it again (a "
        f"running one does, {MARKER_RECHECK_S:g} s after it last looked). No object is removed. Retire it?"
    )
    if not out.confirm(question, is_agreed=args.yes):
        out.note("nothing was changed")
        return 1
    key = marker_key(namespace, args.retire)
    (outcome,) = connector.delete([key], Deadline.after(args.timeout), [version])
    out.document({"namespace": namespace, "slot": args.retire, "retired": outcome.is_ok})
    if not outcome.is_ok:
        out.note(f"slot {args.retire} was not retired: {outcome.status.value} {outcome.detail}".rstrip())
        return 1
    out.line(f"slot {args.retire} is free")
    return 0
