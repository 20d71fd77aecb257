"""A request as the store sees it: the names of its pages, and what is known of them."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from hicache_store.errors import HicacheError
from hicache_store.layout.hashing import LoraIdentity, MultimodalInput, RequestIdentity, page_hashes
from hicache_store.layout.weights import local_weights

log = logging.getLogger("hicache_store")


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a look-up: the names of a prompt's whole pages, and how many leading ones are stored for
    every rank."""

    hashes: tuple[str, ...]
    pages: int


@dataclass(slots=True)
class TrackedRequest:
    """What the scheduler's half knows of one request. Times are monotonic seconds."""

    request: Any
    lookup: Future[Found] | None
    asked_at: float
    found: Found | None = None
    limit_tokens: int | None = None
    """After a load failed: up to where another is worth trying."""
    local_tokens: int = 0
    """What vLLM had itself when it last asked."""
    loading: tuple[str, ...] = ()
    """Pages that this request loads, until vLLM has them in its own cache."""
    waits_since: float | None = None
    """Since when it waits for another request's load of the same pages."""
    was_short: bool = False
    """Whether its hit was too short to be loaded."""
    was_late: bool = False
    """Whether its look-up was given up once."""
    saved_pages: int = 0
    """Leading pages that are stored or ordered to be."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.request.num_prompt_tokens)


def is_storable(request: Any) -> bool:
    """Whether tokens alone, with the request's identity, decide its KV: embeddings given as a prompt do not
    tell what they stand for."""
    return request.prompt_embeds is None


def identity_of(request: Any) -> RequestIdentity:
    """What beside its tokens makes a request's KV its own. Reads the adapter's files: not for the engine's
    thread. Raises :class:`HicacheError` where an adapter cannot be told."""
    lora = None
    if request.lora_request is not None:
        given = request.lora_request
        weights = local_weights(given.lora_path)
        lora = LoraIdentity(str(given.lora_name), weights.value)
    inputs = tuple(
        MultimodalInput(int(feature.mm_position.offset), str(feature.mm_hash or feature.identifier))
        for feature in request.mm_features
    )
    return RequestIdentity(lora, request.cache_salt, inputs)


def hashes_of(request: Any, tokens: np.ndarray[Any, Any], page_size: int) -> tuple[str, ...]:
    """The names of the whole pages of ``tokens``; none where the request cannot be identified."""
    try:
        seed = identity_of(request).seed()
        return tuple(page_hashes(tokens, page_size, seed=seed))
    except HicacheError as error:
        log.warning("hicache_store: a request is neither loaded nor stored: %s", error)
        return ()
