"""The format of a stored object from its name, its length and its last bytes alone.

Tools meet objects of pools whose geometry no manifest tells. A name gives heads and layers; what is
missing is the bytes of one layer of one head, which fix everything else. Lengths do not always tell
them: padding gives up to 4096 neighbouring payloads one length. The trailer's fields do, though
where they lie depends on them, so every format of the right length is tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from hicache_store.errors import ConfigurationError, IdentityError
from hicache_store.layout.box import Box, Span
from hicache_store.layout.dtypes import DType
from hicache_store.layout.format import (
    FIELDS,
    MAGIC,
    PAD_BYTES,
    TAIL,
    VERSION,
    NameSeed,
    ObjectFormat,
    Verdict,
    layers_per_cell,
)
from hicache_store.layout.model import MAIN_POOL, KVPart, Pool
from hicache_store.layout.names import ObjectName
from hicache_store.limits import LAYERS_MAX

_SUM_BYTES: Final = 8
_OVERHEAD_BYTES: Final = FIELDS.size + TAIL.size


@dataclass(frozen=True, slots=True)
class Recovered:
    """What an object's last bytes say: its format, or why they prove nothing."""

    format: ObjectFormat | None
    verdict: Verdict | None


def main_pool(record: Mapping[str, object]) -> Pool | None:
    """The main pool that a namespace's record tells of, ``None`` when it tells none.

    Its ``num_layers`` leaves packed draft layers out, so boxes may reach beyond it.
    """
    kv = record.get("kv")
    if not isinstance(kv, Mapping):
        return None
    try:
        return Pool(
            name=MAIN_POOL,
            num_layers=kv["num_layers"],
            num_heads=kv["num_kv_heads"],
            parts=tuple(KVPart(name, width) for name, width in kv["parts"]),
            dtype=DType.of(kv["dtype"]),
            page_size=kv["page_size"],
        )
    except (ConfigurationError, IdentityError, KeyError, TypeError, ValueError, AttributeError):
        return None


def format_in_pool(name: ObjectName, pool: Pool) -> ObjectFormat | None:
    """The format of an object of ``pool``; ``None`` where the name leaves more open than its box."""
    if name.pool != pool.key_name or name.pages != 1 or name.shard is not None:
        return None
    if name.layers.stop > LAYERS_MAX or name.heads.stop > pool.num_heads:
        return None
    tokens = Span(0, pool.page_size) if name.tokens is None else name.tokens
    return ObjectFormat.of(pool, Box(name.heads, name.layers, tokens))


@lru_cache(maxsize=32)
def formats_of_length(heads: int, layers: int, object_bytes: int) -> tuple[ObjectFormat, ...]:
    """Every format of ``heads`` and ``layers`` whose object has this length, smallest payload first.

    Between ``heads`` and ``heads * layers`` cells and at most 4095 bytes of padding bound the payload
    from both sides, so at most some 4,100 layer widths are looked at. More than
    ``LAYERS_MAX`` layers have none.
    """
    places = heads * layers
    if layers > LAYERS_MAX or places > object_bytes:
        return ()
    least = object_bytes - _OVERHEAD_BYTES - _SUM_BYTES * places - (PAD_BYTES - 1)
    most = object_bytes - _OVERHEAD_BYTES - _SUM_BYTES * heads
    widths = range(max(1, -(-least // places)), most // places + 1)
    formats = (ObjectFormat(heads, layers, width, layers_per_cell(layers, width)) for width in widths)
    return tuple(shape for shape in formats if shape.object_bytes == object_bytes)


def recover(name: ObjectName, tail: memoryview, formats: Sequence[ObjectFormat]) -> Recovered:
    """The one format among ``formats`` that the object's last bytes prove, else what is wrong.

    ``tail`` ends the object and holds at least the trailer of every one of ``formats``, which are those
    of the object's length. A later version is told by the last 32 bytes, which no version moves.
    """
    magic, version, _, _ = TAIL.unpack(tail[-TAIL.size :])
    if magic != MAGIC or not formats:
        return Recovered(None, Verdict.CORRUPT)
    seed = NameSeed.of(str(name))
    likely = formats if version != VERSION else [f for f in formats if _fields_match(f, tail)]
    verdicts = {shape.check_trailer(seed, tail[-shape.trailer_bytes :]): shape for shape in likely}
    if None in verdicts:
        return Recovered(verdicts[None], None)
    if version != VERSION and Verdict.CORRUPT not in verdicts:
        return Recovered(None, Verdict.UNKNOWN_VERSION)
    if Verdict.FOREIGN in verdicts:
        return Recovered(verdicts[Verdict.FOREIGN], Verdict.FOREIGN)
    return Recovered(None, Verdict.CORRUPT)


def _fields_match(shape: ObjectFormat, tail: memoryview) -> bool:
    at = len(tail) - shape.trailer_bytes + _SUM_BYTES * shape.cells
    fields = (shape.payload_bytes, shape.cells, shape.layers_per_cell, shape.object_bytes)
    return FIELDS.unpack_from(tail, at)[:4] == fields
