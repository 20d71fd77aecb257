"""What a running vLLM tells of its model and of this rank, from its own configuration objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from hicache_store.engines.identity import RunningModel
from hicache_store.errors import ConfigurationError
from hicache_store.layout.config_fields import config_fields

WEIGHTLESS_FORMATS: Final = frozenset({"dummy", "sharded_state"})
"""Load formats whose weights are not the files of the model's path as they lie there: dummy weights must
never be stored under the name of real ones."""


@dataclass(frozen=True, slots=True)
class Place:
    """This rank among those of one engine. The scheduler has a place of its own, outside of all."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int


def place_of(vllm_config: Any) -> Place:
    """This worker's place, from vLLM's process groups."""
    from vllm.distributed import parallel_state  # noqa: PLC0415, an engine is running

    parallel = vllm_config.parallel_config
    return Place(
        int(parallel_state.get_tp_group().rank_in_group),
        int(parallel.tensor_parallel_size),
        int(parallel_state.get_pp_group().rank_in_group),
        int(parallel.pipeline_parallel_size),
    )


def check_config(vllm_config: Any) -> None:
    """Raise :class:`ConfigurationError`, with the way out, for what cannot be stored rightly."""
    parallel = vllm_config.parallel_config
    for what, name in (
        ("decode", "decode_context_parallel_size"),
        ("prefill", "prefill_context_parallel_size"),
    ):
        size = int(getattr(parallel, name, 1) or 1)
        if size > 1:
            raise ConfigurationError(
                f"{what} context parallelism of size {size} interleaves the tokens of a block over ranks, "
                f"which hicache_store does not store; run with {name}=1"
            )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigurationError(
            "vLLM runs without prefix caching (enable_prefix_caching), by its options or as it cannot "
            "go on from a prefix of this model on this platform; turn it on, or run without hicache_store"
        )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ConfigurationError(
            "this engine takes new weights while it runs (weight_transfer_config), and pages would be stored "
            "under the name of the old ones; run it without hicache_store"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigurationError(
            "calculate_kv_scales takes KV scales from the first requests, so no other engine could read this "
            "one's pages; use a checkpoint that holds its scales, or another kv_cache_dtype"
        )


def running_model(vllm_config: Any) -> RunningModel:
    """The model of this engine, the same in its scheduler and in every rank."""
    model, load = vllm_config.model_config, vllm_config.load_config
    is_weightless = str(load.load_format) in WEIGHTLESS_FORMATS
    return RunningModel(
        config=_config(model),
        model_path=None if is_weightless else str(model.model),
        revision=model.revision,
        kv_dtype=_kv_dtype(str(vllm_config.cache_config.cache_dtype)),
        total_kv_heads=int(model.get_total_num_kv_heads()),
        num_layers=int(model.get_total_num_hidden_layers()),
    )


def _config(model: Any) -> dict[str, object]:
    """The configuration after overrides, with the dtype, the length and the quantisation of weights that the
    engine really runs: one that is applied while loading is in no configuration file."""
    fields = dict(config_fields(model.hf_config))
    dtype = str(model.dtype).removeprefix("torch.")
    fields.pop("torch_dtype", None)
    fields["dtype"] = dtype
    nested = fields.get("text_config")
    if isinstance(nested, dict):
        nested = {key: value for key, value in nested.items() if key != "torch_dtype"}
        fields["text_config"] = {**nested, "dtype": dtype}
    length = getattr(model, "original_max_model_len", None)
    if length is not None and length > 0:
        fields["max_model_len"] = int(length)
    if fields.get("quantization_config") is None and model.quantization is not None:
        fields["quantization_config"] = {"quant_method": str(model.quantization)}
    return fields


def _kv_dtype(named: str) -> str | None:
    """The logical dtype of ``--kv-cache-dtype``; ``None`` where the KV cache itself tells."""
    if named == "auto":
        return None
    if named in ("fp8", "fp8_e4m3"):
        from vllm.platforms import current_platform  # noqa: PLC0415, an engine is running

        return str(current_platform.fp8_dtype()).removeprefix("torch.")
    return {"fp8_e5m2": "float8_e5m2", "half": "float16"}.get(named, named)
