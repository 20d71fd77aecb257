from __future__ import annotations

import dataclasses

import pytest
import torch

from hicache_store.errors import ConfigurationError, IdentityError
from hicache_store.layout.dtypes import ALL_DTYPES, DType


def test_the_registry_is_these_nine() -> None:
    assert {d.name: d.bits for d in ALL_DTYPES} == {
        "float32": 32,
        "float16": 16,
        "bfloat16": 16,
        "float8_e4m3fn": 8,
        "float8_e4m3fnuz": 8,
        "float8_e5m2": 8,
        "float8_e5m2fnuz": 8,
        "int8": 8,
        "float4_e2m1": 4,
    }


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda d: d.name)
def test_a_dtype_is_found_by_its_own_name_and_torch_agrees_on_the_size(dtype: DType) -> None:
    assert DType.of(dtype.name) == dtype
    assert DType.of(dtype) is dtype
    if dtype.name != "float4_e2m1":
        torch_dtype = getattr(torch, dtype.name)
        assert DType.of(str(torch_dtype)) == dtype
        assert torch_dtype.itemsize == dtype.row_bytes(1)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        (" bfloat16 ", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("torch.half", "float16"),
        ("F32", "float32"),
        ("fp32", "float32"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("fp8_e4m3fnuz", "float8_e4m3fnuz"),
        ("fp8_e5m2fnuz", "float8_e5m2fnuz"),
        ("fp4_e2m1", "float4_e2m1"),
    ],
)
def test_aliases(alias: str, name: str) -> None:
    assert DType.of(alias).name == name


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("fp8", "float8_e5m2fnuz"),
        ("float8", "float8_e4m3fn"),
        ("float8_e4m3", "float8_e4m3fnuz"),
        ("uint8", "int8"),
        ("torch.uint8", "float8_e4m3fn"),
        ("AUTO", "bfloat16"),
        ("fp4", "float4_e2m1"),
        ("torch.float4_e2m1fn_x2", "widths in elements"),
        ("float", "float32"),
    ],
)
def test_a05_a_name_that_several_formats_share_is_refused_with_the_way_out(name: str, way_out: str) -> None:
    """Pools of different fp8 formats have one size and look like raw bytes: only a full name tells."""
    with pytest.raises(IdentityError, match=way_out):
        DType.of(name)


@pytest.mark.parametrize("name", ["", "bfloat", "float64", "int4", "torch.", "float16x"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigurationError, match="float8_e4m3fnuz"):
        DType.of(name)


def test_only_registered_pairs_exist() -> None:
    with pytest.raises(ConfigurationError, match="of 8 bits"):
        DType("bfloat16", 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ALL_DTYPES[0].bits = 8  # type: ignore[misc]


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("width", [1, 2, 64, 127, 128, 576])
def test_row_bytes(dtype: DType, width: int) -> None:
    if width * dtype.bits % 8:
        with pytest.raises(ConfigurationError, match="multiple of 2"):
            dtype.row_bytes(width)
    else:
        assert dtype.row_bytes(width) * 8 == width * dtype.bits


@pytest.mark.parametrize("width", [0, -1])
def test_an_empty_row_is_refused(width: int) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        DType.of("int8").row_bytes(width)
