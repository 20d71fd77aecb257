"""Logical dtypes of KV elements: what the bits mean, not how a buffer spells them.

Engines hand fp8 pools over as ``uint8``, and four different fp8 formats share that size, so a
buffer's own dtype never decides an identity; the name given here does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from hicache_store.errors import ConfigurationError, IdentityError

_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {
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
)

_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fp32": "float32",
        "f32": "float32",
        "fp16": "float16",
        "f16": "float16",
        "half": "float16",
        "bf16": "bfloat16",
        # The engines' option names. Where an engine stores the fnuz variant under the same option
        # (some AMD GPUs), its adapter must pass the dtype it really uses, not the option.
        "fp8_e4m3": "float8_e4m3fn",
        "fp8_e4m3fn": "float8_e4m3fn",
        "fp8_e4m3fnuz": "float8_e4m3fnuz",
        "fp8_e5m2": "float8_e5m2",
        "fp8_e5m2fnuz": "float8_e5m2fnuz",
        "i8": "int8",
        "fp4_e2m1": "float4_e2m1",
        "float4_e2m1fn": "float4_e2m1",
    }
)

_FP8_CHOICES: Final = "float8_e4m3fn, float8_e4m3fnuz, float8_e5m2 or float8_e5m2fnuz"

_REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "auto": "it means whatever the engine chose; give the dtype that it chose, such as bfloat16",
        "fp8": f"four formats of 8 bits go by it; give {_FP8_CHOICES}",
        "float8": f"four formats of 8 bits go by it; give {_FP8_CHOICES}",
        "float8_e4m3": "libraries differ on its infinities; give float8_e4m3fn or float8_e4m3fnuz",
        "uint8": f"raw bytes do not say what they hold; give int8, float4_e2m1, {_FP8_CHOICES}",
        "byte": f"raw bytes do not say what they hold; give int8, float4_e2m1, {_FP8_CHOICES}",
        "fp4": "it may carry scales of its own; give float4_e2m1 for elements without scales",
        "float4_e2m1fn_x2": "it counts pairs; give float4_e2m1, with widths in elements",
        "float": "it is 32 bits in some libraries and 64 in others; give float32",
    }
)


@dataclass(frozen=True, slots=True)
class DType:
    """A logical element type: its canonical ``name`` and the ``bits`` of one element.

    Raises :class:`ConfigurationError` for a pair that is not one of the known ones.
    """

    name: str
    bits: int

    def __post_init__(self) -> None:
        if _BITS.get(self.name) != self.bits:
            raise ConfigurationError(f"no logical dtype {self.name!r} of {self.bits} bits; known: {_known()}")

    @classmethod
    def of(cls, name: str | DType) -> DType:
        """The dtype of a canonical name or of an unambiguous alias, in any case.

        A ``torch.`` prefix is accepted. Raises :class:`IdentityError` for a name that several
        formats share, :class:`ConfigurationError` for an unknown one.
        """
        if isinstance(name, DType):
            return name
        key = name.strip().lower().removeprefix("torch.")
        if key in _REFUSED:
            raise IdentityError(f"the KV dtype {name!r} cannot be told safely: {_REFUSED[key]}")
        key = _ALIASES.get(key, key)
        if key not in _BITS:
            raise ConfigurationError(f"unknown KV dtype {name!r}; known: {_known()}")
        return cls(key, _BITS[key])

    def row_bytes(self, width: int) -> int:
        """Bytes of ``width`` consecutive elements.

        Raises :class:`ConfigurationError` when ``width`` is below 1 or its bits are not whole bytes.
        """
        if width < 1:
            raise ConfigurationError(f"a row of {width} elements holds nothing; give at least 1")
        size_bits = width * self.bits
        if size_bits % 8:
            per_byte = 8 // self.bits
            raise ConfigurationError(
                f"{width} elements of {self.name} are {size_bits} bits, not whole bytes; "
                f"use a multiple of {per_byte} elements"
            )
        return size_bits // 8


def _known() -> str:
    return ", ".join(_BITS)


ALL_DTYPES: Final = tuple(DType(name, bits) for name, bits in _BITS.items())
"""Every logical dtype, in the order of the table."""
