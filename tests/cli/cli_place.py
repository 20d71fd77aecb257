"""A store filled object by object, for tools to look at."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from hicache_store.cli.main import main
from hicache_store.clock import SYSTEM_CLOCK, Deadline
from hicache_store.connectors.base import BufferSource, BufferTarget, Connector, Read, Write
from hicache_store.layout.box import Box
from hicache_store.layout.format import NameSeed, ObjectFormat
from hicache_store.layout.grid import Grid
from hicache_store.layout.model import ModelKV, Pool
from hicache_store.layout.names import ObjectName
from hicache_store.layout.namespace import Namespace, namespace
from hicache_store.layout.weights import WeightsIdentity
from hicache_store.metrics import Metrics
from hicache_store.store import manifest
from hicache_store.store.grids import Announcement, GridDirectory

MODEL = ModelKV.dense(num_layers=4, num_kv_heads=4, head_dim=8, dtype="bfloat16")
PAGE_SIZE = 16
POOL = MODEL.pool(PAGE_SIZE)
DRAFT = Pool("draft", 1, 2, MODEL.parts, MODEL.dtype, PAGE_SIZE, identity="a draft model")
CONFIG = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8}
GRID = Grid("kv", (0, 2, 4), (0, 4))


def soon() -> Deadline:
    return Deadline.after(600.0)


def namespace_of(tenant: str = "t") -> Namespace:
    return namespace(CONFIG, WeightsIdentity.operator("w"), MODEL.facts(PAGE_SIZE), tenant)


def page_hash(number: int) -> str:
    return f"{random.Random(number).getrandbits(256):064x}"


@dataclass
class StorePlace:
    """``connector`` fills what ``url`` names; ``keys`` are the objects put so far."""

    url: str
    connector: Connector
    keys: list[str] = field(default_factory=list)

    def add_namespace(self, tenant: str = "t", pages: int = 3, grid: Grid = GRID) -> Namespace:
        """A manifest, a marker, and every object of the grid for some pages."""
        made = namespace_of(tenant)
        manifest.ensure(self.connector, made, soon(), Metrics())
        self.announce(made, grid)
        for page in range(pages):
            for box in grid.chunks(PAGE_SIZE):
                self.put(made, page, box)
        return made

    def announce(self, made: Namespace, grid: Grid) -> None:
        directory = GridDirectory(self.connector, made.digest, SYSTEM_CLOCK, Metrics())
        assert directory.ensure(grid, soon()) is Announcement.CONFIRMED

    def put(self, made: Namespace, page: int, box: Box, pool: Pool = POOL) -> str:
        name = ObjectName(made.digest, page_hash(page), pool.key_name, box.heads, box.layers)
        self.keys.append(str(name))
        self.write(str(name), sealed(str(name), pool, box))
        return str(name)

    def write(self, key: str, data: bytes) -> None:
        """Whatever lies there goes."""
        self.connector.delete([key], soon())
        (outcome,) = self.connector.write_from([Write(key, len(data), BufferSource.of(data))], soon())
        assert outcome.is_ok, outcome

    def replace(self, key: str, data: bytes) -> None:
        """As a writer replaces what it knows to be bad: the new object is there before the old one goes."""
        (entry,) = self.connector.scan(key)
        write = Write(key, len(data), BufferSource.of(data), replace=entry.version)
        (outcome,) = self.connector.write_from([write], soon())
        assert outcome.is_ok, outcome

    def read(self, key: str) -> bytearray:
        (size,) = self.connector.sizes([key], soon())
        data = bytearray(size)
        (outcome,) = self.connector.read_into([Read(key, size, BufferTarget.whole(data))], soon())
        assert outcome.is_ok
        return data

    def stored(self) -> set[str]:
        return {entry.key for entry in self.connector.scan()}


def sealed(key: str, pool: Pool, box: Box) -> bytes:
    """A sound object of random values."""
    shape = ObjectFormat.of(pool, box)
    payload = random.Random(key).randbytes(shape.payload_bytes)
    return payload + shape.seal(NameSeed.of(key), [memoryview(payload)])


def run_json(capsys, *argv: str, code: int = 0) -> dict:
    """Run a command with ``--json``; its document."""
    assert main([*argv, "--json"]) == code
    captured = capsys.readouterr()
    return json.loads(captured.out)


def run_text(capsys, *argv: str, code: int = 0) -> tuple[str, str]:
    """Run a command; its stdout and stderr."""
    assert main(list(argv)) == code
    captured = capsys.readouterr()
    return captured.out, captured.err
