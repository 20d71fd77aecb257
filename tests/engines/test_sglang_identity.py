"""What keeps pages of models, weights, dtypes, tenants and requests apart, and what refuses to attach."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.utils import get_storage_hash_str, storage_namespace_seed
from sglang.srt.server_args import ServerArgs
from sglang_rig import Model, attach, host_pool, make_rank, other, ranks, storage_config

import hicache_store.engines.sglang as adapter
from hicache_store.clock import Deadline
from hicache_store.connectors.base import BufferSource, BufferTarget, Read, Write
from hicache_store.connectors.registry import open_connector
from hicache_store.errors import ConfigurationError, IdentityError, TopologyError

MODEL = Model()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/kv?quota=1GiB"


def _write(url: str, model: Model = MODEL, **keys: Any) -> list[str]:
    hashes = model.hashes(4)
    with ranks(model, url, **keys) as (rank,):
        assert rank.write(hashes, [0, 1, 2, 3]) == [True] * 4
    return hashes


def _hits(url: str, hashes: list[str], model: Model = MODEL, **keys: Any) -> int:
    with ranks(model, url, **keys) as (rank,):
        return int(rank.backend.batch_exists(hashes))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float16},
        {"weights": "w2"},
        {"rope_theta": 20_000.0},
        {"page": 8},
        {"layers": 5},
        {"heads": 4},
        {"k_dim": 32, "v_dim": 32},
    ],
    ids=str,
)
def test_another_model_finds_nothing(url: str, changes: dict[str, Any]) -> None:
    hashes = _write(url)
    assert _hits(url, hashes) == 4
    assert _hits(url, hashes, other(MODEL, **changes)) == 0


def test_tenants_share_nothing(url: str) -> None:
    hashes = _write(url, tenant="a")
    assert _hits(url, hashes, tenant="a") == 4
    assert _hits(url, hashes, tenant="b") == 0


@pytest.mark.parametrize(("written", "read"), [("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "int8")])
def test_dtypes_of_bytes_share_nothing(url: str, written: str, read: str) -> None:
    """The pools look the same to the last byte; only the name tells."""
    model = other(MODEL, dtype=torch.uint8)
    hashes = _write(url, model, dtype=written)
    assert _hits(url, hashes, model, dtype=written) == 4
    assert _hits(url, hashes, model, dtype=read) == 0


def test_a25_new_weights_under_the_same_served_name_find_nothing(url: str) -> None:
    """The name that clients use is not part of the identity: the weights are."""
    hashes = _write(url, other(MODEL, weights="revision 1"))
    assert _hits(url, hashes, other(MODEL, weights="revision 2")) == 0
    assert storage_config(MODEL, url).model_name == "served-name"


def test_a25_objects_moved_into_another_namespace_are_refused(url: str) -> None:
    """An operator copies files to where other weights look: found by name, foreign by content, counted."""
    second = other(MODEL, weights="w2")
    hashes = _write(url)
    with ranks(second, url) as (rank,):
        target = rank.backend.namespace.digest
    with ranks(MODEL, url) as (rank,):
        source = rank.backend.namespace.digest
    connector, deadline = open_connector(url), Deadline.after(30)
    for entry in [entry for entry in connector.scan("v1/") if source in entry.key]:
        data = bytearray(entry.size_bytes)
        (got,) = connector.read_into([Read(entry.key, entry.size_bytes, BufferTarget.whole(data))], deadline)
        moved = Write(entry.key.replace(source, target), entry.size_bytes, BufferSource.of(bytes(data)))
        (put,) = connector.write_from([moved], deadline)
        assert got.is_ok
        assert put.is_ok
    connector.close()
    with ranks(second, url) as (rank,):
        assert rank.backend.batch_exists(hashes) == 4  # there by name and length
        assert rank.read(hashes, [5, 6, 7, 8]) == [False] * 4
        assert rank.backend.metrics.get("object.foreign") >= 1
        assert rank.backend.batch_exists(hashes) == 0


def _chain(salt: str | None, extra_key: str | None) -> list[str]:
    seed = storage_namespace_seed(extra_key, salt)
    return list(get_storage_hash_str(list(range(16)), seed, page_size=MODEL.page))


def test_a23_salt_reaches_the_names_of_objects(url: str) -> None:
    """SGLang seeds its page hashes with the salt; equal salts share, others find nothing."""
    with ranks(MODEL, url) as (rank,):
        assert rank.write(_chain("s1", None), [0, 1, 2, 3]) == [True] * 4
        assert rank.backend.batch_exists(_chain("s1", None)) == 4
        for salt in ("s2", None):
            assert rank.backend.batch_exists(_chain(salt, None)) == 0
            assert rank.read(_chain(salt, None), [4, 5, 6, 7]) == [False] * 4


def test_a38_an_adapter_loaded_anew_has_an_identity_of_its_own(url: str) -> None:
    """SGLang gives each loaded LoRA adapter an id; its name is not what pages are named by."""
    with ranks(MODEL, url) as (rank,):
        rank.write(_chain(None, "adapter-id-1"), [0, 1, 2, 3])
        assert rank.backend.batch_exists(_chain(None, "adapter-id-1")) == 4
        assert rank.backend.batch_exists(_chain(None, "adapter-id-2")) == 0


# What refuses, and where.


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"interface_v1": None}, "interface_v1"),
        ({"tennant": "a"}, "did you mean 'tenant'"),
        ({"url": None}, '"url"'),
        ({"url": "nowhere"}, "no scheme"),
        ({"timeout_s": -1}, "timeout_s=-1"),
        ({"weights": ""}, "weights="),
        ({"dtype": "fp8"}, "four formats"),
    ],
)
def test_a_wrong_key_refuses_in_the_constructor(url: str, keys: dict[str, Any], says: str) -> None:
    config = storage_config(MODEL, **{"url": url} | keys)
    with pytest.raises(ConfigurationError, match=says):
        adapter.HiCacheL3(config, {})


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"weights": None}, '"weights"'),
        ({"config": None}, '"config"'),
        ({"total_kv_heads": None}, '"total_kv_heads"'),
        ({"total_kv_heads": 4}, "correct total_kv_heads"),
        ({"num_layers": 7}, "num_layers says 7"),
        ({"dtype": "float16"}, "holds bfloat16"),
        ({"weights": "hub:org/model@main"}, "40 hex digits"),
    ],
)
def test_what_cannot_be_known_refuses_at_attach(url: str, keys: dict[str, Any], says: str) -> None:
    with pytest.raises((IdentityError, TopologyError), match=says):
        make_rank(MODEL, url, **keys)


def test_bytes_without_a_named_dtype_refuse(url: str) -> None:
    with pytest.raises(IdentityError, match='"dtype"'):
        make_rank(other(MODEL, dtype=torch.uint8), url)


def test_heads_that_do_not_divide_refuse_with_both_numbers(url: str) -> None:
    pool = host_pool(MODEL, heads=2)
    with pytest.raises(TopologyError, match="8 KV heads cannot be split over tensor-parallel size 3"):
        attach(pool, MODEL, url, tp_size=3)


def test_a_stage_that_the_pool_contradicts_refuses(url: str) -> None:
    pool = host_pool(MODEL, layers=3, start=4)
    with pytest.raises(TopologyError, match="stage 1 of 2"):
        attach(pool, MODEL, url, pp=1, pp_size=2)


@pytest.mark.parametrize("size", ["dcp", "attn_cp"])
def test_context_parallel_slices_refuse(url: str, size: str) -> None:
    config = storage_config(MODEL, url)
    setattr(config, f"{size}_size", 2)
    with pytest.raises(ConfigurationError, match="context parallelism of size 2"):
        adapter.HiCacheL3(config, {})


def test_another_version_of_sglang_is_refused_unless_allowed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "TESTED_VERSIONS", ("0.0.1",))
    with pytest.raises(ConfigurationError, match="allow_untested"):
        adapter.HiCacheL3(storage_config(MODEL, url), {})
    adapter.HiCacheL3(storage_config(MODEL, url, allow_untested=True), {})


class RenamedPool:
    """A pool of a class that nobody has looked at."""

    kv_buffer = object()
    layout = "layer_first"


def test_an_unknown_anchor_pool_refuses_by_name(url: str) -> None:
    with pytest.raises(ConfigurationError, match="RenamedPool"):
        attach(RenamedPool(), MODEL, url)


def test_a16_a_buffer_of_another_shape_refuses(url: str) -> None:
    """An engine that packs K and V anew, at the same number of bytes, must not be read in the old way."""
    pool = host_pool(MODEL, layout="page_first")
    tokens, layers, heads, width = pool.kv_buffer.shape[1:]
    pool.kv_buffer = pool.kv_buffer.view(tokens, layers, 2 * heads, width)
    with pytest.raises(ConfigurationError, match="another way than the ones tested"):
        attach(pool, MODEL, url)


def test_a16_pages_at_other_addresses_refuse(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes agree and the engine's own addresses do not: no page is moved."""
    pool = host_pool(MODEL, layout="page_first")
    real = pool.get_page_buffer_meta

    def swapped(indices: Any) -> Any:
        pointers, sizes = real(indices)
        return [pointers[1], pointers[0]], sizes

    monkeypatch.setattr(pool, "get_page_buffer_meta", swapped)
    with pytest.raises(ConfigurationError, match="elsewhere than expected"):
        attach(pool, MODEL, url)


