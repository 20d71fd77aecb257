"""The facts of a model's configuration that change its KV, in one canonical form.

The weights' identity already covers the configuration a checkpoint ships with; what this record
guards against is everything an operator or an engine overrides after loading. A field belongs here
when changing it, with the same weights and tokens, changes a key or a value of any layer: rotary
embedding, masks and windows, norms, activations, residual and attention scales, expert routing,
quantisation of the weights. Left out is what cannot: output heads and their soft caps, dropout and
initialisation, token ids of special tokens, tensor names, caches and library versions.

An absent field is written as its default, so that a sparse ``config.json`` and the full object an
engine made of it agree. Where the default depends on the model type and the type is not in
``_TYPE_DEFAULTS``, it is ``null``: "the default of this type", which equals no number.

A name added in a later release is written only where it differs from its default, because writing
it always would rename every namespace in the field.
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Mapping, Sequence
from typing import Final

from hicache_store.errors import IdentityError
from hicache_store.layout.canonical import canonical_json
from hicache_store.layout.dtypes import DType

_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("kv_channels",),
    "max_position_embeddings": ("n_positions",),
    "dtype": ("torch_dtype",),
}
"""Other spellings of one fact; the first that is given wins."""

_PLAIN_FIELDS: Final = (
    # Which graph the weights are put into.
    "model_type", "architectures",
    # Sizes that a different reading of the same tensors could change.
    "intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
    # Positions. Scaled rotary embeddings are canonicalised apart, see _rope.
    "rotary_pct", "rotary_dim", "rotary_emb_base", "rope_local_base_freq", "rope_interleave",
    "no_rope_layers", "no_rope_layer_interval", "position_embedding_type", "alibi",
    # Attention: biases, norms of q and k, scales and caps of the scores, chunks, sparse selection.
    "attention_bias", "use_qk_norm", "qk_layernorm", "clip_qkv", "query_pre_attn_scalar",
    "attention_multiplier", "attn_logit_softcapping", "attn_temperature_tuning", "attn_scale",
    "floor_scale", "attention_chunk_size", "index_topk", "parallel_attn",
    # Norms, activations and scales on the way to the next layer's keys.
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon",
    "hidden_act", "hidden_activation", "activation_function", "swiglu_limit", "mlp_bias",
    "embedding_multiplier", "residual_multiplier", "scale_emb", "scale_depth", "use_parallel_residual",
    # Expert routing.
    "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "norm_topk_prob", "routed_scaling_factor", "scoring_func", "topk_method", "n_group", "topk_group",
    "first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers",
)  # fmt: skip

_DERIVED_FIELDS: Final = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "v_head_dim", "sliding_window", "use_sliding_window", "max_window_layers",
    "sliding_window_pattern", "layer_types", "rope_theta", "partial_rotary_factor", "rope_parameters",
    "rope_scaling", "original_max_position_embeddings", "max_position_embeddings", "max_model_len",
    "quantization_config", "dtype",
)  # fmt: skip

_LISTED: Final = (*_PLAIN_FIELDS, *_DERIVED_FIELDS)

_NEUTRAL: Final[Mapping[str, object]] = {"embedding_multiplier": 1, "residual_multiplier": 1, "scale_emb": 1}
"""Multiplying by one is what leaving the multiplier out does, in every model type."""

_LLAMA: Final[Mapping[str, object]] = {
    "rope_theta": 10_000,
    "partial_rotary_factor": 1,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
_QWEN2: Final = {**_LLAMA, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

_TYPE_DEFAULTS: Final[Mapping[str, Mapping[str, object]]] = {
    "llama": {**_LLAMA, "attention_bias": False, "mlp_bias": False},
    "mistral": {**_LLAMA, "num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {
        **_LLAMA, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000,
        "num_experts_per_tok": 2,
    },
    "qwen2": {**_QWEN2, "num_key_value_heads": 32},
    "qwen2_moe": {
        **_QWEN2, "num_key_value_heads": 16, "num_experts_per_tok": 4, "norm_topk_prob": False,
    },
    "qwen3": {**_QWEN2, "num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
    "qwen3_moe": {
        **_QWEN2, "num_key_value_heads": 4, "attention_bias": False, "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    "gemma2": {
        "rope_theta": 10_000, "partial_rotary_factor": 1, "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "num_key_value_heads": 4,
        "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50,
        "sliding_window": 4096,
    },
    "phi3": {**_LLAMA, "rms_norm_eps": 1e-5},
    "olmo2": {**_LLAMA, "rms_norm_eps": 1e-5, "attention_bias": False},
    "deepseek_v3": {**_LLAMA, "attention_bias": False, "num_key_value_heads": 128},
}  # fmt: skip
"""What the types' configuration classes in ``transformers`` fill in for an absent key."""

_ROPE_DEFAULTS: Final[Mapping[str, Mapping[str, object]]] = {
    "yarn": {"beta_fast": 32, "beta_slow": 1, "truncate": True}
}
_LENGTH_FREE_ROPE: Final = frozenset({"default", "linear", "llama3"})
"""Rotary kinds whose angles do not depend on how long a context the model is set up for. Of every
other kind (yarn, dynamic, longrope, ones yet unknown) the lengths are part of the identity."""

