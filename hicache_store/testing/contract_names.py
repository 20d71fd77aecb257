"""The contract of ``sizes``, ``delete``, ``touch``, ``scan``, of keys and of eviction."""

from __future__ import annotations

import time

from hicache_store.clock import Deadline
from hicache_store.connectors.base import META_PREFIX, Connector, Status, Touch
from hicache_store.limits import KIB, MIB
from hicache_store.testing.contract_base import (
    PATIENCE_S,
    ConnectBounded,
    ContractBase,
    assert_absent,
    assert_holds,
    digest,
    page_key,
    soon,
    store,
    version_of,
)
from hicache_store.testing.probes import content, read_of, write_of

LEAVES = (
    "kv.H000-008.L000-061.T000-064.P004",
    "kv.H000-008.L000-061.T000-064",
    "kv.H000-008.L000-061.P004",
    "kv.H000-008.L000-100",
    "kv.H000-008.L000-1000",
    "kv.H000-001.L000-001.X0123456789abcdef0123456789abcdef",
    "draft_mtp_pool_of_the_longest_name.H000-008.L000-061",
)

HOSTILE_KEYS = (
    "",
    ".",
    "..",
    "/absolute",
    "../../escape",
    "v1/../../escape",
    "v1//double",
    "trailing/",
    "nul\0byte",
    "new\nline",
    "a space",
    "back\\slash",
    "%2e%2e%2fescape",
    "+plus+",
    "~temporary",
    "\u00e9/\u00fc",
    "lone \udcff surrogate",
    "x" * 300,
    "y/" * 2_000 + "y",
)


