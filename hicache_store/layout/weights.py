"""Which weights a model runs: a commit, a digest of local files, or the operator's word.

A name that can move, a branch or a served name, is no identity: pages of the old weights would be
served to the new ones.

:func:`local_weights` reads a directory or a single file. Of a directory it counts every file at any
depth except what cannot change a model's values: names that start with a dot (``.cache``, ``.git``),
``__pycache__``, unfinished downloads and locks, documents and pictures. A link to a file is the file
it leads to, as in a hub's cache, where a snapshot is links into a store of blobs; a link to a
directory, a dangling link and anything that is no file is refused, because leaving it out could
leave weights out. File names are part of the identity, the directory's own path is not.

A sampled digest covers names, sizes, files up to 1 MiB as a whole, and of larger ones the first
64 KiB, the whole safetensors header, 4 KiB in the middle of every tensor that it lists, and 64 to
4096 evenly spaced blocks of 4 KiB. So weights trained further differ, tensor by tensor where the
format is safetensors; a change of a few bytes between the samples is seen by a full digest only.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache_store.errors import IdentityError
from hicache_store.layout.canonical import canonical_json, require_text
from hicache_store.limits import (
    KIB,
    MIB,
    WEIGHT_CACHE_ENTRIES_MAX,
    WEIGHT_FILES_MAX,
    WEIGHT_HEADER_BYTES_MAX,
    WEIGHT_SAMPLES_MAX,
)

_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

_WHOLE_BYTES: Final = MIB
_HEAD_BYTES: Final = 64 * KIB
_SAMPLE_BYTES: Final = 4 * KIB
_SAMPLE_EVERY_BYTES: Final = 16 * MIB
_SAMPLES_MIN: Final = 64
_SAMPLES_EVEN_MAX: Final = 4096
_PIECE_BYTES: Final = MIB

_UNCOUNTED_SUFFIXES: Final = (
    ".lock", ".incomplete", ".part", ".tmp", ".pyc",
    ".md", ".rst", ".pdf", ".html", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp",
)  # fmt: skip
_UNCOUNTED_NAMES: Final = (
    "__pycache__", "readme", "readme.txt", "license", "license.txt", "notice", "notice.txt"
)  # fmt: skip

_WAY_OUT: Final = "give a hub commit or a string of your own as the weights' identity instead"


class WeightsKind(enum.StrEnum):
    """How the weights were told apart. Identities of different kinds are never equal."""

    HUB_COMMIT = "hub_commit"
    SAMPLED = "sampled"
    FULL = "full"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class WeightsIdentity:
    """One identity of one kind; use the constructors, which check the value."""

    kind: WeightsKind
    value: str
    repository: str | None = None

    @classmethod
    def hub_commit(cls, repository: str, commit: str) -> WeightsIdentity:
        """A commit of a model repository. Raises :class:`IdentityError` for a branch or a short hash."""
        if not _REPOSITORY.fullmatch(repository):
            raise IdentityError(f"{repository!r} is not a repository of a hub; give one such as org/model")
        if not _COMMIT.fullmatch(commit.lower()):
            raise IdentityError(
                f"{commit!r} can move to other weights, or is cut short; give the 40 hex digits of the "
                f"commit of {repository} (the name of its snapshot folder), a digest of the local files, "
                "or a string of your own"
            )
        return cls(WeightsKind.HUB_COMMIT, commit.lower(), repository)

    @classmethod
    def sampled(cls, digest: str) -> WeightsIdentity:
        """A digest made by :func:`local_weights`."""
        return cls(WeightsKind.SAMPLED, _checked(digest))

    @classmethod
    def full(cls, digest: str) -> WeightsIdentity:
        """A digest over every byte of the files."""
        return cls(WeightsKind.FULL, _checked(digest))

    @classmethod
    def operator(cls, text: str) -> WeightsIdentity:
        """The operator's own string: they change it whenever the weights change."""
        if not text:
            raise IdentityError("an empty string tells no weights apart; give one that changes with them")
        require_text(text, "the operator's string")
        return cls(WeightsKind.OPERATOR, text)

    def record(self) -> dict[str, object]:
        """The tagged form that enters a namespace."""
        return {"kind": self.kind.value, "repository": self.repository, "value": self.value}