_OUTER_FIELDS: Final = ("architectures", "quantization_config", "dtype", "max_model_len")
"""Fields of a multimodal model that its outer configuration may hold for the text model."""


def config_fields(source: object) -> Mapping[str, object]:
    """The configuration of ``source`` as a mapping, for :func:`model_record`.

    A mapping is returned as it is. Of an object, ``to_dict()`` is used where it has one (the
    configuration classes of ``transformers``), else the attributes with listed names. Raises
    :class:`IdentityError` when neither gives a field.
    """
    if isinstance(source, Mapping):
        return source
    to_dict = getattr(source, "to_dict", None)
    if callable(to_dict):
        fields = to_dict()
        if isinstance(fields, Mapping):
            return fields
    aliases = (alias for names in _ALIASES.values() for alias in names)
    names = (*_LISTED, *aliases, "text_config")
    found = {name: getattr(source, name) for name in names if hasattr(source, name)}
    if not found:
        raise IdentityError(
            f"a {type(source).__name__} holds none of the configuration's fields; "
            "give the mapping of the model's config.json"
        )
    return found


def model_record(config: Mapping[str, object], kv_dtype: DType) -> dict[str, object]:
    """The listed fields of ``config``, canonical, absent ones as their default.

    ``kv_dtype`` stands in for an absent ``dtype`` when it is a float of 16 bits or more, which is
    what engines compute in unless told otherwise. Raises :class:`IdentityError` when a needed field
    is missing or two spellings of one fact contradict each other.
    """
    text, outer = _text_model(config)
    defaults = _TYPE_DEFAULTS.get(str(text.get("model_type")), {})
    record: dict[str, object] = {"outer": outer}
    for name in _PLAIN_FIELDS:
        record[name] = _take(text, name, defaults.get(name, _NEUTRAL.get(name)))
    if record["model_type"] is None and not record["architectures"]:
        raise IdentityError("the configuration names no architecture; give model_type or architectures")
    record |= _shapes(text, defaults)
    record |= _window(text, defaults)
    record |= _rope(text, defaults)
    record["quantization_config"] = _quantisation(text.get("quantization_config"))
    record["dtype"] = _compute_dtype(_take(text, "dtype", None), kv_dtype)
    return record


def _text_model(config: Mapping[str, object]) -> tuple[Mapping[str, object], object]:
    """The fields of the text model, and where its outer configuration says something else.

    Engines differ on which level an override must be made at, so a field that the two levels
    disagree on counts with both its values.
    """
    nested = config.get("text_config")
    if nested is None or _take(config, "num_hidden_layers", None) is not None:
        return config, None
    text = dict(config_fields(nested))
    outer: dict[str, object] = {}
    for name in _LISTED:
        value, own = _take(config, name, None), _take(text, name, None)
        if value is None or name == "model_type":
            continue
        if own is None and name in _OUTER_FIELDS:
            text[name] = value
        elif own is None or _comparable(name, own) != _comparable(name, value):
            outer[name] = _comparable(name, value)
    return text, outer or None


def _comparable(name: str, value: object) -> object:
    if name == "dtype":
        return DType.of(str(value)).name
    return _quantisation(value) if name == "quantization_config" else _without_nulls(value)


def _take(config: Mapping[str, object], name: str, default: object) -> object:
    """The field under its name or an alias; ``default`` where it is absent.

    An explicit null is no absence: it stays null, which is how a window is switched off.
    """
    names = (name, *_ALIASES.get(name, ()))
    for spelling in names:
        if config.get(spelling) is not None:
            return config[spelling]
    return None if any(spelling in config for spelling in names) else default


def _whole(value: object, name: str) -> int:
    if isinstance(value, (numbers.Integral, float)) and not isinstance(value, bool):
        number = float(value)
        if number.is_integer() and number >= 1:
            return int(number)
    raise IdentityError(f"the configuration's {name} is {value!r}; give a whole number of at least 1")


