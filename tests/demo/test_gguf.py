from __future__ import annotations

import struct
from pathlib import Path

import gguf_files as files
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_store.demo.gguf import GgufError, GgufFile

NIBBLES = [(7 * i + 3) % 16 for i in range(32)]
SIGNED = [(37 * i) % 256 - 128 for i in range(32)]

SMALL = files.build(
    {
        "general.name": (files.STRING, files.text("naïve")),
        "size": (files.U32, struct.pack("<I", 7)),
        "theta": (files.F32, struct.pack("<f", 0.5)),
        "flag": (files.BOOL, b"\1"),
        "big": (files.I64, struct.pack("<q", -(2**40))),
        "words": files.strings("a", "", "Ġb"),
        "types": files.integers(1, 2, 3),
    },
    {
        "vector": (0, (3,), np.array([1, -2, 0.5], "<f4").tobytes()),
        "half": (1, (2, 3), np.array([[1, 2], [3, 4], [5, 6]], "<f2").tobytes()),
        "q4": (3, (32, 2), files.q4_1(0.5, -2, NIBBLES) + files.q4_1(2, 1, NIBBLES[::-1])),
        "q8": (8, (64, 1), files.q8_0(0.25, SIGNED) + files.q8_0(-1, SIGNED[::-1])),
    },
)


def opened(folder: Path, raw: bytes) -> GgufFile:
    path = folder / "model.gguf"
    path.write_bytes(raw)
    return GgufFile.open(path)


def test_metadata_of_every_kind_comes_back(tmp_path: Path) -> None:
    assert opened(tmp_path, SMALL).metadata == {
        "general.name": "naïve",
        "size": 7,
        "theta": 0.5,
        "flag": True,
        "big": -(2**40),
        "words": ("a", "", "Ġb"),
        "types": (1, 2, 3),
    }


def test_tensors_of_every_encoding_decode(tmp_path: Path) -> None:
    file = opened(tmp_path, SMALL)
    assert file.tensor("vector").rows(0, 1).tolist() == [[1, -2, 0.5]]
    assert file.tensor("half").shape == (3, 2)
    assert file.tensor("half").rows(1, 3).tolist() == [[3, 4], [5, 6]]
    expected = [[0.5 * n - 2 for n in NIBBLES], [2.0 * n + 1 for n in NIBBLES[::-1]]]
    assert file.tensor("q4").rows(0, 2).tolist() == expected
    assert file.tensor("q4").take(np.array([1, 0, 1])).tolist() == [expected[1], expected[0], expected[1]]
    assert file.tensor("q8").rows(0, 1).tolist() == [[0.25 * v for v in SIGNED] + [-v for v in SIGNED[::-1]]]


def test_every_truncation_is_refused_in_words(tmp_path: Path) -> None:
    for length in range(len(SMALL)):
        with pytest.raises(GgufError, match=r"model\.gguf"):
            opened(tmp_path, SMALL[:length])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_altered_bytes_give_a_file_or_a_refusal(changes: list[tuple[int, int]]) -> None:
    """Whatever the header claims, nothing but the reader's own error comes out, and no memory is asked for
    that the file does not back."""
    raw = bytearray(SMALL)
    for position, value in changes:
        raw[position] = value
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    path = folder / f"hicache-gguf-{hash(bytes(raw)) & 0xFFFFFFFF:x}.gguf"
    path.write_bytes(raw)
    try:
        file = GgufFile.open(path)
    except GgufError:
        return
    finally:
        path.unlink()
    for tensor in file.tensors.values():
        assert tensor.rows(0, len(tensor.raw)).size == np.prod(tensor.shape)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (files.build({}, {}, magic=b"GGML"), "not a GGUF file"),
        (files.build({}, {}, version=9), "version 9"),
        (files.build({"x": (99, b"")}, {}), "value type 99"),
        (files.build({"x": (9, struct.pack("<IQ", 9, 1))}, {}), "value type 9"),
        (files.build({"x": (9, struct.pack("<IQ", 4, 2**40))}, {}), "1099511627776 elements announced"),
        (files.build({"x": (9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 2**63))}, {}), "x is cut short"),
        (files.build({"x": (8, struct.pack("<Q", 2) + b"\xff\xfe")}, {}), "not UTF-8"),
        (files.build({}, {"t": (2, (32,), bytes(18))}), "tensor t has type 2; F32, F16, Q4_1, Q8_0"),
        (files.build({}, {"t": (0, (0,), b"")}), "t is empty"),
        (files.build({}, {"t": (0, (1,) * 5, bytes(4))}), "5 dimensions"),
        (files.build({}, {"t": (3, (33,), bytes(40))}), "33 columns, no multiple of 32"),
        (files.build({}, {"t": (0, (2**40, 2**40), bytes(4))}), "the file ends inside tensor t"),
        (files.build({"general.alignment": (4, struct.pack("<I", 3))}, {}), "alignment 3"),
        (
            files.build({}, {"a": (0, (1,), bytes(4)), "b": (0, (1,), bytes(4))}, alignment=4),
            "tensor b is at 4, no multiple of 32",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_and_how(tmp_path: Path, raw: bytes, words: str) -> None:
    with pytest.raises(GgufError, match=words):
        opened(tmp_path, raw)


def test_one_name_for_two_tensors_is_refused(tmp_path: Path) -> None:
    raw = files.build({}, {"aa": (0, (1,), bytes(4)), "ab": (0, (1,), bytes(4))})
    with pytest.raises(GgufError, match="one name"):
        opened(tmp_path, raw.replace(b"ab", b"aa"))


def test_absent_files_values_and_tensors_are_named(tmp_path: Path) -> None:
    file = opened(tmp_path, SMALL)
    with pytest.raises(GgufError, match="metadata size is int, not str"):
        file.get("size", str)
    with pytest.raises(GgufError, match="metadata nothing is NoneType"):
        file.get("nothing", str)
    with pytest.raises(GgufError, match="no tensor q5"):
        file.tensor("q5")
    with pytest.raises(GgufError, match="cannot be mapped"):
        GgufFile.open(tmp_path / "absent")
