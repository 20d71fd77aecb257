"""A Redis server, or the way to it, that fails: a counted miss or a failed put, never a wrong byte, no
call that outlives its deadline, and everything well again once the fault has ended."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest

from hicache_store.clock import Deadline
from hicache_store.connectors.base import (
    BufferSource,
    BufferTarget,
    Outcome,
    Read,
    Status,
    Touch,
    Write,
)
from hicache_store.connectors.redis_connector import RedisConnector
from hicache_store.errors import ConfigurationError, HandleError, HicacheError
from hicache_store.limits import MIB, REDIS_CONNECTIONS_MAX
from hicache_store.testing.clocks import FakeClock
from hicache_store.testing.contract_base import fetch, run_together, soon, store
from hicache_store.testing.probes import ProbeTarget, content, read_of, variant_of, write_of
from hicache_store.testing.redis_servers import RedisServer, redis_sentinel, redis_server
from tests.connectors.redis_rig import LyingServer, Proxy, bulk, open_redis, opened, wait_until

SIZE = 300_001


def through(proxy: Proxy, prefix: str, options: str = "") -> str:
    return f"redis://127.0.0.1:{proxy.port}?prefix={prefix}{options}"


def objects_of(count: int, size: int = SIZE) -> dict[str, bytes]:
    return {f"v1/object/{index:04d}": content(f"v1/object/{index:04d}", size) for index in range(count)}


def read_all(
    connector: RedisConnector, objects: dict[str, bytes], deadline: Deadline | None = None
) -> tuple[list[Outcome], list[ProbeTarget]]:
    pairs = [read_of(key, len(data)) for key, data in objects.items()]
    outcomes = connector.read_into([read for read, _ in pairs], deadline or soon())
    targets = [target for _, target in pairs]
    assert_nothing_wrong(objects, outcomes, targets)
    return outcomes, targets


def assert_nothing_wrong(
    objects: dict[str, bytes], outcomes: Sequence[Outcome], targets: Sequence[ProbeTarget]
) -> None:
    """Whatever is said to be there has its own bytes, and every target was released."""
    for data, outcome, target in zip(objects.values(), outcomes, targets, strict=True):
        if outcome.status is Status.OK:
            assert target.delivered() == data
        else:
            assert "check" not in target.events
        assert target.guards_hold
        assert target.events.count("parts") == target.events.count("release") <= 1


def assert_well(connector: RedisConnector, objects: dict[str, bytes]) -> None:
    """The handle works, as if nothing had happened."""
    assert connector.sizes(list(objects), soon()) == [len(data) for data in objects.values()]
    outcomes, _ = read_all(connector, objects)
    assert {outcome.status for outcome in outcomes} == {Status.OK}


# -- connections that break ----------------------------------------------------------------


def test_a_connection_that_breaks_in_mid_reply(handle: RedisConnector, proxy: Proxy, prefix: str) -> None:
    """One object at most is lost: the others of the connection were not begun and are asked for again."""
    objects = objects_of(24)
    store(handle, objects)
    with opened(through(proxy, prefix, "&threads=2")) as connector:
        assert_well(connector, objects)
        proxy.cut_replies_after = 2 * SIZE + 5_000
        proxy.cut_all()  # so that the next connections count from zero
        outcomes, _ = read_all(connector, objects)
        failed = [outcome for outcome in outcomes if outcome.status is not Status.OK]
        assert [outcome.status for outcome in failed] == [Status.FAILED]
        assert failed[0].is_transient
        assert connector.metrics.get("redis.read_failed") == 1
        assert_well(connector, objects)


def test_a_server_killed_in_mid_reply_and_started_again() -> None:
    """All that was on its way fails, nothing hangs, and the same handle goes on with the new server."""
    objects = objects_of(16)
    with redis_server() as server, Proxy(server.port) as proxy, opened(through(proxy, "k:")) as connector:
        store(connector, objects)
        proxy.stall()
        results: list[list[Outcome]] = []
        reader = threading.Thread(target=lambda: results.append(read_all(connector, objects)[0]))
        reader.start()
        server.daemon.kill()
        proxy.resume()
        reader.join(60)
        assert not reader.is_alive()
        assert {outcome.status for outcome in results[0]} <= {Status.FAILED, Status.OK}
        writes = [write_of("v1/new", content("v1/new", 100))]
        assert connector.write_from(writes, soon())[0].status is Status.FAILED
        assert connector.sizes(list(objects), soon()) == [None] * 16
        assert connector.metrics.get("redis.look_failed") == 16
        server.restart()
        assert connector.sizes(list(objects), soon()) == [None] * 16
        assert {outcome.status for outcome in read_all(connector, objects)[0]} == {Status.ABSENT}
        store(connector, objects)
        assert_well(connector, objects)


def test_a_server_that_was_restarted_between_two_calls_costs_nothing() -> None:
    """Connections that died while they were idle are seen before anything is sent."""
    objects = objects_of(8, 1_000)
    with redis_server() as server, opened(f"redis://{server.address}") as connector:
        store(connector, objects)
        server.restart()
        store(connector, objects)
        assert_well(connector, objects)
        assert connector.metrics.get("redis.connections_stale") >= 1
        assert connector.metrics.get("redis.connections_broken") == 0


def test_a_write_whose_connection_breaks(handle: RedisConnector, proxy: Proxy, prefix: str) -> None:
    """The object is absent or whole, its put has failed, and its source was released."""
    with opened(through(proxy, prefix)) as connector:
        connector.sizes(["x"], soon())
        proxy.hold_requests_after = 100_000
        writes = [write_of(key, data) for key, data in objects_of(4).items()]
        outcomes = connector.write_from(writes, Deadline.after(0.5))
        assert Status.TIMED_OUT in {outcome.status for outcome in outcomes}
        for write in writes:
            assert write.source.events in ([], ["buffers", "release"])
        proxy.hold_requests_after = None
        proxy.cut_all()
        for key, outcome in zip(objects_of(4), outcomes, strict=True):
            assert handle.sizes([key], soon()) == [SIZE if outcome.is_ok else None]
        outcomes = connector.write_from(writes, soon())
        assert all(outcome.is_ok for outcome in outcomes)
        assert_well(handle, objects_of(4))


def test_a_write_whose_reply_is_lost_is_whole(handle: RedisConnector, proxy: Proxy, prefix: str) -> None:
    """The server has stored it; the caller cannot know, and writing again finds it."""
    objects = objects_of(1)
    with opened(through(proxy, prefix, "&threads=1")) as connector:
        connector.sizes(["x"], soon())
        proxy.cut_all()
        # Handshake, PING and the look at what is there are answered; then the connection ends.
        proxy.cut_replies_after = 18
        (write,) = [write_of(key, data) for key, data in objects.items()]
        outcome = connector.write_from([write], soon())[0]
        assert outcome.status in (Status.FAILED, Status.OK, Status.EXISTS)
        assert connector.write_from([write], soon())[0].is_ok
    assert_well(handle, objects)


def test_a_write_that_the_server_has_when_time_is_up_is_not_denied(
    redis_single: RedisServer, prefix: str
) -> None:
    """Its reply is only moments away; the next one is not even begun."""
    clock = FakeClock()
    with opened(f"redis://{redis_single.address}?prefix={prefix}&threads=1") as connector:
        writes = [write_of(key, data) for key, data in objects_of(3).items()]
        writes[1].source.on_release = lambda: clock.advance(60.0)
        outcomes = connector.write_from(writes, Deadline.after(30.0, clock))
        assert [one.status for one in outcomes] == [Status.OK, Status.OK, Status.TIMED_OUT]
        assert writes[2].source.events == []
        assert connector.sizes(list(objects_of(3)), soon()) == [SIZE, SIZE, None]


# -- no reply reaches another command ------------------------------------------------------


def test_a54_a_command_that_timed_out_and_the_next_one(
    handle: RedisConnector, proxy: Proxy, prefix: str
) -> None:
    """Its reply arrives late, on a connection that nobody uses any more."""
    objects = objects_of(6, 50_001)
    store(handle, objects)
    with opened(through(proxy, prefix, "&threads=2")) as connector:
        for turn in range(8):
            proxy.stall()
            outcomes, targets = read_all(connector, objects, Deadline.after(0.05))
            assert {outcome.status for outcome in outcomes} == {Status.TIMED_OUT}
            assert connector.sizes(list(objects), Deadline.after(0.05)) == [None] * 6
            proxy.resume()
            shuffled = dict(random.Random(turn).sample(sorted(objects.items()), 6))
            assert_well(connector, shuffled)
            assert all(target.is_untouched for target in targets)


def test_a54_readers_with_every_kind_of_patience(handle: RedisConnector, proxy: Proxy, prefix: str) -> None:
    """Eight readers, some of them cancelled at any point of a reply; all that is said to be there is."""
    objects = objects_of(12, 200_001)
    store(handle, objects)
    done: list[Status] = []

    def reader(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(25):
            some = dict(rng.sample(sorted(objects.items()), 4))
            patience_s = rng.choice([0.0005, 0.002, 0.005, 0.02, 30.0])
            outcomes, targets = read_all(connector, some, Deadline.after(patience_s))
            for target in targets:
                target.memory[:] = b"\xee" * len(target.memory)
            done.extend(outcome.status for outcome in outcomes)
            assert all(target.memory.count(0xEE) == len(target.memory) for target in targets)

    with opened(through(proxy, prefix, "&threads=3")) as connector:
        run_together(*[lambda seed=seed: reader(seed) for seed in range(8)])
        assert set(done) <= {Status.OK, Status.TIMED_OUT}
        assert done.count(Status.OK) > 50
        assert done.count(Status.TIMED_OUT) > 50
        assert_well(connector, objects)


def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    """A reply that arrives between two calls belongs to nothing; the connection is not used again."""
    body = content("key", 500)

    def answer(words: Sequence[bytes]) -> bytes:
        return bulk(body + bytes(16)) if words[0] == b"GET" else b":516\r\n"

    with LyingServer(answer) as server, opened(server.url) as connector:
        assert fetch(connector, "key", 500)[0].status is Status.OK
        before = server.connections
        server.push(bulk(content("other", 500) + bytes(16)))
        (pool,) = connector._pools._by_address.values()
        wait_until(lambda: not pool._idle[-1].channel.is_fresh())
        for _ in range(3):
            outcome, target = fetch(connector, "key", 500)
            assert outcome.status is Status.OK
            assert target.delivered() == body
        assert server.connections > before


# -- a server that answers wrongly ---------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "status", "is_transient"),
    [
        (b"-LOADING Redis is loading the dataset in memory\r\n", Status.FAILED, True),
        (b"-MASTERDOWN Link with MASTER is down\r\n", Status.FAILED, True),
        (b"-BUSY Redis is busy running a script\r\n", Status.FAILED, True),
        (b"-CLUSTERDOWN Hash slot not served\r\n", Status.FAILED, True),
        (b"-MOVED 1 127.0.0.1:1\r\n", Status.FAILED, True),
        (b"-NOPERM this user has no permissions\r\n", Status.FAILED, False),
        (b"-NOAUTH Authentication required.\r\n", Status.FAILED, False),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", Status.REFUSED, True),
        (b"-READONLY You can't write against a read only replica.\r\n", Status.REFUSED, True),
        (b"-MISCONF Redis is configured to save RDB snapshots\r\n", Status.REFUSED, True),
    ],
)
def test_error_replies(reply: bytes, status: Status, is_transient: bool) -> None:
    """Each is that item's outcome, with the server's words, and the connection goes on."""
    with LyingServer(lambda words: b":0\r\n" if words[0] == b"STRLEN" else reply) as server:
        with opened(server.url + "?threads=1") as connector:
            outcomes = [
                fetch(connector, "key", 500)[0],
                connector.write_from([write_of("key", bytes(500))], soon())[0],
                connector.delete(["key"], soon())[0],
                connector.touch([Touch("key")], soon())[0],
            ]
            for outcome in outcomes:
                assert (outcome.status, outcome.is_transient) == (status, is_transient)
                assert outcome.detail == reply[1:-2].decode()
        assert server.connections == 1
    with LyingServer(lambda words: reply) as server, opened(server.url) as connector:
        assert connector.sizes(["a", "b"], soon()) == [None, None]
        assert connector.metrics.get("redis.look_failed") == 2


@pytest.mark.parametrize(
    "reply",
    [
        b"nonsense\r\n",
        b"+OK\r\n",
        b":5\r\n",
        b"*1\r\n:5\r\n",
        b"$516\r\nshort",
        bulk(bytes(516))[:-2] + b"XX",
        b"\x00" * 6_000,
        b"",
    ],
)
def test_replies_that_are_none(reply: bytes) -> None:
    """A counted failure, and the connection is not used again."""

    def answer(words: Sequence[bytes]) -> bytes | None:
        return reply or None

    with LyingServer(answer) as server, opened(server.url + "?threads=1") as connector:
        outcome, target = fetch(connector, "key", 500) if reply != b"$516\r\nshort" else _impatient(connector)
        assert outcome.status in (Status.FAILED, Status.TIMED_OUT)
        assert "check" not in target.events
        assert target.guards_hold
        before = server.connections
        fetch(connector, "key", 500) if reply != b"$516\r\nshort" else _impatient(connector)
        assert server.connections > before


def _impatient(connector: RedisConnector) -> tuple[Outcome, ProbeTarget]:
    read, target = read_of("key", 500)
    return connector.read_into([read], Deadline.after(0.2))[0], target


def test_an_object_that_changes_between_the_parts_of_a_read() -> None:
    """Another version at the end than at the begin: the parts need not belong together."""
    old, new = b"o" * 16, b"n" * 16
    versions = iter([old, new])

    def answer(words: Sequence[bytes]) -> bytes:
        if words[0] == b"STRLEN":
            return b":1016\r\n"
        start, stop = int(words[2]), int(words[3])
        return bulk(next(versions)) if start < 0 else bulk(bytes(stop - start + 1))

    with LyingServer(answer) as server, opened(server.url) as connector:
        target = ProbeTarget([(0, [100]), (500, [100])])
        read = Read("key", 1_000, target, ranges=((0, 100), (500, 600)))
        outcome = connector.read_into([read], soon())[0]
        assert outcome.status is Status.FAILED
        assert "changed" in outcome.detail
        assert outcome.is_transient
        assert target.events == ["parts", "release"]


@pytest.mark.parametrize("gone_at", ["begin", "middle"])
def test_d08_d14_an_object_that_is_evicted_between_the_parts_of_a_read(gone_at: str) -> None:
    """One key an object, whole or not at all: no part outlives another, and half a read is a miss."""
    seen: list[bytes] = []

    def answer(words: Sequence[bytes]) -> bytes:
        seen.append(words[0])
        if words[0] == b"STRLEN":
            return b":0\r\n" if gone_at == "begin" else b":1016\r\n"
        if gone_at == "begin" or len(seen) > 3:
            return b"$0\r\n\r\n"
        return bulk(bytes(16)) if int(words[2]) < 0 else bulk(bytes(100))

    with LyingServer(answer) as server, opened(server.url + "?threads=1") as connector:
        target = ProbeTarget([(0, [100]), (500, [100])])
        read = Read("key", 1_000, target, ranges=((0, 100), (500, 600)))
        outcome = connector.read_into([read], soon())[0]
        assert outcome.status is (Status.ABSENT if gone_at == "begin" else Status.FAILED)
        assert "check" not in target.events
        assert server.connections == 1


# -- memory and eviction -------------------------------------------------------------------


def test_d19_a_full_server_that_evicts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Puts fail and are counted, gets go on; with room again, puts work again."""
    settings = {"maxmemory": "12mb", "maxmemory-policy": "noeviction"}
    objects = objects_of(40)
    with redis_server(settings=settings) as server, opened(f"redis://{server.address}") as connector:
        assert [r.message for r in caplog.records if "noeviction" in r.message] != []
        writes = [write_of(key, data) for key, data in objects.items()]
        outcomes = connector.write_from(writes, soon())
        refused = [outcome for outcome in outcomes if not outcome.is_ok]
        assert {outcome.status for outcome in refused} == {Status.REFUSED}
        assert all("OOM" in outcome.detail and outcome.is_transient for outcome in refused)
        assert connector.metrics.get("redis.write_refused") == len(refused) > 0
        kept = {key: data for (key, data), one in zip(objects.items(), outcomes, strict=True) if one.is_ok}
        assert kept
        assert_well(connector, kept)
        connector.delete(list(kept), soon())
        assert connector.write_from(writes[:4], soon())[0].is_ok


