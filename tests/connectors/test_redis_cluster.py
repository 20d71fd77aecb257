"""A Redis cluster whose slots move, whose nodes die, and whose round trips are counted."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Outcome, Status, Touch
from hicache_store.connectors.redis_connector import RedisConnector
from hicache_store.connectors.redis_topology import SLOTS, key_slot
from hicache_store.testing.contract_base import assert_holds, fetch, run_together, soon, store
from hicache_store.testing.probes import content, read_of, variant_of, write_of
from hicache_store.testing.redis_servers import RedisCluster, RedisServer, redis_cluster
from tests.connectors.redis_rig import HOST, LyingServer, bulk, opened, wait_until

SIZE = 20_001


@pytest.fixture
def prefix() -> str:
    return f"cluster-{uuid.uuid4().hex}:"


@pytest.fixture
def handle(redis_three: RedisCluster, prefix: str) -> Iterator[RedisConnector]:
    with opened(f"redis+cluster://{redis_three.addresses}?prefix={prefix}") as connector:
        yield connector


@pytest.fixture(scope="module")
def doomed() -> Iterator[RedisCluster]:
    """A cluster of this module's own, to be destroyed."""
    with redis_cluster() as cluster:
        yield cluster


def objects_of(count: int, size: int = SIZE) -> dict[str, bytes]:
    return {f"v1/object/{index:04d}": content(f"v1/object/{index:04d}", size) for index in range(count)}


def slot_of(connector: RedisConnector, key: str) -> int:
    return key_slot(connector._encode(key))


def test_slots_are_those_of_the_servers(redis_three: RedisCluster) -> None:
    for key in (b"", b"a", b"{a}b", b"a{b}c{d}", b"x{}y", b"{", b"\x00\xff", b"hicache:v1/" + b"f" * 200):
        assert redis_three.nodes[0].ask("CLUSTER", "KEYSLOT", key) == key_slot(key)


def test_one_node_is_enough_to_find_the_others(redis_three: RedisCluster, prefix: str) -> None:
    """By the scheme, by the option, and by what the server says of itself."""
    objects = objects_of(30)
    address = redis_three.nodes[1].address
    urls = [f"redis+cluster://{HOST}:1,{address}?", f"redis://{address}?cluster=1&", f"redis://{address}?"]
    for turn, url in enumerate(urls):
        with opened(f"{url}prefix={prefix}{turn}:") as connector:
            store(connector, objects)
            assert_holds(connector, objects)
            owners = {redis_three.owner(slot_of(connector, key)) for key in objects}
            assert owners == {0, 1, 2}
            assert {entry.key for entry in connector.scan()} == set(objects)


def test_a_handle_that_is_told_not_to_follow_says_what_to_do(redis_three: RedisCluster) -> None:
    with opened(f"redis://{redis_three.nodes[0].address}?cluster=0") as connector:
        statuses = Counter(fetch(connector, key, 100)[0].status for key in objects_of(30))
        assert set(statuses) == {Status.ABSENT, Status.FAILED}


def calls_of(node: RedisServer) -> int:
    """Reads from clients' sockets: requests that arrive together are one."""
    return int(node.info("total_reads_processed"))


def test_c14_round_trips_do_not_grow_with_the_keys(redis_three: RedisCluster, handle: RedisConnector) -> None:
    """300 keys over three servers: each is asked at once for all of its own, in one request."""
    keys = list(objects_of(300))
    handle.sizes(keys, soon())
    before = [calls_of(node) for node in redis_three.nodes]
    assert handle.sizes(keys, soon()) == [None] * 300
    # A request of 100 commands may arrive in pieces; 100 requests would be 100.
    for node, count in zip(redis_three.nodes, before, strict=True):
        assert calls_of(node) - count <= 25


def test_a_slot_that_moves_is_followed(redis_three: RedisCluster, handle: RedisConnector) -> None:
    """Every stage of a migration: keys here, there and in between, and a layout that is out of date."""
    key = "v1/object/moves"
    slot = slot_of(handle, key)
    source = redis_three.owner(slot)
    target = (source + 1) % 3
    # Names in the same slot, so that some move while others stay.
    names = [key, *[f"{key}/{i}" for i in range(60_000) if slot_of(handle, f"{key}/{i}") == slot][:2]]
    objects = {name: content(name, SIZE) for name in names}
    store(handle, objects)
    try:
        redis_three.open_migration(slot, source, target)
        assert_holds(handle, objects)
        assert redis_three.move_keys(slot, source, target, count=1) == 1
        assert_holds(handle, objects)
        assert handle.metrics.get("redis.asked_elsewhere") > 0
        new = next(f"{key}/new{i}" for i in range(600_000) if slot_of(handle, f"{key}/new{i}") == slot)
        store(handle, {new: content(new, SIZE)})
        assert_holds(handle, {new: content(new, SIZE)})
        outcomes = handle.touch([Touch(name) for name in (*objects, new)], soon())
        assert {outcome.status for outcome in outcomes} == {Status.OK}
        redis_three.move_keys(slot, source, target)
        assert_holds(handle, {**objects, new: content(new, SIZE)})
        redis_three.close_migration(slot, target)
        assert handle.metrics.get("redis.moved") == 0
        assert_holds(handle, objects)
        assert handle.metrics.get("redis.moved") > 0
        moved = handle.metrics.get("redis.moved")
        assert_holds(handle, objects)
        assert handle.metrics.get("redis.moved") == moved, "the new place is remembered"
        assert handle.delete([*objects, new], soon())[0].status is Status.OK
    finally:
        put_back(redis_three, slot, source)


