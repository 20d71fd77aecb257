"""What one page becomes: the objects of a writer and what each rank of a reader takes of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hicache_store.errors import ConfigurationError
from hicache_store.layout.box import Box, Span, cover
from hicache_store.layout.format import ByteRange, ObjectFormat
from hicache_store.layout.grid import fixed_grid, own_grid
from hicache_store.layout.model import ModelKV, Pool
from hicache_store.layout.names import leaf_of
from hicache_store.layout.parallel import ParallelSpec, Rank, shard
from hicache_store.layout.reading import PieceRead, plan_piece


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """One object of the page; of several ``writers`` holding the same box one is elected a page."""

    name: str
    box: Box
    payload_bytes: int
    object_bytes: int
    writers: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """What one rank takes of one object."""

    object: PlannedObject
    read: PieceRead

    @property
    def ranges(self) -> list[ByteRange]:
        """The wanted bytes as contiguous ranges of the object: one, unless the piece leaves out layers."""
        read = self.read
        heads, row_bytes = len(read.piece.heads), len(read.piece.layers) * read.format.layer_bytes
        if row_bytes == read.format.head_bytes:
            return [ByteRange(read.first_byte, read.first_byte + read.wanted_bytes)]
        starts = (read.first_byte + head * read.format.head_bytes for head in range(heads))
        return [ByteRange(start, start + row_bytes) for start in starts]


@dataclass(frozen=True, slots=True)
class RankReads:
    """All that one rank reads of a page."""

    rank: Rank
    box: Box
    reads: tuple[ObjectRead, ...]

    @property
    def wanted_bytes(self) -> int:
        """Bytes of the rank's box."""
        return sum(one.read.wanted_bytes for one in self.reads)

    @property
    def fetched_bytes(self) -> int:
        """Bytes that travel."""
        return sum(one.read.fetched_bytes for one in self.reads)

    @property
    def over_read_bytes(self) -> int:
        """Payload bytes that travel and are not wanted."""
        return sum(one.read.over_read_bytes for one in self.reads)

    @property
    def trailer_bytes(self) -> int:
        """Bytes of trailers that travel."""
        return sum(one.read.trailer_bytes for one in self.reads)

    @property
    def requests(self) -> int:
        """Ranges that are fetched."""
        return sum(len(one.read.fetches) for one in self.reads)


@dataclass(frozen=True, slots=True)
class Plan:
    """One page of ``pool`` between two topologies. Objects and ranks are in the order of their boxes.

    Context-parallel ranks own whole pages, so those of equal tp and pp read alike; one stands for all.
    """

    pool: Pool
    writer: ParallelSpec
    reader: ParallelSpec
    request_cost_bytes: int
    objects: tuple[PlannedObject, ...]
    ranks: tuple[RankReads, ...]


def plan_page(
    pool: Pool,
    writer: ParallelSpec,
    reader: ParallelSpec,
    *,
    request_cost_bytes: int,
    fixed: tuple[int, int] | None = None,
) -> Plan:
    """Plan one page; ``fixed`` is a grid of (heads, layers) an object.

    Raises :class:`~hicache_store.errors.TopologyError` for a topology that cannot hold the pool, and
    :class:`~hicache_store.errors.ConfigurationError` for a grid that does not tile the writer's shards.
    """
    objects = _objects(pool, writer, fixed)
    boxes = [(index, one.box) for index, one in enumerate(objects)]
    ranks = []
    for rank, box in _shards(pool, reader):
        found = cover(box, boxes)
        assert found.is_complete, f"the writer's shards leave out {found.missing}"
        reads = tuple(
            ObjectRead(
                objects[piece.candidate],
                plan_piece(
                    pool, objects[piece.candidate].box, piece.box, request_cost_bytes=request_cost_bytes
                ),
            )
            for piece in found.pieces
        )
        ranks.append(RankReads(rank, box, reads))
    return Plan(pool, writer, reader, request_cost_bytes, objects, tuple(ranks))


def _shards(pool: Pool, spec: ParallelSpec) -> Iterator[tuple[Rank, Box]]:
    for rank in spec.ranks():
        held = shard(pool, spec, rank)
        if rank.cp == 0 and held is not None:
            yield rank, held.box


