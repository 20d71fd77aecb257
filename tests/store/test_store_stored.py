"""Presence page by page: holes do not end the answer, and every grid counts."""

from __future__ import annotations

import pytest
from store_rig import Place, attach_rank, chain, tiny, write_pages

from hicache_store.errors import ConfigurationError
from hicache_store.layout.parallel import Rank

POOL = tiny(2, 2, 1, "int8").pool(1)


@pytest.mark.parametrize("writer", ["tp1pp1", "tp2pp2"])
def test_holes_are_told_under_any_grid(writer: str) -> None:
    place, hashes = Place(), chain(6)
    write_pages(place, POOL, writer, [hashes[1], hashes[2], hashes[5]])
    rig = attach_rank(place, POOL, "tp1pp1", Rank(), pages=1)
    assert rig.store.stored(hashes) == (False, True, True, False, False, True)
    assert rig.store.contains(hashes).pages == 0
    rig.store.close()


def test_a_page_of_which_one_object_is_gone_is_not_stored() -> None:
    place, hashes = Place(), chain(3)
    write_pages(place, POOL, "tp2pp1", hashes)
    doomed = next(key for key in place.objects() if f"/{hashes[1]}/" in key)
    place.remove(doomed)
    rig = attach_rank(place, POOL, "tp1pp1", Rank(), pages=1)
    assert rig.store.stored(hashes) == (True, False, True)
    assert rig.store.stored([]) == ()
    with pytest.raises(ConfigurationError, match="not a page hash"):
        rig.store.stored(["../x"])
    rig.store.close()
