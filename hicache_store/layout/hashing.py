"""The page-hash chain: a page's name from its tokens, and the request's identity that seeds it.

The chain is SGLang's, bit for bit, so that pages written by either engine can have one name::

    digest[i] = SHA256(digest[i - 1] || body[i])        digest[-1] = the seed, or nothing
    body      = each token id as little-endian u32      (bigram: t[j], t[j + 1] for each position j)
    wide body = 0xFF, then the same words as u64        (when one word of the page exceeds 32 bits)

Everything is a pure function of its arguments: no process, Python version or hash seed enters.
"""

from __future__ import annotations

import enum
import hashlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache_store.errors import ConfigurationError, IdentityError
from hicache_store.layout.canonical import canonical_json, require_text

DIGEST_BYTES: Final = 32

_SEED_TAG: Final = b"sglang-cache-namespace-v1"
_REQUEST_TAG: Final = "hicache-request-v1:"
_NARROW_MAX: Final = 2**32 - 1
_WIDE_MAX: Final = 2**64 - 1
_WIDE_TAG: Final = b"\xff"

Tokens = Sequence[int] | npt.NDArray[Any]


class ChainKind(enum.StrEnum):
    """What one position of a page hashes: its token, or its token and the next one (EAGLE)."""

    PLAIN = "plain"
    BIGRAM = "bigram"


def chain_seed(extra_key: str | None, cache_salt: str | None) -> bytes | None:
    """The 32 bytes that stand before the first page, ``None`` when neither part is given.

    An empty string is a part of its own, different from ``None``; lengths keep ("ab", "c") and
    ("a", "bc") apart; strings are taken as given, without Unicode normalisation. Raises
    :class:`IdentityError` for a string that has no UTF-8 form.
    """
    if extra_key is None and cache_salt is None:
        return None
    hasher = hashlib.sha256(_SEED_TAG)
    for what, part in (("extra_key", extra_key), ("cache_salt", cache_salt)):
        if part is None:
            hasher.update(b"\x00")
        else:
            text = require_text(part, what)
            hasher.update(b"\x01" + len(text).to_bytes(8, "little") + text)
    return hasher.digest()