def test_d12_eviction_between_the_look_up_and_the_get(
    handle: RedisConnector, redis_single: RedisServer
) -> None:
    """What was there is a miss, and a miss again for who asks again."""
    objects = objects_of(8)
    store(handle, objects)
    assert handle.sizes(list(objects), soon()) == [SIZE] * 8
    gone = list(objects)[2:5]
    for key in gone:
        redis_single.ask("DEL", handle._encode(key))
    outcomes, _ = read_all(handle, objects)
    assert [one.status is Status.ABSENT for one in outcomes] == [key in gone for key in objects]
    assert [size is None for size in handle.sizes(list(objects), soon())] == [key in gone for key in objects]
    store(handle, {key: objects[key] for key in gone})
    assert_well(handle, objects)


def test_a_server_that_evicts_while_it_is_written_to_and_read() -> None:
    """Three times as much as fits: every object is whole or absent, and no write fails."""
    settings = {"maxmemory": "24mb", "maxmemory-policy": "allkeys-lru"}
    objects = objects_of(160)
    with redis_server(settings=settings) as server, opened(f"redis://{server.address}") as connector:
        found = 0
        for start in range(0, 160, 20):
            part = dict(list(objects.items())[start : start + 20])
            writes = [write_of(key, data) for key, data in part.items()]
            assert all(outcome.is_ok for outcome in connector.write_from(writes, soon()))
            outcomes, _ = read_all(connector, objects)
            assert {outcome.status for outcome in outcomes} <= {Status.OK, Status.ABSENT}
            found = sum(outcome.is_ok for outcome in outcomes)
        assert 0 < found < 160
        assert int(server.info("evicted_keys")) > 0


