"""Which weights a model runs: a commit, a digest of local files, or the operator's word.

A name that can move, a branch or a served name, is no identity: pages of the old weights would be
served to the new ones.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from hicache_store.errors import IdentityError
from hicache_store.layout.canonical import require_text

_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


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
        """A digest made by :func:`hicache_store.layout.weight_files.local_weights`."""
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
