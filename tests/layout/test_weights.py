from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_store.errors import IdentityError
from hicache_store.layout import weights
from hicache_store.layout.weights import WeightsIdentity, WeightsKind, local_weights

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_commit_in_any_case_is_one_identity() -> None:
    identity = WeightsIdentity.hub_commit("org/model-1.5_B", COMMIT.upper())
    assert identity == WeightsIdentity(WeightsKind.HUB_COMMIT, COMMIT, "org/model-1.5_B")
    assert WeightsIdentity.hub_commit("gpt2", COMMIT).repository == "gpt2"


@pytest.mark.parametrize(
    "revision", ["main", "v1.0", "refs/pr/3", COMMIT[:7], COMMIT[:39], COMMIT + "0", "", COMMIT + "\n"]
)
def test_a12_a_name_that_can_move_is_refused_with_the_way_out(revision: str) -> None:
    """A branch keeps its name while the weights behind it change."""
    with pytest.raises(IdentityError, match="give the 40 hex digits of the commit of org/model"):
        WeightsIdentity.hub_commit("org/model", revision)


@pytest.mark.parametrize(
    "repository", ["", "/models/llama", "../x", "a/b/c", "org/", "org/mo del", "org/model\n", "é/x"]
)
def test_a_path_is_no_repository(repository: str) -> None:
    with pytest.raises(IdentityError, match="not a repository of a hub"):
        WeightsIdentity.hub_commit(repository, COMMIT)


@pytest.mark.parametrize("digest", ["", "ab", "g" * 64, "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_a_digest_is_64_lower_case_hex_digits(digest: str) -> None:
    with pytest.raises(IdentityError, match="64 lower-case hex digits"):
        WeightsIdentity.sampled(digest)
    with pytest.raises(IdentityError, match="64 lower-case hex digits"):
        WeightsIdentity.full(digest)


@pytest.mark.parametrize("text", ["", "\ud800"])
def test_the_operators_string_must_say_something(text: str) -> None:
    with pytest.raises(IdentityError):
        WeightsIdentity.operator(text)


def test_equal_values_of_different_kinds_differ() -> None:
    digest = "a" * 64
    identities = [
        WeightsIdentity.sampled(digest),
        WeightsIdentity.full(digest),
        WeightsIdentity.operator(digest),
    ]
    assert len(set(identities)) == 3
    assert len({str(identity.record()) for identity in identities}) == 3
    assert dataclasses.replace(identities[0]) == identities[0]


# --- local files -------------------------------------------------------------------------------

WIDTH = 96 * 1024
TENSORS = ("embed", "layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v", "norm")


def safetensors(tensors: Mapping[str, bytes], metadata: Mapping[str, str] | None = None) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata or {})}
    start = 0
    for name, data in tensors.items():
        entries[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [start, start + len(data)]}
        start += len(data)
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + b"".join(tensors.values())


def random_tensors(seed: int) -> dict[str, bytes]:
    """Six tensors, the last one small, together well above the size that is read whole."""
    generator = np.random.default_rng(seed)
    return {name: generator.bytes(64 if name == "norm" else 3 * WIDTH) for name in TENSORS}


def write_model(directory: Path, weights: bytes | None = None) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "model.safetensors").write_bytes(
        safetensors(random_tensors(0)) if weights is None else weights
    )
    return directory


def sampled(path: Path) -> str:
    return local_weights(path, uses_cache=False).value


def full(path: Path) -> str:
    return local_weights(path, is_full=True, uses_cache=False).value


def test_copies_are_one_identity_wherever_and_whenever_they_lie(tmp_path: Path) -> None:
    model = write_model(tmp_path / "a")
    copy = Path(shutil.copytree(model, tmp_path / "deep" / "b"))
    os.utime(copy / "config.json", (1, 1))
    assert local_weights(copy, uses_cache=False) == local_weights(str(model), uses_cache=False)
    assert full(copy) == full(model)
    assert local_weights(model, uses_cache=False).kind is WeightsKind.SAMPLED
    assert local_weights(model, is_full=True, uses_cache=False).kind is WeightsKind.FULL
    assert sampled(model) != full(model)