def test_what_is_no_value_of_ours_harms_nobody(handle: RedisConnector, redis_single: RedisServer) -> None:
    """Lists and short strings under our names: no object, no exception, and they can be replaced."""
    redis_single.ask("RPUSH", handle._encode("list"), "x")
    redis_single.ask("SET", handle._encode("short"), "abc")
    store(handle, {"good": content("good", 100)})
    assert handle.sizes(["list", "short", "good"], soon()) == [None, 0, 100]
    outcome, target = fetch(handle, "list", 100)
    assert (outcome.status, outcome.version) == (Status.WRONG_SIZE, None)
    assert "WRONGTYPE" in outcome.detail
    outcome, target = fetch(handle, "short", 100)
    assert outcome.status is Status.WRONG_SIZE
    assert outcome.detail == "there is a value of 3 bytes, too short for any object"
    assert target.is_untouched
    write = write_of("short", content("short", 100), replace=outcome.version)
    assert handle.write_from([write], soon())[0].status is Status.OK
    assert sorted(entry.key for entry in handle.scan()) == ["good", "short"]
    assert handle.delete(["list"], soon())[0].status is Status.OK


def test_d23_a_value_that_is_too_large_is_never_sent(redis_single: RedisServer, prefix: str) -> None:
    with opened(f"redis://{redis_single.address}?prefix={prefix}&max_value=64KiB") as connector:
        writes = [write_of("small", bytes(64 << 10)), write_of("large", bytes((64 << 10) + 1))]
        outcomes = connector.write_from(writes, soon())
        assert [outcome.status for outcome in outcomes] == [Status.OK, Status.REFUSED]
        assert "65537 bytes exceed max_value=65536" in outcomes[1].detail
        assert writes[1].source.events == []
        assert connector.sizes(["large"], soon()) == [None]