def _objects(pool: Pool, writer: ParallelSpec, fixed: tuple[int, int] | None) -> tuple[PlannedObject, ...]:
    writers: dict[Box, list[Rank]] = {}
    for rank, box in _shards(pool, writer):
        if fixed is None:
            grid = own_grid(pool, writer, box)
        else:
            grid = fixed_grid(pool, heads_per_object=fixed[0], layers_per_object=fixed[1], stage=box.layers)
        for chunk in grid.chunks_within(box):
            writers.setdefault(chunk, []).append(rank)
    return tuple(_object(pool, box, tuple(writers[box])) for box in sorted(writers))


def _object(pool: Pool, box: Box, writers: tuple[Rank, ...]) -> PlannedObject:
    shape = ObjectFormat.of(pool, box)
    return PlannedObject(leaf_of(pool.key_name, box), box, shape.payload_bytes, shape.object_bytes, writers)


def pool_of(
    *,
    layers: int,
    kv_heads: int | None,
    head_dim: int | None,
    v_head_dim: int | None,
    mla_latent: int | None,
    mla_rope: int | None,
    dtype: str,
    page_size: int,
) -> Pool:
    """The main pool of the model that the options describe; raises :class:`ConfigurationError`."""
    if mla_latent is not None:
        if mla_rope is None or head_dim is not None or v_head_dim is not None or kv_heads not in (None, 1):
            raise ConfigurationError(
                "MLA keeps one latent and one rope part a token: give --mla-latent and --mla-rope, "
                "without --head-dim, --v-head-dim or more than one of --kv-heads"
            )
        model = ModelKV.mla(num_layers=layers, latent_dim=mla_latent, rope_dim=mla_rope, dtype=dtype)
    elif kv_heads is None or head_dim is None or mla_rope is not None:
        raise ConfigurationError("give --kv-heads and --head-dim, or --mla-latent and --mla-rope")
    else:
        model = ModelKV.dense(
            num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype
        )
    return model.pool(page_size)


def topology(text: str, stage_starts: tuple[int, ...] | None) -> ParallelSpec:
    """``tp4pp2`` with the first layers of its later stages, where they are uneven."""
    spec = ParallelSpec.parse(text)
    return spec if stage_starts is None else replace(spec, stage_starts=stage_starts)


def document(plan: Plan) -> dict[str, object]:
    """The plan as JSON: sizes in bytes, ranges as ``[start, stop]``, names without the page's prefix."""
    pool = plan.pool
    return {
        "page": {
            "pool": pool.name,
            "layers": pool.num_layers,
            "heads": pool.num_heads,
            "tokens": pool.page_size,
            "parts": {part.name: part.width for part in pool.parts},
            "dtype": pool.dtype.name,
            "bytes": pool.payload_bytes(pool.page_box),
        },
        "writer": plan.writer.label,
        "reader": plan.reader.label,
        "request_cost_bytes": plan.request_cost_bytes,
        "objects": [
            {
                "name": one.name,
                "heads": _pair(one.box.heads),
                "layers": _pair(one.box.layers),
                "payload_bytes": one.payload_bytes,
                "object_bytes": one.object_bytes,
                "writers": [rank.label for rank in one.writers],
            }
            for one in plan.objects
        ],
        "reads": [_read(rank, one) for rank in plan.ranks for one in rank.reads],
        "ranks": [
            {
                "rank": rank.rank.label,
                "heads": _pair(rank.box.heads),
                "layers": _pair(rank.box.layers),
                "objects": len(rank.reads),
                "bytes": rank.wanted_bytes,
                "fetched_bytes": rank.fetched_bytes,
                "over_read_bytes": rank.over_read_bytes,
                "trailer_bytes": rank.trailer_bytes,
                "requests": rank.requests,
            }
            for rank in plan.ranks
        ],
    }


def _read(rank: RankReads, one: ObjectRead) -> dict[str, object]:
    read, ranges = one.read, one.ranges
    entry: dict[str, object] = {
        "rank": rank.rank.label,
        "object": one.object.name,
        "offset": read.first_byte,
        "bytes": read.wanted_bytes,
        "over_read_bytes": read.over_read_bytes,
        "trailer_bytes": read.trailer_bytes,
        "fetched_bytes": read.fetched_bytes,
        "fetches": [[fetch.start, fetch.stop] for fetch in read.fetches],
    }
    if len(ranges) > 1:
        entry["ranges"] = [_pair(span) for span in ranges]
    return entry


def _pair(span: Span | ByteRange) -> list[int]:
    return [span.start, span.stop]
