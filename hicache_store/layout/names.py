"""Object names: what an object holds, never who wrote it.

``v1/{namespace}/{hh}/{page_hash}/{pool}.H004-006.L030-060[.T000-064][.P004][.X{shard digest}]``

Only digests and numbers, fixed depth, every part far below 255 bytes. ``hh`` repeats the first two
hex digits of the page hash for stores that partition by prefix. Parsing is the exact inverse of
formatting: a text that formatting would not produce is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hicache_store.errors import NameFormatError
from hicache_store.layout.box import Box, Span

FORMAT = "v1"
META_PREFIX = f"meta/{FORMAT}"

_HEX64 = re.compile(r"[0-9a-f]{64}")
_NUMBER = r"(?:\d{3}|[1-9]\d{3,8})"
_LEAF = re.compile(
    r"(?P<pool>[a-z][a-z0-9_]{0,31})"
    rf"\.H(?P<h0>{_NUMBER})-(?P<h1>{_NUMBER})"
    rf"\.L(?P<l0>{_NUMBER})-(?P<l1>{_NUMBER})"
    rf"(?:\.T(?P<t0>{_NUMBER})-(?P<t1>{_NUMBER}))?"
    rf"(?:\.P(?P<pages>{_NUMBER}))?"
    r"(?:\.X(?P<shard>[0-9a-f]{32}))?"
)


@dataclass(frozen=True, slots=True, order=True)
class ObjectName:
    """One object of one page (or of a full group of ``pages`` pages named by its last hash).

    ``tokens`` is ``None`` for whole pages. ``shard`` is the digest that ties an opaque object to
    the one topology that can read it.
    """

    namespace: str
    page_hash: str
    pool: str
    heads: Span
    layers: Span
    tokens: Span | None = None
    pages: int = 1
    shard: str | None = None

    def __str__(self) -> str:
        return page_prefix(self.namespace, self.page_hash) + self.leaf

    @property
    def leaf(self) -> str:
        """The last part of the name: pool and box."""
        tail = ""
        if self.tokens is not None:
            tail += f".T{self.tokens.start:03d}-{self.tokens.stop:03d}"
        if self.pages != 1:
            tail += f".P{self.pages:03d}"
        if self.shard is not None:
            tail += f".X{self.shard}"
        return box_leaf(self.pool, self.heads, self.layers) + tail

    @classmethod
    def parse(cls, text: str) -> ObjectName:
        """The name written as ``text``; :class:`NameFormatError` when formatting would differ."""
        parts = text.split("/")
        if len(parts) != 5 or parts[0] != FORMAT:
            raise NameFormatError(
                f"{text!r} is not an object name: it needs five parts and starts with {FORMAT}/"
            )
        _, namespace, _, page_hash, leaf = parts
        match = _LEAF.fullmatch(leaf)
        if match is None or not _HEX64.fullmatch(namespace) or not _HEX64.fullmatch(page_hash):
            raise NameFormatError(f"{text!r} is not an object name")
        try:
            tokens = None if match["t0"] is None else Span(int(match["t0"]), int(match["t1"]))
            name = cls(
                namespace,
                page_hash,
                match["pool"],
                Span(int(match["h0"]), int(match["h1"])),
                Span(int(match["l0"]), int(match["l1"])),
                tokens,
                1 if match["pages"] is None else int(match["pages"]),
                match["shard"],
            )
        except ValueError as error:
            raise NameFormatError(f"{text!r} is not an object name: {error}") from error
        is_empty = any(span is not None and not len(span) for span in (name.heads, name.layers, tokens))
        if str(name) != text or is_empty or name.pages < 1:
            raise NameFormatError(f"{text!r} is not in the one form an object name has")
        return name


def page_prefix(namespace: str, page_hash: str) -> str:
    """Everything before the leaf, shared by all objects of a page."""
    return f"{FORMAT}/{namespace}/{page_hash[:2]}/{page_hash}/"


def box_leaf(pool: str, heads: Span, layers: Span) -> str:
    """The leaf of an object that holds whole pages of a box."""
    return f"{pool}.H{heads.start:03d}-{heads.stop:03d}.L{layers.start:03d}-{layers.stop:03d}"


def leaf_of(pool: str, box: Box) -> str:
    """The leaf of a whole-page object of ``box``."""
    return box_leaf(pool, box.heads, box.layers)


def manifest_key(namespace: str) -> str:
    """Where the manifest of a namespace is kept."""
    return f"{META_PREFIX}/{namespace}/manifest"


def marker_key(namespace: str, slot: int) -> str:
    """Where the grid marker of one slot is kept."""
    return f"{META_PREFIX}/{namespace}/grid-{slot:02d}"
