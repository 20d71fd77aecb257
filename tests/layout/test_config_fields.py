from __future__ import annotations

import collections
import types
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from hicache_store.errors import IdentityError
from hicache_store.layout.canonical import canonical_json
from hicache_store.layout.config_fields import config_fields, model_record
from hicache_store.layout.dtypes import DType

BF16 = DType.of("bfloat16")
FP8 = DType.of("float8_e4m3fn")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}
LLAMA_YARN = LLAMA | {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 4096}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def record(config: Mapping[str, Any], dtype: DType = BF16) -> dict[str, Any]:
    return model_record(config, dtype)


def same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return canonical_json(record(first)) == canonical_json(record(second))


@pytest.mark.parametrize(
    ("config", "spelled_out"),
    [
        (LLAMA, {"head_dim": 64}),
        (LLAMA, {"v_head_dim": 64, "head_dim": 64}),
        (LLAMA, {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}),
        (LLAMA, {"rope_scaling": None, "partial_rotary_factor": 1.0}),
        (LLAMA, {"rope_scaling": {"rope_type": "default"}}),
        (LLAMA, {"rope_scaling": {"rope_type": "default", "original_max_position_embeddings": 8192}}),
        (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
        (LLAMA, {"sliding_window": None, "layer_types": ["full_attention"] * 30}),
        (LLAMA, {"torch_dtype": "bfloat16"}),
        (LLAMA, {"dtype": torch.bfloat16}),
        (LLAMA, {"embedding_multiplier": 1.0, "residual_multiplier": 1}),
        (LLAMA, {"quantization_config": None}),
        (LLAMA_YARN, {"max_model_len": 8192}),
        (MISTRAL, {"head_dim": 64}),
        (DEEPSEEK, {"head_dim": 64}),
        (DEEPSEEK, {"head_dim": 192}),
        (
            LLAMA | {"model_type": "qwen2"},
            {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 9},
        ),
        (LLAMA | {"model_type": "some_new_type"}, {"num_key_value_heads": 3, "rope_local_base_freq": None}),
    ],
)
def test_absent_is_the_default(config: dict[str, Any], spelled_out: dict[str, Any]) -> None:
    assert same(config, config | spelled_out)


def test_each_type_has_its_own_defaults() -> None:
    bare = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "num_key_value_heads")}
    assert record(bare)["rope_theta"] == 10_000
    assert record(bare)["num_key_value_heads"] == 9
    mixtral = record(bare | {"model_type": "mixtral"})
    assert (mixtral["rope_theta"], mixtral["num_key_value_heads"]) == (1_000_000, 8)
    assert record(bare | {"model_type": "mistral"})["sliding_window"] == 4096
    assert record(bare | {"model_type": "mistral", "sliding_window": None})["sliding_window"] is None
    assert record(bare | {"model_type": "gemma2"})["head_dim"] == 256


def test_the_default_of_an_unknown_type_equals_no_number() -> None:
    """Its class may fill in any value, so an absent base must not pass for the usual one."""
    unknown = {key: value for key, value in LLAMA.items() if key != "rope_theta"} | {"model_type": "new"}
    assert record(unknown)["rope_theta"] is None
    assert not same(unknown, unknown | {"rope_theta": 10_000})
    assert not same(unknown, unknown | {"rms_norm_eps": 1e-6})


@pytest.mark.parametrize(
    "ignored",
    [
        {"use_cache": False},
        {"transformers_version": "9.9"},
        {"_name_or_path": "/somewhere/else"},
        {"tensor_parallel_size": 8, "pp_size": 4},
        {"attn_implementation": "eager", "attention_backend": "x"},
        {"vocab_size": 1, "bos_token_id": 7, "tie_word_embeddings": False, "final_logit_softcapping": 30},
        {"attention_dropout": 0.5, "initializer_range": 1},
        {"max_position_embeddings": 131072},
        {"max_model_len": 4096},
        {"original_max_position_embeddings": 2048},
        {"sliding_window_pattern": 6, "max_window_layers": 3},
    ],
    ids=str,
)
def test_what_cannot_change_kv_is_ignored(ignored: dict[str, Any]) -> None:
    assert same(LLAMA, LLAMA | ignored)


