"""obstore: the data plane of choice, a native client with asynchronous functions.

The only module that imports obstore. Its errors are text, so kinds are read from it; the headers of a
refusal are lost, and with them Retry-After. Its own retries are off, and it asks for credentials
through a callback, so that one chain serves all clients.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store

from hicache_store.connectors.s3_boto import BotoSession, Keys, fault_of
from hicache_store.connectors.s3_plane import (
    Body,
    Condition,
    FaultKind,
    Found,
    PlaneFault,
    fault_of_error_body,
    judge_length,
    require_version,
)
from hicache_store.connectors.s3_threads import Threads, at_exit_after_loops
from hicache_store.errors import ConfigurationError
from hicache_store.limits import S3_CONNECT_TIMEOUT_S, S3_CREDENTIALS_REFRESH_S, S3_EXIT_GRACE_S

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config, S3Credential

T = TypeVar("T")

_STATUS: Final = re.compile(r"status code: (\d{3})[^:]*:? ?(.*?)(?:\n\nDebug source|$)", re.DOTALL)
_CAUSE: Final = re.compile(r'message: "([^"]*)"|(TimedOut|IncompleteMessage|IncompleteBody)')
_runtime_pids: Final[set[int]] = set()


def _await_callbacks() -> None:
    """Let native threads end that told a loop of a result a moment ago.

    One that comes back to an interpreter on its way out is ended inside native frames, which before
    Python 3.14 aborts the process. It takes microseconds, and nothing tells when it is over.
    """
    time.sleep(S3_EXIT_GRACE_S)


def claim_runtime() -> None:
    """Refuse to go on in a child of a process that used obstore: its threads exist in the parent only."""
    if not _runtime_pids:
        at_exit_after_loops.append(_await_callbacks)
    _runtime_pids.add(os.getpid())
    if len(_runtime_pids) > 1:
        raise ConfigurationError(
            "s3: this process was forked from one that used obstore, whose threads it does not have; "
            "open the store with client=boto3, start processes by spawn, or open it after the fork only"
        )


class ObstorePlane:
    """The data plane over obstore."""

    def __init__(self, session: BotoSession, threads: Threads) -> None:
        claim_runtime()
        self._session = session
        self._threads = threads
        self._credential_fault: PlaneFault | None = None
        self._is_anonymous = session.keys() is None
        self._store = self._open()

    async def head(self, key: str) -> Found | None:
        """HEAD."""
        try:
            meta = await self._ask(obstore.head_async(self._store, key))
        except FileNotFoundError:
            return None
        return Found(meta["size"], require_version(meta["e_tag"]))

    async def get(self, key: str, span: tuple[int, int] | None, size_bytes: int) -> Body | Found | None:
        """GET, of a range where ``span`` is one."""
        try:
            if span is None:
                answer = await self._ask(obstore.get_async(self._store, key))
            else:
                answer = await self._ask(obstore.get_async(self._store, key, options={"range": span}))
        except FileNotFoundError as error:
            _require_key_missing(error)
            return None
        except PlaneFault as fault:
            if fault.status != 416:
                raise
            return await self.head(key)
        meta = answer.meta
        found = Found(meta["size"], require_version(meta["e_tag"]))
        if found.size_bytes != size_bytes:
            return found
        start, stop = answer.range
        judge_length(stop - start, span, size_bytes)
        data = memoryview(cast(bytes, await self._ask(answer.bytes_async())))
        judge_length(len(data), span, size_bytes)
        return Body(data, found.version)

    async def put(self, key: str, body: memoryview, condition: Condition) -> str | None:
        """PUT in one request."""
        mode: Any = "overwrite"
        if condition.creates:
            mode = "create"
        elif condition.version is not None:
            mode = {"e_tag": condition.version}
        try:
            result = await self._ask(
                obstore.put_async(self._store, key, body, mode=mode, use_multipart=False)
            )
        except FileNotFoundError as error:
            raise fault_of_text(str(error)) from None
        return require_version(result["e_tag"])

    async def renew(self) -> None:
        """Run the credential chain again, and start with what it gives."""
        try:
            await self._threads.run(lambda _: self._session.renew())
        except Exception as error:
            raise fault_of(error) from None
        self._is_anonymous = False
        self._store = self._open()

    async def close(self) -> None:
        """Drop the client and with it its connections."""
        del self._store

    async def _ask(self, request: Awaitable[T]) -> T:
        try:
            return await request
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._fault_of(error) from None

    def _fault_of(self, error: Exception) -> PlaneFault:
        if isinstance(error, PlaneFault):
            return error
        fault, self._credential_fault = self._credential_fault, None
        if fault is not None:
            return fault
        if isinstance(error, TimeoutError):
            return PlaneFault(FaultKind.TIMED_OUT)
        if isinstance(error, AlreadyExistsError | PreconditionError):
            return PlaneFault(FaultKind.CONDITION)
        if isinstance(error, BaseError):
            return fault_of_text(str(error))
        return PlaneFault(FaultKind.CONNECTION, f"{type(error).__name__}: {error}")

    def _open(self) -> S3Store:
        access, settings = self._session.access, self._session.settings
        endpoint = access.endpoint
        if access.is_virtual:
            scheme, _, host = endpoint.partition("://")
            endpoint = f"{scheme}://{settings.bucket}.{host}"
        config: S3Config = {
            "endpoint": endpoint,
            # Else a variable of the environment would outdo the endpoint that was resolved.
            "aws_endpoint_url_s3": endpoint,
            "region": access.region,
            "virtual_hosted_style_request": access.is_virtual,
            "unsigned_payload": not settings.signs_payload,
            "disable_tagging": True,
            "conditional_put": "etag",
            "skip_signature": self._is_anonymous,
        }
        limit = timedelta(seconds=settings.operation_timeout_s)
        client: ClientConfig = {
            "allow_http": endpoint.startswith("http://"),
            "allow_invalid_certificates": access.verify is False,
            "connect_timeout": min(timedelta(seconds=S3_CONNECT_TIMEOUT_S), limit),
            "timeout": limit,
            "pool_max_idle_per_host": str(settings.concurrency),
        }
        if isinstance(access.verify, str):
            client["root_certificate"] = _certificates(access.verify)
        return S3Store(
            settings.bucket,
            config=config,
            client_options=client,
            retry_config={"max_retries": 0},
            credential_provider=None if self._is_anonymous else self._credentials,
        )

    async def _credentials(self) -> S3Credential:
        """Called by obstore whenever the credentials it holds are old."""
        try:
            keys = await self._threads.run(lambda _: self._session.keys())
        except Exception as error:
            self._credential_fault = _as_credential_fault(error)
            raise
        if keys is None:
            self._credential_fault = PlaneFault(FaultKind.CREDENTIALS, "the chain gives none any more")
            raise self._credential_fault
        return _credential(keys)


def fault_of_text(text: str) -> PlaneFault:
    """The fault behind the text of an error."""
    answered = _STATUS.search(text)
    if answered is not None:
        return fault_of_error_body(int(answered[1]), answered[2])
    head = text.partition("\n\nDebug source")[0].rpartition(" - ")[2]
    lowered = text.lower()
    if "certificate" in lowered or "tls" in lowered or "invalidcontenttype" in lowered:
        return PlaneFault(FaultKind.TLS, head)
    if "kind: timeout" in lowered:
        return PlaneFault(FaultKind.TIMED_OUT, head)
    if "redirect" in lowered:
        return PlaneFault(FaultKind.REDIRECT, head)
    if "http error" in lowered:
        causes = [cause[1] or cause[2] for cause in _CAUSE.finditer(text)]
        words = "cannot resolve the host name" if "dns error" in lowered else ", ".join(causes[-1:])
        return PlaneFault(FaultKind.CONNECTION, words or head)
    return PlaneFault(FaultKind.PROTOCOL, head)


def _require_key_missing(error: FileNotFoundError) -> None:
    """Raise when a 404 is about the bucket."""
    fault = fault_of_text(str(error))
    if fault.kind is FaultKind.NO_BUCKET:
        raise fault


def _as_credential_fault(error: Exception) -> PlaneFault:
    fault = fault_of(error)
    return fault if fault.kind is FaultKind.OVERLOADED else PlaneFault(FaultKind.CREDENTIALS, fault.detail)


def _credential(keys: Keys) -> S3Credential:
    return {
        "access_key_id": keys.access_key,
        "secret_access_key": keys.secret_key,
        "token": keys.token,
        "expires_at": datetime.now(UTC) + timedelta(seconds=S3_CREDENTIALS_REFRESH_S),
    }


def _certificates(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"s3: the certificates {path} cannot be read: {error.strerror}") from error