def _checked(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise IdentityError(f"{digest!r} is not a digest; give 64 lower-case hex digits")
    return digest


@dataclass(frozen=True, slots=True)
class _File:
    """A counted file: its name inside the directory (empty for a single file), path and stat."""

    name: str
    path: Path
    size: int
    stamp: tuple[int, ...]
    """What changes whenever the content may have: device, inode, size, mtime and ctime. The ctime
    matters: images with normalised times hold different weights under equal names, sizes and mtimes."""


def local_weights(
    path: str | os.PathLike[str],
    *,
    is_full: bool = False,
    cache_dir: Path | None = None,
    uses_cache: bool = True,
) -> WeightsIdentity:
    """The sampled (or full) identity of a model directory or of a single weight file.

    The result is remembered in ``cache_dir`` (by default ``hicache_store/weights`` in the user's
    cache directory) for as long as no file's stamp changes; a cache that cannot be written, or that
    others could write, is not used. A full digest reads every byte, so expect a second per
    gigabyte. Raises :class:`IdentityError` when the files cannot be read, change meanwhile, or are
    none or more than ``WEIGHT_FILES_MAX``.
    """
    kind = WeightsKind.FULL if is_full else WeightsKind.SAMPLED
    try:
        root = Path(path).resolve(strict=True)
        files = sorted(_files(root), key=lambda file: file.name)
        if not files:
            raise IdentityError(f"{root} holds no files that could be weights; {_WAY_OUT}")
        stamps = [[file.name, *map(str, file.stamp)] for file in files]
        key = canonical_json([kind, os.fsencode(root).hex(), stamps], "the weights' files")
        cache = _DigestCache.open(cache_dir) if uses_cache else None
        digest = cache.recall(key) if cache else None
        if digest is None:
            digest = _digest(kind, files)
            if cache:
                cache.remember(key, digest)
    except OSError as error:
        raise IdentityError(f"the weights at {path} cannot be read ({error}); {_WAY_OUT}") from error
    return WeightsIdentity(kind, digest)


def _files(root: Path) -> Iterator[_File]:
    if not root.is_dir():
        yield _file("", root)
        return
    count = 0
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = sorted(name for name in folders if _is_counted(name))
        for name in folders:
            if os.path.islink(os.path.join(folder, name)):
                raise IdentityError(
                    f"{folder}/{name} is a link to a directory, which could hold weights or lead in a "
                    f"circle; name the directory it leads to, or {_WAY_OUT}"
                )
        for name in filter(_is_counted, names):
            count += 1
            if count > WEIGHT_FILES_MAX:
                raise IdentityError(
                    f"{root} holds more than {WEIGHT_FILES_MAX} files; name the model's directory"
                )
            path = Path(folder, name)
            yield _file(path.relative_to(root).as_posix(), path)


def _raise(error: OSError) -> None:
    raise error


def _is_counted(name: str) -> bool:
    lowered = name.lower()
    return (
        not lowered.startswith(".")
        and lowered not in _UNCOUNTED_NAMES
        and not lowered.endswith(_UNCOUNTED_SUFFIXES)
    )


def _file(name: str, path: Path) -> _File:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise IdentityError(f"{path} is neither a file nor a directory; remove it or {_WAY_OUT}")
    stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return _File(name, path, found.st_size, stamp)


def _digest(kind: WeightsKind, files: list[_File]) -> str:
    read = _whole_pieces if kind is WeightsKind.FULL else _sampled_pieces
    rows: list[list[object]] = []
    for file in files:
        hasher = hashlib.sha256()
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for piece in read(fd, file):
                hasher.update(piece)
        finally:
            os.close(fd)
        if _file(file.name, file.path).stamp != file.stamp:
            raise IdentityError(f"{file.path} changed while it was read; try again when nothing writes to it")
        rows.append([file.name, str(file.size), hasher.hexdigest()])
    return hashlib.sha256(
        canonical_json([f"hicache-weights-{kind}-v1", rows], "the weights' files")
    ).hexdigest()


def _whole_pieces(fd: int, file: _File) -> Iterator[bytes]:
    for offset in range(0, file.size, _PIECE_BYTES):
        yield os.pread(fd, _PIECE_BYTES, offset)


def _sampled_pieces(fd: int, file: _File) -> Iterator[bytes]:
    if file.size <= _WHOLE_BYTES:
        yield from _whole_pieces(fd, file)
        return
    yield os.pread(fd, _HEAD_BYTES, 0)
    header = _safetensors_header(fd, file)
    yield header
    even = min(max(file.size // _SAMPLE_EVERY_BYTES, _SAMPLES_MIN), _SAMPLES_EVEN_MAX)
    last = file.size - _SAMPLE_BYTES
    offsets = {index * last // (even - 1) for index in range(even)}
    middles = [8 + len(header) + middle - _SAMPLE_BYTES // 2 for middle in _tensor_middles(header)]
    room = WEIGHT_SAMPLES_MAX - even
    stride = max(1, -(-len(middles) // room))
    offsets.update(min(max(offset, 0), last) for offset in sorted(middles)[::stride])
    for offset in sorted(offsets):
        yield offset.to_bytes(8, "little")
        yield os.pread(fd, _SAMPLE_BYTES, offset)


def _safetensors_header(fd: int, file: _File) -> bytes:
    """The JSON header, empty for a file that has none.

    Told by content, because the blobs that links lead to have no suffix.
    """
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > min(file.size - 8, WEIGHT_HEADER_BYTES_MAX) or os.pread(fd, 1, 8) != b"{":
        return b""
    return os.pread(fd, length, 8)


def _tensor_middles(header: bytes) -> list[int]:
    """The middle of each tensor, from the start of the data; empty when the header is not sound."""
    try:
        entries = json.loads(header).values()
        spans = [entry["data_offsets"] for entry in entries if "data_offsets" in entry]
        return [(int(start) + int(stop)) // 2 for start, stop in spans]
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return []


@dataclass(frozen=True, slots=True)
class _DigestCache:
    """Digests by key, one small file each, in a directory that only its owner can write."""

    directory: Path

    @classmethod
    def open(cls, directory: Path | None) -> _DigestCache | None:
        """The cache, or ``None`` where there is no place that can be trusted."""
        with suppress(OSError, RuntimeError):
            if directory is None:
                base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
                directory = Path(base, "hicache_store", "weights")
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = directory.lstat()
            is_private = found.st_uid == os.geteuid() and not found.st_mode & 0o022
            if stat.S_ISDIR(found.st_mode) and is_private:
                return cls(directory)
        return None

    def recall(self, key: bytes) -> str | None:
        """The digest remembered under ``key``; ``None`` for none, or for anything unsound."""
        with suppress(OSError, ValueError):
            fd = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                text = os.read(fd, 65).decode("ascii")
            finally:
                os.close(fd)
            if _DIGEST.fullmatch(text):
                return text
        return None

    def remember(self, key: bytes, digest: str) -> None:
        """Keep a digest, if the place allows it."""
        temporary = self.directory / f".{secrets.token_hex(8)}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, digest.encode())
            finally:
                os.close(fd)
            temporary.replace(self._path(key))
            entries = sorted(self.directory.iterdir(), key=lambda path: path.lstat().st_mtime_ns)
            for path in entries[:-WEIGHT_CACHE_ENTRIES_MAX]:
                path.unlink(missing_ok=True)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _path(self, key: bytes) -> Path:
        return self.directory / hashlib.sha256(key).hexdigest()