def put_back(cluster: RedisCluster, slot: int, home: int) -> None:
    """End a migration, wherever it stopped, at the node where it began."""
    owner = cluster.owner(slot)
    if owner != home:
        cluster.open_migration(slot, owner, home)
        cluster.move_keys(slot, owner, home)
    for node in cluster.nodes:
        node.ask("CLUSTER", "SETSLOT", slot, "STABLE")
    cluster.close_migration(slot, home)


def test_versions_are_kept_apart_while_a_slot_moves(
    redis_three: RedisCluster, handle: RedisConnector
) -> None:
    """A repair of an object on its way is put off, not done by halves."""
    key = "v1/object/repaired"
    slot = slot_of(handle, key)
    source = redis_three.owner(slot)
    target = (source + 1) % 3
    store(handle, {key: content(key, SIZE)})
    version = fetch(handle, key, SIZE)[0].version
    try:
        redis_three.open_migration(slot, source, target)
        redis_three.move_keys(slot, source, target)
        write = write_of(key, content(key, SIZE, 1), replace=version)
        outcome = handle.write_from([write], soon())[0]
        assert outcome.status is Status.FAILED
        assert outcome.is_transient
        assert write.source.events == []
        assert handle.delete([key], soon(), [version])[0].status is Status.FAILED
        redis_three.close_migration(slot, target)
        assert handle.write_from([write], soon())[0].status is Status.OK
        assert_holds(handle, {key: content(key, SIZE, 1)})
    finally:
        put_back(redis_three, slot, source)


def test_resharding_under_load(redis_three: RedisCluster, handle: RedisConnector) -> None:
    """Slots move back and forth while objects are written, read and deleted: no wrong byte, no hang."""
    keys = list(objects_of(40))
    bodies = {(key, variant): content(key, SIZE, variant) for key in keys for variant in range(2)}
    slots = sorted({slot_of(handle, key) for key in keys[:12]})
    homes = {slot: redis_three.owner(slot) for slot in slots}
    stop = threading.Event()
    bad: list[str] = []
    seen: Counter[Status] = Counter()

    def judge(outcomes: Sequence[Outcome], allowed: set[Status]) -> None:
        for outcome in outcomes:
            seen[outcome.status] += 1
            if outcome.status not in allowed and not outcome.is_transient:
                bad.append(str(outcome))

    def write(variant: int) -> None:
        while not stop.is_set():
            writes = [write_of(key, bodies[key, variant]) for key in keys]
            judge(handle.write_from(writes, soon()), {Status.OK, Status.EXISTS})

    def read() -> None:
        while not stop.is_set():
            pairs = [read_of(key, SIZE) for key in keys]
            outcomes = handle.read_into([one for one, _ in pairs], soon())
            judge(outcomes, {Status.OK, Status.ABSENT})
            for key, outcome, (_, target) in zip(keys, outcomes, pairs, strict=True):
                if outcome.is_ok and variant_of(key, target.delivered()) not in (0, 1):
                    bad.append(f"wrong bytes of {key}")

    def delete() -> None:
        while not stop.is_set():
            judge(handle.delete(keys[::3], soon()), {Status.OK, Status.ABSENT})

    def reshard() -> None:
        try:
            for turn in range(3):
                for slot in slots:
                    source = redis_three.owner(slot)
                    target = (source + 1 + turn % 2) % 3
                    redis_three.open_migration(slot, source, target)
                    while redis_three.move_keys(slot, source, target, count=2):
                        pass
                    redis_three.close_migration(slot, target)
        finally:
            stop.set()

    try:
        run_together(reshard, lambda: write(0), lambda: write(1), read, read, delete)
    finally:
        for slot, home in homes.items():
            put_back(redis_three, slot, home)
    assert bad == []
    assert seen[Status.OK] > 100
    assert handle.metrics.get("redis.moved") + handle.metrics.get("redis.asked_elsewhere") > 0
    writes = [write_of(key, bodies[key, 0]) for key in keys]
    gone = {Status.OK, Status.ABSENT}
    wait_until(lambda: {outcome.status for outcome in handle.delete(keys, soon())} <= gone)
    wait_until(lambda: all(outcome.is_ok for outcome in handle.write_from(writes, soon())))
    assert_holds(handle, {key: bodies[key, 0] for key in keys})