def test_a_fine_tune_of_equal_shape_is_another_identity(tmp_path: Path) -> None:
    """Equal names, sizes and headers: only the content tells."""
    base = write_model(tmp_path / "base")
    tuned = write_model(tmp_path / "tuned", safetensors(random_tensors(1)))
    assert (base / "model.safetensors").stat().st_size == (tuned / "model.safetensors").stat().st_size
    assert sampled(base) != sampled(tuned)


@pytest.mark.parametrize("name", TENSORS)
def test_a_fine_tune_of_one_tensor_is_another_identity(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(0)
    tensors[name] = random_tensors(1)[name]
    tuned = write_model(tmp_path / "tuned", safetensors(tensors))
    assert sampled(write_model(tmp_path / "base")) != sampled(tuned)


def test_a_tensor_between_the_even_samples_is_still_sampled(tmp_path: Path) -> None:
    """A large file with a small tensor far from every even block: the header leads to it."""
    size, small = 80 * 1024 * 1024, 4096
    digests = set()
    for fill in (b"\x01", b"\x02"):
        path = tmp_path / f"{fill.hex()}.safetensors"
        tensors = {"a": size // 128 * 40 + 50_000, "b": small, "c": size // 2}
        entries, start = {}, 0
        for name, length in tensors.items():
            entries[name] = {"data_offsets": [start, start + length]}
            start += length
        header = json.dumps(entries).encode()
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.seek(8 + len(header) + tensors["a"])
            file.write(fill * small)
            file.truncate(8 + len(header) + start)
        digests.add(sampled(path))
    assert len(digests) == 2


def test_only_the_full_digest_promises_to_see_a_single_byte(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    path = model / "model.safetensors"
    before = sampled(model), full(model)
    content = bytearray(path.read_bytes())
    middle = len(content) - 64 - 3 * WIDTH // 2
    # Between the middle of the last large tensor and the even sample before it.
    spot = next(
        at for at in range(middle - 3 * 4096, middle, 4096) if not _is_sampled(at, len(content), middle)
    )
    content[spot] ^= 1
    path.write_bytes(content)
    after = sampled(model), full(model)
    assert after[0] == before[0]
    assert after[1] != before[1]


def _is_sampled(spot: int, size: int, middle: int) -> bool:
    even = [index * (size - 4096) // 63 for index in range(64)]
    return any(start - 4096 <= spot < start + 2 * 4096 for start in [*even, middle - 2048])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "config.json").write_text('{"model_type": "llamb"}'),
        lambda model: (model / "config.json").rename(model / "config2.json"),
        lambda model: (model / "extra.bin").write_bytes(b""),
        lambda model: (model / "sub").mkdir() or (model / "sub" / "adapter.bin").write_bytes(b"x"),
        lambda model: (model / "model.safetensors").open("ab").write(b"x"),
        lambda model: (model / "model.safetensors").write_bytes(safetensors(random_tensors(0), {"a": "b"})),
        lambda model: (model / "modeling_own.py").write_text("# code that comes with the weights"),
    ],
)
@pytest.mark.parametrize("digest", [sampled, full])
def test_a_name_a_size_a_header_or_a_small_file_counts(tmp_path: Path, change: Any, digest: Any) -> None:
    model = write_model(tmp_path / "model")
    before = digest(model)
    change(model)
    assert digest(model) != before


def test_names_and_contents_do_not_run_together(tmp_path: Path) -> None:
    digests = set()
    for index, (name, content) in enumerate([("a", "bc"), ("ab", "c"), ("abc", ""), ("a\nb", "c")]):
        directory = tmp_path / str(index)
        directory.mkdir()
        (directory / name).write_text(content)
        digests |= {sampled(directory), full(directory)}
    assert len(digests) == 8


@pytest.mark.parametrize(
    "name",
    [".cache/huggingface/x.metadata", ".gitattributes", "README.md", "LICENSE", "license.txt",
     "figures/a.PNG", "model.safetensors.lock", "model.safetensors.incomplete",
     "__pycache__/modeling.cpython-311.pyc"],
)  # fmt: skip
def test_what_cannot_change_a_model_is_not_counted(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path / "model")
    before = sampled(model), full(model)
    (model / name).parent.mkdir(parents=True, exist_ok=True)
    (model / name).write_text("anything")
    assert (sampled(model), full(model)) == before


def test_a_snapshot_of_links_is_the_files_they_lead_to(tmp_path: Path) -> None:
    """A hub's cache keeps blobs by hash and lets snapshots link to them."""
    model = write_model(tmp_path / "model")
    snapshot, blobs = tmp_path / ".hub" / "snapshots" / COMMIT, tmp_path / ".hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, path in enumerate(sorted(model.iterdir())):
        (blobs / f"{index:040x}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{index:040x}")
    assert sampled(snapshot) == sampled(model)
    assert full(snapshot) == full(model)
    assert sampled(snapshot / "model.safetensors") == sampled(model / "model.safetensors")
    (tmp_path / "current").symlink_to(snapshot)
    assert sampled(tmp_path / "current") == sampled(model)
    (blobs / f"{0:040x}").write_bytes(b"{}")
    assert sampled(snapshot) != sampled(model)


@pytest.mark.parametrize("size", [100, 5 * 1024 * 1024])
def test_a_single_file_is_its_content_under_any_name(tmp_path: Path, size: int) -> None:
    content = b"GGUF" + np.random.default_rng(7).bytes(size)
    first, second = tmp_path / "model.gguf", tmp_path / "renamed"
    first.write_bytes(content)
    second.write_bytes(content)
    assert sampled(first) == sampled(second)
    assert full(first) == full(second)
    second.write_bytes(content[:4] + np.random.default_rng(8).bytes(size))
    assert sampled(first) != sampled(second)
    assert sampled(first) != sampled(tmp_path)


@pytest.mark.parametrize(
    "start",
    [
        (2**63).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"{}",
        (5).to_bytes(8, "little") + b"{[1]}",
        (12).to_bytes(8, "little") + b'{"a": "text"}'[:12],
        (11).to_bytes(8, "little") + b'{"a":{"b":1}',
        *(
            len(header).to_bytes(8, "little") + header
            for header in (
                b'{"a":{"data_offsets":[0,99999999999999999999999]}}',
                b'{"a":{"data_offsets":[-5,-3]}}',
                b'{"a":{"data_offsets":["x",{}]}}',
                b'{"a":{"data_offsets":[1]}}',
                b'{"a":{"data_offsets":[NaN,1]}}',
                b'{"a":{"data_offsets":[Infinity,1]}}',
                b'{"a":[1],"b":null}',
                b'{"a":' + b"[" * 100_000,
                b'{"\xff":1}',
            )
        ),
    ],
    ids=range(14),
)
def test_a_header_that_lies_is_only_bytes(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(start + bytes(2 * 1024 * 1024))
    before = sampled(path)
    path.write_bytes(start + bytes(2 * 1024 * 1024 - 1) + b"x")
    assert sampled(path) != before


def test_a_header_of_very_many_tensors_is_sampled_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "WEIGHT_SAMPLES_MAX", 128)
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({f"t{index}": b"12345678" * 64 for index in range(5000)}))
    reads: list[int] = []
    pread = os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        reads.append(length)
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    sampled(path)
    assert 64 < reads.count(4096) <= 128


