"""Which namespace an engine's pages belong to: from what the running model tells and the operator adds.

One function for every engine, so that pages written by one can be read by the other. A field that
matters and that nobody tells refuses the attach, with the key that would tell it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from hicache_store.engines.options import EngineOptions
from hicache_store.errors import IdentityError
from hicache_store.layout.dtypes import DType
from hicache_store.layout.hashing import ChainKind
from hicache_store.layout.model import ModelKV
from hicache_store.layout.namespace import Namespace, namespace
from hicache_store.layout.weights import WeightsIdentity, local_weights

log = logging.getLogger("hicache_store")
V = TypeVar("V")

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT: Final = re.compile(r"models--(?P<repository>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")
_HUB_PREFIX: Final = "hub:"
FULL_DIGEST: Final = "full"
"""The value of ``weights`` that asks for a digest of every byte of a local model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningModel:
    """What an engine tells of the model it runs; ``None`` where it does not tell.

    ``config`` is the configuration after all overrides. ``kv_dtype`` is the logical dtype of the KV
    cache. ``layer_ids`` are the layers with full attention where a model has others too, and ``stage``
    the first layer and the end of this rank's pipeline stage, in the model's own layer numbers.
    """

    config: Mapping[str, object] | None = None
    model_path: str | None = None
    revision: str | None = None
    kv_dtype: str | None = None
    total_kv_heads: int | None = None
    num_layers: int | None = None
    layer_ids: tuple[int, ...] | None = None
    stage: tuple[int, int] | None = None
    chain: ChainKind = ChainKind.PLAIN
    scales_file: str | None = None
    draft_path: str | None = None
    draft_revision: str | None = None


def agreed(key: str, told: V | None, given: V | None, what: str) -> V:
    """The value that the model tells or the operator gives; raises where neither does or both differ."""
    if told is not None and given is not None and told != given:
        raise IdentityError(
            f"the running model has {what} {told}, the configuration says {key}={given}; remove the key"
        )
    value = told if told is not None else given
    if value is None:
        raise IdentityError(
            f'the running model does not tell its {what}; add "{key}" to the configuration of hicache_store'
        )
    return value


def logical_dtype(pool_dtype: str, told: str | None, given: str | None) -> str:
    """What the elements of a pool mean.

    A pool of 16 or 32 bits says so itself. One of bytes does not: four fp8 formats and int8 share
    them, so the model or the operator has to.
    """
    name = pool_dtype.removeprefix("torch.")
    if name in ("uint8", "int8"):
        named = agreed("dtype", told and DType.of(told).name, given and DType.of(given).name, "KV dtype")
        if DType.of(named).bits != 8:
            raise IdentityError(
                f"the KV pool holds bytes, which {named} does not fit; give the 8-bit dtype that the engine "
                "stores, such as float8_e4m3fn"
            )
        return named
    own = DType.of(name).name
    for other in (told, given):
        if other is not None and DType.of(other).name != own:
            raise IdentityError(
                f"the KV pool holds {own}, the KV dtype is given as {other}; remove the key dtype"
            )
    return own


def weights_of(
    given: str | None, path: str | None, revision: str | None, *, key: str = "weights"
) -> WeightsIdentity:
    """The identity of the weights at ``path``, a local directory or the name of a hub's repository.

    ``given`` is the operator's word: ``full`` for a digest of every byte, ``hub:org/model@commit``, or
    any string that changes when the weights do. Without it a hub's cache tells the commit, and a local
    directory is sampled. Raises :class:`IdentityError` where a name alone is all there is.
    """
    if given is not None and given != FULL_DIGEST:
        if given.startswith(_HUB_PREFIX):
            repository, _, commit = given.removeprefix(_HUB_PREFIX).partition("@")
            return WeightsIdentity.hub_commit(repository, commit)
        return WeightsIdentity.operator(given)
    if path is None:
        raise IdentityError(
            f'the running model does not tell where its weights are; add "{key}" to the configuration of '
            "hicache_store: a string that you change whenever the weights change"
        )
    if Path(path).exists():
        snapshot = _SNAPSHOT.search(str(Path(path).absolute()))
        if snapshot and given is None:
            return WeightsIdentity.hub_commit(snapshot["repository"].replace("--", "/"), snapshot["commit"])
        return local_weights(path, is_full=given == FULL_DIGEST)
    is_commit = revision is not None and _COMMIT.fullmatch(revision) is not None
    found = revision if is_commit else _cached_commit(path, revision)
    if found is None:
        raise IdentityError(
            f"the weights are named {path!r} at revision {revision or 'main'!r}, which can move to others; "
            f'start the engine with a commit of 40 hex digits as its revision, or add "{key}"'
        )
    return WeightsIdentity.hub_commit(path, found)


def _cached_commit(repository: str, revision: str | None) -> str | None:
    """The commit that a branch of a hub's repository had when its files were fetched to this machine."""
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415, present where an engine is

        found = try_to_load_from_cache(repository, "config.json", revision=revision)
    except (ImportError, ValueError, OSError):
        return None
    snapshot = _SNAPSHOT.search(str(Path(found).parent)) if isinstance(found, str) else None
    return snapshot["commit"] if snapshot else None


def config_of(running: RunningModel, options: EngineOptions) -> Mapping[str, Any]:
    """The model's configuration, from the engine or from the file that the operator names."""
    if running.config is not None:
        return running.config
    if options.config is None:
        raise IdentityError(
            'the engine does not tell its model\'s configuration; add "config": the path of its config.json'
        )
    path = Path(options.config)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IdentityError(f"the model's configuration {path} cannot be read: {error}") from error
    if not isinstance(config, Mapping):
        raise IdentityError(f"{path} holds no JSON object; name a model's config.json")
    return config


def namespace_of(model: ModelKV, page_size: int, running: RunningModel, options: EngineOptions) -> Namespace:
    """The namespace of a model's pages. Raises :class:`IdentityError` where a part cannot be told."""
    quantised = model.dtype.bits < 16
    if quantised and running.scales_file is not None:
        raise IdentityError(
            f"KV scales are read from {running.scales_file}, which belongs to no weights; use a checkpoint "
            "that holds its scales"
        )
    facts = model.facts(page_size, chain=running.chain, scales="weights" if quantised else "none")
    weights = weights_of(options.weights, running.model_path, running.revision)
    identity = namespace(config_of(running, options), weights, facts, options.tenant)
    log.info(
        "hicache_store namespace %s: weights %s, %s, pages of %d tokens, tenant %r",
        identity.digest,
        weights.kind.value,
        model.dtype.name,
        page_size,
        options.tenant,
    )
    return identity
