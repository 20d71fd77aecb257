"""Namespaces: what makes two equal, what makes two differ, and frozen vectors.

Run as a script, this file adds cases that ``tests/golden/namespace.json`` lacks; it never changes one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_store.errors import ConfigurationError, IdentityError
from hicache_store.layout.dtypes import ALL_DTYPES
from hicache_store.layout.hashing import ChainKind
from hicache_store.layout.namespace import KVFacts, Namespace, namespace
from hicache_store.layout.weights import WeightsIdentity
from hicache_store.limits import NAMESPACE_BYTES_MAX

GOLDEN = Path(__file__).parent.parent / "golden" / "namespace.json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
DIGEST = hashlib.sha256(b"weights").hexdigest()

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 8192,
}
YARN = SMALL | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}}
LATENT = SMALL | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
DENSE_KV = KVFacts(
    num_kv_heads=3,
    parts=(("k", 64), ("v", 64)),
    dtype="bfloat16",
    attention="gqa",
    page_size=64,
    num_layers=30,
)
LATENT_KV = KVFacts(
    num_kv_heads=1, parts=(("latent", 576),), dtype="fp8_e4m3", attention="mla", page_size=64, num_layers=61,
    chain=ChainKind.BIGRAM, scales="weights",
)  # fmt: skip
HUB = WeightsIdentity.hub_commit("org/model", COMMIT)


def digest(
    config: Mapping[str, Any] = YARN,
    weights: WeightsIdentity = HUB,
    kv: KVFacts = DENSE_KV,
    tenant: str = "",
) -> str:
    return namespace(config, weights, kv, tenant).digest


# --- the frozen vectors ------------------------------------------------------------------------


def cases() -> dict[str, Namespace]:
    nfc, nfd = "caf\u00e9", "cafe\u0301"
    return {
        "dense, hub commit": namespace(SMALL, HUB, DENSE_KV, ""),
        "yarn, sampled digest": namespace(YARN, WeightsIdentity.sampled(DIGEST), DENSE_KV, "team-a"),
        "latent, fp8, bigram, full digest": namespace(
            LATENT, WeightsIdentity.full(DIGEST), LATENT_KV, "team-a"
        ),
        "operator's string, composed": namespace(SMALL, WeightsIdentity.operator(nfc), DENSE_KV, nfc),
        "operator's string, decomposed": namespace(SMALL, WeightsIdentity.operator(nfd), DENSE_KV, nfd),
        "unknown type, sparse": namespace(
            {"model_type": "new", "num_hidden_layers": 2, "hidden_size": 8},
            HUB,
            DENSE_KV,
            "a\x00b/..\U0001f600",
        ),
    }


def _frozen() -> list[dict[str, str]]:
    return json.loads(GOLDEN.read_text("utf-8")) if GOLDEN.exists() else []


@pytest.mark.parametrize("frozen", _frozen(), ids=lambda case: case["name"])
def test_frozen_namespace(frozen: dict[str, str]) -> None:
    """The encoding is compared as text, so that a difference shows which field moved."""
    built = cases()[frozen["name"]]
    assert built.encoded.decode() == frozen["encoded"]
    assert built.digest == frozen["digest"] == hashlib.sha256(frozen["encoded"].encode()).hexdigest()


def test_every_case_is_frozen() -> None:
    assert [case["name"] for case in _frozen()] == list(cases())


def test_the_record_of_a_small_model_written_by_hand() -> None:
    """The one vector that no program wrote, as far as its fields have a value."""
    record = namespace(SMALL, HUB, DENSE_KV, "t").record
    model = {key: value for key, value in record.pop("model").items() if value is not None}
    assert record == {
        "kv": {
            "attention": "gqa", "bits": 16, "chain": "plain", "dtype": "bfloat16", "has_rope": True,
            "head_order": "model", "mla_split": None, "num_kv_heads": 3, "num_layers": 30, "page_size": 64,
            "parts": [["k", 64], ["v", 64]], "scales": "none",
        },
        "tenant": "t",
        "weights": {"kind": "hub_commit", "repository": "org/model", "value": COMMIT},
    }  # fmt: skip
    assert model == {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "dtype": "bfloat16",
        "embedding_multiplier": 1, "head_dim": 64, "hidden_act": "silu", "hidden_size": 576,
        "intermediate_size": 1536, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "partial_rotary_factor": 1,
        "residual_multiplier": 1, "rms_norm_eps": 1e-05, "rope": {"rope_type": "default"},
        "rope_theta": 100000, "scale_emb": 1, "v_head_dim": 64,
    }  # fmt: skip


@pytest.mark.parametrize("hash_seed", [None, "0", "1", "random", "4242"])
def test_e04_fresh_processes_agree_whatever_their_hash_seed(hash_seed: str | None) -> None:
    """Ranks are processes of their own; one drawn seed in the namespace and none would ever share."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    result = subprocess.run(
        [sys.executable, __file__, "--print"],
        env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert json.loads(result.stdout) == {case["name"]: case["digest"] for case in _frozen()}