# The model that a running engine publishes.


@contextmanager
def published(directory: Path, **arguments: Any) -> Iterator[None]:
    """SGLang's own context of a server with the model of ``directory``."""
    state = runtime_context.snapshot_context()
    try:
        server = ServerArgs(model_path=str(directory), device="cpu", **arguments)
        server.resolve_once()
        runtime_context.get_context().set_server_args(server)
        yield
    finally:
        runtime_context.restore_context(state)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 64,
        "intermediate_size": 64,
    }
    (path / "config.json").write_text(json.dumps(MODEL.config() | fields))
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return path


TOLD = {"weights": None, "config": None, "total_kv_heads": None, "num_layers": None}


def test_a_running_model_needs_nothing_but_a_url(url: str, checkpoint: Path) -> None:
    with published(checkpoint):
        hashes = _write(url, **TOLD)
        assert _hits(url, hashes, **TOLD) == 4
        with ranks(MODEL, url, tp_size=4, pp_size=2, layout="page_head", **TOLD) as readers:
            for rank in readers:
                assert rank.read(hashes, [3, 4, 5, 6]) == [True] * 4
                assert rank.holds(hashes, [3, 4, 5, 6])


def test_a_running_model_and_its_config_file_are_one_identity(url: str, checkpoint: Path) -> None:
    """The configuration after the engine's defaults and the sparse file that it was made of agree."""
    with published(checkpoint):
        hashes = _write(url, **TOLD | {"weights": "w1"})
    assert _hits(url, hashes, config=str(checkpoint)) == 4


