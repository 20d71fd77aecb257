"""What a call of the store found, did, and why a prefix ended where it did."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hicache_store.connectors.base import Outcome, Status
from hicache_store.layout.format import Verdict


class EndReason(enum.StrEnum):
    """Why a page is not part of the usable prefix."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    UNKNOWN_VERSION = "unknown_version"
    TIMED_OUT = "timed_out"
    FAILED = "failed"
    REFUSED = "refused"
    NO_SLOT = "no_slot"
    """More pages were asked for than placements were given."""


@dataclass(frozen=True, slots=True)
class PrefixEnd:
    """The first page that is not usable: its index in the call, why, and the object that told."""

    page: int
    reason: EndReason
    key: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LookupReport:
    """``pages`` leading pages are stored for this rank. A hint: only what a restore verified is sure."""

    pages: int
    end: PrefixEnd | None


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """``pages`` leading pages were read, verified and placed; slots of later pages hold nothing of use."""

    pages: int
    end: PrefixEnd | None
    objects: int = 0
    read_bytes: int = 0
    requests: int = 0


class PageState(enum.StrEnum):
    """What a backup did with one page."""

    STORED = "stored"
    PRESENT = "present"
    NOT_ELECTED = "not_elected"
    """Another holder of the same box writes this page; this rank stored nothing."""
    REFUSED = "refused"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class BackupReport:
    """The state of each page, and what was written. A failed page left nothing visible of its own."""

    states: tuple[PageState, ...]
    objects: int = 0
    written_bytes: int = 0
    detail: str = ""

    @property
    def pages(self) -> int:
        """Leading pages whose part of this rank is in the store now."""
        good = (PageState.STORED, PageState.PRESENT)
        return next((i for i, state in enumerate(self.states) if state not in good), len(self.states))


_END_OF_STATUS = {
    Status.ABSENT: EndReason.ABSENT,
    Status.WRONG_SIZE: EndReason.CORRUPT,
    Status.TIMED_OUT: EndReason.TIMED_OUT,
    Status.REFUSED: EndReason.REFUSED,
}
_END_OF_VERDICT = {
    Verdict.CORRUPT.value: EndReason.CORRUPT,
    Verdict.FOREIGN.value: EndReason.FOREIGN,
    Verdict.UNKNOWN_VERSION.value: EndReason.UNKNOWN_VERSION,
}


def end_reason(outcome: Outcome) -> EndReason:
    """Why a page ends whose object had this outcome."""
    if outcome.status is Status.REJECTED:
        return _END_OF_VERDICT.get(outcome.detail, EndReason.CORRUPT)
    return _END_OF_STATUS.get(outcome.status, EndReason.FAILED)


def page_state(outcome: Outcome) -> PageState:
    """The state of a page one of whose objects had this outcome of a write."""
    if outcome.is_ok:
        return PageState.STORED
    if outcome.status is Status.TIMED_OUT:
        return PageState.TIMED_OUT
    return PageState.REFUSED if outcome.status is Status.REFUSED else PageState.FAILED
