"""The contract of ``write_from``."""

from __future__ import annotations

import numpy as np

from hicache_store.clock import Deadline
from hicache_store.connectors.base import BufferSource, Connector, Outcome, Status, Write
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.contract_base import (
    Connect,
    ContractBase,
    assert_absent,
    assert_holds,
    fetch,
    page_key,
    probe,
    soon,
    store,
    version_of,
)
from hicache_store.testing.probes import ProbeSource, content, raising, variant_of, write_of


class WriteContract(ContractBase):
    """All or nothing, first writer wins, and a named version may be replaced."""

    def test_sources_are_used_once_and_copied(self, connector: Connector, writer: Connector) -> None:
        """Every source is asked once, released once, and free to change after the call."""
        keys = [page_key(f"source {index}") for index in range(12)]
        buffers = [bytearray(content(key, 4_097)) for key in keys]
        sources = [ProbeSource([memoryview(buffer)]) for buffer in buffers]
        writes = [Write(key, 4_097, source) for key, source in zip(keys, sources, strict=True)]
        assert {outcome.status for outcome in writer.write_from(writes, soon())} == {Status.OK}
        assert [source.events for source in sources] == [["buffers", "release"]] * 12
        for buffer in buffers:
            buffer[:] = b"\xee" * len(buffer)
        assert_holds(connector, {key: content(key, 4_097) for key in keys})

    def test_the_first_complete_object_stays(self, connector: Connector, writer: Connector) -> None:
        """A second writer of equal size is told so, and stores nothing where that can be promised."""
        key = page_key("create only")
        store(writer, {key: content(key, 3_000, variant=1)})
        write = write_of(key, content(key, 3_000, variant=2))
        outcome = writer.write_from([write], soon())[0]
        assert outcome.is_ok, outcome
        assert probe(write).events.count("buffers") == probe(write).events.count("release") <= 1
        stays = variant_of(key, fetch(connector, key, 3_000)[1].delivered())
        if writer.capabilities.create_only:
            assert outcome.status is Status.EXISTS
            assert stays == 1
        else:
            assert stays == (1 if outcome.status is Status.EXISTS else 2)

    def test_an_object_of_another_size_is_a_conflict(self, connector: Connector, writer: Connector) -> None:
        """Equal names mean equal lengths, so a difference is neither success nor overwritten."""
        key = page_key("conflict")
        data = content(key, 3_000)
        store(writer, {key: data})
        for size in (2_999, 3_001, 64):
            outcome = writer.write_from([write_of(key, content(key, size))], soon())[0]
            if writer.capabilities.create_only:
                assert outcome.status is Status.CONFLICT
                assert_holds(connector, {key: data})
            elif outcome.is_ok:
                data = content(key, size)
                assert_holds(connector, {key: data})

    def _write_around(self, connector: Connector, writer: Connector, bad: ProbeSource) -> Outcome:
        """The outcome of ``bad``, said to have 3000 bytes; its neighbours must fare well."""
        keys = [page_key(f"around {index}") for index in range(9)]
        writes = [write_of(key, content(key, 3_000)) for key in keys]
        writes[3] = Write(keys[3], 3_000, bad)
        outcomes = writer.write_from(writes, soon())
        assert len(outcomes) == 9
        rest = (0, 1, 2, 4, 5, 6, 7, 8)
        assert {outcomes[index].status for index in rest} == {Status.OK}
        assert_holds(connector, {keys[index]: content(keys[index], 3_000) for index in rest})
        assert bad.events == ["buffers", "release"]
        return outcomes[3]

    def test_buffers_that_raise_fail_one_item(self, connector: Connector, writer: Connector) -> None:
        """Nothing becomes visible, and the key is free for the next try."""
        bad = ProbeSource.of(b"", 1)
        bad.on_buffers = raising(RuntimeError("the slot was taken back"))
        assert self._write_around(connector, writer, bad).status is Status.FAILED
        key = page_key("around 3")
        assert_absent(connector, [key], 3_000)
        store(writer, {key: content(key, 3_000)})
        assert_holds(connector, {key: content(key, 3_000)})

    def test_too_short_a_source_fails_one_item(self, connector: Connector, writer: Connector) -> None:
        """A source that gives fewer bytes than said never becomes an object."""
        bad = ProbeSource.of(content(page_key("around 3"), 2_999), 3)
        assert self._write_around(connector, writer, bad).status is Status.FAILED
        assert_absent(connector, [page_key("around 3")], 3_000)

    def test_too_long_a_source_fails_one_item(self, connector: Connector, writer: Connector) -> None:
        """Nor does one that gives more."""
        bad = ProbeSource.of(content(page_key("around 3"), 3_001), 3)
        assert self._write_around(connector, writer, bad).status is Status.FAILED
        assert_absent(connector, [page_key("around 3")], 3_000)

    def test_release_of_a_source_that_raises(self, connector: Connector, writer: Connector) -> None:
        """Neighbours do not notice, and the object is whole or absent."""
        key = page_key("around 3")
        bad = ProbeSource.of(content(key, 3_000))
        bad.on_release = raising(KeyError("released twice"))
        self._write_around(connector, writer, bad)
        if connector.sizes([key], soon()) != [None]:
            assert_holds(connector, {key: content(key, 3_000)})

    def test_sources_that_are_not_contiguous(self, connector: Connector, writer: Connector) -> None:
        """Their bytes are stored in the order of the view, or refused."""
        wide = np.frombuffer(content("wide", 1_536), np.uint8).reshape(32, 48)
        for index, view in enumerate((wide[:, :16], wide[::2, :32], wide.T[:16, :32])):
            key = page_key(f"strided source {index}")
            outcome = writer.write_from([Write(key, 512, BufferSource([view.data]))], soon())[0]
            if outcome.is_ok:
                assert_holds(connector, {key: view.tobytes()})
            else:
                assert outcome.status is Status.FAILED
                assert_absent(connector, [key], 512)

    def test_an_empty_object_is_refused_or_kept(self, connector: Connector, writer: Connector) -> None:
        """Zero bytes are no object of the format; a store may refuse them, but not half-accept them."""
        key = page_key("empty")
        outcome = writer.write_from([write_of(key, b"")], soon())[0]
        if outcome.is_ok:
            assert_holds(connector, {key: b""})
        else:
            assert outcome.status in (Status.REFUSED, Status.FAILED)
            assert_absent(connector, [key])

    def test_replacing_a_named_version(self, connector: Connector, writer: Connector) -> None:
        """The bad object gives way to the new one; the old name of it opens nothing any more."""
        key, neighbour = page_key("replace"), page_key("replace, neighbour")
        store(writer, {key: content(key, 3_000, 1), neighbour: content(neighbour, 3_000)})
        bad = version_of(connector, key, 3_000)
        if bad is None:
            bad = "no versions here"
            outcome = writer.write_from([write_of(key, content(key, 3_000, 2), replace=bad)], soon())[0]
            assert not outcome.is_ok
            assert_holds(connector, {key: content(key, 3_000, 1)})
            return
        outcome = writer.write_from([write_of(key, content(key, 3_000, 2), replace=bad)], soon())[0]
        assert outcome.status is Status.OK, outcome
        assert_holds(connector, {key: content(key, 3_000, 2), neighbour: content(neighbour, 3_000)})
        stale = writer.write_from([write_of(key, content(key, 3_000, 3), replace=bad)], soon())[0]
        assert stale.status is Status.CONFLICT
        assert_holds(connector, {key: content(key, 3_000, 2)})

    def test_replacing_an_object_of_another_size(self, connector: Connector, writer: Connector) -> None:
        """A truncated object is replaced by a whole one, by the version that the read reported."""
        key = page_key("regrow")
        store(writer, {key: content(key, 1_000)})
        outcome, target = fetch(connector, key, 3_000)
        assert outcome.status is Status.WRONG_SIZE
        assert target.is_untouched
        version = outcome.version
        if version is None:
            assert not connector.capabilities.conditional_versions
            return
        write = write_of(key, content(key, 3_000), replace=version)
        assert writer.write_from([write], soon())[0].status is Status.OK
        assert_holds(connector, {key: content(key, 3_000)})

    def test_replacing_what_is_not_there(self, connector: Connector, writer: Connector) -> None:
        """A version that names nothing creates nothing."""
        key, gone = page_key("never was"), page_key("is gone")
        store(writer, {gone: content(gone, 3_000)})
        version = version_of(connector, gone, 3_000) or "made up"
        assert writer.delete([gone], soon())[0].is_ok
        writes = [write_of(name, content(name, 3_000), replace=version) for name in (key, gone)]
        assert [one.status for one in writer.write_from(writes, soon())] == [Status.CONFLICT] * 2
        assert_absent(connector, [key, gone], 3_000)

    def test_a_version_is_never_used_again(self, connector: Connector, writer: Connector) -> None:
        """Deleting and writing the same bytes again makes another version, where versions are exact."""
        key = page_key("again and again")
        seen: list[str | None] = []
        for _ in range(20):
            store(writer, {key: content(key, 3_000)})
            seen.append(version_of(connector, key, 3_000))
            assert writer.delete([key], soon())[0].is_ok
        if writer.capabilities.conditional_versions:
            assert len(set(seen)) == 20
            store(writer, {key: content(key, 3_000, 7)})
            writes = [write_of(key, content(key, 3_000, 8), replace=version) for version in seen]
            assert {outcome.status for outcome in writer.write_from(writes, soon())} == {Status.CONFLICT}
            assert_holds(connector, {key: content(key, 3_000, 7)})

    def test_a_create_that_loses_its_race(self, connector: Connector, connect_writer: Connect) -> None:
        """Another writer publishes while the source is asked: the first complete object stays."""
        late, early, key = connect_writer(), connect_writer(), page_key("lost race")
        source = ProbeSource.of(content(key, 3_000, 2))
        source.on_buffers = lambda: store(early, {key: content(key, 3_000, 1)})
        outcome = late.write_from([Write(key, 3_000, source)], soon())[0]
        stays = variant_of(key, fetch(connector, key, 3_000)[1].delivered())
        assert outcome.is_ok, outcome
        assert stays == (2 if outcome.status is Status.OK else 1)
        assert outcome.status is Status.EXISTS or not late.capabilities.create_only
        late.close()
        early.close()

    def test_a_repair_that_loses_its_race(self, connector: Connector, connect_writer: Connect) -> None:
        """Another writer replaces the same version while the source is asked."""
        late, early, key = connect_writer(), connect_writer(), page_key("lost repair")
        store(early, {key: content(key, 3_000, 0)})
        version = version_of(connector, key, 3_000) or "no versions here"

        def repair_first() -> None:
            early.write_from([write_of(key, content(key, 3_000, 1), replace=version)], soon())

        source = ProbeSource.of(content(key, 3_000, 2), 1)
        source.on_buffers = repair_first
        outcome = late.write_from([Write(key, 3_000, source, replace=version)], soon())[0]
        stays = variant_of(key, fetch(connector, key, 3_000)[1].delivered())
        assert stays == 2 if outcome.status is Status.OK else stays in (0, 1)
        assert outcome.status is Status.CONFLICT or not late.capabilities.conditional_versions
        late.close()
        early.close()

    def test_one_key_twice_in_a_batch(self, connector: Connector, writer: Connector) -> None:
        """Both items succeed and exactly one content is there."""
        key, other = page_key("double"), page_key("double, neighbour")
        writes = [write_of(key, content(key, 3_000, variant)) for variant in (1, 2)]
        writes.insert(1, write_of(other, content(other, 3_000)))
        outcomes = writer.write_from(writes, soon())
        assert all(outcome.is_ok for outcome in outcomes), outcomes
        stays = variant_of(key, fetch(connector, key, 3_000)[1].delivered())
        assert stays in {variant for variant in (1, 2) if outcomes[(variant - 1) * 2].status is Status.OK}
        if writer.capabilities.create_only:
            assert sorted([outcomes[0].status, outcomes[2].status]) == [Status.EXISTS, Status.OK]
        assert_holds(connector, {other: content(other, 3_000)})

    def test_any_depth_can_be_written(self, connector: Connector, writer: Connector) -> None:
        """The depth orders eviction and changes nothing else."""
        objects = {page_key(f"depth {depth}"): depth for depth in (0, 1, 999, 1_000_000, 2**31)}
        writes = [write_of(key, content(key, 100), depth) for key, depth in objects.items()]
        assert {outcome.status for outcome in writer.write_from(writes, soon())} == {Status.OK}
        assert_holds(connector, {key: content(key, 100) for key in objects})

    def test_past_deadline_writes_nothing(self, connector: Connector, writer: Connector) -> None:
        """No time left: every item times out, nothing is stored, nothing is kept of the source."""
        keys = [page_key(f"late write {index}") for index in range(20)]
        writes = [write_of(key, content(key, 2_000)) for key in keys]
        outcomes = writer.write_from(writes, Deadline.after(-1.0))
        assert [outcome.status for outcome in outcomes] == [Status.TIMED_OUT] * 20
        for write in writes:
            assert probe(write).events.count("buffers") == probe(write).events.count("release")
        assert_absent(connector, keys, 2_000)
        store(writer, {keys[0]: content(keys[0], 2_000)})

    def test_write_deadline_that_passes_midway(self, connector: Connector, writer: Connector) -> None:
        """Items are stored or timed out; what timed out is absent or, on a server, complete."""
        count = 8 + 4 * writer.capabilities.concurrency
        clock = FakeClock()
        keys = [page_key(f"midway {index}") for index in range(count)]
        buffers = [bytearray(content(key, 2_000)) for key in keys]
        sources = [ProbeSource([memoryview(buffer)], lambda: clock.advance(20.0)) for buffer in buffers]
        writes = [Write(key, 2_000, source) for key, source in zip(keys, sources, strict=True)]
        outcomes = writer.write_from(writes, Deadline.after(10.0, clock))
        for buffer in buffers:
            buffer[:] = b"\xee" * len(buffer)
        assert {outcome.status for outcome in outcomes} <= {Status.OK, Status.TIMED_OUT}
        assert Status.TIMED_OUT in {outcome.status for outcome in outcomes}
        sizes = connector.sizes(keys, soon())
        for key, outcome, source, size in zip(keys, outcomes, sources, sizes, strict=True):
            assert source.events.count("buffers") == source.events.count("release") <= 1
            if size is not None:
                assert_holds(connector, {key: content(key, 2_000)})
                assert outcome.is_ok or writer.capabilities.stop == "abandons"
            else:
                assert outcome.status is Status.TIMED_OUT
