"""What the S3 connector asks of a client library, and how answers that are none are told apart.

A plane moves the bytes of single objects; a control plane lists, deletes and looks at the bucket. Both
are asynchronous, never retry, and raise :class:`PlaneFault` for everything that is neither an answer
nor an absence. Keys are whole: the prefix of the store is part of them.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from hicache_store.connectors.base import Outcome, Status
from hicache_store.errors import HicacheError
from hicache_store.limits import S3_RETRY_AFTER_MAX_S

_DETAIL_CHARS = 240


class FaultKind(enum.StrEnum):
    """Why a request brought no answer."""

    DENIED = "access denied"
    CREDENTIALS = "no valid credentials"
    NO_BUCKET = "no such bucket"
    CONDITION = "condition not met"
    THROTTLED = "the server asks to slow down"
    SERVER = "the server failed"
    UNSUPPORTED = "not supported by the server"
    REDIRECT = "redirected"
    REFUSED = "request refused"
    CONNECTION = "connection failed"
    TLS = "TLS failed"
    TIMED_OUT = "no answer in time"
    PROTOCOL = "an answer that cannot be right"
    OVERLOADED = "too much hung work"


_TRANSIENT: Final = frozenset(
    {
        FaultKind.CREDENTIALS,
        FaultKind.THROTTLED,
        FaultKind.SERVER,
        FaultKind.CONNECTION,
        FaultKind.TIMED_OUT,
        FaultKind.PROTOCOL,
    }
)


class PlaneFault(HicacheError):  # noqa: N818  a fault is what the outcomes call it
    """A request that failed. ``detail`` holds no secret and is short enough for a log line."""

    def __init__(
        self,
        kind: FaultKind,
        detail: str = "",
        *,
        status: int | None = None,
        code: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        self.kind = kind
        self.detail = " ".join(detail.split())[:_DETAIL_CHARS]
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        super().__init__(f"{kind}: {self.detail}" if self.detail else str(kind))

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.kind in _TRANSIENT

    @property
    def may_be_stale_credentials(self) -> bool:
        """Whether new credentials could help. The answer to a HEAD has no body that tells more."""
        is_bare = self.status == 400 and not self.code
        return self.kind in (FaultKind.CREDENTIALS, FaultKind.DENIED) or is_bare

    def outcome(self) -> Outcome:
        """What the fault means for one item."""
        status = Status.FAILED
        if self.kind is FaultKind.TIMED_OUT:
            status = Status.TIMED_OUT
        elif self.kind is FaultKind.OVERLOADED:
            status = Status.REFUSED
        return Outcome(status, str(self), None, self.is_transient, self.retry_after_s)


class Found(NamedTuple):
    """An object that is there. ``version`` is its ETag, as the server writes it."""

    size_bytes: int
    version: str


class Body(NamedTuple):
    """Bytes of an object of the expected length, in memory of the plane."""

    data: memoryview
    version: str


class Condition(NamedTuple):
    """When a PUT may take effect: always, only on a free key, or only over one version."""

    creates: bool = False
    version: str | None = None


class Listed(NamedTuple):
    """One row of a list."""

    key: str
    size_bytes: int
    modified_s: float
    version: str | None


class Page(NamedTuple):
    """A page of a list and the token of the next one."""

    rows: Sequence[Listed]
    token: str | None


class BucketFacts(NamedTuple):
    """What looking at the bucket told. ``server_time_s`` has a resolution of one second."""

    region: str | None = None
    server_time_s: float | None = None


class DataPlane(Protocol):
    """Single objects."""

    async def head(self, key: str) -> Found | None:
        """Length and version; ``None`` when the object is absent."""
        ...

    async def get(self, key: str, span: tuple[int, int] | None, size_bytes: int) -> Body | Found | None:
        """The bytes ``span`` (all of them for ``None``) of an object that must have ``size_bytes``.

        ``Found`` says that it has another length, and no body was read; ``None`` that it is absent.
        """
        ...

    async def put(self, key: str, body: memoryview, condition: Condition) -> str | None:
        """Store ``body`` in one request; its ETag. The plane may use ``body`` after a cancellation."""
        ...

    async def renew(self) -> None:
        """Forget the credentials and read them anew."""
        ...

    async def close(self) -> None:
        """Give the connections back."""
        ...


class ControlPlane(Protocol):
    """The bucket, and what is done to many objects."""

    async def check_bucket(self) -> BucketFacts:
        """Look at the bucket; raises when it cannot be reached, is absent or is denied."""
        ...

    async def list_page(self, prefix: str, token: str | None) -> Page:
        """Up to 1000 objects whose key starts with ``prefix``."""
        ...

    async def delete(self, key: str, version: str | None) -> None:
        """Delete one object; with a version under If-Match. An absent object is no fault."""
        ...

    async def delete_many(self, keys: Sequence[str]) -> list[PlaneFault | None]:
        """Delete up to 1000 objects in one request; UNSUPPORTED where the server has no such call."""
        ...

    async def set_expiry(self, prefix: str, days: int | None) -> None:
        """The lifecycle rule that removes objects below ``prefix`` so long after they were written."""
        ...

    async def close(self) -> None:
        """Give the connections back."""
        ...


_KIND_OF_CODE: Final = {
    **dict.fromkeys(
        (
            "ExpiredToken",
            "ExpiredTokenException",
            "InvalidToken",
            "TokenRefreshRequired",
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
        ),
        FaultKind.CREDENTIALS,
    ),
    "NoSuchBucket": FaultKind.NO_BUCKET,
    **dict.fromkeys(
        ("SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded"),
        FaultKind.THROTTLED,
    ),
    **dict.fromkeys(("NotImplemented", "MissingContentMD5", "MethodNotAllowed"), FaultKind.UNSUPPORTED),
    **dict.fromkeys(("RequestTimeout", "InternalError"), FaultKind.SERVER),
}
_KIND_OF_STATUS: Final = {
    401: FaultKind.DENIED,
    403: FaultKind.DENIED,
    405: FaultKind.UNSUPPORTED,
    409: FaultKind.CONDITION,
    412: FaultKind.CONDITION,
    429: FaultKind.THROTTLED,
    501: FaultKind.UNSUPPORTED,
    503: FaultKind.THROTTLED,
}


def fault_of_answer(
    status: int, code: str, message: str, headers: Mapping[str, str] | None = None
) -> PlaneFault:
    """The fault of an answer whose status is not a success.

    Servers echo tokens and signatures in the bodies of errors, so only code and message are taken.
    """
    kind = _KIND_OF_CODE.get(code) or _KIND_OF_STATUS.get(status)
    if kind is None:
        kind = FaultKind.SERVER if status >= 500 else FaultKind.REFUSED
        if 300 <= status < 400:
            kind = FaultKind.REDIRECT
    words = [f"HTTP {status}", code, message]
    if kind is FaultKind.REDIRECT:
        words.append("the bucket lies elsewhere: give its region or endpoint")
    retry_after_s = _retry_after_s((headers or {}).get("retry-after"))
    told = " ".join(word for word in words if word)
    return PlaneFault(kind, told, status=status, code=code, retry_after_s=retry_after_s)


def fault_of_error_body(status: int, body: str) -> PlaneFault:
    """Like :func:`fault_of_answer`, from the XML of an error."""
    return fault_of_answer(status, _field(body, "Code"), _field(body, "Message"))


def _field(body: str, name: str) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", body)
    return found[1] if found else ""


def _retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After header; the form with a date is rare and not worth a parser."""
    if value is None or not value.strip().isdigit():
        return None
    return min(float(value), S3_RETRY_AFTER_MAX_S)


def judge_length(declared_bytes: int, span: tuple[int, int] | None, size_bytes: int) -> None:
    """Raise unless a body of ``declared_bytes`` is what ``span`` of ``size_bytes`` must bring."""
    wanted = size_bytes if span is None else span[1] - span[0]
    if declared_bytes != wanted:
        raise PlaneFault(FaultKind.PROTOCOL, f"a body of {declared_bytes} bytes instead of {wanted}")


def require_version(version: str | None) -> str:
    """The ETag, which every answer about an object has: an answer without one is about something else."""
    if not version:
        raise PlaneFault(FaultKind.PROTOCOL, "the answer has no ETag")
    return version