def _shapes(text: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, object]:
    hidden = _whole(_take(text, "hidden_size", None), "hidden_size")
    heads = _take(text, "num_attention_heads", None)
    kv_heads = _take(text, "num_key_value_heads", defaults.get("num_key_value_heads"))
    if text.get("kv_lora_rank") is not None:
        # Library versions disagree on what head_dim means for latent attention; its parts are exact.
        head_dim: object = sum(_whole(text.get(n), n) for n in ("qk_nope_head_dim", "qk_rope_head_dim"))
    else:
        head_dim = _take(text, "head_dim", defaults.get("head_dim"))
    if head_dim is None and heads is not None:
        head_dim = hidden // _whole(heads, "num_attention_heads")
    v_head_dim = _take(text, "v_head_dim", None)
    return {
        "num_hidden_layers": _whole(_take(text, "num_hidden_layers", None), "num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "v_head_dim": head_dim if v_head_dim is None else v_head_dim,
    }


def _window(text: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, object]:
    """The window that takes effect: one that is switched off is no window, whatever its size."""
    window = _take(text, "sliding_window", defaults.get("sliding_window"))
    if _take(text, "use_sliding_window", defaults.get("use_sliding_window")) is False:
        window = None
    layer_types = _take(text, "layer_types", None)
    if window is None and isinstance(layer_types, (list, tuple)) and set(layer_types) <= {"full_attention"}:
        layer_types = None
    has_window = window is not None
    return {
        "sliding_window": window,
        "layer_types": layer_types,
        "max_window_layers": (
            _take(text, "max_window_layers", defaults.get("max_window_layers")) if has_window else None
        ),
        "sliding_window_pattern": _take(text, "sliding_window_pattern", None) if has_window else None,
    }


def _rope(text: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, object]:
    """Rotary embedding in one form, whether spelled ``rope_scaling`` or ``rope_parameters``."""
    theta, partial = text.get("rope_theta"), text.get("partial_rotary_factor")
    rope = _merged_rope(text)
    if rope is None and (defaults or "rope_scaling" in text or "rope_parameters" in text):
        rope = {"rope_type": "default"}
    if rope is not None:
        theta = _agreed("rope_theta", theta, rope.pop("rope_theta", None))
        partial = _agreed("partial_rotary_factor", partial, rope.pop("partial_rotary_factor", None))
    needs_lengths = rope is None or _depends_on_length(rope)
    length = _take(text, "max_position_embeddings", None)
    run_length = _take(text, "max_model_len", None)
    return {
        "rope": rope,
        "rope_theta": defaults.get("rope_theta") if theta is None else theta,
        "partial_rotary_factor": defaults.get("partial_rotary_factor") if partial is None else partial,
        "max_position_embeddings": length if needs_lengths else None,
        "max_model_len": (length if run_length is None else run_length) if needs_lengths else None,
    }


def _merged_rope(text: Mapping[str, object]) -> dict[str, object] | None:
    """Both spellings as one mapping, or one mapping a layer type; ``None`` when neither is given."""
    flat: list[dict[str, object]] = []
    by_layer_type: list[dict[str, object]] = []
    for name in ("rope_parameters", "rope_scaling"):
        given = text.get(name)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise IdentityError(f"{name} is a {type(given).__name__}; give a mapping")
        if any(isinstance(value, Mapping) for value in given.values()):
            by_layer_type.append({str(kind): _one_rope(value, None) for kind, value in given.items()})
        else:
            flat.append(_one_rope(given, text.get("original_max_position_embeddings")))
    if not by_layer_type:
        return _union(flat) if flat else None
    return _union(by_layer_type) | ({"all": _union(flat)} if flat else {})


def _union(forms: Sequence[Mapping[str, object]]) -> dict[str, object]:
    return {key: _agreed(key, *(form.get(key) for form in forms)) for form in forms for key in form}


def _one_rope(given: object, original: object) -> dict[str, object]:
    if not isinstance(given, Mapping):
        raise IdentityError(f"rope_parameters holds {given!r} beside mappings; give mappings only")
    fields = {str(key): value for key, value in given.items() if value is not None}
    kind = _agreed("rope_type", fields.pop("rope_type", None), fields.pop("type", None))
    kind = "default" if kind is None else kind
    length = _agreed(
        "original_max_position_embeddings", fields.pop("original_max_position_embeddings", None), original
    )
    rope = {**_ROPE_DEFAULTS.get(str(kind), {}), **fields, "rope_type": kind}
    if length is not None and kind not in ("default", "linear"):
        rope["original_max_position_embeddings"] = length
    return rope


def _depends_on_length(rope: Mapping[str, object]) -> bool:
    if "rope_type" in rope:
        return rope["rope_type"] not in _LENGTH_FREE_ROPE
    return any(_depends_on_length(part) for part in rope.values() if isinstance(part, Mapping))


def _agreed(name: str, *values: object) -> object:
    """The one value among those given; raises :class:`IdentityError` when two differ."""
    given = [value for value in values if value is not None]
    if len({canonical_json(_without_nulls(value), name) for value in given}) > 1:
        raise IdentityError(
            f"the configuration gives {name} twice, as {given[0]!r} and as {given[1]!r}, and engines "
            "differ on which one wins; remove one"
        )
    return given[0] if given else None


def _quantisation(given: object) -> object:
    """The method in clear and a digest of the rest, which can list every tensor of a large model."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise IdentityError(
            f"quantization_config is a {type(given).__name__}; "
            "give a mapping such as {'quant_method': 'fp8'}"
        )
    encoded = canonical_json(_without_nulls(given), "quantization_config")
    return {"quant_method": given.get("quant_method"), "digest": hashlib.sha256(encoded).hexdigest()}


def _compute_dtype(given: object, kv_dtype: DType) -> object:
    if given is not None:
        return DType.of(str(given)).name
    return kv_dtype.name if kv_dtype.bits >= 16 else None


def _without_nulls(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