# --- equal -------------------------------------------------------------------------------------


def _respelled(value: Any, draw: Any) -> Any:
    """The same value with keys in another order and whole numbers as the other type."""
    if isinstance(value, dict):
        keys = draw(st.permutations(list(value)))
        return {key: _respelled(value[key], draw) for key in keys}
    if isinstance(value, list):
        return [_respelled(item, draw) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and draw(st.booleans()):
        return float(value) if isinstance(value, int) else int(value) if value.is_integer() else value
    return value


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from([SMALL, YARN, LATENT]))
def test_order_and_spelling_do_not_matter(data: st.DataObject, config: dict[str, Any]) -> None:
    assert digest(_respelled(config, data.draw)) == digest(config)


def test_a_subclass_of_dict_is_its_content() -> None:
    class Config(dict[str, Any]):
        pass

    assert digest(Config(YARN)) == digest(YARN)


@pytest.mark.parametrize("alias", ["bfloat16", "bf16", "torch.bfloat16"])
def test_aliases_of_a_dtype_are_one(alias: str) -> None:
    assert digest(kv=dataclasses.replace(DENSE_KV, dtype=alias)) == digest()


def test_the_mla_split_has_a_default() -> None:
    assert LATENT_KV.mla_split == "latent_then_rope"
    explicit = dataclasses.replace(LATENT_KV, mla_split="latent_then_rope")
    assert digest(kv=explicit) == digest(kv=LATENT_KV)


def test_the_record_is_a_copy() -> None:
    built = namespace(SMALL, HUB, DENSE_KV, "")
    built.record["tenant"] = "other"
    assert built.record["tenant"] == ""
    assert built == namespace(dict(SMALL), HUB, DENSE_KV, "")
    assert built.digest == hashlib.sha256(built.encoded).hexdigest()


def test_large_numbers_of_the_record_are_exact() -> None:
    built = namespace(SMALL | {"clip_qkv": 2**60}, HUB, DENSE_KV, "")
    assert built.record["model"]["clip_qkv"] == 2**60


# --- different ---------------------------------------------------------------------------------

KV_CHANGES: list[dict[str, Any]] = [
    {"num_kv_heads": 6},
    {"parts": (("k", 64), ("v", 32))},
    {"parts": (("v", 64), ("k", 64))},
    {"parts": (("k", 128),)},
    {"attention": "mha"},
    {"attention": "mla"},
    {"attention": "mla", "mla_split": "rope_then_latent"},
    {"page_size": 32},
    {"num_layers": 31},
    {"chain": ChainKind.BIGRAM},
    {"has_rope": False},
    {"head_order": "interleaved"},
    {"scales": "weights"},
    *({"dtype": dtype.name} for dtype in ALL_DTYPES if dtype.name != "bfloat16"),
]


def test_a05_a12_every_field_of_the_kv_makes_another_namespace() -> None:
    """Formats of one size, other widths, another page or chain: none may read what another wrote."""
    digests = [digest(), *(digest(kv=dataclasses.replace(DENSE_KV, **change)) for change in KV_CHANGES)]
    assert len(set(digests)) == len(KV_CHANGES) + 1
    touched = {name for change in KV_CHANGES for name in change}
    assert touched == {field.name for field in dataclasses.fields(KVFacts)}


def test_a12_one_name_with_other_weights_or_settings_is_another_namespace() -> None:
    """The served name stays while the revision, the rope settings or the depth behind it change."""
    scaled = YARN["rope_scaling"]
    digests = {
        digest(),
        digest(weights=WeightsIdentity.hub_commit("org/model", COMMIT[::-1])),
        digest(weights=WeightsIdentity.hub_commit("org/other", COMMIT)),
        digest(YARN | {"rope_scaling": scaled | {"factor": 8.0}}),
        digest(YARN | {"rope_theta": 500_000}),
        digest(YARN | {"num_hidden_layers": 31}),
        digest(YARN | {"quantization_config": {"quant_method": "awq", "bits": 4}}),
    }
    assert len(digests) == 7