def test_the_rules_are_frozen(tmp_path: Path) -> None:
    """Another rule of sampling would be another namespace for every local model in the field."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    pattern = b"".join(index.to_bytes(4, "little") for index in range(100_000))
    data = safetensors({"a": pattern * 3, "b": b"tiny", "c": pattern * 4})
    (directory / "model.safetensors").write_bytes(data)
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    middles = [600_000, 1_200_002, 1_200_004 + 800_000]
    offsets = {index * (len(data) - 4096) // 63 for index in range(64)}
    offsets |= {8 + len(header) + middle - 2048 for middle in middles}
    blocks = b"".join(struct.pack("<Q", offset) + data[offset : offset + 4096] for offset in sorted(offsets))
    expected = {"full": data, "sampled": data[: 64 * 1024] + header + blocks}
    for kind, content in expected.items():
        rows = [
            ["config.json", "2", hashlib.sha256(b"{}").hexdigest()],
            ["model.safetensors", str(len(data)), hashlib.sha256(content).hexdigest()],
        ]
        text = json.dumps([f"hicache-weights-{kind}-v1", rows], separators=(",", ":"))
        assert {"full": full, "sampled": sampled}[kind](directory) == hashlib.sha256(
            text.encode()
        ).hexdigest()
    assert full(directory) == "4e304db31daf55f8357dfde7f66126fad94c86ac98b600f41dfeeb284192bbe0"
    assert sampled(directory) == "937e7410d8e3333ced2a846d937cb1bbd774cffc3c384076d6784a5d0c5a69bd"


# --- refusals ----------------------------------------------------------------------------------


def test_files_that_cannot_be_told_are_refused_with_the_way_out(tmp_path: Path) -> None:
    way_out = "give a hub commit or a string of your own"
    with pytest.raises(IdentityError, match=f"cannot be read.*{way_out}"):
        sampled(tmp_path / "absent")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "README.md").write_text("")
    with pytest.raises(IdentityError, match=f"no files that could be weights; {way_out}"):
        sampled(empty)
    model = write_model(tmp_path / "model")
    (model / "dangling.bin").symlink_to("nowhere")
    with pytest.raises(IdentityError, match=f"cannot be read.*nowhere.*|cannot be read.*dangling.*{way_out}"):
        sampled(model)
    (model / "dangling.bin").unlink()
    (model / "linked").symlink_to(model)
    with pytest.raises(IdentityError, match="a link to a directory"):
        sampled(model)
    (model / "linked").unlink()
    os.mkfifo(model / "pipe.bin")
    with pytest.raises(IdentityError, match="neither a file nor a directory"):
        sampled(model)
    with pytest.raises(IdentityError, match="neither a file nor a directory"):
        sampled(model / "pipe.bin")


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "WEIGHT_FILES_MAX", 2)
    model = write_model(tmp_path / "model")
    sampled(model)
    (model / "one_more.json").write_text("{}")
    with pytest.raises(IdentityError, match="more than 2 files"):
        sampled(model)


def test_a_name_without_utf8_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with open(os.fsencode(model) + b"/\xff.bin", "wb"):
        pass
    with pytest.raises(IdentityError, match="lone surrogate"):
        sampled(model)


@pytest.mark.parametrize("digest", [sampled, full])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: Any
) -> None:
    """A download still running would give a digest of weights that never existed."""
    path = write_model(tmp_path / "model") / "model.safetensors"
    pread = os.pread

    def racing(fd: int, length: int, offset: int) -> bytes:
        with path.open("ab") as file:
            file.write(b"x")
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", racing)
    with pytest.raises(IdentityError, match="changed while it was read"):
        digest(path.parent)


# --- the cache ---------------------------------------------------------------------------------


@pytest.fixture
def counted_digests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the digests that were really computed."""
    computed: list[str] = []
    digest = weights._digest

    def counted(kind: WeightsKind, files: Any) -> str:
        computed.append(kind.value)
        return digest(kind, files)

    monkeypatch.setattr(weights, "_digest", counted)
    return computed


