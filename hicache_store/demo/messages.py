"""What the parent and its ranks say to each other: one bounded JSON object a message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from hicache_store.demo.weights import ModelConfig, ModelSource
from hicache_store.errors import HicacheError
from hicache_store.layout.parallel import ParallelSpec

Message: TypeAlias = Mapping[str, Any]

MESSAGE_BYTES_MAX: Final = 128 * 1024
"""A prompt of 8,192 ids is 56 KB; at this size a message still fits the socket's buffer, so that
sending to a rank that hangs does not hang the sender."""


class MessageError(HicacheError, ValueError):
    """A message that is too long or no JSON object."""


def encode(message: Message) -> bytes:
    """The bytes of ``message``; :class:`MessageError` when they are too many."""
    raw = json.dumps(message, separators=(",", ":")).encode()
    if len(raw) > MESSAGE_BYTES_MAX:
        raise MessageError(f"a message of {len(raw)} bytes exceeds {MESSAGE_BYTES_MAX}")
    return raw


def decode(raw: bytes) -> Message:
    """The message of ``raw``; :class:`MessageError` when it is none."""
    try:
        message = json.loads(raw)
    except ValueError as error:
        raise MessageError(f"{len(raw)} bytes are no JSON") from error
    if not isinstance(message, dict):
        raise MessageError(f"a message is an object, got {type(message).__name__}")
    return message


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group of ranks: the model, how it is divided, and each rank's memory."""

    model: ModelSource
    parallel: ParallelSpec
    page_size: int = 64
    slots: int = 160
    """Page-sized places in each rank's pool."""
    seed: int = 0
    """Shuffles each rank's free slots."""
    chunk_tokens: int = 256
    """Tokens of one prefill step; stages work on different chunks at the same time."""
    collective_timeout_s: float = 120.0
    """Longest wait of a rank for its peers."""


def spec_to_message(spec: GroupSpec) -> Message:
    """``spec`` as JSON values."""
    message = asdict(spec)
    message["model"]["path"] = None if spec.model.path is None else str(spec.model.path)
    return message


def spec_of_message(message: Message) -> GroupSpec:
    """The inverse of :func:`spec_to_message`."""
    model, parallel = dict(message["model"]), dict(message["parallel"])
    if model["path"] is not None:
        model["path"] = Path(model["path"])
    if model["config"] is not None:
        model["config"] = ModelConfig(**model["config"])
    if parallel["stage_starts"] is not None:
        parallel["stage_starts"] = tuple(parallel["stage_starts"])
    if parallel["head_map"] is not None:
        parallel["head_map"] = tuple((start, stop) for start, stop in parallel["head_map"])
    rest = {key: value for key, value in message.items() if key not in ("model", "parallel")}
    return GroupSpec(ModelSource(**model), ParallelSpec(**parallel), **rest)