def test_kinds_of_weights_identity_never_equal_one_another() -> None:
    same_text = COMMIT + "0" * 24
    kinds = [
        HUB,
        WeightsIdentity.operator(COMMIT),
        WeightsIdentity.operator(f"org/model@{COMMIT}"),
        WeightsIdentity.operator(same_text),
        WeightsIdentity.sampled(same_text),
        WeightsIdentity.full(same_text),
    ]
    assert len({digest(weights=weights) for weights in kinds}) == len(kinds)


def test_tenants_share_nothing() -> None:
    tenants = [
        "",
        "a",
        "b",
        "ab",
        "A",
        "a ",
        "a/b",
        "a\x00",
        "caf\u00e9",
        "cafe\u0301",
        "null",
        "none",
        "default",
    ]
    assert len({digest(tenant=tenant) for tenant in tenants}) == len(tenants)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
       st.text(st.characters(exclude_categories=["Cs"]), max_size=6))  # fmt: skip
def test_text_fields_never_run_into_one_another(first: str, second: str) -> None:
    plain, swapped = (first, second), (second, first)
    digests = {digest(weights=WeightsIdentity.operator("x" + a), tenant=b) for a, b in (plain, swapped)}
    assert len(digests) == (1 if first == second else 2)


@pytest.mark.parametrize("value", [0, 1, "false", None])
def test_a_boolean_is_no_number_and_no_word(value: Any) -> None:
    assert digest(SMALL | {"model_type": "new", "attention_bias": False}) != digest(
        SMALL | {"model_type": "new", "attention_bias": value}
    )


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_kv_heads": 0}, ConfigurationError, "num_kv_heads is 0"),
        ({"page_size": True}, ConfigurationError, "page_size is True"),
        ({"num_layers": 2.0}, ConfigurationError, r"num_layers is 2\.0"),
        ({"parts": (("k", 0),)}, ConfigurationError, "width of part 'k' is 0"),
        ({"parts": ()}, ConfigurationError, "at least one"),
        ({"parts": (("k", 8), ("k", 8))}, ConfigurationError, "a name of its own"),
        ({"parts": (("K V", 8),)}, ConfigurationError, "'K V' is not a lower-case word"),
        ({"attention": ""}, ConfigurationError, "'' is not a lower-case word"),
        ({"chain": "trigram"}, ConfigurationError, "plain, bigram"),
        ({"mla_split": "latent_then_rope"}, ConfigurationError, "no latent to split"),
        ({"dtype": "fp8"}, IdentityError, "four formats"),
        ({"dtype": "uint8"}, IdentityError, "do not say what they hold"),
        ({"scales": "runtime"}, IdentityError, "scales stored with the weights, or none"),
        ({"scales": "dynamic"}, IdentityError, "'dynamic' are not part of the checkpoint"),
    ],
)
def test_facts_that_cannot_be_shared_are_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dataclasses.replace(DENSE_KV, **change)


def test_weights_must_be_an_identity() -> None:
    with pytest.raises(IdentityError, match="give a WeightsIdentity"):
        namespace(SMALL, "main", DENSE_KV, "")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**53 + 1, b"x", "\ud800"])
def test_a_value_that_cannot_be_encoded_is_refused_by_name(value: Any) -> None:
    with pytest.raises(IdentityError, match=r"namespace\.model\.clip_qkv"):
        digest(SMALL | {"clip_qkv": value})


def test_a_namespace_that_no_manifest_could_hold_is_refused() -> None:
    with pytest.raises(IdentityError, match=f"more than {NAMESPACE_BYTES_MAX}"):
        digest(tenant="t" * NAMESPACE_BYTES_MAX)


def _write_missing() -> None:
    frozen = {case["name"]: case for case in _frozen()}
    for name, built in cases().items():
        case = {"name": name, "encoded": built.encoded.decode(), "digest": built.digest}
        frozen.setdefault(name, case)
    lines = ",\n".join(json.dumps(case, sort_keys=True) for case in frozen.values())
    GOLDEN.write_text(f"[\n{lines}\n]\n", "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(json.dumps({name: built.digest for name, built in cases().items()}))
    else:
        _write_missing()