# -- who may do what -----------------------------------------------------------------------


def test_a_wrong_password_is_told_without_the_password(caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(password="right") as server:
        for login in (":wr0ng@", "nobody:wr0ng@", ""):
            with pytest.raises(ConfigurationError) as caught:
                open_redis(f"redis://{login}{server.address}")
            assert "wr0ng" not in str(caught.value) + repr(caught.value.__cause__) + caplog.text
            assert server.address in str(caught.value)


def test_a_password_that_changes_under_a_handle() -> None:
    """Misses and failed puts while it is wrong; well again once it is right, without opening again."""
    objects = objects_of(3)
    with redis_server(password="right") as server, opened(f"redis://:right@{server.address}") as connector:
        store(connector, objects)
        with server.connect() as admin:
            admin.ask("CONFIG", "SET", "requirepass", "changed")
            admin.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert {outcome.status for outcome in read_all(connector, objects)[0]} == {Status.FAILED}
            outcome = connector.write_from([write_of("new", bytes(100))], soon())[0]
            assert outcome.status is Status.FAILED
            assert "right" not in outcome.detail
            admin.ask("CONFIG", "SET", "requirepass", "right")
        assert_well(connector, objects)


def test_a_replica_can_be_read(caplog: pytest.LogCaptureFixture) -> None:
    """It says so at attach, and refuses changes as items."""
    objects = objects_of(4)
    with redis_server() as master, redis_server(replica_of=master, name="replica") as replica:
        with opened(f"redis://{master.address}") as writer:
            store(writer, objects)
        wait_until(lambda: replica.ask("DBSIZE") == len(objects))
        with opened(f"redis://{replica.address}") as connector:
            assert connector.capabilities.is_read_only
            assert "is a replica" in caplog.text
            assert_well(connector, objects)
            outcomes = connector.write_from([write_of("new", bytes(100))], soon())
            outcomes += connector.delete(list(objects)[:1], soon())
            outcomes += connector.touch([Touch(next(iter(objects)))], soon())
            assert [outcome.status for outcome in outcomes] == [Status.REFUSED] * 3


def test_a_master_that_becomes_a_replica_and_a_master_again() -> None:
    """Puts are refused meanwhile, gets go on, and the handle needs no attention."""
    objects = objects_of(4)
    with redis_server() as other, redis_server() as server, opened(f"redis://{server.address}") as connector:
        with opened(f"redis://{other.address}") as elsewhere:
            store(elsewhere, objects)
        server.ask("REPLICAOF", "127.0.0.1", other.port)
        wait_until(lambda: server.info("master_link_status") == "up")
        outcome = connector.write_from([write_of("new", bytes(100))], soon())[0]
        assert outcome.status is Status.REFUSED
        assert "READONLY" in outcome.detail
        assert_well(connector, objects)
        server.ask("REPLICAOF", "NO", "ONE")
        assert connector.write_from([write_of("new", bytes(100))], soon())[0].status is Status.OK


def test_sentinels_lead_to_the_new_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master dies; the same handle writes to its successor once the sentinel has named it."""
    objects = objects_of(4)
    with (
        redis_server() as master,
        redis_server(replica_of=master, name="replica") as replica,
        redis_sentinel(master, "cache", password="hidden") as sentinel,
    ):
        wait_until(lambda: bool(sentinel.ask("SENTINEL", "REPLICAS", "cache")))
        monkeypatch.setenv("SENTINEL_PASSWORD", "hidden")
        url = f"redis+sentinel://127.0.0.1:1,{sentinel.address}/cache/2"
        with opened(f"{url}?sentinel_password_env=SENTINEL_PASSWORD") as connector:
            store(connector, objects)
            wait_until(lambda: f"keys={len(objects)}," in replica.info("db2"))
            master.daemon.kill()
            assert {one.status for one in read_all(connector, objects)[0]} == {Status.FAILED}
            writes = [write_of("new", bytes(100))]
            wait_until(lambda: connector.write_from(writes, soon())[0].is_ok)
            assert_well(connector, objects)
            assert f"keys={len(objects) + 1}," in replica.info("db2")


# -- attaching -----------------------------------------------------------------------------


def test_d09_a_server_that_cannot_be_used_is_one_error(redis_single: RedisServer, tmp_path: object) -> None:
    """It names the place and the cause, and comes before long."""
    with Proxy(redis_single.port) as deaf:
        deaf.stall()
        cases = {
            "redis://127.0.0.1:1": "refused",
            "redis://no-such-host.invalid": "no-such-host.invalid:6379",
            f"unix://{tmp_path}/no.sock": "No such file",
            f"rediss://{redis_single.address}": "does it speak TLS there",
            f"redis://{redis_single.address}/99": "out of range",
            f"redis+cluster://{redis_single.address}": "cluster",
            f"redis+sentinel://{redis_single.address}/main": "main",
            f"redis://127.0.0.1:{deaf.port}?connect_timeout=300ms": f"127.0.0.1:{deaf.port}",
        }
        for url, words in cases.items():
            with pytest.raises(ConfigurationError, match=words):
                open_redis(url)


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({}, "", "has no memory limit"),
        ({"maxmemory": "100mb"}, "", "evicts nothing"),
        ({"maxmemory": "100mb", "maxmemory-policy": "volatile-lru"}, "", "only keys with a time to live"),
        ({"maxmemory": "100mb", "maxmemory-policy": "volatile-lru"}, "?ttl=1h", None),
        ({"maxmemory": "100mb", "maxmemory-policy": "allkeys-lfu"}, "", None),
    ],
)
def test_what_will_surprise_is_said_once_at_attach(
    settings: dict[str, str],
    options: str,
    words: str | None,
    redis_single: RedisServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = {"maxmemory": "0", "maxmemory-policy": "noeviction", **settings}
    try:
        for name, value in policy.items():
            redis_single.ask("CONFIG", "SET", name, value)
        with opened(f"redis://{redis_single.address}{options}"):
            pass
    finally:
        redis_single.ask("CONFIG", "SET", "maxmemory", "0")
        redis_single.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert len(caplog.records) == (words is not None)
    assert words is None or words in caplog.text


# -- deadlines and resources ---------------------------------------------------------------


def test_d06_a_server_that_stops_answering_costs_the_deadline(prefix: str) -> None:
    """Every call returns, nothing is written afterwards, closing does not wait, and it comes back."""
    objects = objects_of(8)
    with redis_server() as server, opened(f"redis://{server.address}") as connector:
        store(connector, objects)
        server.daemon.pause()
        targets: list[ProbeTarget] = []
        for _ in range(5):
            outcomes, some = read_all(connector, objects, Deadline.after(0.1))
            targets += some
            writes = [write_of(f"new {index}", bytes(SIZE)) for index in range(4)]
            outcomes += connector.write_from(writes, Deadline.after(0.1))
            outcomes += connector.delete(list(objects), Deadline.after(0.1))
            outcomes += connector.touch([Touch(key) for key in objects], Deadline.after(0.1))
            # Failed, not timed out, once as many threads hang in handshakes as may.
            assert {outcome.status for outcome in outcomes} <= {Status.TIMED_OUT, Status.FAILED}
            assert connector.sizes(list(objects), Deadline.after(0.1)) == [None] * 8
        server.daemon.resume()
        wait_until(lambda: connector.write_from([write_of("x", bytes(100))], soon())[0].is_ok)
        assert connector.metrics.get("workers.abandoned") > 0
        assert all(target.is_untouched for target in targets)


def test_closing_ends_a_call_that_waits_for_the_server() -> None:
    objects = objects_of(4)
    with redis_server() as server:
        connector = open_redis(f"redis://{server.address}")
        store(connector, objects)
        server.daemon.pause()
        outcomes: list[Outcome] = []
        reader = threading.Thread(
            target=lambda: outcomes.extend(read_all(connector, objects, Deadline.after(3_600.0))[0])
        )
        reader.start()
        threading.Event().wait(0.2)
        connector.close()
        reader.join(60)
        assert not reader.is_alive()
        assert {outcome.status for outcome in outcomes} <= {Status.FAILED, Status.TIMED_OUT}
        with pytest.raises(HandleError):
            connector.sizes(["x"], soon())


def test_c10_connections_are_bounded_and_reused(
    handle: RedisConnector, proxy: Proxy, prefix: str, redis_single: RedisServer
) -> None:
    """80 threads and two calls each: no more connections than the pool allows, and no failure."""
    objects = objects_of(4, 20_001)
    store(handle, objects)
    with opened(through(proxy, prefix, "&threads=4")) as connector:
        proxy.forget_counts()

        def use() -> None:
            for _ in range(2):
                assert_well(connector, objects)

        run_together(*[use] * 80)
        assert proxy.connections <= REDIS_CONNECTIONS_MAX
        proxy.forget_counts()
        for _ in range(20):
            assert_well(connector, objects)
        assert proxy.connections == 0


def test_d10_fifty_handles_leave_nothing_behind(redis_single: RedisServer, prefix: str) -> None:
    import os  # noqa: PLC0415

    def cycle() -> None:
        with opened(f"redis://{redis_single.address}?prefix={prefix}") as connector:
            store(connector, objects_of(6, 100))
            read_all(connector, objects_of(6, 100))
            connector.delete(list(objects_of(6)), soon())

    cycle()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(50):
        cycle()
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_listing_that_breaks_off_says_so(handle: RedisConnector, proxy: Proxy, prefix: str) -> None:
    store(handle, objects_of(20, 100))
    with opened(through(proxy, prefix)) as connector:
        assert len(list(connector.scan())) == 20
        proxy.cut_replies_after = 100
        with pytest.raises(HicacheError, match="broke off"):
            list(connector.scan())
        assert len(list(connector.scan())) == 20


def test_two_writers_race_and_one_wins(
    handle: RedisConnector, redis_single: RedisServer, prefix: str
) -> None:
    """Between the look and the SET another writer comes: the loser is told which it is."""
    with opened(f"redis://{redis_single.address}?prefix={prefix}") as other:
        cases = {"equal": 500, "longer": 600}
        for name, size in cases.items():
            write = write_of(name, content(name, 500, 2))
            write.source.on_buffers = lambda name=name, size=size: store(
                other, {name: content(name, size, 1)}
            )
            outcome = handle.write_from([write], soon())[0]
            assert outcome.status is (Status.EXISTS if size == 500 else Status.CONFLICT)
            assert variant_of(name, fetch(handle, name, size)[1].delivered()) == 1


def test_c19_objects_of_a_mebibyte_pass_without_copies(handle: RedisConnector) -> None:
    """32 MiB each way need no memory to speak of: bytes go straight from and into place."""
    import tracemalloc  # noqa: PLC0415

    objects = {f"large {index}": content(f"large {index}", MIB) for index in range(32)}
    writes = [Write(key, MIB, BufferSource.of(data)) for key, data in objects.items()]
    memory = [bytearray(MIB) for _ in objects]
    pairs = zip(objects, memory, strict=True)
    reads = [Read(key, MIB, BufferTarget.whole(into)) for key, into in pairs]
    tracemalloc.start()
    try:
        assert all(outcome.is_ok for outcome in handle.write_from(writes, soon()))
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        assert all(outcome.is_ok for outcome in handle.read_into(reads, soon()))
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written < MIB
    assert read < MIB
    assert memory == list(objects.values())
