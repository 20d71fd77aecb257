"""Write one dense array from one topology and say what was stored: run in processes of their own."""

from __future__ import annotations

import hashlib
import sys

from store_rig import Place, chain, tiny, write_pages

from hicache_store.store import FixedGrid


def written_by(writer: str) -> dict[str, bytes]:
    """Everything that a writer of the common grid leaves, metadata included."""
    place = Place()
    pool = tiny(4, 4, 2).pool(2)
    write_pages(place, pool, writer, chain(3, 2), grid=FixedGrid(1, 2))
    # Ranks of one stage announce one grid, so markers differ between pipeline sizes.
    return {key: data for key, data in place.contents().items() if "/grid-" not in key}


def digest_of(contents: dict[str, bytes]) -> str:
    """One digest of all names and bytes."""
    digest = hashlib.sha256()
    for key, data in sorted(contents.items()):
        digest.update(f"{key}:{len(data)}:".encode() + data)
    return digest.hexdigest()


if __name__ == "__main__":
    print(digest_of(written_by(sys.argv[1])))
