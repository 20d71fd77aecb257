"""Values of other programs under keys of ours."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from hicache_store.clock import SYSTEM_CLOCK
from hicache_store.connectors.base import Read, Status
from hicache_store.connectors.redis_connector import RedisConnector
from hicache_store.layout.grid import Grid
from hicache_store.layout.names import marker_key
from hicache_store.layout.records import first_slot
from hicache_store.limits import MARKER_SLOTS
from hicache_store.metrics import Metrics
from hicache_store.store.grids import Announcement, GridDirectory
from hicache_store.testing.contract_base import fetch, soon, store
from hicache_store.testing.probes import ProbeTarget, content, write_of
from hicache_store.testing.redis_servers import RedisServer
from tests.connectors.redis_rig import opened

GRID = Grid("main", (0, 4, 8), (0, 16))


@pytest.fixture
def handle(redis_single: RedisServer) -> Iterator[RedisConnector]:
    with opened(f"redis://{redis_single.address}?prefix=foreign-{uuid.uuid4().hex}:") as connector:
        yield connector


@pytest.mark.parametrize("ranges", [None, ((0, 10),), ((5, 10), (90, 100))])
def test_a_value_of_another_type_is_damaged_and_not_ours_to_replace(
    handle: RedisConnector, redis_single: RedisServer, ranges: tuple[tuple[int, int], ...] | None
) -> None:
    """It has no version that a write could name; every word about it says what to do."""
    redis_single.ask("HSET", handle._encode("other"), "field", "x")
    store(handle, {"good": content("good", 100)})
    reads = []
    for key in ("other", "good", "other"):
        target = ProbeTarget([(start, [stop - start]) for start, stop in ranges or ((0, 100),)])
        reads.append(Read(key, 100, target, ranges))
    outcomes = handle.read_into(reads, soon())
    statuses = [Status.WRONG_SIZE, Status.OK, Status.WRONG_SIZE]
    assert [one.status for one in outcomes] == statuses
    assert reads[0].target.events == []  # type: ignore[attr-defined]
    assert (outcomes[0].version, outcomes[0].is_transient) == (None, False)
    outcomes += handle.write_from(
        [write_of("other", bytes(100)), write_of("other", bytes(9), replace="ab")], soon()
    )
    outcomes += handle.delete(["other"], soon(), ["ab"])
    assert [one.status for one in outcomes[3:]] == [Status.FAILED] * 3
    for one in (outcomes[0], *outcomes[3:]):
        assert "remove it there (DEL), or give the store a prefix of its own" in one.detail
    assert handle.metrics.get("redis.read_wrong_size") == 2
    assert handle.metrics.get("redis.write_failed") == 2
    assert redis_single.ask("TYPE", handle._encode("other")) == "hash"


def test_a_value_that_is_too_short_has_no_negative_length(
    handle: RedisConnector, redis_single: RedisServer
) -> None:
    for text in ("", "abc", "x" * 15):
        redis_single.ask("SET", handle._encode("short"), text)
        met = handle.write_from([write_of("short", bytes(100))], soon())[0] if text else None
        for outcome in (fetch(handle, "short", 100)[0], *([] if met is None else [met])):
            assert outcome.detail == f"there is a value of {len(text)} bytes, too short for any object"
            assert (outcome.version is None) == (text == "")


def test_a_marker_slot_with_a_value_of_another_type_is_passed_over(
    handle: RedisConnector, redis_single: RedisServer
) -> None:
    """Whatever another program put where a grid's marker would go first, the next free slot serves."""
    namespace, metrics = "0" * 64, Metrics()
    slot = first_slot(GRID)
    for step, words in enumerate((("RPUSH", "x"), ("SET", ""))):
        key = marker_key(namespace, (slot + step) % MARKER_SLOTS)
        redis_single.ask(words[0], handle._encode(key), words[1])
    directory = GridDirectory(handle, namespace, SYSTEM_CLOCK, metrics)
    assert directory.ensure(GRID, soon()) is Announcement.CONFIRMED
    slots = directory.read_slots(soon())
    assert slots[(slot + 2) % MARKER_SLOTS].grid == GRID
    assert redis_single.ask("TYPE", handle._encode(marker_key(namespace, slot))) == "list"
    other = GridDirectory(handle, namespace, SYSTEM_CLOCK, metrics)
    other.refresh(soon())
    assert other.grids == (GRID,)