def test_a_digest_is_computed_once(tmp_path: Path, counted_digests: list[str]) -> None:
    model, cache = write_model(tmp_path / "model"), tmp_path / "cache" / "deep"
    first = local_weights(model, cache_dir=cache)
    assert local_weights(model, cache_dir=cache) == first == local_weights(model, uses_cache=False)
    assert counted_digests == ["sampled", "sampled"]
    whole = local_weights(model, is_full=True, cache_dir=cache)
    assert local_weights(model, is_full=True, cache_dir=cache) == whole != first
    assert counted_digests == ["sampled", "sampled", "full"]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in cache.iterdir()} == {0o600}
    assert len(list(cache.iterdir())) == 2


def test_the_users_cache_directory_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted_digests: list[str]
) -> None:
    model = write_model(tmp_path / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    local_weights(model)
    assert len(list((tmp_path / "xdg" / "hicache_store" / "weights").iterdir())) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    local_weights(model)
    local_weights(model)
    assert len(list((tmp_path / "home" / ".cache" / "hicache_store" / "weights").iterdir())) == 1
    assert counted_digests == ["sampled", "sampled"]


def test_changed_content_is_seen_even_if_size_and_mtime_are_put_back(tmp_path: Path) -> None:
    """Images with normalised times hold different weights under equal sizes and mtimes."""
    model, cache = write_model(tmp_path / "model"), tmp_path / "cache"
    path = model / "model.safetensors"
    os.utime(path, ns=(0, 0))
    before = local_weights(model, cache_dir=cache)
    path.write_bytes(safetensors(random_tensors(1)))
    os.utime(path, ns=(0, 0))
    assert local_weights(model, cache_dir=cache) != before


@pytest.mark.parametrize("content", [b"", b"g" * 64, b"a" * 63, b"a" * 65, b"\xff" * 64, b"a" * 10_000])
def test_a_damaged_entry_is_computed_again_and_replaced(
    tmp_path: Path, counted_digests: list[str], content: bytes
) -> None:
    model, cache = write_model(tmp_path / "model"), tmp_path / "cache"
    first = local_weights(model, cache_dir=cache)
    (entry,) = cache.iterdir()
    entry.write_bytes(content)
    assert local_weights(model, cache_dir=cache) == first
    assert entry.read_text() == first.value
    assert len(counted_digests) == 2


def test_an_entry_that_is_a_link_or_a_pipe_is_not_followed(
    tmp_path: Path, counted_digests: list[str]
) -> None:
    model, cache = write_model(tmp_path / "model"), tmp_path / "cache"
    first = local_weights(model, cache_dir=cache)
    (entry,) = cache.iterdir()
    (tmp_path / "elsewhere").write_text("b" * 64)
    entry.unlink()
    entry.symlink_to(tmp_path / "elsewhere")
    assert local_weights(model, cache_dir=cache) == first
    assert (tmp_path / "elsewhere").read_text() == "b" * 64
    entry.unlink()
    os.mkfifo(entry)
    assert local_weights(model, cache_dir=cache) == first
    assert len(counted_digests) == 3


@pytest.mark.parametrize("place", ["a file", "below a file", "writable by others", "a link"])
def test_a_place_that_cannot_be_used_or_trusted_is_not(
    tmp_path: Path, counted_digests: list[str], place: str
) -> None:
    model, cache = write_model(tmp_path / "model"), tmp_path / "cache"
    if place == "a file":
        cache.write_text("")
    elif place == "below a file":
        (tmp_path / "file").write_text("")
        cache = tmp_path / "file" / "cache"
    elif place == "writable by others":
        cache.mkdir()
        cache.chmod(0o777)
    else:
        (tmp_path / "target").mkdir()
        cache.symlink_to(tmp_path / "target")
    assert local_weights(model, cache_dir=cache) == local_weights(model, cache_dir=cache)
    assert len(counted_digests) == 2
    assert not cache.is_dir() or not list(cache.iterdir())


def test_a_cache_on_a_full_disk_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted_digests: list[str]
) -> None:
    model, cache = write_model(tmp_path / "model"), tmp_path / "cache"

    def full_disk(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "write", full_disk)
    assert local_weights(model, cache_dir=cache).kind is WeightsKind.SAMPLED
    assert counted_digests == ["sampled"]
    assert list(cache.iterdir()) == []


def test_the_cache_forgets_its_oldest_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "WEIGHT_CACHE_ENTRIES_MAX", 3)
    cache = tmp_path / "cache"
    kept: list[set[str]] = []
    for index in range(6):
        path = tmp_path / f"{index}.gguf"
        path.write_bytes(bytes([index]))
        local_weights(path, cache_dir=cache)
        for entry in cache.iterdir():
            age = entry.stat().st_mtime_ns - 10**9
            os.utime(entry, ns=(age, age))
        kept.append({entry.name for entry in cache.iterdir()})
    assert [len(names) for names in kept] == [1, 2, 3, 3, 3, 3]
    assert len(kept[2] & kept[5]) == 0
