"""The process of one rank: it builds its part of the model, then answers its parent's commands.

Every command goes to all ranks of a group, in one order; each answers it once, with ``done`` or
``failed``, and the first rank of the last stage says ``first`` as soon as the first token is known.
"""

from __future__ import annotations

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
from hicache_store.layout.parallel import Rank

IDLE_S: Final = 3600.0
"""A rank that hears nothing for this long leaves; its parent is gone or has forgotten it."""


class RankServer:
    """One rank's engine and the commands on it."""

    def __init__(self, spec: GroupSpec, rank: Rank, rendezvous: Path | None, connection: Connection) -> None:
        self.spec, self.rank, self._connection = spec, rank, connection
        self.fabric = Fabric(spec.parallel, rank, rendezvous, spec.collective_timeout_s)
        config, weights = spec.model.open()
        self.kv = config.kv().pool(spec.page_size)
        self.cut = cut_of(config, self.kv, spec.parallel, rank)
        # Slots of one page number differ between ranks too, as they would on different machines.
        seed = spec.seed * 1000 + rank.pp * spec.parallel.tp_size + rank.tp
        self.pool = KVPool(self.cut.kv.box, config.head_dim, spec.slots, seed)
        part = LlamaPart(config, weights, self.cut, self.fabric)
        self.engine = Engine(part, self.pool, self.fabric, spec.chunk_tokens)
        self.commands: Mapping[str, Callable[[Message], Message]] = {
            "generate": self._generate,
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
        """Leave the process groups."""
        self.fabric.close()

    def _say(self, message: Message) -> None:
        self._connection.send_bytes(encode(message))

    def _reset(self, message: Message) -> Message:  # noqa: ARG002  (the commands share one signature)
        self.engine.reset()
        return {"free": self.pool.free_slots}

    def _generate(self, message: Message) -> Message:
        tokens: list[int] = message["tokens"]
        count: int = message["count"]
        self.engine.open(len(tokens) + count)
        choices = [self.engine.prefill(tokens, 0)]
        if self.rank == Rank(0, self.spec.parallel.pp_size - 1):
            self._say({"kind": "first", "token": choices[0].token})
        for position in range(len(tokens), len(tokens) + count - 1):
            choices.append(self.engine.step(choices[-1].token, position))
        return {"choices": [[choice.token, choice.best, choice.second] for choice in choices]}


def rank_main(connection: Connection, setup: bytes) -> None:
    """Body of a rank's process. A failure is told to the parent, then the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, and ends its ranks itself
    os.dup2(2, 1)  # gloo writes to standard output, which may be someone's JSON
    torch.set_num_threads(1)
    try:
        message: dict[str, Any] = dict(decode(setup))
        rendezvous = None if message["rendezvous"] is None else Path(message["rendezvous"])
        server = RankServer(spec_of_message(message["spec"]), Rank(*message["rank"]), rendezvous, connection)
        server.serve()
        server.close()
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        connection.send_bytes(
            encode({"kind": "failed", "type": type(error).__name__, "text": str(error)[:4096]})
        )