LISTED = {
    "model_type": "mistral", "architectures": ["Other"], "num_hidden_layers": 31, "hidden_size": 577,
    "num_attention_heads": 8, "num_key_value_heads": 9, "head_dim": 65, "v_head_dim": 32,
    "intermediate_size": 1537, "q_lora_rank": 7, "qk_rope_head_dim": 7, "qk_nope_head_dim": 7,
    "rope_theta": 10001, "partial_rotary_factor": 0.5, "rotary_pct": 0.25, "rotary_dim": 32,
    "rotary_emb_base": 5, "rope_local_base_freq": 5, "rope_interleave": True, "no_rope_layers": [1, 0],
    "no_rope_layer_interval": 4, "position_embedding_type": "x", "alibi": True, "attention_bias": True,
    "use_qk_norm": True, "qk_layernorm": True, "clip_qkv": 8, "query_pre_attn_scalar": 128,
    "attention_multiplier": 0.1, "attn_logit_softcapping": 50, "attn_temperature_tuning": 4,
    "attn_scale": 0.1, "floor_scale": 8192, "attention_chunk_size": 8192, "index_topk": 2048,
    "parallel_attn": True, "rms_norm_eps": 1.1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5, "norm_epsilon": 1e-5, "hidden_act": "gelu", "hidden_activation": "gelu",
    "activation_function": "gelu", "swiglu_limit": 7, "mlp_bias": True, "embedding_multiplier": 2,
    "residual_multiplier": 2, "scale_emb": 12, "scale_depth": 1.4, "use_parallel_residual": False,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "greedy", "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3, "moe_layer_freq": 2, "decoder_sparse_step": 2, "mlp_only_layers": [1],
    "sliding_window": 4096, "layer_types": ["sliding_attention"],
    "rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "linear", "factor": 3},
    "quantization_config": {"quant_method": "fp8"}, "dtype": "float16",
}  # fmt: skip


@pytest.mark.parametrize("name", LISTED)
def test_a_listed_field_counts(name: str) -> None:
    assert not same(LLAMA, LLAMA | {name: LISTED[name]})


def test_the_listed_fields_differ_from_one_another() -> None:
    """No two of the changes above may look alike."""
    encodings = {canonical_json(record(LLAMA | {name: value})) for name, value in LISTED.items()}
    assert len(encodings) == len(LISTED)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (DEEPSEEK, {"kv_lora_rank": 256}),
        (DEEPSEEK, {"qk_rope_head_dim": 32}),
        (DEEPSEEK, {"qk_nope_head_dim": 64}),
        (DEEPSEEK, {"v_head_dim": 64}),
        (MISTRAL, {"sliding_window": 2048}),
        (MISTRAL, {"sliding_window": None}),
        (MISTRAL, {"use_sliding_window": False}),
        (MISTRAL, {"sliding_window_pattern": 6}),
        (MISTRAL, {"max_window_layers": 6}),
        (MISTRAL, {"layer_types": ["full_attention"] * 30}),
        (LLAMA_YARN, {"max_position_embeddings": 32768}),
        (LLAMA_YARN, {"max_model_len": 32768}),
        (LLAMA_YARN, {"rope_theta": 1e6}),
    ],
)
def test_fields_that_count_where_they_take_effect(config: dict[str, Any], change: dict[str, Any]) -> None:
    assert not same(config, config | change)


def _with_rope(**scaling: Any) -> dict[str, Any]:
    return LLAMA | {"rope_scaling": scaling}


def test_a12_every_rope_parameter_counts() -> None:
    base = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 8192}
    changes: list[dict[str, Any]] = [
        {}, {"factor": 4.5}, {"rope_type": "dynamic"}, {"original_max_position_embeddings": 4096},
        {"beta_fast": 33}, {"beta_slow": 2}, {"mscale": 0.7}, {"mscale_all_dim": 0.7},
        {"attention_factor": 1.2}, {"truncate": False}, {"a_parameter_of_next_year": 1},
    ]  # fmt: skip
    assert len(
        {canonical_json(record(_with_rope(**base, **{}) | {"rope_scaling": base | c})) for c in changes}
    ) == len(changes)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2.0}),
        ({"type": "linear", "rope_type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2}),
        ({"rope_type": "linear", "factor": 2, "mscale": None}, {"rope_type": "linear", "factor": 2}),
        (
            {"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "truncate": True},
            {"rope_type": "yarn", "factor": 4},
        ),
    ],
)
def test_rope_spellings_of_one_meaning(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert same(LLAMA | {"rope_scaling": first}, LLAMA | {"rope_scaling": second})


def test_rope_is_one_form_before_and_after_the_library_renamed_it() -> None:
    """The base moved into the mapping, the mapping got a new name, and some engines carry both."""
    old = LLAMA | {"rope_scaling": {"type": "llama3", "factor": 8, "original_max_position_embeddings": 8192}}
    moved = {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 1e5,
    }
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"} | {"rope_parameters": moved}
    assert same(old, new)
    assert same(old, old | {"rope_parameters": moved})
    partial = {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}
    assert same(LLAMA | {"partial_rotary_factor": 0.5}, LLAMA | {"rope_parameters": partial})
    phi = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1, 64]}
    inside = phi | {"original_max_position_embeddings": 4096}
    outside = LLAMA | {"rope_scaling": phi, "original_max_position_embeddings": 4096}
    assert same(outside, LLAMA | {"rope_scaling": inside})


