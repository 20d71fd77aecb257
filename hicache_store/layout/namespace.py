"""The namespace: everything that must agree for two engines' KV bytes to be interchangeable.

A namespace is the SHA-256 of one canonical record with four tagged parts: ``model`` (the
configuration's facts), ``weights``, ``kv`` (what the bytes mean) and ``tenant``. It never holds
parallel sizes, the engine, a host layout, an attention backend, or a version of a library or of
the format, so every rank of every topology of every engine computes the same one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from hicache_store.errors import ConfigurationError, IdentityError
from hicache_store.layout.canonical import canonical_json
from hicache_store.layout.config_fields import model_record
from hicache_store.layout.dtypes import DType
from hicache_store.layout.hashing import ChainKind
from hicache_store.layout.weights import WeightsIdentity
from hicache_store.limits import NAMESPACE_BYTES_MAX

_WORD: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")

LATENT_THEN_ROPE: Final = "latent_then_rope"
MODEL_HEAD_ORDER: Final = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFacts:
    """What the bytes of a page mean.

    ``num_kv_heads`` counts the heads of the whole model, never of a rank (latent attention has one).
    ``parts`` are the arrays of a head in payload order, name and width in elements. ``dtype`` is a
    logical dtype or an alias of one; it is stored under its canonical name. ``num_layers`` leaves
    draft layers out, so that plain and speculative deployments share pages. ``has_rope`` tells
    whether keys are stored after rotary embedding. ``scales`` says where quantised elements get
    theirs: ``"none"``, or ``"weights"`` when they come with the checkpoint.

    Raises :class:`ConfigurationError` for a number below 1 or a part that is named twice, and
    :class:`IdentityError` for a dtype that several formats share and for scales calibrated at run
    time, which differ between processes.
    """

    num_kv_heads: int
    parts: tuple[tuple[str, int], ...]
    dtype: str
    attention: str
    page_size: int
    num_layers: int
    chain: ChainKind = ChainKind.PLAIN
    has_rope: bool = True
    head_order: str = MODEL_HEAD_ORDER
    mla_split: str | None = None
    scales: Literal["none", "weights"] = "none"

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "dtype", DType.of(self.dtype).name)
        if self.chain not in set(ChainKind):
            raise ConfigurationError(
                f"chain kind {self.chain!r} is unknown; give one of {', '.join(ChainKind)}"
            )
        set_field(self, "chain", ChainKind(self.chain))
        set_field(self, "parts", tuple((str(name), width) for name, width in self.parts))
        if self.attention == "mla" and self.mla_split is None:
            set_field(self, "mla_split", LATENT_THEN_ROPE)
        self._check_numbers()
        self._check_words()

    def _check_numbers(self) -> None:
        counts = {
            "num_kv_heads": self.num_kv_heads,
            "page_size": self.page_size,
            "num_layers": self.num_layers,
            **{f"width of part {name!r}": width for name, width in self.parts},
        }
        for what, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{what} is {value!r}; give a whole number of at least 1")
        names = [name for name, _ in self.parts]
        if not names or len(set(names)) != len(names):
            raise ConfigurationError(f"kv parts are {names}; give at least one, each with a name of its own")

    def _check_words(self) -> None:
        words = [self.attention, self.head_order, *(name for name, _ in self.parts)]
        words += [] if self.mla_split is None else [self.mla_split]
        for word in words:
            if not _WORD.fullmatch(word):
                raise ConfigurationError(f"{word!r} is not a lower-case word of letters, digits and _")
        if self.mla_split is not None and self.attention != "mla":
            raise ConfigurationError(f"attention {self.attention!r} has no latent to split; drop mla_split")
        if self.scales not in ("none", "weights"):
            raise IdentityError(
                f"KV scales {self.scales!r} are not part of the checkpoint, so two processes would read one "
                "another's elements at different scales; use scales stored with the weights, or none"
            )

    def record(self) -> dict[str, object]:
        """The form that enters a namespace."""
        return {
            "num_kv_heads": self.num_kv_heads,
            "parts": [list(part) for part in self.parts],
            "dtype": self.dtype,
            "bits": DType.of(self.dtype).bits,
            "attention": self.attention,
            "page_size": self.page_size,
            "num_layers": self.num_layers,
            "chain": self.chain.value,
            "has_rope": self.has_rope,
            "head_order": self.head_order,
            "mla_split": self.mla_split,
            "scales": self.scales,
        }


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace by its canonical encoding; equal encodings are equal namespaces."""

    kv: KVFacts = field(compare=False)
    """The facts it was made of, for checks against a pool."""
    encoded: bytes = field(repr=False)
    digest: str = field(init=False, compare=False)
    """SHA-256 of ``encoded``, 64 lower-case hex digits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.sha256(self.encoded).hexdigest())

    @property
    def record(self) -> dict[str, Any]:
        """The canonical record, a fresh copy."""
        # Integers beyond 2**53 are spelled by their shortest float64 digits, so that is how they read.
        record: dict[str, Any] = json.loads(self.encoded, parse_int=lambda text: int(float(text)))
        return record


def namespace(config: Mapping[str, object], weights: WeightsIdentity, kv: KVFacts, tenant: str) -> Namespace:
    """The namespace of a model's KV.

    ``config`` is the model's configuration after all overrides, in the spelling of ``config.json``
    (of an object, take :func:`~hicache_store.layout.config_fields.config_fields`). ``tenant`` is any
    string, taken as given; tenants share nothing. Raises :class:`IdentityError` when a part cannot
    be told safely or the record exceeds ``NAMESPACE_BYTES_MAX``.
    """
    if not isinstance(weights, WeightsIdentity):
        raise IdentityError(
            f"weights are given as {weights!r}; give a WeightsIdentity: a hub commit, a digest of the local "
            "files, or a string of your own"
        )
    record = {
        "kv": kv.record(),
        "model": model_record(config, DType.of(kv.dtype)),
        "tenant": tenant,
        "weights": weights.record(),
    }
    encoded = canonical_json(record, "namespace")
    if len(encoded) > NAMESPACE_BYTES_MAX:
        raise IdentityError(
            f"the namespace takes {len(encoded)} bytes, more than {NAMESPACE_BYTES_MAX}; "
            "shorten the tenant, the operator's string or the lists of the configuration"
        )
    return Namespace(kv, encoded)
