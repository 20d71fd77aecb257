"""Rows of vLLM's offloading as opaque pages: what makes two of them interchangeable, and where they lie.

vLLM's CPU tier keeps a chunk of tokens as one row of bytes. Only vLLM can take a row apart, so a row is
stored whole, under a name that holds everything its bytes depend on beyond the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hicache_store.connectors.base import Connector
from hicache_store.engines.identity import agreed, logical_dtype, namespace_of, weights_of
from hicache_store.engines.options import EngineOptions
from hicache_store.engines.vllm_running import check_config, running_model
from hicache_store.errors import ConfigurationError
from hicache_store.layout.canonical import canonical_json
from hicache_store.layout.dtypes import DType
from hicache_store.layout.layouts import engine_layout
from hicache_store.layout.model import Attention, KVPart, ModelKV, Pool
from hicache_store.layout.namespace import Namespace
from hicache_store.layout.parallel import ParallelSpec, Rank
from hicache_store.layout.plan import Placement, placement_of_slot
from hicache_store.limits import (
    ENGINE_LOAD_PAGES,
    ENGINE_LOAD_THREADS,
    ENGINE_SAVE_THREADS,
    ENGINE_SCRATCH_BYTES,
)
from hicache_store.metrics import Metrics
from hicache_store.store import BackupReport, PageState, PoolBuffers, RestoreReport, Store

STABLE_HASHES: Final = ("sha256", "sha256_cbor")
"""Algorithms of block hashes that neither collide nor start from a random seed."""
_POOL: Final = "rows"


@dataclass(frozen=True, slots=True)
class RowIdentity:
    """The model whose rows they are, everything else that their bytes depend on as a digest, how many bytes
    of a row mean something, and the tokens of a chunk of each group."""

    namespace: Namespace
    digest: bytes
    row_bytes: int
    chunk_tokens: tuple[int, ...]

    def name(self, key: bytes) -> str:
        """The name of the row of a chunk: ``key`` is its block hash, followed by the group."""
        return hashlib.sha256(self.digest + key).hexdigest()


def row_identity(
    vllm_config: Any, kv_cache_config: Any, offloading: Any, options: EngineOptions
) -> RowIdentity:
    """What the rows of a running engine are; ``offloading`` is vLLM's ``OffloadingConfig``.

    Raises :class:`ConfigurationError`, with the way out, where two engines could take each other's rows for
    what they are not.
    """
    check_config(vllm_config)
    if vllm_config.lora_config is not None:
        raise ConfigurationError(
            "vLLM's offloading names the rows of a LoRA adapter by its name and path, so an adapter that is "
            "trained again would get the old one's rows; use HiCacheConnector, which tells adapters by their "
            "weights, or run without LoRA"
        )
    specs = _attention_specs(kv_cache_config)
    chunks = tuple(group.tokens_per_block * offloading.cache.blocks_per_chunk for group in offloading.groups)
    running = running_model(vllm_config)
    first = specs[0]
    dtype = DType.of(logical_dtype(str(first.dtype), running.kv_dtype, options.dtype))
    layers = agreed("num_layers", running.num_layers, options.num_layers, "number of layers")
    heads = agreed("total_kv_heads", running.total_kv_heads, options.total_kv_heads, "number of KV heads")
    if type(first).__name__ == "MLAAttentionSpec":
        model = ModelKV(layers, 1, (KVPart("latent", int(first.head_size)),), dtype, Attention.MLA)
    else:
        parts = (KVPart("k", int(first.head_size)), KVPart("v", int(first.head_size_v)))
        model = ModelKV(layers, heads, parts, dtype, Attention.GQA)
    facts = _facts(vllm_config, offloading, options)
    facts["dtypes"] = sorted({str(spec.dtype) for spec in specs})
    digest = hashlib.sha256(canonical_json(facts, "row")).digest()
    namespace = namespace_of(model, chunks[0], running, options)
    return RowIdentity(namespace, digest, _row_bytes(offloading, heads), chunks)


def _attention_specs(kv_cache_config: Any) -> list[Any]:
    specs = []
    for group in kv_cache_config.kv_cache_groups:
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        specs += [group.kv_cache_spec] if inner is None else list(inner.values())
    found = [spec for spec in specs if hasattr(spec, "head_size")]
    if not found:
        raise ConfigurationError("no layer of this model keeps keys and values; run it without hicache_store")
    return found


def is_portable(offloading: Any) -> bool:
    """Whether rows hold every head and layer once, whatever the parallel sizes.

    vLLM says as much of rows without ``canonical_layout`` too, but there each rank's bytes lie by
    themselves: engines of other sizes read them wrongly.
    """
    return bool(offloading.canonical_layout and offloading.parallel.is_parallelism_agnostic)


def _facts(vllm_config: Any, offloading: Any, options: EngineOptions) -> dict[str, object]:
    parallel, layout = offloading.parallel, offloading.kv_cache_layout
    if layout is None:
        raise ConfigurationError(
            "vLLM does not tell the layout of its KV cache, so its rows could be taken for another layout's; "
            "set VLLM_KV_CACHE_LAYOUT"
        )
    return {
        "format": _format(offloading),
        "topology": None
        if is_portable(offloading)
        else {
            "sizes": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
            "is_one_copy": bool(offloading.replicated_layout),
        },
        "backend": _backend(vllm_config),
        "runner": 2 if vllm_config.use_v2_model_runner else 1,
        "dtype": offloading.model.dtype,
        "tokens_per_hash": offloading.cache.tokens_per_hash,
        "blocks_per_chunk": offloading.cache.blocks_per_chunk,
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in offloading.groups],
        "hash": _hash(vllm_config),
        "draft": _draft(vllm_config, options),
    }


def _format(offloading: Any) -> str:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (  # noqa: PLC0415
        canonical_format_id,
    )

    layout = offloading.kv_cache_layout
    return str(canonical_format_id(layout)) if offloading.canonical_layout else f"direct-{layout.lower()}"


def _backend(vllm_config: Any) -> list[str]:
    """The attention backend, which decides the bytes of a page, as the configuration and the machine choose
    it: what a scheduler can tell is the same whether or not a rank lives in its process."""
    from vllm.config import set_current_vllm_config  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415
    from vllm.v1.attention.selector import get_attn_backend  # noqa: PLC0415

    model, attention = vllm_config.model_config, vllm_config.attention_config
    kinds = [f"{kind}={backend.name}" for kind, backend in sorted(attention.backend_per_kind.items())]
    if attention.backend is not None:
        return [current_platform.device_type, attention.backend.name, *kinds]
    try:
        with set_current_vllm_config(vllm_config):
            chosen = get_attn_backend(
                head_size=model.get_head_size(),
                dtype=model.dtype,
                kv_cache_dtype=vllm_config.cache_config.cache_dtype,
                use_mla=model.use_mla,
            )
    except Exception as error:
        raise ConfigurationError(
            f"vLLM does not tell which attention backend it chooses ({error}), on which rows depend; "
            "name one by --attention-backend"
        ) from error
    return [current_platform.device_type, str(chosen.get_name()), *kinds]


def _hash(vllm_config: Any) -> list[str]:
    """The algorithm of vLLM's block hashes and their seed, which names of rows are made of."""
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed  # noqa: PLC0415

    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm not in STABLE_HASHES:
        raise ConfigurationError(
            f"block hashes by {algorithm} can collide, and without PYTHONHASHSEED no two processes agree on "
            "them; start vLLM with --prefix-caching-hash-algo sha256_cbor (or sha256)"
        )
    return [algorithm, str(resolve_none_hash_seed(get_hash_fn_by_name(algorithm)))]


