"""What the two halves of the vLLM adapter tell each other; plain values, since they cross processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

BlockTables = tuple[list[int], ...]
"""The blocks of a request, in token order, one list a KV cache group."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load ``hashes``, the pages from ``first_page`` of a chain on, into a request's blocks.

    Tokens before ``start`` are the engine's own already and must not be touched; tokens from ``stop`` on
    have no block. ``prefix`` are the hashes of the pages before, which count as used too.
    """

    request_id: str
    hashes: tuple[str, ...]
    prefix: tuple[str, ...]
    start: int
    stop: int
    blocks: BlockTables

    @property
    def first_page(self) -> int:
        """The position of ``hashes[0]`` in its chain."""
        return len(self.prefix)


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Store ``hashes``, the pages from ``first_page`` on, which are whole when this step has run."""

    request_id: str
    hashes: tuple[str, ...]
    first_page: int
    blocks: BlockTables


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's half asks of every rank in one step."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    is_idle: bool = False
    """Whether the step computes nothing."""


@dataclass
class RankReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Of loads that failed, how many tokens from a request's start every rank so far could restore."""

    restorable: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """What holds for both ranks."""
        assert isinstance(other, RankReport)
        merged = dict(self.restorable)
        for request_id, tokens in other.restorable.items():
            merged[request_id] = min(tokens, merged.get(request_id, tokens))
        return RankReport(merged)
