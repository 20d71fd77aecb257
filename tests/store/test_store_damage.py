"""A damaged object is a miss and is put right; never a hit with a wrong byte."""

from __future__ import annotations

import dataclasses
import random
import struct
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
import xxhash
from store_rig import Place, RankRig, attach_rank, chain, namespace_of, tiny, write_pages

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Connector, Outcome, Read
from hicache_store.layout.format import VERSION
from hicache_store.layout.model import ModelKV, Pool
from hicache_store.layout.parallel import Rank
from hicache_store.store import EndReason, PageState
from hicache_store.testing.faults import CountingConnector, Fail, FaultyConnector, FlipBit, on_keys

LARGE = ModelKV.dense(num_layers=8, num_kv_heads=2, head_dim=512, dtype="bf16").pool(64)
"""2 MiB of payload in 16 cells of 128 KiB."""


class Bench:
    """One stored page, its object, and readers that take it whole or in part."""

    def __init__(self, pool: Pool, readers: Iterable[tuple[str, Rank]], form: str = "layer_first") -> None:
        self.pool = pool
        self.place = Place()
        self.hashes = chain(1, pool.page_size)
        write_pages(self.place, pool, "tp1pp1", self.hashes)
        ((self.key, self.sound),) = self.place.objects().items()
        self.readers = [attach_rank(self.place, pool, spec, rank, form=form) for spec, rank in readers]

    def close(self) -> None:
        for reader in self.readers:
            reader.store.close()

    def try_object(self, data: bytes) -> list[EndReason | None]:
        """What every reader makes of ``data`` in the object's place; a hit must be exact."""
        found = []
        for reader in self.readers:
            self.place.put(self.key, data)
            report = reader.restore(self.hashes)
            if report.pages:
                reader.assert_holds([0])
            found.append(None if report.end is None else report.end.reason)
        return found


WHOLE = ("tp1pp1", Rank())
HEADS = ("tp2pp1", Rank(tp=1))
LAYERS = ("tp1pp4", Rank(pp=2))
CORNER = ("tp2pp4", Rank(tp=1, pp=1))


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_every_bit_of_a_small_object(tally: Counter[str]) -> None:
    bench = Bench(tiny(2, 4, 4).pool(4), [WHOLE, HEADS, CORNER])
    assert 512 < len(bench.sound) <= 4096
    for bit in range(8 * len(bench.sound)):
        found = bench.try_object(flipped(bench.sound, bit))
        assert found[0] is EndReason.CORRUPT, (bit, found)
        # A part of the object is sound when the flipped bit is another part's.
        assert set(found) <= {EndReason.CORRUPT, None}
        tally["bits of a small object flipped, read whole, by head and by head and layer"] += 1
    assert bench.try_object(bench.sound) == [None] * 3
    bench.close()


@pytest.mark.soak
def test_every_bit_of_an_object_of_4_kib(tally: Counter[str]) -> None:
    bench = Bench(tiny(2, 8, 31).pool(2), [WHOLE, HEADS, LAYERS])
    assert 4000 < len(bench.sound) <= 4096
    for bit in range(8 * len(bench.sound)):
        assert bench.try_object(flipped(bench.sound, bit))[0] is EndReason.CORRUPT
        tally["bits of a 4 KiB object flipped, read whole, by head and by layer"] += 1
    bench.close()


@pytest.mark.parametrize("form", ["layer_first", "canonical"])
def test_random_bits_of_an_object_of_2_mib(form: str, tally: Counter[str]) -> None:
    """Read whole, through staging and straight into place: every bit counts."""
    bench = Bench(LARGE, [WHOLE], form)
    (reader,) = bench.readers
    assert len(bench.sound) > 2 << 20
    assert reader.restore(bench.hashes).pages == 1
    generator = random.Random(7)
    for bit in generator.sample(range(8 * len(bench.sound)), 2_000):
        bench.place.put(bench.key, flipped(bench.sound, bit))
        report = reader.store.restore(bench.hashes, reader.placements[:1])
        assert report.pages == 0, bit
        assert report.end.reason is EndReason.CORRUPT, bit
        tally["random bits of a 2 MiB object flipped"] += 1
    bench.close()


