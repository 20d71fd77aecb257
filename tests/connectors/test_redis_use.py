"""What the Redis connector costs and how long objects stay: round trips, bytes, lifetimes, listings."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from hicache_store.connectors.base import Read, Status, Touch
from hicache_store.connectors.redis_connector import RedisConnector
from hicache_store.limits import MIB, REDIS_LOOKUP_ITEMS
from hicache_store.testing.contract_base import assert_holds, fetch, page_key, soon, store
from hicache_store.testing.probes import ProbeTarget, content, read_of, write_of
from hicache_store.testing.redis_servers import RedisServer
from tests.connectors.redis_rig import LyingServer, Proxy, bulk, opened, wait_until


def objects_of(count: int, size: int) -> dict[str, bytes]:
    return {page_key(f"use {index}"): content(page_key(f"use {index}"), size) for index in range(count)}


# -- round trips ---------------------------------------------------------------------------


def test_c01_a_look_up_of_any_length_is_a_few_round_trips(proxy: Proxy, prefix: str) -> None:
    """A long prompt must not cost a round trip a page, whether it hits or not."""
    with opened(f"redis://127.0.0.1:{proxy.port}?prefix={prefix}&threads=1") as connector:
        store(connector, objects_of(50, 100))
        for keys in (
            list(objects_of(50, 100)),
            [page_key(f"none {i}") for i in range(3 * REDIS_LOOKUP_ITEMS)],
        ):
            proxy.forget_counts()
            connector.sizes(keys, soon())
            # What is sent in one go may arrive in pieces, with a reply to a piece in between.
            assert proxy.turns <= 3 + len(keys) // 100
            assert proxy.connections == 0


def test_c09_a_batch_of_reads_costs_few_round_trips(
    handle: RedisConnector, proxy: Proxy, prefix: str
) -> None:
    """The time to the first token must not grow by a round trip a page: requests are sent ahead."""
    objects = objects_of(64, 8_000)
    store(handle, objects)
    with opened(f"redis://127.0.0.1:{proxy.port}?prefix={prefix}&threads=1") as connector:
        connector.sizes(["x"], soon())
        proxy.forget_counts()
        pairs = [read_of(key, 8_000) for key in objects]
        outcomes = connector.read_into([read for read, _ in pairs], soon())
        assert {outcome.status for outcome in outcomes} == {Status.OK}
        assert proxy.turns <= 16
        proxy.forget_counts()
        fresh = [write_of(f"{key}x", data) for key, data in objects.items()]
        assert all(outcome.is_ok for outcome in connector.write_from(fresh, soon()))
        assert proxy.turns <= 40


def test_parts_of_an_object_move_only_their_bytes(handle: RedisConnector, proxy: Proxy, prefix: str) -> None:
    """Two ranges of 4 MiB: a few kilobytes, checked to be of one version."""
    data = content("parts", 4 * MIB)
    store(handle, {"parts": data})
    with opened(f"redis://127.0.0.1:{proxy.port}?prefix={prefix}") as connector:
        connector.sizes(["x"], soon())
        layouts = [
            [(0, [1_000])],
            [(MIB, [500, 500]), (4 * MIB - 72, [72])],
            [(0, [1]), (7, [1]), (2 * MIB, [2_000])],
            [(4 * MIB - 1, [1])],
        ]
        for layout in layouts:
            proxy.forget_counts()
            target = ProbeTarget(layout)
            ranges = tuple((offset, offset + sum(lengths)) for offset, lengths in layout)
            outcome = connector.read_into([Read("parts", 4 * MIB, target, ranges)], soon())[0]
            assert outcome.status is Status.OK
            assert target.delivered() == target.wanted(data)
            assert target.guards_hold
            assert proxy.reply_bytes < 4_000
            assert outcome.version == fetch(handle, "parts", 4 * MIB)[0].version


def test_ranges_that_hold_more_than_the_parts(handle: RedisConnector) -> None:
    """What is fetched may be wider than what is asked for; what was not fetched cannot be had."""
    data = content("wide", 10_000)
    store(handle, {"wide": data})
    good = ProbeTarget([(120, [30]), (100, [5, 5]), (9_990, [10])])
    reads = [Read("wide", 10_000, good, ((100, 200), (9_900, 10_000)))]
    bad = ProbeTarget([(100, [101])])
    reads.append(Read("wide", 10_000, bad, ((100, 200), (9_900, 10_000))))
    outcomes = handle.read_into(reads, soon())
    assert [outcome.status for outcome in outcomes] == [Status.OK, Status.FAILED]
    assert good.delivered() == good.wanted(data)
    assert "not among the ranges" in outcomes[1].detail
    assert bad.is_untouched
    assert_holds(handle, {"wide": data})


def test_partial_reads_of_what_is_not_as_expected(handle: RedisConnector) -> None:
    store(handle, {"short": content("short", 5_000)})
    targets = [ProbeTarget([(0, [10])]) for _ in range(3)]
    ranges = ((0, 10),)
    reads = [
        Read("short", 5_001, targets[0], ranges),
        Read("absent", 5_000, targets[1], ranges),
        Read("short", 5_000, targets[2], ranges),
    ]
    outcomes = handle.read_into(reads, soon())
    assert [one.status for one in outcomes] == [Status.WRONG_SIZE, Status.ABSENT, Status.OK]
    assert outcomes[0].version == outcomes[2].version
    assert targets[0].events == targets[1].events == []


def test_d21_what_is_there_is_not_sent_again(proxy: Proxy, prefix: str) -> None:
    """A batch with two objects present stores the others; the two sources are not even asked."""
    objects = objects_of(16, 100_000)
    with opened(f"redis://127.0.0.1:{proxy.port}?prefix={prefix}") as connector:
        keys = list(objects)
        store(connector, {keys[3]: objects[keys[3]], keys[7]: objects[keys[7]]})
        proxy.forget_counts()
        writes = [write_of(key, data) for key, data in objects.items()]
        outcomes = connector.write_from(writes, soon())
        found = [index for index, outcome in enumerate(outcomes) if outcome.status is Status.EXISTS]
        assert found == [3, 7]
        assert writes[3].source.events == writes[7].source.events == []
        assert proxy.request_bytes < 14 * 101_000
        assert_holds(connector, objects)
        proxy.forget_counts()
        assert all(one.status is Status.EXISTS for one in connector.write_from(writes, soon()))
        assert proxy.request_bytes < 10_000


def test_d14_removing_large_values_holds_up_nobody() -> None:
    """UNLINK frees their memory beside the commands of others; DEL would stand before those."""

    def answer(words: Sequence[bytes]) -> bytes:
        return bulk(bytes(116)) if words[0] == b"GET" else b"+OK\r\n" if words[0] == b"WATCH" else b":1\r\n"

    with LyingServer(answer) as server, opened(server.url) as connector:
        keys = [page_key(f"removed {index}") for index in range(5)]
        assert all(one.is_ok for one in connector.delete(keys, soon()))
        connector.delete(keys[:1], soon(), ["00" * 16])
        sent = {words[0].upper() for words in server.commands}
        assert b"UNLINK" in sent
        assert b"DEL" not in sent


# -- lifetimes -----------------------------------------------------------------------------


def lifetime_ms(server: RedisServer, connector: RedisConnector, key: str) -> int:
    found = server.ask("PTTL", connector._encode(key))
    assert isinstance(found, int)
    return found


def test_lifetimes_end_a_chain_from_its_tail(redis_single: RedisServer, prefix: str) -> None:
    """Objects live for ``ttl`` after their last use, the deeper the shorter; metadata stays for ever."""
    chain = [page_key(f"chain {depth}") for depth in range(4)]
    depths = [0, 10, 1_000, 10**9]
    with opened(f"redis://{redis_single.address}?prefix={prefix}&ttl=1h") as connector:
        meta = "meta/v1/manifest"
        writes = [write_of(key, content(key, 100), depth) for key, depth in zip(chain, depths, strict=True)]
        writes.append(write_of(meta, content(meta, 100)))
        assert all(outcome.is_ok for outcome in connector.write_from(writes, soon()))

        def assert_fresh() -> None:
            lives = [lifetime_ms(redis_single, connector, key) for key in chain]
            assert lives == sorted(lives, reverse=True)
            assert 3_590_000 < lives[0] <= 3_600_000
            assert 3_580_000 < lives[2] <= 3_599_000
            assert 1_790_000 < lives[3] <= 1_800_000
            assert lifetime_ms(redis_single, connector, meta) == -1

        assert_fresh()
        uses = {
            "touch": lambda: connector.touch(
                [Touch(key, depth) for key, depth in zip([*chain, meta], [*depths, 0], strict=True)], soon()
            ),
            "write again": lambda: connector.write_from(writes, soon()),
        }
        for use in uses.values():
            for key in chain:
                redis_single.ask("PEXPIRE", connector._encode(key), 60_000)
            assert all(outcome.is_ok for outcome in use())
            assert_fresh()
        redis_single.ask("PEXPIRE", connector._encode(chain[0]), 60_000)
        assert fetch(connector, chain[0], 100)[0].status is Status.OK
        assert lifetime_ms(redis_single, connector, chain[0]) <= 60_000, "reading is no use"
        version = fetch(connector, chain[0], 100)[0].version
        write = write_of(chain[0], content(chain[0], 100, 2), replace=version)
        assert connector.write_from([write], soon())[0].status is Status.OK
        assert_fresh()
        redis_single.ask("PEXPIRE", connector._encode(chain[3]), 1)
        wait_until(lambda: connector.sizes([chain[3]], soon()) == [None])
        assert connector.touch([Touch(chain[3])], soon())[0].status is Status.ABSENT


def test_without_a_lifetime_objects_stay(handle: RedisConnector, redis_single: RedisServer) -> None:
    store(handle, {"key": content("key", 100)})
    assert handle.touch([Touch("key")], soon())[0].status is Status.OK
    assert lifetime_ms(redis_single, handle, "key") == -1


# -- listings ------------------------------------------------------------------------------


def test_prefixes_are_taken_literally(redis_single: RedisServer, prefix: str) -> None:
    """Stores share a server; characters that mean something to SCAN mean nothing here."""
    strange = ["a*", "a?", "a[b]", "a[^x]", "a\\", "a", "ab", "a-b", "\u00fc"]
    urls = {name: f"redis://{redis_single.address}?prefix={quote(prefix + name + ':')}" for name in strange}
    for name, url in urls.items():
        with opened(url) as connector:
            store(connector, {f"of {name}": content(name, 50)})
    for name, url in urls.items():
        with opened(url) as connector:
            entries = list(connector.scan())
            assert [entry.key for entry in entries] == [f"of {name}"]
            assert entries[0].version == fetch(connector, f"of {name}", 50)[0].version
            assert list(connector.scan("of *")) == [e for e in entries if e.key.startswith("of *")]


def test_listing_tells_when_objects_were_used(handle: RedisConnector, redis_single: RedisServer) -> None:
    """And is not a use itself where the server can be told so; it lists thousands of keys page by page."""
    objects = objects_of(2_500, 20)
    store(handle, objects)
    entries = list(handle.scan())
    assert sorted(entry.key for entry in entries) == sorted(objects)
    assert {entry.size_bytes for entry in entries} == {20}
    now = float(redis_single.ask("TIME")[0])  # type: ignore[index, arg-type]
    assert all(abs(now - entry.last_used_s) < 120 for entry in entries)
