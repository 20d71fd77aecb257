"""Where a look-up is a request a key: how many keys are asked for, and that the answer stays the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_rig import Place, RankRig, attach_rank, chain, tiny, write_pages

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Capabilities, Connector
from hicache_store.layout.names import ObjectName
from hicache_store.layout.parallel import Rank
from hicache_store.limits import LOOKUP_FIRST_PAGES, LOOKUP_ROUNDS
from hicache_store.store import EndReason
from hicache_store.testing.faults import CountingConnector

TOGETHER = 64
POOL = tiny(2, 2, 1, "int8").pool(1)


class KeyByKey(CountingConnector):
    """A connector that says each key of a look-up is a request, and keeps the sizes of its calls."""

    def __init__(self, inner: Connector) -> None:
        super().__init__(inner)
        self.asked: list[list[str]] = []

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, lookup_items=TOGETHER)

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        self.asked.append(list(keys))
        return super().sizes(keys, deadline)

    @property
    def requests(self) -> int:
        return sum(map(len, self.asked))

    @property
    def rounds(self) -> int:
        return sum(-(-len(keys) // TOGETHER) for keys in self.asked)


@dataclasses.dataclass
class Looker:
    rig: RankRig
    connector: KeyByKey

    def __call__(self, hashes: Sequence[str]) -> int:
        self.connector.asked = []
        return self.rig.store.contains(hashes).pages


def stored(pages: Sequence[int], writer: str, hashes: Sequence[str]) -> Place:
    """Objects of these pages, as ``writer`` would have stored them."""
    place = Place()
    write_pages(place, POOL, writer, ["f" * 64])
    template = place.objects()
    place.remove(*template)
    for key, data in template.items():
        name = ObjectName.parse(key)
        for page in pages:
            place.put(str(dataclasses.replace(name, page_hash=hashes[page])), data)
    return place


def looking(place: Place, spec: str = "tp1pp1") -> Looker:
    made: list[KeyByKey] = []
    place.wrap = lambda connector: made.append(KeyByKey(connector)) or made[-1]
    return Looker(attach_rank(place, POOL, spec, Rank()), made[0])


@pytest.fixture
def opened() -> Iterator[list[Looker]]:
    lookers: list[Looker] = []
    yield lookers
    for looker in lookers:
        looker.rig.store.close()


@pytest.mark.parametrize("length", [1, 8, 9, 512, 3_000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_c18_a_chain_costs_what_is_stored_of_it(opened: list[Looker], length: int, share: float) -> None:
    """A HEAD a page of a long prompt that is not stored would keep the scheduler waiting for nothing."""
    hashes, pages = chain(length), int(length * share)
    look = looking(stored(range(pages), "tp1pp1", hashes))
    opened.append(look)
    assert look(hashes) == pages
    assert look.connector.requests <= max(LOOKUP_FIRST_PAGES, 2 * pages + LOOKUP_FIRST_PAGES)
    assert look.connector.requests <= pages + max(LOOKUP_FIRST_PAGES, LOOKUP_ROUNDS * TOGETHER)
    assert look.connector.rounds <= -(-length // TOGETHER) + 8
    assert max(map(len, look.connector.asked)) <= LOOKUP_ROUNDS * TOGETHER
    if share == 0.0:
        assert look.connector.rounds == 1
    asked = [key for keys in look.connector.asked for key in keys]
    assert len(asked) == len(set(asked)), "nothing is asked for twice"


def test_c18_holes_end_the_prefix_although_pages_behind_them_are_there(opened: list[Looker]) -> None:
    """Expiry by age takes the head of a chain first: an answer from the middle would promise too much."""
    hashes = chain(512)
    for hole in (0, 1, 7, 8, 300):
        look = looking(stored([page for page in range(512) if page != hole], "tp1pp1", hashes))
        opened.append(look)
        assert look(hashes) == hole
        assert look.connector.requests <= max(LOOKUP_FIRST_PAGES, 2 * hole + LOOKUP_FIRST_PAGES)


def test_c18_the_cut_that_served_a_slice_is_asked_for_first_in_the_next(opened: list[Looker]) -> None:
    """A reader of another cut asks for its own in vain once, not once a slice."""
    hashes = chain(400)
    look = looking(stored(range(400), "tp1pp2", hashes))
    opened.append(look)
    assert look(hashes) == 400
    assert look.connector.requests <= 2 * 400 + LOOKUP_FIRST_PAGES
    assert max(map(len, look.connector.asked)) <= LOOKUP_ROUNDS * TOGETHER


HASHES = chain(40)


@given(
    own=st.sets(st.integers(0, 39)),
    other=st.sets(st.integers(0, 39)),
    full=st.integers(0, 40),
    length=st.integers(0, 40),
)
def test_c18_the_answer_is_that_of_asking_one_by_one(
    own: set[int], other: set[int], full: int, length: int
) -> None:
    """Whatever is missing, and under whatever cuts the rest is stored."""
    place = stored(sorted(own | set(range(full))), "tp1pp1", HASHES)
    halves = stored(sorted(other), "tp1pp2", HASHES)
    for key, data in {**halves.meta(), **halves.objects()}.items():
        place.put(key, data)
    there = own | other | set(range(full))
    look = looking(place)
    try:
        expected = next((page for page in range(length) if page not in there), length)
        assert look(HASHES[:length]) == expected
        report = look.rig.store.contains(HASHES[:length])
        assert report.end is None or report.end.reason is EndReason.ABSENT
    finally:
        look.rig.store.close()