@pytest.mark.parametrize("form", ["layer_first", "canonical", "page_first_direct_kv_apart"])
def test_random_bits_of_2_mib_read_in_part(form: str, tally: Counter[str]) -> None:
    """A bit of a wanted cell or of the trailer is a miss; one of another cell is nobody's business."""
    bench = Bench(LARGE, [HEADS, LAYERS, CORNER], form)
    cell, payload = 128 << 10, 2 << 20
    wanted = [{*range(8, 16)}, {4, 5, 12, 13}, {10, 11}]
    generator = random.Random(8)
    bits = generator.sample(range(8 * payload), 60)
    bits += generator.sample(range(8 * payload, 8 * len(bench.sound)), 20)
    bits += [8 * cell * index + side for index in range(1, 16) for side in (-1, 0)]
    for bit in bits:
        found = bench.try_object(flipped(bench.sound, bit))
        in_cell = bit // 8 // cell
        expected = [bit >= 8 * payload or in_cell in cells for cells in wanted]
        assert [reason is EndReason.CORRUPT for reason in found] == expected, (bit, found)
        tally["bits of a 2 MiB object flipped that is read in part"] += len(found)
    bench.close()


@pytest.mark.parametrize("form", ["layer_first", "canonical"])
def test_bits_flipped_on_the_way_are_found_too(form: str) -> None:
    """The same, where storage is sound and the transfer is not; the sound object is not lost for long."""
    bench = Bench(LARGE, [], form)
    generator = random.Random(9)
    for spec, rank in (WHOLE, CORNER):
        for bit in generator.sample(range(8 * len(bench.sound)), 20):
            plan = on_keys(lambda key: key == bench.key, FlipBit(bit), ("read",), times=1)
            bench.place.wrap = lambda connector, plan=plan: FaultyConnector(connector, plan)
            with attach_rank(bench.place, LARGE, spec, rank, form=form) as reader:
                report = reader.restore(bench.hashes)
                reader.assert_holds(range(report.pages))
                assert report.pages == 0 or rank == CORNER[1]
            bench.place.put(bench.key, bench.sound)


def test_every_truncation_and_some_growth_of_a_small_object(tally: Counter[str]) -> None:
    bench = Bench(tiny(2, 4, 4).pool(4), [WHOLE, HEADS, CORNER])
    size = len(bench.sound)
    for length in [*range(1, size), *range(size + 1, size + 65)]:
        found = bench.try_object((bench.sound + bench.sound)[:length])
        assert found == [EndReason.CORRUPT] * 3, length
        tally["lengths of a small object tried"] += 1
    bench.close()