def test_other_weights_of_equal_shape_find_nothing(url: str, checkpoint: Path) -> None:
    with published(checkpoint):
        hashes = _write(url, **TOLD)
        weights = bytearray((checkpoint / "model.safetensors").read_bytes())
        weights[77] ^= 1
        (checkpoint / "model.safetensors").write_bytes(weights)
        assert _hits(url, hashes, **TOLD) == 0


def test_an_override_of_the_rotary_embedding_finds_nothing(url: str, checkpoint: Path) -> None:
    with published(checkpoint):
        hashes = _write(url, **TOLD)
    changed = json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0}})
    with published(checkpoint, json_model_override_args=changed):
        assert _hits(url, hashes, **TOLD) == 0
    with published(checkpoint):
        assert _hits(url, hashes, **TOLD) == 4


def test_weights_quantised_while_loading_find_nothing(url: str, checkpoint: Path) -> None:
    """The same files give other keys and values, and no configuration file says so."""
    with published(checkpoint):
        hashes = _write(url, **TOLD)
        assert _hits(url, hashes, **TOLD) == 4
    with published(checkpoint, quantization="fp8"):
        assert _hits(url, hashes, **TOLD) == 0


def test_dummy_weights_have_no_identity_of_their_own(url: str, checkpoint: Path) -> None:
    """A benchmark with random weights must not store under the name of the real ones."""
    with published(checkpoint, load_format="dummy"):
        with pytest.raises(IdentityError, match='"weights"'):
            make_rank(MODEL, url, **TOLD)
        make_rank(MODEL, url, **TOLD | {"weights": "random, for a benchmark"}).close()


def test_a_key_that_contradicts_the_running_model_refuses(url: str, checkpoint: Path) -> None:
    with published(checkpoint):
        with pytest.raises(IdentityError, match="the running model has number of layers 6"):
            make_rank(MODEL, url, pp_size=2, **TOLD | {"num_layers": 8})
        with pytest.raises(TopologyError, match="correct total_kv_heads"):
            make_rank(MODEL, url, **TOLD | {"total_kv_heads": 4})


def test_heads_of_layers_that_the_model_does_not_tell_can_be_given(url: str, checkpoint: Path) -> None:
    """A pool whose layers have other heads than the model tells refuses, until the operator gives theirs."""
    model = other(MODEL, heads=4)
    with published(checkpoint):
        with pytest.raises(TopologyError, match="correct total_kv_heads"):
            make_rank(model, url, tp_size=2, **TOLD)
        make_rank(model, url, tp_size=2, **TOLD | {"total_kv_heads": 4}).close()


def test_weights_replaced_while_attached_stop_the_store(url: str, checkpoint: Path) -> None:
    """A weight update without a new attach: nothing old is served, nothing new stored under the old name."""
    hashes = MODEL.hashes(4)
    with published(checkpoint), ranks(MODEL, url, **TOLD) as (rank,):
        assert rank.write(hashes[:2], [0, 1]) == [True, True]
        runtime_context.get_context().override("test", weight_version="step 2")
        assert rank.backend.batch_exists(hashes) == 0
        assert rank.read(hashes[:2], [2, 3]) == [False, False]
        assert rank.write(hashes[2:], [4, 5]) == [False, False]
        assert rank.backend.metrics.get("engine.weights_changed") == 3