def _draft(vllm_config: Any, options: EngineOptions) -> dict[str, object] | None:
    """The weights of a draft model, whose layers lie in the same rows."""
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is None:
        return None
    return weights_of(options.draft_weights, str(draft.model), draft.revision, key="draft_weights").record()


def _row_bytes(offloading: Any, total_heads: int) -> int:
    """Bytes of a row that mean something: without the padding behind them, and once where several ranks
    hold the same heads, so that it does not depend on the parallel size where the row does not."""
    parallel = offloading.parallel
    copies = 1 if offloading.replicated_layout else parallel.world_size
    if is_portable(offloading) and not offloading.replicated_layout:
        copies //= max(1, parallel.tp_size // total_heads)
    return int(offloading.worker_kv_bytes_per_block * copies * offloading.cache.blocks_per_chunk)


@dataclass(frozen=True, slots=True)
class Lane:
    """Scratch rows that one thread has to itself: the first of them and how many."""

    start: int
    count: int

    def placements(self, rows: int) -> list[Placement]:
        """The first ``rows`` of them as places of pages."""
        return [placement_of_slot(self.start + row, 1) for row in range(rows)]


class RowStore:
    """Rows in a store, through scratch memory.

    Scratch and not the rows themselves: a transfer that hangs can be given up, because what it still
    writes, or reads, is no memory of vLLM's.
    """

    def __init__(
        self,
        storage: str | Connector,
        identity: RowIdentity,
        options: EngineOptions,
        staging_bytes: int,
        metrics: Metrics,
    ) -> None:
        row_bytes, self.identity = identity.row_bytes, identity
        threads = min(ENGINE_LOAD_THREADS + ENGINE_SAVE_THREADS, staging_bytes // row_bytes)
        if threads < 2:
            raise ConfigurationError(
                f"a row has {row_bytes} bytes, and staging_bytes={staging_bytes} must hold one on its way in "
                f'and one on its way out; give "staging_bytes": "{-(-2 * row_bytes // 2**20)}MiB" or more, '
                'or a smaller "block_size"'
            )
        step = min(ENGINE_LOAD_PAGES, staging_bytes // (threads * row_bytes))
        lanes = [Lane(number * step, step) for number in range(threads)]
        savers = max(1, threads // 3)
        self.save_lanes, self.load_lanes = lanes[:savers], lanes[savers:]
        self.scratch = np.empty((threads * step, row_bytes), np.uint8)
        part = KVPart("row", row_bytes)
        pool = Pool(_POOL, 1, 1, (part,), DType.of("int8"), page_size=1, identity=identity.digest.hex())
        layout = engine_layout("canonical", pool, pool.page_box, slots=len(self.scratch))
        self._store = Store.attach(
            storage,
            identity.namespace,
            [PoolBuffers(pool, layout, [self.scratch.reshape(-1)])],
            ParallelSpec(),
            Rank(),
            writer="caller",
            verify=options.verify,
            staging_bytes=max(ENGINE_SCRATCH_BYTES, 2 * row_bytes + 8192),
            timeout_s=options.timeout_s,
            metrics=metrics,
        )

    def names(self, keys: Sequence[bytes]) -> list[str]:
        """The names of the rows of some chunks."""
        return [self.identity.name(key) for key in keys]

    def stored(self, keys: Sequence[bytes], timeout_s: float) -> tuple[bool, ...]:
        """For each chunk whether its row is stored."""
        return self._store.stored(self.names(keys), pool=_POOL, timeout_s=timeout_s)

    def load(
        self, keys: Sequence[bytes], prefix: Sequence[bytes], lane: Lane, timeout_s: float
    ) -> RestoreReport:
        """Leading rows into a lane, verified; ``prefix`` are the chunks before them."""
        return self._store.restore(
            self.names(keys),
            lane.placements(len(keys)),
            pool=_POOL,
            prefix=self.names(prefix),
            timeout_s=timeout_s,
        )

    def save(self, keys: Sequence[bytes], first: int, lane: Lane, timeout_s: float) -> BackupReport:
        """The rows of a lane; ``first`` is the place of the first in its chain."""
        return self._store.backup(
            self.names(keys), lane.placements(len(keys)), pool=_POOL, first_page=first, timeout_s=timeout_s
        )

    def close(self) -> None:
        """Close the store."""
        self._store.close()


DONE: Final = (PageState.STORED, PageState.PRESENT)
"""States of a row that is in the store."""