def spoiled(sound: bytes, others: list[bytes]) -> Iterable[bytes]:
    """Whole objects that are not what the name says: blank, another's, or stitched from two."""
    yield from (bytes(len(sound)), b"\xff" * len(sound))
    for other in others:
        yield other
        for cut in (1, len(sound) // 3, len(sound) - 120, len(sound) - 96, len(sound) - 32, len(sound) - 1):
            yield sound[:cut] + other[cut:]
            yield other[:cut] + sound[cut:]


@pytest.mark.parametrize("pool", [tiny(2, 4, 4).pool(4), LARGE], ids=["small", "large"])
def test_swapped_zero_filled_and_stitched_objects(pool: Pool) -> None:
    """Objects of equal length of another page, another cell, another namespace: never a hit."""
    place, hashes = Place(), chain(2, pool.page_size)
    write_pages(place, pool, "tp2pp1", hashes)
    write_pages(place, pool, "tp2pp1", hashes, seed=1, ns=namespace_of(pool, "another tenant"))
    objects = place.objects()
    mine = sorted(key for key in objects if namespace_of(pool).digest in key)
    others = {key: [data for other, data in objects.items() if other != key] for key in mine}
    assert len({len(data) for data in objects.values()}) == 1
    assert [len(other) for other in others.values()] == [7] * 4
    with attach_rank(place, pool, "tp1pp1", Rank(), pages=2) as reader:
        for key in mine:
            page = next(index for index, page_hash in enumerate(hashes) if page_hash in key)
            for data in spoiled(objects[key], others[key]):
                place.put(key, data)
                report = reader.restore(hashes)
                if data == objects[key]:  # stitched from two objects that agree there
                    assert report.pages == 2
                    continue
                assert report.pages == page
                assert report.end.reason in (EndReason.CORRUPT, EndReason.FOREIGN)
                reader.assert_holds(range(page))
                if data in others[key]:
                    assert report.end.reason is EndReason.FOREIGN
            place.put(key, objects[key])
        first, second = mine[0], mine[-1]
        place.put(first, objects[second])
        place.put(second, objects[first])
        assert reader.restore(hashes).end.reason is EndReason.FOREIGN


def sealed_by_a_later_release(sound: bytes, cells: int) -> bytes:
    """The object with the next version in its tail and the sum that goes with it."""
    changed = bytearray(sound)
    digest = bytes(changed[-16:])
    changed[-24:-20] = struct.pack("<I", VERSION + 1)
    trailer_at = len(changed) - (64 + 8 * cells)
    at = trailer_at + 8 * cells + 24
    covered = bytes(changed[trailer_at:at]) + bytes(changed[at + 8 :])
    seed = int.from_bytes(digest, "little") % 2**64
    changed[at : at + 8] = xxhash.xxh3_64(covered, seed=seed).intdigest().to_bytes(8, "little")
    return bytes(changed)


def test_an_object_of_a_later_version_is_neither_deleted_nor_overwritten() -> None:
    bench = Bench(tiny(2, 4, 4).pool(4), [WHOLE])
    later = sealed_by_a_later_release(bench.sound, cells=2)
    (reader,) = bench.readers
    for _ in range(2):
        assert bench.try_object(later) == [EndReason.UNKNOWN_VERSION]
        assert bench.place.objects() == {bench.key: later}
    assert reader.store.metrics.get("object.unknown_version") >= 2
    look = reader.store.contains(bench.hashes)
    assert (look.pages, look.end.reason, look.end.key) == (0, EndReason.UNKNOWN_VERSION, bench.key)
    assert reader.backup(bench.hashes).states == (PageState.REFUSED,)
    assert bench.place.objects() == {bench.key: later}
    with attach_rank(bench.place, bench.pool, "tp1pp1", Rank()) as fresh:
        fresh.fill([0])
        assert fresh.backup(bench.hashes).objects == 0
        assert fresh.restore(bench.hashes).end.reason is EndReason.UNKNOWN_VERSION
    assert bench.place.objects() == {bench.key: later}
    bench.close()


def refill(reader: RankRig, hashes: list[str]) -> None:
    reader.fill([0])
    report = reader.backup(hashes)
    assert report.states == (PageState.STORED,)
    assert reader.restore(hashes).pages == 1
    reader.assert_holds([0])


def test_a_bad_object_is_set_aside_counted_and_filled_again() -> None:
    bench = Bench(tiny(2, 4, 4).pool(4), [WHOLE])
    (reader,) = bench.readers
    assert bench.try_object(flipped(bench.sound, 99)) == [EndReason.CORRUPT]
    assert bench.place.objects() == {}, "deleted"
    assert reader.store.metrics.get("object.corrupt") == 1
    assert reader.store.metrics.get("miss.corrupt") == 1
    refill(reader, bench.hashes)
    assert bench.place.objects() == {bench.key: bench.sound}
    bench.close()


def test_a_bad_object_that_cannot_be_deleted_counts_as_absent_and_is_replaced() -> None:
    bench = Bench(tiny(2, 4, 4).pool(4), [])
    bench.place.wrap = lambda connector: FaultyConnector(
        connector, on_keys(lambda key: True, Fail(), ("delete",))
    )
    with attach_rank(bench.place, bench.pool, "tp1pp1", Rank()) as reader:
        bad = flipped(bench.sound, 99)
        bench.place.put(bench.key, bad)
        assert reader.restore(bench.hashes).pages == 0
        assert bench.place.objects() == {bench.key: bad}
        look = reader.store.contains(bench.hashes)
        assert (look.pages, look.end.reason) == (0, EndReason.CORRUPT)
        refill(reader, bench.hashes)
        assert bench.place.objects() == {bench.key: bench.sound}
        assert reader.store.contains(bench.hashes).pages == 1


class Versionless:
    """Storage that tells no versions, so that nothing can be replaced on condition."""

    def __init__(self, inner: Connector) -> None:
        self._inner = inner

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        outcomes = self._inner.read_into(reads, deadline)
        return [dataclasses.replace(outcome, version=None) for outcome in outcomes]

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def test_a_bad_object_that_can_be_neither_deleted_nor_replaced_is_never_called_stored() -> None:
    bench = Bench(tiny(2, 4, 4).pool(4), [])
    undeletable = on_keys(lambda key: True, Fail(), ("delete",))
    bench.place.wrap = lambda connector: Versionless(FaultyConnector(connector, undeletable))
    with attach_rank(bench.place, bench.pool, "tp1pp1", Rank()) as reader:
        bad = flipped(bench.sound, 99)
        bench.place.put(bench.key, bad)
        for _ in range(2):
            assert reader.restore(bench.hashes).end.reason is EndReason.CORRUPT
            assert reader.store.contains(bench.hashes).pages == 0
            reader.fill([0])
            assert reader.backup(bench.hashes).states == (PageState.FAILED,)
        assert bench.place.objects() == {bench.key: bad}


def test_an_object_put_right_by_somebody_else_is_not_deleted() -> None:
    """Between the refusal and the removal another process replaced the object: it stays."""
    bench = Bench(tiny(2, 4, 4).pool(4), [])

    def race(attempt) -> None:
        if attempt.operation == "delete":
            bench.place.put(bench.key, bench.sound)

    bench.place.wrap = lambda connector: FaultyConnector(connector, race)
    with attach_rank(bench.place, bench.pool, "tp1pp1", Rank()) as reader:
        bench.place.put(bench.key, flipped(bench.sound, 99))
        assert reader.restore(bench.hashes).end.reason is EndReason.CORRUPT
        assert bench.place.objects() == {bench.key: bench.sound}
        assert reader.store.contains(bench.hashes).pages == 1
        assert reader.restore(bench.hashes).pages == 1
        reader.assert_holds([0])


def test_a_replacement_that_lost_the_race_keeps_what_is_there_now() -> None:
    bench = Bench(tiny(2, 4, 4).pool(4), [])

    def race(attempt):
        if attempt.operation == "write" and attempt.key == bench.key and attempt.nth == 0:
            bench.place.put(bench.key, bench.sound)
        return Fail() if attempt.operation == "delete" else None

    bench.place.wrap = lambda connector: FaultyConnector(connector, race)
    with attach_rank(bench.place, bench.pool, "tp1pp1", Rank()) as reader:
        bench.place.put(bench.key, flipped(bench.sound, 99))
        assert reader.restore(bench.hashes).pages == 0
        reader.fill([0])
        assert reader.backup(bench.hashes).pages == 1
        assert reader.restore(bench.hashes).pages == 1


def test_a_page_is_assembled_around_a_bad_object_where_another_grid_holds_it() -> None:
    """Each half is bad under one grid: what is left of both is the page, and the rounds find it."""
    pool = tiny(4, 4, 2).pool(2)
    hashes = chain(3, 2)
    place = Place()
    write_pages(place, pool, "tp2pp1", hashes)
    whole = place.objects()
    other = Place()
    write_pages(other, pool, "tp1pp2", hashes)
    for key, data in other.objects().items():
        place.put(key, data)
    for key, data in other.meta().items():
        place.put(key, data)
    for bad in (key for key in whole if hashes[1] in key):
        with attach_rank(place, pool, "tp1pp1", Rank(), pages=3) as reader:
            assert reader.restore(hashes).pages == 3
            place.put(bad, flipped(whole[bad], 300))
            assert reader.restore(hashes).pages == 3
            reader.assert_holds(range(3))
            place.put(bad, whole[bad])


def test_without_verification_damage_passes_as_the_caller_asked() -> None:
    """The control: what all tests above refuse is what verification refuses."""
    bench = Bench(tiny(2, 4, 4).pool(4), [])
    bench.place.put(bench.key, flipped(bench.sound, 99))
    with attach_rank(bench.place, bench.pool, "tp1pp1", Rank(), verify=False) as reader:
        assert reader.restore(bench.hashes).pages == 1
        with pytest.raises(AssertionError):
            reader.assert_holds([0])


def test_a_damaged_read_costs_one_more_request_before_the_object_is_removed() -> None:
    """It is read once more, into memory that nobody else writes, and never a third time."""
    watched: list[CountingConnector] = []

    def watch(connector: Connector) -> Connector:
        watched.append(CountingConnector(connector))
        return watched[-1]

    bench = Bench(tiny(2, 4, 4).pool(4), [])
    bench.place.wrap = watch
    with attach_rank(bench.place, bench.pool, "tp1pp1", Rank()) as reader:
        bench.place.put(bench.key, flipped(bench.sound, 99))
        watched[0].reset()
        reader.restore(bench.hashes)
        reads = [record.key for record in watched[0].reads if record.key == bench.key]
        assert len(reads) == 2
        assert bench.key not in bench.place.contents()
