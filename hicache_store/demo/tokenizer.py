"""Text to token ids and back: byte-level BPE from a GGUF's metadata, and plain bytes.

Byte-level BPE works on bytes, each written as one printable character (the printable Latin-1 bytes
stand for themselves, the others follow from U+0100 up). Text is cut into digits and words first;
inside a word the adjacent pair with the lowest merge rank is joined until none is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Final, Protocol, cast

import regex

from hicache_store.demo.gguf import GgufError, GgufFile
from hicache_store.demo.weights import ModelSource
from hicache_store.errors import ConfigurationError

_WORDS: Final = regex.compile(
    r"""'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
)
_DIGITS: Final = regex.compile(r"\p{N}|\P{N}+")
_CONTROL: Final = 3
"""The token type of tokens that are markers and never come out of text."""
_WORD_CACHE_MAX: Final = 65_536
"""Words whose ids are remembered; a prompt of 8,192 tokens has fewer."""
_SYSTEM: Final = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system turn that the model's own chat template adds when there is none."""


class TokenizerError(ConfigurationError):
    """A text that the vocabulary cannot express."""


class Tokenizer(Protocol):
    """What the demo needs of a tokenizer. ``decode(encode(text)) == text`` for every text."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; markers in it are text. :class:`TokenizerError` if impossible."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens``; bytes that are no UTF-8 become U+FFFD."""
        ...

    def turn(self, user: Sequence[int]) -> list[int]:
        """A prompt that asks for the answer to one user message, given as tokens."""
        ...


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"the text holds a lone surrogate at {error.start}") from error


@cache
def _byte_characters() -> tuple[str, ...]:
    """The character that stands for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


@dataclass(frozen=True, slots=True)
class BpeTokenizer:
    """Byte-level BPE with the word split of SmolLM (every digit is a word of its own)."""

    ids: Mapping[str, int]
    ranks: Mapping[tuple[str, str], int]
    pieces: Sequence[str]
    """The vocabulary by id."""
    markers: frozenset[int]
    _words: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, file: GgufFile) -> BpeTokenizer:
        """The tokenizer a GGUF file carries; :class:`GgufError` when it is of another kind."""
        kind, split = file.get("tokenizer.ggml.model", str), file.get("tokenizer.ggml.pre", str)
        if (kind, split) != ("gpt2", "smollm"):
            raise GgufError(f"{file.path}: tokenizer {kind}/{split} is not known, gpt2/smollm is")
        pieces = cast("tuple[str, ...]", file.get("tokenizer.ggml.tokens", tuple))
        types = file.get("tokenizer.ggml.token_type", tuple)
        merges = (str(merge).split(" ", 1) for merge in file.get("tokenizer.ggml.merges", tuple))
        ranks = {(left, right): rank for rank, (left, right) in enumerate(merges)}
        markers = frozenset(index for index, kind in enumerate(types) if kind == _CONTROL)
        return cls({piece: index for index, piece in enumerate(pieces)}, ranks, pieces, markers)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; a byte that the vocabulary lacks raises :class:`TokenizerError`."""
        raw = _utf8(text)
        table = _byte_characters()
        lacking = sorted({byte for byte in raw if table[byte] not in self.ids})
        if lacking:
            raise TokenizerError("the vocabulary has no token for byte " + ", ".join(map(hex, lacking)))
        words = (word for part in _DIGITS.findall(text) for word in _WORDS.findall(part))
        return [token for word in words for token in self._word(word)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens``, markers by their names."""
        table = {character: byte for byte, character in enumerate(_byte_characters())}
        out = bytearray()
        for token in tokens:
            piece = self.pieces[token]
            out += piece.encode() if token in self.markers else bytes(table[c] for c in piece)
        return out.decode(errors="replace")

    def turn(self, user: Sequence[int]) -> list[int]:
        """The model's chat template with its default system turn around one user message."""
        start, end = self.ids["<|im_start|>"], self.ids["<|im_end|>"]
        newline = self.encode("\n")
        system = [start, *self.encode(f"system\n{_SYSTEM}"), end, *newline]
        return [
            *system,
            start,
            *self.encode("user\n"),
            *user,
            end,
            *newline,
            start,
            *self.encode("assistant\n"),
        ]

    def _word(self, word: str) -> tuple[int, ...]:
        found = self._words.get(word)
        if found is None:
            parts = self._merge([_byte_characters()[byte] for byte in word.encode()])
            found = tuple(self.ids[part] for part in parts)
            if len(self._words) < _WORD_CACHE_MAX:
                self._words[word] = found
        return found

    def _merge(self, parts: list[str]) -> list[str]:
        never = len(self.ranks)
        while len(parts) > 1:
            best = min(self.ranks.get(pair, never) for pair in pairwise(parts))
            if best == never:
                break
            merged: list[str] = []
            for part in parts:
                if merged and self.ranks.get((merged[-1], part)) == best:
                    merged[-1] += part
                else:
                    merged.append(part)
            parts = merged
        return parts


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """One token a byte, for models with random weights."""

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of ``text``."""
        return list(_utf8(text))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens``; ids past 255 have none and become U+FFFD."""
        return b"".join(bytes([t]) if t < 256 else b"\xff" for t in tokens).decode(errors="replace")

    def turn(self, user: Sequence[int]) -> list[int]:
        """The message itself: there is no template."""
        return list(user)


def tokenizer_of(source: ModelSource) -> Tokenizer:
    """The tokenizer of a model: its file's own, or bytes for a random one."""
    return ByteTokenizer() if source.path is None else BpeTokenizer.of(GgufFile.open(source.path))