class NameContract(ContractBase):
    """Names are opaque, exact and independent of one another."""

    def test_empty_batches(self, connector: Connector, writer: Connector) -> None:
        """Nothing asked, nothing answered."""
        assert connector.sizes([], soon()) == []
        assert connector.read_into([], soon()) == []
        assert writer.write_from([], soon()) == []
        assert writer.delete([], soon()) == []
        assert writer.delete([], soon(), []) == []
        assert writer.touch([], soon()) == []

    def test_capabilities_are_sound_and_steady(self, connector: Connector) -> None:
        """Every field is within its meaning and does not change."""
        said = connector.capabilities
        assert said.scheme
        assert said.stop in ("bounded", "abandons")
        assert said.request_cost_bytes >= 0
        assert said.concurrency >= 1
        assert said.alignment_bytes >= 1
        assert said.alignment_bytes & (said.alignment_bytes - 1) == 0
        assert connector.capabilities == said

    def test_ten_thousand_sizes_in_one_call(self, connector: Connector, writer: Connector) -> None:
        """The look-up of a long prompt is one call, whatever share of it is there."""
        keys = [page_key(f"sizes {index}") for index in range(10_000)]
        there = {index: 20 + index % 50 for index in range(0, 10_000, 97)}
        store(writer, {keys[index]: content(keys[index], size) for index, size in there.items()})
        found = connector.sizes(keys, soon())
        assert len(found) == len(keys)
        # Told in few words: a difference of two lists of this length takes minutes to spell out.
        wrong = [index for index, size in enumerate(found) if size != there.get(index)]
        assert not wrong[:3]

    def test_delete_removes_exactly_the_named(self, connector: Connector, writer: Connector) -> None:
        """Deleting is by item, in order, and frees the key for another content."""
        keys = [page_key(f"delete {index}") for index in range(8)]
        store(writer, {key: content(key, 500) for key in keys})
        nobody = page_key("delete nobody")
        outcomes = writer.delete([keys[1], nobody, keys[5]], soon())
        assert [outcomes[0].status, outcomes[2].status] == [Status.OK, Status.OK]
        assert outcomes[1].status in (Status.ABSENT, Status.OK)  # not every storage can tell
        assert_absent(connector, [keys[1], keys[5], nobody], 500)
        assert_holds(connector, {key: content(key, 500) for i, key in enumerate(keys) if i not in (1, 5)})
        store(writer, {keys[1]: content(keys[1], 700, 3)})
        assert_holds(connector, {keys[1]: content(keys[1], 700, 3)})
        assert {outcome.status for outcome in writer.delete(keys, Deadline.after(-1.0))} == {Status.TIMED_OUT}
        assert_holds(connector, {keys[1]: content(keys[1], 700, 3), keys[0]: content(keys[0], 500)})

    def test_delete_of_a_named_version(self, connector: Connector, writer: Connector) -> None:
        """Only the version that was judged bad goes; an item without a version goes as it is."""
        keys = [page_key(f"delete version {index}") for index in range(4)]
        store(writer, {key: content(key, 500) for key in keys})
        old = [version_of(connector, key, 500) for key in keys]
        if old[0] is None:
            assert not writer.capabilities.conditional_versions
            assert writer.delete(keys[:1], soon(), [None])[0].is_ok
            assert_absent(connector, keys[:1], 500)
            return
        write = write_of(keys[1], content(keys[1], 500, 9), replace=old[1])
        assert writer.write_from([write], soon())[0].status is Status.OK
        outcomes = writer.delete(keys, soon(), [old[0], old[1], None, "made up"])
        wanted = [Status.OK, Status.CONFLICT, Status.OK, Status.CONFLICT]
        assert [outcome.status for outcome in outcomes] == wanted
        assert_absent(connector, [keys[0], keys[2]], 500)
        assert_holds(connector, {keys[1]: content(keys[1], 500, 9), keys[3]: content(keys[3], 500)})
        again = writer.delete([keys[0]], soon(), [old[0]])[0]
        assert again.status in (Status.ABSENT, Status.CONFLICT)

    def test_touch_keeps_the_bytes(self, connector: Connector, writer: Connector) -> None:
        """Touching marks what is there, creates nothing and reports item by item."""
        keys = [page_key(f"touch {index}") for index in range(6)]
        objects = {key: content(key, 500) for key in keys[:5]}
        store(writer, objects)
        touches = [Touch(key, depth) for depth, key in enumerate(keys)]
        outcomes = writer.touch(touches, soon())
        assert [outcome.status for outcome in outcomes[:5]] == [Status.OK] * 5
        assert outcomes[5].status is Status.ABSENT or (
            outcomes[5].status is Status.OK and not writer.capabilities.orders_eviction
        )
        assert_absent(connector, [keys[5]], 500)
        assert_holds(connector, objects)
        assert {outcome.status for outcome in writer.touch(touches, Deadline.after(-1.0))} == {
            Status.TIMED_OUT
        }

    def test_scan_yields_what_lies_below_a_prefix(self, connector: Connector, writer: Connector) -> None:
        """Every object once, with its size, for prefixes that end anywhere in a name."""
        names = [page_key(f"scan {i}", leaf, space) for i in range(3) for leaf in LEAVES for space in "AB"]
        names += [f"meta/v1/{digest('A')}/grid-{slot:02d}" for slot in range(4)]
        objects = {name: content(name, 30 + index) for index, name in enumerate(names)}
        store(writer, objects)
        one = page_key("scan 1", LEAVES[1], "A")
        prefixes = [
            "",
            "v",
            "v1/",
            "meta/",
            f"v1/{digest('A')}/",
            f"v1/{digest('B')}",
            f"v1/{digest('A')[:9]}",
        ]
        prefixes += [one, one[:-3], one[: one.rindex("/")], f"meta/v1/{digest('A')}/grid-0", "w", one + "/"]
        for prefix in prefixes:
            entries = sorted(connector.scan(prefix), key=lambda entry: entry.key)
            wanted = sorted(name for name in names if name.startswith(prefix))
            assert [entry.key for entry in entries] == wanted, prefix
            assert [entry.size_bytes for entry in entries] == [len(objects[name]) for name in wanted]
        assert len(list(connector.scan())) == len(names)

    def test_names_of_the_real_form_never_meet(self, connector: Connector, writer: Connector) -> None:
        """The longest names there are, names that begin alike, and names that differ in one digit."""
        names = [page_key("real", leaf) for leaf in LEAVES]
        names += [page_key(f"real {index}", LEAVES[0]) for index in range(20)]
        near = page_key("real", LEAVES[0])
        names += [near[:-1] + "5", near[:4] + ("0" if near[4] != "0" else "1") + near[5:]]
        names += [f"meta/v1/{digest('real')}/{leaf}" for leaf in ("manifest", "grid-00", "grid-63")]
        objects = {name: content(name, 64 + index) for index, name in enumerate(names)}
        store(writer, objects)
        assert_holds(connector, objects)
        gone = [page_key("real", LEAVES[3]), f"meta/v1/{digest('real')}/grid-00"]
        assert all(outcome.is_ok for outcome in writer.delete(gone, soon()))
        assert_absent(connector, gone)
        assert_holds(connector, {name: data for name, data in objects.items() if name not in gone})

    def test_hostile_names_harm_nobody(self, connector: Connector, writer: Connector) -> None:
        """A key outside the real form works in full or is refused as an item; nothing else suffers."""
        good = [page_key(f"beside hostile {index}") for index in range(2)]
        for hostile in HOSTILE_KEYS:
            keys = [good[0], hostile, good[1]]
            objects = {key: content(key, 200) for key in keys}
            outcomes = writer.write_from([write_of(key, data) for key, data in objects.items()], soon())
            assert outcomes[0].is_ok
            assert outcomes[2].is_ok
            kept = outcomes[1].is_ok
            sizes = connector.sizes(keys, soon())
            assert sizes == [200, 200 if kept else None, 200], hostile
            pairs = [read_of(key, 200) for key in keys]
            reads = connector.read_into([read for read, _ in pairs], soon())
            assert [reads[0].status, reads[2].status] == [Status.OK] * 2
            assert reads[1].is_ok == kept
            if kept:
                assert pairs[1][1].delivered() == objects[hostile]
                assert hostile in [entry.key for entry in connector.scan(hostile)]
            else:
                assert pairs[1][1].is_untouched
            touched = writer.touch([Touch(key) for key in keys], soon())
            assert len(touched) == 3
            assert len(writer.delete(keys, soon())) == 3
            assert list(connector.scan()) == []

    def test_eviction_takes_the_tail_first(
        self, connector: Connector, connect_bounded: ConnectBounded | None
    ) -> None:
        """Under a quota, a chain last used in one second loses its deepest objects and no others."""
        if connect_bounded is None:
            assert not connector.capabilities.orders_eviction, "orders eviction: override `connect_bounded`"
            return
        size, quota_bytes = 256 * KIB, 8 * MIB
        bounded = connect_bounded(quota_bytes)
        chain = [page_key(f"old chain {depth}") for depth in range(24)]
        shuffled = sorted(enumerate(chain), key=lambda item: digest(item[1]))
        meta = {f"meta/v1/{digest('bounded')}/manifest": b"m" * 2_000}
        store(bounded, meta)
        outcomes = bounded.write_from([write_of(k, content(k, size), d) for d, k in shuffled], soon())
        assert {outcome.status for outcome in outcomes} == {Status.OK}
        _touch_within_one_second(bounded, chain)
        for start in range(0, 40, 4):
            newer = [page_key(f"new chain {depth}") for depth in range(start, start + 4)]
            bounded.write_from(
                [write_of(k, content(k, size), start + i) for i, k in enumerate(newer)], soon()
            )
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and _held_bytes(bounded) > quota_bytes:
            time.sleep(0.01)  # a connector may evict behind the call
        assert _held_bytes(bounded) <= quota_bytes
        left = [held is not None for held in bounded.sizes(chain, soon())]
        assert left == sorted(left, reverse=True), "a shallow object went before a deep one"
        assert not all(left)
        assert_holds(bounded, meta)
        bounded.close()


def _touch_within_one_second(connector: Connector, chain: list[str]) -> None:
    for _ in range(20):
        connector.touch([Touch(key, depth) for depth, key in enumerate(chain)], soon())
        if len({int(entry.last_used_s) for entry in connector.scan("v1/")}) == 1:
            return
    raise AssertionError(f"touching {len(chain)} objects takes more than a second, 20 times over")


def _held_bytes(connector: Connector) -> int:
    return sum(entry.size_bytes for entry in connector.scan() if not entry.key.startswith(META_PREFIX))