def page_hashes(
    tokens: Tokens,
    page_size: int,
    *,
    seed: bytes | None = None,
    prior: bytes | None = None,
    kind: ChainKind = ChainKind.PLAIN,
    includes_short_tail: bool = False,
) -> list[str]:
    """The hashes of all pages of ``tokens``, 64 lower-case hex digits each.

    ``page_size`` counts positions; N tokens are N positions, or N - 1 in a bigram chain. Only full
    pages are hashed unless ``includes_short_tail``. ``seed`` comes from :func:`chain_seed`.
    ``prior`` is the digest of the page before ``tokens[0]`` when a chain is continued; it carries
    its seed already, so ``seed`` is not used beside it.

    Raises :class:`ConfigurationError` for a ``page_size`` below 1 or a seed or prior that is not
    32 bytes, :class:`IdentityError` for token ids that are not integers from 0 to 2**64 - 1.
    """
    if page_size < 1:
        raise ConfigurationError(f"a page of {page_size} tokens cannot be hashed; give at least 1")
    link = _link(seed, prior)
    words = _words(_token_ids(tokens), kind)
    if not includes_short_tail:
        words = words[: len(words) // page_size * page_size]
    hashes: list[str] = []
    for body in _bodies(words, page_size):
        link = hashlib.sha256(link + body).digest()
        hashes.append(link.hex())
    return hashes


def _link(seed: bytes | None, prior: bytes | None) -> bytes:
    for what, value in (("seed", seed), ("prior", prior)):
        if value is not None and len(value) != DIGEST_BYTES:
            raise ConfigurationError(
                f"the {what} of a page chain has {len(value)} bytes; "
                f"give the {DIGEST_BYTES} raw bytes of a digest"
            )
    if prior is not None:
        return bytes(prior)
    return b"" if seed is None else bytes(seed)


def _token_ids(tokens: Tokens) -> npt.NDArray[Any]:
    """``tokens`` as a one-dimensional integer array of values from 0 to 2**64 - 1."""
    try:
        ids = np.asarray(tokens)
    except (ValueError, OverflowError):
        ids = np.asarray(tokens, dtype=object)
    if ids.ndim != 1:
        raise IdentityError(f"token ids have {ids.ndim} axes; give one sequence of integers")
    if ids.size == 0:
        return np.empty(0, np.uint64)
    if ids.dtype.kind not in "iu":
        ids = _exact_ids(tokens, ids.dtype)
    if ids.dtype.kind == "i" and (lowest := int(ids.min())) < 0:
        raise IdentityError(f"token id {lowest} is negative: a placeholder does not say what it stands for")
    return ids


def _exact_ids(tokens: Tokens, found: np.dtype[Any]) -> npt.NDArray[np.uint64]:
    """The ids of a sequence that numpy read as something else: beyond 63 bits, or no integers."""
    if isinstance(tokens, np.ndarray) or found.kind == "b":
        raise IdentityError(f"token ids of type {found} are not integers; convert them first")
    ids: list[int] = []
    for token in tokens:
        try:
            value = operator.index(token)
        except TypeError:
            raise IdentityError(f"token id {token!r} is not an integer") from None
        if not 0 <= value <= _WIDE_MAX:
            raise IdentityError(f"token id {value} is outside 0 to {_WIDE_MAX}")
        ids.append(value)
    return np.array(ids, np.uint64)


def _words(ids: npt.NDArray[Any], kind: ChainKind) -> npt.NDArray[Any]:
    """The words that are hashed, shaped (position, 1) or, of a bigram chain, (position, 2)."""
    if kind is ChainKind.PLAIN:
        return ids[:, None]
    return np.stack((ids[:-1], ids[1:]), axis=1)


def _bodies(words: npt.NDArray[Any], page_size: int) -> Iterator[bytes]:
    """The body of each page in turn; the last may be short."""
    if words.size == 0:
        return
    narrow = np.ascontiguousarray(words, "<u4").tobytes()
    step = page_size * words.shape[1] * 4
    if int(words.max()) <= _NARROW_MAX:
        for start in range(0, len(narrow), step):
            yield narrow[start : start + step]
        return
    page_starts = np.arange(0, len(words), page_size)
    highest = np.maximum.reduceat(words.max(axis=1), page_starts)
    wide = np.ascontiguousarray(words, "<u8").tobytes()
    for index, top in enumerate(highest.tolist()):
        if top > _NARROW_MAX:
            yield _WIDE_TAG + wide[2 * step * index : 2 * step * (index + 1)]
        else:
            yield narrow[step * index : step * (index + 1)]


@dataclass(frozen=True, slots=True)
class LoraIdentity:
    """An adapter: the name it is served under and a digest of its weights.

    The digest is what keeps an adapter reloaded under its old name from hitting old pages.
    """

    name: str
    weights_digest: str

    def __post_init__(self) -> None:
        if not self.weights_digest:
            raise IdentityError(
                f"LoRA {self.name!r} has no weights digest, and a name alone can be reloaded with other "
                "weights; give a digest of its files"
            )


@dataclass(frozen=True, slots=True)
class MultimodalInput:
    """An image, sound or video: the index of its first token and a digest of its content."""

    position: int
    content_digest: str

    def __post_init__(self) -> None:
        if self.position < 0:
            raise IdentityError(f"a multimodal input cannot start at token {self.position}")
        if not self.content_digest:
            raise IdentityError(f"the multimodal input at token {self.position} has no content digest")


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What, beside its tokens, makes a request's KV its own.

    The salt keeps a slot of its own in the seed, so that one salt gives the same page hashes
    whichever engine the request came through; the rest is folded into the extra key. The order of
    ``multimodal`` does not matter.
    """

    lora: LoraIdentity | None = None
    cache_salt: str | None = None
    multimodal: tuple[MultimodalInput, ...] = ()

    @property
    def extra_key(self) -> str | None:
        """Adapter and multimodal inputs as one string, ``None`` when there are none.

        Canonical JSON behind a tag: every string is quoted and escaped, so no value can imitate a
        separator, and different identities never give the same key.
        """
        if self.lora is None and not self.multimodal:
            return None
        lora = None if self.lora is None else [self.lora.name, self.lora.weights_digest]
        inputs = sorted((item.position, item.content_digest) for item in self.multimodal)
        return _REQUEST_TAG + canonical_json({"lora": lora, "multimodal": inputs}).decode()

    def seed(self) -> bytes | None:
        """The seed of the page chain, ``None`` for a plain request."""
        return chain_seed(self.extra_key, self.cache_salt)