def test_c14_d18_a_node_that_dies_takes_its_keys_with_it(doomed: RedisCluster) -> None:
    """The keys of the others are hits all the time; when its slots have a new server, so are its own."""
    objects = objects_of(90)
    with opened(f"redis+cluster://{doomed.addresses}") as connector:
        store(connector, objects)
        owners = {key: doomed.owner(slot_of(connector, key)) for key in objects}
        doomed.nodes[1].daemon.pause()
        sizes = connector.sizes(list(objects), Deadline.after(1.0))
        assert [size is None for size in sizes] == [owners[key] == 1 for key in objects]
        doomed.nodes[1].daemon.resume()
        doomed.nodes[1].daemon.kill()
        for _ in range(3):
            sizes = connector.sizes(list(objects), soon())
            assert [size is None for size in sizes] == [owners[key] == 1 for key in objects]
            pairs = [read_of(key, SIZE) for key in objects]
            outcomes = connector.read_into([read for read, _ in pairs], soon())
            for key, outcome in zip(objects, outcomes, strict=True):
                wanted = Status.FAILED if owners[key] == 1 else Status.OK
                assert outcome.status is wanted, outcome
        give_slots_of_the_dead(doomed, dead=1, heir=2)
        lost = {key: data for key, data in objects.items() if owners[key] == 1}
        writes = [write_of(key, data) for key, data in lost.items()]
        wait_until(lambda: all(outcome.is_ok for outcome in connector.write_from(writes, soon())))
        assert_holds(connector, objects)


def give_slots_of_the_dead(cluster: RedisCluster, dead: int, heir: int) -> None:
    """What an operator does after the loss of a node: forget it, and serve its slots elsewhere, empty."""
    rows = cluster.nodes[heir].ask("CLUSTER", "NODES")
    assert isinstance(rows, bytes)
    address = f"{HOST}:{cluster.nodes[dead].port}@"
    (name,) = [row.split()[0] for row in rows.decode().splitlines() if address in row]
    alive = [node for index, node in enumerate(cluster.nodes) if index != dead]
    for node in alive:
        node.ask("CLUSTER", "FORGET", name)
    first, last = SLOTS * dead // 3, SLOTS * (dead + 1) // 3
    cluster.nodes[heir].ask("CLUSTER", "ADDSLOTSRANGE", first, last - 1)


def slots_reply(*rows: tuple[int, int, bytes, int]) -> bytes:
    body = b"".join(
        b"*3\r\n:%d\r\n:%d\r\n*3\r\n%b:%d\r\n%b" % (first, last, bulk(host), port, bulk(b"id"))
        for first, last, host, port in rows
    )
    return b"*%d\r\n%b" % (len(rows), body)


def test_a_cluster_that_serves_only_some_slots() -> None:
    """Keys of the others fail as items, and a server that does not know its own name is found."""
    body = content("key", 500)

    def answer(words: Sequence[bytes]) -> bytes:
        if words[0] == b"CLUSTER":
            return slots_reply((0, SLOTS // 2, b"", server.port))
        return bulk(body + bytes(16)) if words[0] == b"GET" else b":516\r\n"

    with LyingServer(answer) as server, opened(f"redis+cluster://{HOST}:{server.port}") as connector:
        keys = [f"key {index}" for index in range(40)]
        served = [slot_of(connector, key) <= SLOTS // 2 for key in keys]
        assert set(served) == {True, False}
        assert [size is not None for size in connector.sizes(keys, soon())] == served
        outcomes = [fetch(connector, key, 500)[0] for key in keys]
        assert [outcome.is_ok for outcome in outcomes] == served
        assert {one.detail for one in outcomes if not one.is_ok} == {"no server serves the key"}


@pytest.mark.parametrize("word", [b"MOVED", b"ASK"])
def test_servers_that_send_one_another_the_keys_in_circles(word: bytes) -> None:
    """The rounds are few."""

    def answer(words: Sequence[bytes]) -> bytes:
        if words[0] == b"CLUSTER":
            return slots_reply((0, SLOTS - 1, b"", server.port))
        if words[0] == b"ASKING":
            return b"+OK\r\n"
        return b"-%b 5 %b:%d\r\n" % (word, HOST.encode(), server.port)

    with LyingServer(answer) as server, opened(f"redis+cluster://{HOST}:{server.port}") as connector:
        outcome = fetch(connector, "key", 500)[0]
        assert outcome.status is Status.FAILED
        assert outcome.is_transient
        gets = [words for words in server.commands if words[0] == b"GET"]
        assert 2 <= len(gets) <= 5


@pytest.mark.parametrize(
    "reply",
    [b"-ERR This instance has cluster support disabled\r\n", b"+OK\r\n", b"*0\r\n", b"*1\r\n*1\r\n:1\r\n"],
)
def test_a_layout_that_cannot_be_read_is_told_at_attach(reply: bytes) -> None:
    from hicache_store.errors import ConfigurationError  # noqa: PLC0415

    with (
        LyingServer(lambda words: reply) as server,
        pytest.raises(ConfigurationError, match=str(server.port)),
        opened(f"redis+cluster://{HOST}:{server.port}"),
    ):
        pass
