"""Whole topologies of ranks over one place: write with one, read with another, judge by the oracle."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hicache_store.clock import Deadline
from hicache_store.connectors.base import META_PREFIX, BufferSource, Connector, Write
from hicache_store.connectors.memory import MemoryConnector, MemoryTable
from hicache_store.connectors.registry import open_connector
from hicache_store.layout.box import Box
from hicache_store.layout.hashing import page_hashes
from hicache_store.layout.layouts import Layout
from hicache_store.layout.model import ModelKV, Pool
from hicache_store.layout.namespace import KVFacts, Namespace, namespace
from hicache_store.layout.parallel import ParallelSpec, Rank, shard
from hicache_store.layout.plan import Placement, placement_of_slot
from hicache_store.layout.weights import WeightsIdentity
from hicache_store.store import BackupReport, PageState, PoolBuffers, RestoreReport, Store
from hicache_store.testing.engine_forms import EngineForm
from hicache_store.testing.oracle import Dense, EnginePool, dense_page

PATIENCE_S = 60.0
"""How long a thread or call may take before it counts as hung."""

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rope_theta": 10_000.0,
}


def tiny(heads: int = 4, layers: int = 4, width: int = 2, dtype: str = "bf16", v_width: int = 0) -> ModelKV:
    """A model small enough to be copied thousands of times."""
    return ModelKV.dense(
        num_layers=layers, num_kv_heads=heads, head_dim=width, v_head_dim=v_width or width, dtype=dtype
    )


@functools.lru_cache(maxsize=256)
def namespace_of(pool: Pool, tenant: str = "t", weights: str = "w") -> Namespace:
    """A namespace that speaks of ``pool``, its layers all being target layers."""
    facts = KVFacts(
        num_kv_heads=pool.num_heads,
        parts=tuple((part.name, part.width) for part in pool.parts),
        dtype=pool.dtype.name,
        attention="mla" if len(pool.parts) == 1 else "gqa",
        page_size=pool.page_size,
        num_layers=pool.num_layers,
    )
    return namespace(CONFIG, WeightsIdentity.operator(weights), facts, tenant)


def chain(count: int, page_size: int = 1, seed: bytes | None = None) -> list[str]:
    """The hashes of a chain of ``count`` pages."""
    return page_hashes(range(count * page_size), page_size, seed=seed)


def spec_of(topology: ParallelSpec | str) -> ParallelSpec:
    """The spec, from its label if need be."""
    return ParallelSpec.parse(topology) if isinstance(topology, str) else topology


@dataclass(slots=True)
class Place:
    """Storage in memory that outlives its handles, and what a test wants around each handle."""

    table: MemoryTable = field(default_factory=MemoryTable)
    wrap: Callable[[Connector], Connector] = lambda connector: connector

    def open(self) -> Connector:
        """One more handle."""
        return self.wrap(MemoryConnector(self.table))

    def objects(self) -> dict[str, bytes]:
        """Every object but metadata, by key."""
        return {key: data for key, data in self.contents().items() if not key.startswith(META_PREFIX)}

    def meta(self) -> dict[str, bytes]:
        """Manifests and markers by key."""
        return {key: data for key, data in self.contents().items() if key.startswith(META_PREFIX)}

    def contents(self) -> dict[str, bytes]:
        """Everything, by key."""
        found = {entry.key: self.table.find(entry.key) for entry in self.table.entries("")}
        return {key: one[0] for key, one in found.items() if one is not None}

    def put(self, key: str, data: bytes) -> None:
        """Overwrite whatever is there."""
        self.remove(key)
        (outcome,) = MemoryConnector(self.table).write_from(
            [Write(key, len(data), BufferSource.of(data))], Deadline.after(PATIENCE_S)
        )
        assert outcome.is_ok, outcome

    def remove(self, *keys: str) -> None:
        """Drop objects."""
        for key in keys:
            self.table.remove(key, None)


@dataclass(slots=True)
class FilePlace:
    """Storage in files below ``root``."""

    root: Path
    options: str = ""

    def open(self) -> Connector:
        """One more handle, with a quota and without background sweeps."""
        return open_connector(f"file://{self.root}?sweep=0&quota=1GiB{self.options}")


@functools.lru_cache(maxsize=1024)
def layout_of(
    pool: Pool, box: Box, form: str, slots: int, slot_tokens: int | None, head_group: int | None
) -> Layout:
    """What :meth:`EnginePool.layout` says of such arrays; the same for all of one shape."""
    return EnginePool(pool, box, form, slots=slots, slot_tokens=slot_tokens, head_group=head_group).layout()


@functools.lru_cache(maxsize=4096)
def page_values(pool: Pool, page: int, seed: int = 0) -> Dense:
    """The values of one page."""
    return dense_page(pool, page, seed)


def scattered(count: int, page_size: int, spare: int = 1) -> tuple[int, list[Placement]]:
    """A number of slots, and ``count`` whole-slot placements in no order of theirs."""
    slots = count + spare
    order = sorted(range(slots), key=lambda slot: hashlib.sha256(b"%d" % slot).digest())
    return slots, [placement_of_slot(slot, page_size) for slot in order[:count]]


@dataclass(slots=True)
class RankRig:
    """One rank: real arrays, an attached store, and where its pages lie."""

    store: Store
    arrays: EnginePool
    placements: list[Placement]
    box: Box
    pool: Pool

    def __enter__(self) -> RankRig:
        return self

    def __exit__(self, *exc: object) -> None:
        self.store.close()

    def fill(self, pages: Iterable[int], seed: int = 0) -> None:
        """Put the values of ``pages`` where the placements say."""
        for page, placement in zip(pages, self.placements, strict=False):
            self.arrays.write_page(placement, page_values(self.pool, page, seed))

    def backup(self, hashes: Sequence[str], **options: object) -> BackupReport:
        """Back the first pages up."""
        return self.store.backup(hashes, self.placements[: len(hashes)], pool=self.pool.name, **options)

    def restore(self, hashes: Sequence[str], **options: object) -> RestoreReport:
        """Poison everything, then restore."""
        self.arrays.poison()
        return self.store.restore(hashes, self.placements[: len(hashes)], pool=self.pool.name, **options)

    def assert_holds(self, pages: Sequence[int], seed: int = 0) -> None:
        """The first pages hold exactly the values of ``pages``."""
        for page, placement in zip(pages, self.placements, strict=False):
            wanted = page_values(self.pool, page, seed).part_of(self.box)
            assert self.arrays.read_page(placement).equals(wanted), (page, self.box)

    def assert_untouched_beside(self, count: int) -> None:
        """Nothing but the first ``count`` pages was written."""
        assert self.arrays.is_poison_outside(self.placements[:count]), self.box


def attach_rank(
    place: Place | FilePlace,
    pool: Pool,
    spec: ParallelSpec | str,
    rank: Rank,
    *,
    pages: int = 1,
    form: EngineForm | str = "layer_first",
    placements: tuple[int, list[Placement]] | None = None,
    slot_tokens: int | None = None,
    head_group: int | None = None,
    ns: Namespace | None = None,
    **options: object,
) -> RankRig:
    """Attach one rank of a topology with poisoned arrays."""
    spec = spec_of(spec)
    held = shard(pool, spec, rank, options.get("model_layers"))
    assert held is not None
    slots, where = scattered(pages, pool.page_size) if placements is None else placements
    arrays = EnginePool(pool, held.box, form, slots=slots, slot_tokens=slot_tokens, head_group=head_group)
    layout = layout_of(pool, held.box, arrays.form.label, slots, slot_tokens, head_group)
    buffers = [PoolBuffers(pool, layout, arrays.buffers())]
    store = Store.attach(place.open(), ns or namespace_of(pool), buffers, spec, rank, **options)
    return RankRig(store, arrays, where, held.box, pool)


def write_pages(
    place: Place | FilePlace,
    pool: Pool,
    spec: ParallelSpec | str,
    hashes: Sequence[str],
    *,
    pages: Sequence[int] | None = None,
    seed: int = 0,
    ranks: Iterable[Rank] | None = None,
    **options: object,
) -> list[BackupReport]:
    """Back pages up from every rank (or those given); every page is stored, present or another's."""
    spec = spec_of(spec)
    numbers = range(len(hashes)) if pages is None else pages
    reports = []
    for rank in spec.ranks() if ranks is None else ranks:
        with attach_rank(place, pool, spec, rank, pages=len(hashes), **options) as rig:
            rig.fill(numbers, seed)
            before = rig.arrays.snapshot()
            report = rig.backup(hashes)
            assert rig.arrays.snapshot() == before, "a backup changed what it backed up"
            good = (PageState.STORED, PageState.PRESENT, PageState.NOT_ELECTED)
            assert all(state in good for state in report.states), (rank, report)
            reports.append(report)
    return reports


def distinct_ranks(pool: Pool, spec: ParallelSpec | str) -> list[Rank]:
    """One rank for each different box."""
    spec = spec_of(spec)
    boxes: dict[Box, Rank] = {}
    for rank in spec.ranks():
        held = shard(pool, spec, rank)
        if held is not None:
            boxes.setdefault(held.box, rank)
    return list(boxes.values())


def read_pages(
    place: Place | FilePlace,
    pool: Pool,
    spec: ParallelSpec | str,
    hashes: Sequence[str],
    *,
    pages: Sequence[int] | None = None,
    seed: int = 0,
    ranks: Iterable[Rank] | None = None,
    **options: object,
) -> int:
    """Restore on every rank (or those given), all pages, bit for bit; how many ranks did."""
    numbers = list(range(len(hashes))) if pages is None else list(pages)
    done = 0
    for rank in spec_of(spec).ranks() if ranks is None else ranks:
        with attach_rank(place, pool, spec, rank, pages=len(hashes), **options) as rig:
            report = rig.restore(hashes)
            assert report.pages == len(hashes), (spec_of(spec).label, rank, report)
            assert report.end is None
            rig.assert_holds(numbers, seed)
            rig.assert_untouched_beside(len(hashes))
            done += 1
    return done