def test_rope_by_layer_type_counts() -> None:
    per_type = {
        "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    base = LLAMA | {"rope_parameters": per_type}
    changed = per_type | {"sliding_attention": {"rope_type": "default", "rope_theta": 1e5}}
    respelled = per_type | {"sliding_attention": {"type": "default", "rope_theta": 10_000}}
    yarn = per_type | {"full_attention": {"rope_type": "yarn", "factor": 8, "rope_theta": 1e6}}
    assert not same(base, LLAMA | {"rope_parameters": changed})
    assert same(base, LLAMA | {"rope_parameters": respelled})
    assert not same(base, base | {"rope_scaling": {"rope_type": "linear", "factor": 8}})
    assert same(base, base | {"max_position_embeddings": 1})
    assert not same(
        base | {"rope_parameters": yarn}, base | {"rope_parameters": yarn, "max_position_embeddings": 1}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5}}, r"twice, as 100000\.0 and as 5"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2}}, "rope_type twice"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}, "rope_parameters": {"type": "yarn", "factor": 3}},
         "factor twice"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 1},
          "original_max_position_embeddings": 2}, "original_max_position_embeddings twice"),
        ({"rope_scaling": "yarn"}, "give a mapping"),
        ({"rope_parameters": {"full_attention": {}, "factor": 2}}, "beside mappings"),
        ({"quantization_config": "fp8"}, "quant_method"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": 576.5}, r"hidden_size is 576\.5"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": float("inf")}, "hidden_size is inf"),
        ({"num_attention_heads": "9"}, "num_attention_heads is '9'"),
        ({"model_type": None, "architectures": None}, "names no architecture"),
        ({"dtype": "auto"}, "bfloat16"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(IdentityError, match=message):
        record(LLAMA | change)


def test_compute_dtype_defaults_to_a_kv_dtype_that_can_compute() -> None:
    assert record(LLAMA, BF16)["dtype"] == "bfloat16"
    assert record(LLAMA, FP8)["dtype"] is None
    assert record(LLAMA | {"torch_dtype": "torch.float16"}, FP8)["dtype"] == "float16"


def test_quantisation_is_a_digest_however_long_its_lists_are() -> None:
    layers = {f"model.layers.{i}": "fp8" for i in range(50_000)}
    long = record(LLAMA | {"quantization_config": {"quant_method": "modelopt", "layers": layers}})
    assert len(canonical_json(long)) < 4096
    assert long["quantization_config"]["quant_method"] == "modelopt"
    layers["model.layers.7"] = "bf16"
    other = record(LLAMA | {"quantization_config": {"quant_method": "modelopt", "layers": layers}})
    assert other["quantization_config"]["digest"] != long["quantization_config"]["digest"]


def test_the_text_model_of_a_multimodal_configuration() -> None:
    text = {key: value for key, value in LLAMA.items() if key != "architectures"}
    outer = {"model_type": "llava", "architectures": ["LlamaForCausalLM"], "text_config": text}
    assert same(LLAMA, outer)
    assert same(outer, outer | {"vision_config": {"hidden_size": 1024}, "torch_dtype": "bfloat16"})
    assert not same(outer, outer | {"quantization_config": {"quant_method": "awq"}})
    assert not same(outer, outer | {"torch_dtype": "float16"})
    assert not same(outer, outer | {"rope_scaling": {"rope_type": "linear", "factor": 2}})
    assert not same(outer, outer | {"text_config": text | {"rope_theta": 7}})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dtype", ("float16", "bfloat16")),
        ("rope_theta", (7, 8)),
        ("max_model_len", (4096, 8192)),
        ("architectures", (["A"], ["B"])),
        ("quantization_config", ({"quant_method": "awq"}, {"quant_method": "fp8"})),
    ],
)
def test_a_field_on_both_levels_counts_with_both_values(name: str, values: tuple[Any, Any]) -> None:
    """Whichever level an engine obeys, a change of it is another namespace."""

    def nested(inner: object, outer: object) -> dict[str, Any]:
        return {"model_type": "llava", "text_config": LLAMA_YARN | {name: inner}, name: outer}

    pairs = [(inner, outer) for inner in values for outer in values]
    assert len({canonical_json(record(nested(inner, outer))) for inner, outer in pairs}) == 4
    assert same(nested(values[0], values[0]), LLAMA_YARN | {name: values[0]})


class Attributes(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class WithToDict:
    """Like the library's configuration objects, whose attributes may be aliases of others."""

    rope_theta = "not this one"

    def to_dict(self) -> dict[str, Any]:
        return dict(LLAMA)


@pytest.mark.parametrize(
    "source",
    [
        Attributes(LLAMA),
        types.MappingProxyType(LLAMA),
        collections.OrderedDict(reversed(LLAMA.items())),
        types.SimpleNamespace(**LLAMA),
        WithToDict(),
        types.SimpleNamespace(
            **{k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}, n_layer=30, unrelated=object()
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_mapping_or_object_of_fields_will_do(source: object) -> None:
    assert same(config_fields(source), LLAMA)


def test_nested_objects_are_read_too() -> None:
    text = types.SimpleNamespace(**LLAMA)
    assert same(config_fields(types.SimpleNamespace(model_type="llava", text_config=text)), LLAMA)


def test_an_object_without_fields_is_refused() -> None:
    with pytest.raises(IdentityError, match=r"config\.json"):
        config_fields(object())
