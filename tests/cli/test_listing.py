from __future__ import annotations

import hashlib
import threading

import pytest
from cli_place import POOL, namespace_of

from hicache_store.cli.listing import batched, known_namespaces, objects, the_namespace, walk
from hicache_store.cli.ls_command import pages
from hicache_store.cli.stat_command import PageCount
from hicache_store.connectors.base import Entry
from hicache_store.errors import ConfigurationError, DeadlineExceededError
from hicache_store.limits import LISTING_BATCH, LISTING_BATCHES_MAX


class Scanned:
    """A connector of which only the walk is asked."""

    def __init__(self, entries):
        self.entries = entries

    def scan(self, prefix=""):
        yield from self.entries


def entries(count):
    return (Entry(f"k{number:06d}", 1, 0.0) for number in range(count))


def test_a_walk_gives_every_entry_in_order():
    count = 3 * LISTING_BATCH + 7
    assert [one.key for one in walk(Scanned(entries(count)), "")] == [one.key for one in entries(count)]
    assert list(walk(Scanned([]), "")) == []


def test_a_walk_nobody_reads_does_not_run_ahead():
    """However large the store, a listing into a slow pipe holds a bounded number of entries."""
    ran_away = threading.Event()

    def endless():
        for number, entry in enumerate(entries(10**9)):
            if number > (LISTING_BATCHES_MAX + 3) * LISTING_BATCH:
                ran_away.set()
            yield entry

    listing = walk(Scanned(endless()), "")
    next(listing)
    assert not ran_away.wait(0.5)
    listing.close()
    assert not [one for one in threading.enumerate() if one.name == "hicache-listing"]


def test_a_walk_over_storage_that_hangs_ends():
    released = threading.Event()

    def hanging():
        yield from entries(2)
        released.wait()

    try:
        with pytest.raises(DeadlineExceededError, match=r"listing 'v1/': no answer within 0\.05 s"):
            list(walk(Scanned(hanging()), "v1/", wait_s=0.05))
    finally:
        released.set()


def test_what_a_walk_raises_is_raised_where_it_is_read():
    def failing():
        yield from entries(1)
        raise OSError("the mount went away")

    with pytest.raises(OSError, match="the mount went away"):
        list(walk(Scanned(failing()), ""))


def test_objects_pass_over_other_keys(place):
    made = place.add_namespace(pages=2)
    place.write("v1/readme.txt", b"not ours")
    place.write(place.keys[0] + ".part", b"not ours either")
    assert {entry.key for entry, _ in objects(place.connector)} == set(place.keys)
    assert {name.namespace for _, name in objects(place.connector)} == {made.digest}


def test_namespaces_by_the_start_of_their_digest(place):
    first, second = place.add_namespace("a"), place.add_namespace("b", pages=1)
    assert known_namespaces(place.connector) == sorted([first.digest, second.digest])
    assert the_namespace(place.connector, first.digest[:12]) == first.digest
    with pytest.raises(ConfigurationError, match="give more digits"):
        the_namespace(place.connector, "")
    with pytest.raises(ConfigurationError, match="no namespace starts with 00000000"):
        the_namespace(place.connector, "00000000")
    # One whose manifest is lost is still told by its objects.
    lost = namespace_of("c")
    place.put(lost, 0, POOL.page_box)
    assert the_namespace(place.connector, lost.digest[:16]) == lost.digest
    assert the_namespace(place.connector, "ab" * 32) == "ab" * 32


@pytest.mark.parametrize("pages_max", [1, 2, 3, 7, 8, 100])
def test_pages_are_whole_and_sorted_however_few_fit_in_memory(place, pages_max):
    """Objects of a page lie anywhere in a store, so a bound on memory must not tear pages apart."""
    place.add_namespace("a", pages=5)
    place.add_namespace("b", pages=3)
    walks = []
    connector = Scanned([])
    connector.scan = lambda prefix: walks.append(prefix) or place.connector.scan(prefix)
    found = list(pages(connector, pages_max=pages_max))
    assert len(walks) >= 8 / (2 * pages_max)
    assert len(walks) <= 1 + 8 / pages_max
    assert found == sorted(found, key=lambda one: one[0])
    assert len(found) == 8
    assert all(page.objects == 2 for _, page in found)
    sizes = {entry.key: entry.size_bytes for entry in place.connector.scan("v1/")}
    assert sum(page.size_bytes for _, page in found) == sum(sizes.values())


def test_distinct_pages_are_counted_exactly_and_then_estimated():
    exact = PageCount(size=64)
    for _ in range(3):
        for number in range(64):
            exact.add(digest(number))
    assert (exact.value, exact.is_exact) == (64, True)
    estimate = PageCount(size=1_024)
    for _ in range(2):
        for number in range(20_000):
            estimate.add(digest(number))
    assert not estimate.is_exact
    assert 0.85 * 20_000 < estimate.value < 1.15 * 20_000  # 5 standard errors; the hashes are fixed


def digest(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


def test_batches():
    assert list(batched(iter(range(7)), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(batched([], 3)) == []
