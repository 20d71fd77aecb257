"""The manifest is put once, compared at every attach, and no damage to it stops anybody."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from store_rig import Place, attach_rank, chain, namespace_of, read_pages, tiny, write_pages

from hicache_store.connectors.base import Connector
from hicache_store.errors import ConfigurationError, IdentityError
from hicache_store.layout.names import manifest_key
from hicache_store.layout.parallel import Rank
from hicache_store.layout.records import frame
from hicache_store.limits import METADATA_MAX_BYTES
from hicache_store.testing.faults import CountingConnector, Fail, FaultyConnector, TimeOut, on_keys

POOL = tiny().pool(2)
NAMESPACE = namespace_of(POOL)
KEY = manifest_key(NAMESPACE.digest)


def is_manifest(key: str) -> bool:
    return key.endswith("/manifest")


def test_it_is_put_once_and_says_what_the_digest_stands_for() -> None:
    watched: list[CountingConnector] = []

    def watch(connector: Connector) -> Connector:
        watched.append(CountingConnector(connector))
        return watched[-1]

    place = Place(wrap=watch)
    for _ in range(3):
        attach_rank(place, POOL, "tp2pp2", Rank(1, 1)).store.close()
    assert [one.items["write"] for one in watched] == [1, 0, 0]
    assert place.meta() == {KEY: frame(KEY, NAMESPACE.encoded)}
    assert json.loads(NAMESPACE.encoded)["tenant"] == "t"


def damages(sound: bytes) -> Iterator[bytes]:
    yield from (
        b"\0",
        sound[:-1],
        sound[:100],
        sound + b"\0",
        bytes(len(sound)),
        bytes(METADATA_MAX_BYTES + 1),
    )
    body = 8 * len(NAMESPACE.encoded)
    for bit in random.Random(1).sample([*range(body), *range(8 * (len(sound) - 32), 8 * len(sound))], 60):
        flipped = bytearray(sound)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def test_a_damaged_one_is_survived_counted_and_replaced() -> None:
    place, hashes = Place(), chain(2, 2)
    write_pages(place, POOL, "tp1", hashes)
    sound = place.meta()[KEY]
    for damaged in damages(sound):
        place.put(KEY, damaged)
        with attach_rank(place, POOL, "tp1", Rank(), pages=2) as rig:
            assert rig.store.metrics.get("manifest.damaged") == 1
            assert rig.restore(hashes).pages == 2
        assert place.meta()[KEY] == sound


def test_a_sound_one_that_says_something_else_is_refused() -> None:
    place = Place()
    place.put(KEY, frame(KEY, namespace_of(POOL, "another").encoded))
    with pytest.raises(IdentityError, match=rf"{NAMESPACE.digest} has a manifest that says something else"):
        attach_rank(place, POOL, "tp1", Rank())


def test_one_copied_from_another_namespace_is_damage() -> None:
    place = Place()
    other = namespace_of(POOL, "another")
    place.put(KEY, frame(manifest_key(other.digest), other.encoded))
    attach_rank(place, POOL, "tp1", Rank()).store.close()
    assert place.meta() == {KEY: frame(KEY, NAMESPACE.encoded)}


@pytest.mark.parametrize("fault", [Fail(), TimeOut()])
@pytest.mark.parametrize("operation", ["sizes", "read", "write"])
@pytest.mark.parametrize("exists", [False, True])
def test_storage_that_fails_stops_no_attach(fault: Fail | TimeOut, operation: str, exists: bool) -> None:
    place, hashes = Place(), chain(2, 2)
    write_pages(place, POOL, "tp1", hashes)
    if not exists:
        place.remove(KEY)
    place.wrap = lambda connector: FaultyConnector(connector, on_keys(is_manifest, fault, (operation,)))
    assert read_pages(place, POOL, "tp1", hashes) == 1
    place.wrap = lambda connector: connector
    assert read_pages(place, POOL, "tp1", hashes) == 1
    assert place.meta()[KEY] == frame(KEY, NAMESPACE.encoded)


def test_a_namespace_too_long_to_be_kept_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hicache_store.store.manifest.METADATA_MAX_BYTES", 4095)
    with pytest.raises(ConfigurationError, match="the manifest has 4096 bytes, at most 4095 are kept"):
        attach_rank(Place(), POOL, "tp1", Rank())
