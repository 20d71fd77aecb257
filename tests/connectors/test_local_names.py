"""Keys and file names, the directory tree, and transfers: the small parts of the file connector."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_faults import FaultyIO, Gate

from hicache_store.connectors.local_io import IOV_MAX, PosixIO, as_bytes, pieces, transfer
from hicache_store.connectors.local_names import (
    directory_of,
    file_name,
    is_temporary,
    key_of,
    object_directories,
    temporary_name,
)
from hicache_store.connectors.local_tree import DirectoryTree
from hicache_store.errors import HandleError, NameFormatError
from hicache_store.limits import DIRECTORIES_MIN, IO_PIECE_BYTES, IO_TAIL_BYTES

PART = st.text("abcXYZ019._-", min_size=1, max_size=12).filter(lambda part: part not in (".", ".."))
KEY = st.lists(PART, min_size=1, max_size=8).map("/".join)


@given(KEY)
def test_a_key_comes_back_from_its_file_name(key: str) -> None:
    name = file_name(key)
    assert key_of(name) == key
    assert "/" not in name
    assert len(name) == len(key)
    assert not is_temporary(name)


@given(KEY, KEY)
def test_different_keys_have_different_files(one: str, other: str) -> None:
    same = (directory_of(one), file_name(one)) == (directory_of(other), file_name(other))
    assert same == (one == other)


@given(st.text(max_size=40))
def test_any_text_is_a_key_or_refused_and_never_leaves_its_directory(text: str) -> None:
    """Whatever users bring into a name, it is one component without a separator, or no name."""
    try:
        name = file_name(text)
    except NameFormatError:
        return
    assert key_of(name) == text
    assert os.path.basename(name) == name
    assert name not in ("", ".", "..")


@given(st.text(max_size=40))
def test_a_foreign_file_name_is_told_apart(name: str) -> None:
    key = key_of(name)
    assert key is None or file_name(key) == name


@pytest.mark.parametrize("key", ["x" * 256, "a/" * 127 + "bb", "v1/" + "0" * 300])
def test_d02_a_name_of_more_than_255_bytes_is_refused_with_both_numbers(key: str) -> None:
    with pytest.raises(NameFormatError, match=f"{len(key)} bytes.*255"):
        file_name(key)
    assert len(file_name("x" * 255)) == 255


def test_objects_lie_in_listed_directories_and_metadata_in_its_own() -> None:
    assert len(set(object_directories())) == 256
    assert all(directory_of(f"v1/{index}") in set(object_directories()) for index in range(100))
    assert directory_of("meta/v1/x") == ("meta",)
    assert directory_of("metal/v1/x") in set(object_directories())


def test_temporary_names_are_no_keys_and_never_meet() -> None:
    names = {temporary_name() for _ in range(1_000)}
    assert len(names) == 1_000
    assert all(is_temporary(name) and key_of(name) is None for name in names)


# -- transfers -----------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 700_000), max_size=12),
    st.integers(1, IOV_MAX),
    st.lists(st.integers(1, 1_200_000), min_size=1, max_size=6),
)
def test_pieces_cover_the_views_whatever_the_kernel_takes(
    lengths: list[int], copies: int, taken: list[int]
) -> None:
    """All bytes, once, in order, within the bounds; by a call that moves any number of bytes."""
    views = [memoryview(np.zeros(length, np.uint8)) for length in lengths]
    views += [memoryview(np.zeros(1, np.uint8))] * copies
    total = sum(view.nbytes for view in views)
    assert sum(size for _, size in pieces(views)) == total
    most = total if total <= IO_PIECE_BYTES + IO_TAIL_BYTES and len(views) <= IOV_MAX else IO_PIECE_BYTES
    for vector, size in pieces(views):
        assert 0 < sum(view.nbytes for view in vector) == size <= most
        assert 0 < len(vector) <= IOV_MAX
    position = 7
    turn = 0

    def call(fd: int, vector: list[memoryview], offset: int) -> int:  # type: ignore[misc]
        nonlocal position, turn
        assert (fd, offset) == (3, position)
        turn += 1
        count = min(max(taken[turn % len(taken)], total // 300), sum(view.nbytes for view in vector))
        position += count
        return count

    assert transfer(call, 3, views, 7, lambda: False) == total  # type: ignore[arg-type]
    assert position == 7 + total


def test_a_transfer_stops_before_the_next_call() -> None:
    calls: list[int] = []

    def call(fd: int, vector: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return vector[0].nbytes

    views = [memoryview(bytes(3 * IO_PIECE_BYTES))]
    assert transfer(call, 3, views, 0, lambda: len(calls) == 2) == 2 * IO_PIECE_BYTES  # type: ignore[arg-type]
    assert transfer(call, 3, views, 0, lambda: True) == 0  # type: ignore[arg-type]
    assert len(calls) == 2


def test_views_that_are_not_contiguous_are_refused_not_copied() -> None:
    wide = np.zeros((8, 8), np.uint16)
    assert as_bytes(memoryview(wide)).nbytes == 128
    for view in (wide[:, :4], wide.T[:4, :6], wide.reshape(-1)[::2]):
        with pytest.raises((BufferError, ValueError)):
            as_bytes(memoryview(view))


# -- directories ---------------------------------------------------------------------------


@pytest.fixture
def io() -> FaultyIO:
    return FaultyIO()


@pytest.fixture
def tree(tmp_path: Path, io: FaultyIO) -> DirectoryTree:
    return DirectoryTree(os.open(tmp_path, os.O_RDONLY), io)  # type: ignore[arg-type]


def test_a_page_and_its_trailer_are_one_call() -> None:
    views = [memoryview(bytes(IO_PIECE_BYTES)), memoryview(bytes(4096))]
    assert [size for _, size in pieces(views)] == [IO_PIECE_BYTES + 4096]
    views.append(memoryview(bytes(IO_TAIL_BYTES)))
    assert [size for _, size in pieces(views)] == [IO_PIECE_BYTES, 4096 + IO_TAIL_BYTES]


def test_handles_are_shed_when_the_process_is_short_of_them(tree: DirectoryTree, tmp_path: Path) -> None:
    """Idle ones are closed, a lent one stays, and from then on fewer are kept."""
    paths = [("a", f"{number:02d}") for number in range(32)]
    for path in paths[1:]:
        tree.give_back(tree.borrow(path, creates=True))
    lent = tree.borrow(paths[0], creates=True)
    held = set(os.listdir("/proc/self/fd"))
    tree.shed()
    after = set(os.listdir("/proc/self/fd"))
    assert len(held - after) == 31
    assert os.fstat(lent.fd).st_ino == (tmp_path / "a" / "00").stat().st_ino
    for path in paths[1:]:
        tree.give_back(tree.borrow(path))
    kept = len(set(os.listdir("/proc/self/fd")) - after)
    assert DIRECTORIES_MIN - 2 <= kept <= 16
    tree.shed()
    assert set(os.listdir("/proc/self/fd")) == after
    tree.give_back(lent)
    tree.close()
    with pytest.raises(HandleError):
        tree.borrow(paths[0])


def test_a_lent_directory_stays_open_until_it_is_given_back(tree: DirectoryTree, io: FaultyIO) -> None:
    """Its number must not come to mean another directory under a worker that still uses it."""
    first = tree.borrow(("a", "b"), creates=True)
    again = tree.borrow(("a", "b"))
    assert again.fd == first.fd
    tree.close()
    tree.close()
    os.fstat(first.fd)
    with pytest.raises(HandleError):
        tree.borrow(("a", "b"))
    tree.give_back(first)
    os.fstat(again.fd)
    tree.give_back(again)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(again.fd)


def test_a_removed_directory_is_opened_anew(tree: DirectoryTree, tmp_path: Path) -> None:
    lent = tree.borrow(("a",), creates=True)
    assert not tree.is_gone(lent)
    (tmp_path / "a").rmdir()
    (tmp_path / "a").mkdir()
    assert tree.is_gone(lent)
    fresh = tree.borrow(("a",))
    assert fresh.fd != lent.fd
    tree.give_back(lent)
    tree.give_back(fresh)
    tree.close()


def test_threads_that_open_one_directory_at_once_share_it(tree: DirectoryTree, io: FaultyIO) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tree.give_back(tree.borrow(("a", "b"), creates=True))
    other = DirectoryTree(os.dup(tree.borrow(()).fd), io)  # type: ignore[arg-type]
    gate = io.hooks["open"] = Gate(lambda name, *_, **__: name == "b")
    lent: list[int] = []
    threads = [
        threading.Thread(target=lambda: lent.append(other.borrow(("a", "b"), True).fd)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    gate.wait_for(4)
    gate.opened.set()
    for thread in threads:
        thread.join()
    assert len(set(lent)) == 1
    assert len(os.listdir("/proc/self/fd")) == before + 3  # one below each tree, and the other root


def test_a_failed_descent_leaves_nothing_open(tree: DirectoryTree, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").symlink_to(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for path in (("a", "b"), ("a", "b", "c"), ("a", "missing"), ("missing", "c")):
        with pytest.raises(OSError, match=r"Not a directory|No such file"):
            tree.borrow(path)
    assert len(os.listdir("/proc/self/fd")) == before
    tree.close()


def test_no_name_below_a_root_is_followed(tmp_path: Path) -> None:
    io = PosixIO()
    (tmp_path / "link").symlink_to("/etc/hostname")
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="symbolic links"):
        io.open("link", os.O_RDONLY, dir_fd=fd)
    assert io.stat("link", dir_fd=fd).st_mode & 0o170000 == 0o120000
    os.close(fd)
