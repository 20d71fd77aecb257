"""The process of one rank: it builds its part of the model, then answers its parent's commands.

Every command goes to all ranks of a group, in one order; each answers it once, with ``done`` or
``failed``, and the first rank of the last stage says ``first`` as soon as the first token is known.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

from hicache_store.demo.cut import cut_of
from hicache_store.demo.engine import Engine
from hicache_store.demo.fabric import Fabric
from hicache_store.demo.messages import MESSAGE_BYTES_MAX, GroupSpec, Message, decode, encode, spec_of_message
from hicache_store.demo.model import LlamaPart
from hicache_store.demo.pool import KVPool
from hicache_store.demo.rank_store import RankStore
from hicache_store.errors import HandleError
from hicache_store.layout.parallel import Rank

IDLE_S: Final = 3600.0
"""A rank that hears nothing for this long leaves; its parent is gone or has forgotten it."""


class RankServer:
    """One rank's engine and the commands on it."""

    def __init__(self, spec: GroupSpec, rank: Rank, rendezvous: Path | None, connection: Connection) -> None:
        self.spec, self.rank, self._connection = spec, rank, connection
        self.fabric = Fabric(spec.parallel, rank, rendezvous, spec.collective_timeout_s)
        config, weights = spec.model.open()
        self.config = config
        self.store: RankStore | None = None
        self.cut = cut_of(config, config.kv().pool(spec.page_size), spec.parallel, rank)
        # Slots of one page number differ between ranks too, as they would on different machines.
        seed = spec.seed * 1000 + rank.pp * spec.parallel.tp_size + rank.tp
        self.pool = KVPool(self.cut.kv.box, config.head_dim, spec.slots, seed)
        part = LlamaPart(config, weights, self.cut, self.fabric)
        self.engine = Engine(part, self.pool, self.fabric, spec.chunk_tokens)
        self.commands: Mapping[str, Callable[[Message], Message]] = {
            "attach": self._attach,
            "generate": self._generate,
            "backup": self._backup,
            "reset": self._reset,
        }

    def serve(self) -> None:
        """Answer commands until told to leave, the parent is gone, or one fails."""
        self._say({"kind": "done", "slots": self.pool.slots})
        while self._connection.poll(IDLE_S):
            message = decode(self._connection.recv_bytes(MESSAGE_BYTES_MAX))
            if message["op"] == "leave":
                return
            self._say({"kind": "done", **self.commands[message["op"]](message)})

    def close(self) -> None:
        """Close the store and leave the process groups."""
        if self.store is not None:
            self.store.close()
        self.fabric.close()

    def _say(self, message: Message) -> None:
        self._connection.send_bytes(encode(message))

    def _reset(self, message: Message) -> Message:  # noqa: ARG002  (the commands share one signature)
        self.engine.reset()
        return {"free": self.pool.free_slots}

    def _attach(self, message: Message) -> Message:
        if self.store is not None:
            self.store.close()
        self.store = RankStore.attach(self.spec, self.rank, self.config, self.pool, message)
        return {}

    def _attached(self) -> RankStore:
        if self.store is None:
            raise HandleError("no store is attached")
        return self.store

    def _backup(self, message: Message) -> Message:
        return self._attached().backup(message["tokens"], self.engine.slots)

    def _generate(self, message: Message) -> Message:
        tokens: list[int] = message["tokens"]
        count: int = message["count"]
        self.engine.open(len(tokens) + count)
        pages = 0
        restored: Message = {}
        if message["restore"]:
            loaded = self._attached().restore(tokens, self.engine.slots)
            restored = loaded.to_message()
            # A page counts when every rank has its part of it.
            pages = self.fabric.minimum(loaded.report.pages, "restored pages")
        choices = [self.engine.prefill(tokens, pages * self.spec.page_size)]
        if self.rank == Rank(0, self.spec.parallel.pp_size - 1):
            self._say({"kind": "first", "token": choices[0].token})
        for position in range(len(tokens), len(tokens) + count - 1):
            choices.append(self.engine.step(choices[-1].token, position))
        rows = [[choice.token, choice.best, choice.second] for choice in choices]
        return {"choices": rows, "pages": pages, "restored": restored}


def rank_main(connection: Connection, setup: bytes) -> None:
    """Body of a rank's process. A failure is told to the parent, then the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, and ends its ranks itself
    os.dup2(2, 1)  # gloo writes to standard output, which may be someone's JSON
    torch.set_num_threads(1)
    logging.getLogger("hicache_store").setLevel(logging.ERROR)  # the parent's handle warns once for all
    try:
        message: dict[str, Any] = dict(decode(setup))
        rendezvous = None if message["rendezvous"] is None else Path(message["rendezvous"])
        server = RankServer(spec_of_message(message["spec"]), Rank(*message["rank"]), rendezvous, connection)
        server.serve()
        server.close()
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        failure = {"kind": "failed", "type": type(error).__name__, "text": str(error)[:4096]}
        with contextlib.suppress(BrokenPipeError):
            connection.send_bytes(encode(failure))
