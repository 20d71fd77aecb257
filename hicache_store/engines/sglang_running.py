"""What a running SGLang tells of its model, in the process of a scheduler."""

from __future__ import annotations

import logging
from typing import Any

from hicache_store.engines.identity import RunningModel
from hicache_store.layout.config_fields import config_fields
from hicache_store.layout.hashing import ChainKind

log = logging.getLogger("hicache_store")

BIGRAM_ALGORITHMS = frozenset({"EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP"})
"""Speculative algorithms whose trees are keyed by pairs of tokens."""


WEIGHTLESS_FORMATS = frozenset({"dummy", "remote", "remote_instance", "flash_rl"})
"""Load formats whose weights are not the files of the model's path: dummy weights must never be stored under
the name of real ones."""


def running_model(pp_rank: int, pp_size: int) -> RunningModel:
    """The model of this process, or an empty one where none is published (tests, helper processes)."""
    from sglang.srt import runtime_context as context  # noqa: PLC0415, an engine is running

    try:
        settings, config = context.get_model(), context.process_model_config()
    except ValueError:  # SGLang's way to say that nothing was published
        log.warning("this process publishes no model; hicache_store takes everything from its configuration")
        return RunningModel()
    spec = context.get_spec()
    algorithm = str(getattr(spec, "speculative_algorithm", None) or "").upper()
    layer_ids = _full_attention_layers(config)
    layers = int(config.num_hidden_layers)
    is_plain = int(getattr(config, "num_attention_layers", layers)) == layers
    return RunningModel(
        config=_config(config, settings),
        model_path=_weights_path(settings),
        revision=getattr(settings, "revision", None),
        kv_dtype=_kv_dtype(str(settings.kv_cache_dtype)),
        total_kv_heads=int(config.get_total_num_kv_heads()),
        num_layers=layers if is_plain else None,
        layer_ids=layer_ids,
        stage=_stage(layers, pp_rank, pp_size) if is_plain else None,
        chain=ChainKind.BIGRAM if algorithm in BIGRAM_ALGORITHMS else ChainKind.PLAIN,
        scales_file=getattr(settings, "quantization_param_path", None),
        draft_path=getattr(spec, "speculative_draft_model_path", None),
        draft_revision=getattr(spec, "speculative_draft_model_revision", None),
    )


def weights_state() -> tuple[object, object]:
    """What changes when the weights of the running engine are replaced."""
    from sglang.srt import runtime_context as context  # noqa: PLC0415, an engine is running

    try:
        return context.get_model().model_path, context.get_serving().weight_version
    except (ValueError, AttributeError):  # nothing published, or another version's names
        return None, None


def _weights_path(settings: Any) -> str | None:
    is_elsewhere = getattr(settings, "modelopt_checkpoint_restore_path", None) is not None
    if is_elsewhere or str(settings.load_format) in WEIGHTLESS_FORMATS:
        return None
    return str(settings.model_path)


def _config(config: Any, settings: Any) -> dict[str, object]:
    """The configuration after overrides, with the dtype, the length and the quantisation of weights that the
    engine really runs: one that is applied while loading is in no configuration file."""
    fields = dict(config_fields(config.hf_config))
    dtype = str(config.dtype).removeprefix("torch.")
    fields.pop("torch_dtype", None)
    fields["dtype"] = dtype
    nested = fields.get("text_config")
    if isinstance(nested, dict):
        nested = {key: value for key, value in nested.items() if key != "torch_dtype"}
        fields["text_config"] = {**nested, "dtype": dtype}
    if getattr(settings, "context_length", None) is not None:
        fields["max_model_len"] = settings.context_length
    applied = {
        "quant_method": getattr(settings, "quantization", None),
        "modelopt": getattr(settings, "modelopt_quant", None),
        "torchao": getattr(settings, "torchao_config", None) or None,
    }
    if fields.get("quantization_config") is None and any(applied.values()):
        fields["quantization_config"] = applied
    return fields


def _kv_dtype(named: str) -> str | None:
    """The logical dtype of the option ``--kv-cache-dtype``; ``None`` where the pool itself tells."""
    if named == "auto":
        return None
    if named == "bf16":
        return "bfloat16"
    from sglang.srt.utils import is_hip  # noqa: PLC0415, an engine is running

    if named in ("fp8_e4m3", "fp8_e5m2") and is_hip():
        from sglang.kernels.ops.quantization.fp8_kernel import fp8_dtype  # noqa: PLC0415

        return str(fp8_dtype).removeprefix("torch.")
    return named


def _full_attention_layers(config: Any) -> tuple[int, ...] | None:
    """Layers with full attention of a model that has others too, in the model's own numbers."""
    for source in (config, config.hf_text_config):
        found = getattr(source, "full_attention_layer_ids", None)
        if found:
            layers = tuple(sorted(int(layer) for layer in found))
            return layers if len(layers) < int(config.num_hidden_layers) else None
    return None


def _stage(layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    from sglang.srt.distributed.utils import get_pp_indices  # noqa: PLC0415, an engine is running

    start, stop = get_pp_indices(layers, pp_rank, pp_size)
    return int(start), int(stop)
