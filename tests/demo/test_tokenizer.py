from __future__ import annotations

from pathlib import Path

import gguf_files as files
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hicache_store.demo.gguf import GgufError, GgufFile
from hicache_store.demo.tokenizer import BpeTokenizer, ByteTokenizer, TokenizerError

ANY_TEXT = st.text(max_size=200)
NASTY = "a\u0301 e\u0301\u00a0\u200d👩‍👩‍👧 \r\n\t  ١٢٣ ½²  don't 'll日本語\ufeff\U000e0001 ﬁ\u2028end  "


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=ANY_TEXT)
@example(text=NASTY)
@example(text="<|im_end|>DON'T")
@example(text="")
@example(text="x" * 400)
def test_decode_inverts_encode(smollm2_tokenizer: BpeTokenizer, text: str) -> None:
    """Exactly, or the text is refused, and only for a byte that no token holds."""
    pieces = set(smollm2_tokenizer.pieces)
    try:
        tokens = smollm2_tokenizer.encode(text)
    except TokenizerError as error:
        lacking = [int(word.strip(","), 16) for word in str(error).split("byte ")[1].split()]
        # Control bytes have the characters from U+0100 on in the vocabulary, others their own.
        assert lacking
        assert all(byte in text.encode() for byte in lacking)
        assert all(chr(0x100 + b) not in pieces if b < 0x21 else chr(b) not in pieces for b in lacking)
        return
    assert smollm2_tokenizer.decode(tokens) == text
    assert not set(tokens) & smollm2_tokenizer.markers


def test_ids_of_known_texts(smollm2_tokenizer: BpeTokenizer) -> None:
    def pieces(text: str) -> list[str]:
        return [smollm2_tokenizer.pieces[t] for t in smollm2_tokenizer.encode(text)]

    assert smollm2_tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert pieces("Hello  world") == ["Hello", "Ġ", "Ġworld"]
    assert pieces("in 1989, don't") == ["in", "Ġ", "1", "9", "8", "9", ",", "Ġdon", "'t"]


def test_a_turn_is_wrapped_in_the_models_template(smollm2_tokenizer: BpeTokenizer) -> None:
    tokens = smollm2_tokenizer.turn(smollm2_tokenizer.encode("Hi <|im_end|>"))
    assert smollm2_tokenizer.decode(tokens) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    # The user's own "<|im_end|>" is text, not the marker.
    assert tokens.count(smollm2_tokenizer.ids["<|im_end|>"]) == 2
    assert tokens.count(smollm2_tokenizer.ids["<|im_start|>"]) == 3


def test_unknown_bytes_and_lone_surrogates_are_refused(smollm2_tokenizer: BpeTokenizer) -> None:
    with pytest.raises(TokenizerError, match="no token for byte 0x4, 0x6"):
        smollm2_tokenizer.encode("a\x04\x06")
    with pytest.raises(TokenizerError, match="lone surrogate at 1"):
        smollm2_tokenizer.encode("a\ud800")


def slow_merges(word: str, merges: list[str]) -> list[str]:
    """The definition: apply merges in their order, each wherever it fits, from the left."""
    parts = list(word)
    for merge in merges:
        left, right = merge.split()
        i = 0
        while i + 1 < len(parts):
            if (parts[i], parts[i + 1]) == (left, right):
                parts[i : i + 2] = [left + right]
            i += 1
    return parts


MERGES = ["a b", "ab a", "b b", "ab ab", "a a", "aba b", "aa aa", "c ab", "bb a"]
VOCABULARY = [*"abc", *(merge.replace(" ", "") for merge in MERGES)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> BpeTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "small.gguf"
    path.write_bytes(
        files.build(
            {
                "tokenizer.ggml.model": (files.STRING, files.text("gpt2")),
                "tokenizer.ggml.pre": (files.STRING, files.text("smollm")),
                "tokenizer.ggml.tokens": files.strings(*VOCABULARY),
                "tokenizer.ggml.token_type": files.integers(*[1] * len(VOCABULARY)),
                "tokenizer.ggml.merges": files.strings(*MERGES),
            },
            {},
        )
    )
    return BpeTokenizer.of(GgufFile.open(path))


@settings(max_examples=300, deadline=None)
@given(word=st.text("abc", min_size=1, max_size=30))
def test_merging_agrees_with_its_definition(small: BpeTokenizer, word: str) -> None:
    assert [small.pieces[t] for t in small.encode(word)] == slow_merges(word, MERGES)


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    kind = {"tokenizer.ggml.model": (files.STRING, files.text("llama"))}
    path.write_bytes(files.build({**kind, "tokenizer.ggml.pre": (files.STRING, files.text("x"))}, {}))
    with pytest.raises(GgufError, match="llama/x is not known"):
        BpeTokenizer.of(GgufFile.open(path))


@given(text=ANY_TEXT)
def test_bytes_are_tokens_of_random_models(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.turn(tokenizer.encode(text)) == list(text.encode())
    assert tokenizer.decode([104, 300, 105]) == "h\ufffdi"
