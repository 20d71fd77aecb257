"""boto3: how an S3 store is reached, the control plane, and a complete data plane to fall back on.

The only module that imports boto3 and botocore. Region, endpoint, credentials and certificates are
resolved here, by botocore's own rules, for all clients: every client of a URL reaches the same place.
Retries are off, checksums are sent where the protocol asks for them only, and no PUT waits for a
``100 Continue``: older servers take none of the newer ways.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import boto3
import botocore.config
import botocore.exceptions as errors
import botocore.handlers
import botocore.loaders
import botocore.session
import numpy as np

from hicache_store.connectors.s3_answers import (
    condition_arguments,
    delete_arguments,
    facts_of,
    faults_of_delete,
    found_of_get,
    found_of_head,
    lifecycle_rules,
    page_of,
    range_arguments,
)
from hicache_store.connectors.s3_plane import (
    Body,
    BucketFacts,
    Condition,
    FaultKind,
    Found,
    Page,
    PlaneFault,
    fault_of_answer,
    judge_length,
    require_version,
)
from hicache_store.connectors.s3_settings import S3Settings
from hicache_store.connectors.s3_threads import IsStopped, Threads
from hicache_store.errors import ConfigurationError
from hicache_store.limits import MIB, S3_CONNECT_TIMEOUT_S

T = TypeVar("T")

ClientError: TypeAlias = errors.ClientError

_ABSENT_CODES: Final = frozenset({"NoSuchKey", "404", "NotFound"})
_CREDENTIAL_ERRORS: Final = (
    errors.NoCredentialsError,
    errors.PartialCredentialsError,
    errors.CredentialRetrievalError,
    errors.TokenRetrievalError,
    errors.UnauthorizedSSOTokenError,
    errors.SSOTokenLoadError,
)
_TIMEOUT_ERRORS: Final = (errors.ConnectTimeoutError, errors.ReadTimeoutError)
_CONNECTION_ERRORS: Final = (
    errors.HTTPClientError,
    errors.ConnectionError,
    errors.IncompleteReadError,
    errors.ResponseStreamingError,
)


class Keys(NamedTuple):
    """Credentials as they are signed with; their text form shows none of them."""

    access_key: str
    secret_key: str
    token: str | None

    def __repr__(self) -> str:
        return "Keys(...)"


@dataclass(frozen=True, slots=True)
class Access:
    """How the bucket is reached, after the environment, profile and URL had their say."""

    endpoint: str
    region: str
    is_virtual: bool
    verify: bool | str
    """``False``, ``True`` or the path of a file of certificate authorities."""
    is_aws: bool


def client_config(settings: S3Settings, connections: int, is_virtual: bool | None) -> botocore.config.Config:
    """The configuration of a client, for boto3 and, as a dictionary of its options, aiobotocore."""
    return botocore.config.Config(**client_options(settings, connections, is_virtual))


def client_options(settings: S3Settings, connections: int, is_virtual: bool | None) -> dict[str, Any]:
    """What both SDKs are told: our own retries and limits, nothing that only new servers know."""
    style = "auto" if is_virtual is None else "virtual" if is_virtual else "path"
    return {
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "connect_timeout": min(S3_CONNECT_TIMEOUT_S, settings.operation_timeout_s),
        "read_timeout": settings.operation_timeout_s,
        "max_pool_connections": connections,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "tcp_keepalive": True,
        "s3": {"addressing_style": style, "payload_signing_enabled": settings.signs_payload},
    }


@functools.cache
def service_models() -> botocore.loaders.Loader:
    """What botocore knows of the services, parsed once: each attach would parse a megabyte of it anew."""
    return botocore.loaders.create_loader(os.environ.get("AWS_DATA_PATH"))


class BotoSession:
    """One boto3 session of a store: its client, and credentials that can be read anew."""

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        try:
            self._open()
        except (errors.BotoCoreError, ValueError) as error:
            raise ConfigurationError(f"s3: {settings.place}: {error}") from error
        self.access = self._resolve()

    @property
    def client(self) -> Any:
        """The current client; it is replaced when credentials are renewed."""
        return self._client

    def keys(self) -> Keys | None:
        """The credentials as they are now; ``None`` when there are none. May ask the network."""
        with self._lock:
            found = self._session.get_credentials()
            frozen = None if found is None else found.get_frozen_credentials()
        if frozen is None or not frozen.access_key or not frozen.secret_key:
            return None
        return Keys(frozen.access_key, frozen.secret_key, frozen.token)

    def renew(self) -> None:
        """Run the credential chain again, over whatever the environment and the files say now.

        Requests on their way keep the old client, whose connections go with the last of them.
        """
        with self._lock:
            self._open()

    def close(self) -> None:
        """Close the connections."""
        _close(self._client)

    def _open(self) -> None:
        settings = self.settings
        core = botocore.session.Session(profile=settings.profile)
        core.register_component("data_loader", service_models())
        self._core, self._session = core, boto3.Session(botocore_session=core, region_name=settings.region)
        style = {"auto": None, "path": False, "virtual": True}[settings.addressing]
        if style is None and settings.endpoint:
            style = False
        verify: bool | str | None = settings.ca_file or (None if settings.verifies_tls else False)
        client = self._session.client(
            "s3",
            endpoint_url=settings.endpoint,
            verify=verify,
            config=client_config(settings, settings.concurrency, style),
        )
        make_plain(client)
        self._client = client

    def _resolve(self) -> Access:
        settings, meta = self.settings, self._client.meta
        endpoint = str(meta.endpoint_url).rstrip("/")
        is_aws = endpoint.endswith((".amazonaws.com", ".amazonaws.com.cn"))
        is_virtual = settings.addressing == "virtual" or (settings.addressing == "auto" and is_aws)
        if "." in settings.bucket and endpoint.startswith("https"):
            is_virtual = settings.addressing == "virtual"  # no wildcard certificate covers such a host
        verify: bool | str = settings.ca_file or settings.verifies_tls
        if verify is True:
            bundle = self._core.get_config_variable("ca_bundle")
            verify = bundle or True
        region = meta.region_name if meta.region_name not in (None, "aws-global") else "us-east-1"
        return Access(endpoint, region, is_virtual, verify, is_aws)


def _close(client: Any) -> None:
    """Close a client and its idle connections, which would otherwise wait for the garbage collector."""
    with contextlib.suppress(AttributeError):
        pools = client._endpoint.http_session._manager.pools
        for key in pools.keys():  # noqa: SIM118  the container cannot be iterated
            pools[key].close()
    client.close()


def make_plain(client: Any) -> None:
    """Have a client of either SDK do one request for one call, in words that old servers know.

    Bodies are sent at once: servers that do not know ``Expect`` make every PUT wait a second. The sum of
    a DeleteObjects is also sent as MD5. A redirection is an answer: botocore follows it by asking for the
    bucket's region, and where that question is redirected too it does so until the stack is full.
    """
    events = client.meta.events
    events.unregister("before-call.s3", botocore.handlers.add_expect_header)
    events.register("before-sign.s3.DeleteObjects", _add_content_md5)
    events.register("before-call.s3", _take_redirection_for_done)


def _take_redirection_for_done(params: dict[str, Any], **_: object) -> None:
    params.get("context", {}).setdefault("s3_redirect", {})["redirected"] = True


def _add_content_md5(request: Any, **_: object) -> None:
    body = request.data or b""
    if isinstance(body, str):
        body = body.encode()
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    request.headers["Content-MD5"] = base64.b64encode(digest).decode()


def fault_of(error: BaseException) -> PlaneFault:
    """The fault behind an exception of either SDK; secrets that servers echo are left out."""
    if isinstance(error, PlaneFault):
        return error
    if isinstance(error, errors.ClientError):
        told = error.response.get("Error", {})
        answer = error.response.get("ResponseMetadata", {})
        status = int(answer.get("HTTPStatusCode", 0))
        code = str(told.get("Code", ""))
        code = "" if code == str(status) else code
        return fault_of_answer(status, code, str(told.get("Message", "")), answer.get("HTTPHeaders"))
    name = type(error).__name__
    if isinstance(error, _CREDENTIAL_ERRORS):
        return PlaneFault(FaultKind.CREDENTIALS, str(error))
    if isinstance(error, (*_TIMEOUT_ERRORS, TimeoutError)):
        return PlaneFault(FaultKind.TIMED_OUT, name)
    if isinstance(error, (errors.SSLError, ssl.SSLError)):
        return PlaneFault(FaultKind.TLS, _innermost(error))
    if isinstance(error, (*_CONNECTION_ERRORS, OSError)):
        return PlaneFault(FaultKind.CONNECTION, _innermost(error))
    if isinstance(error, errors.BotoCoreError):
        return PlaneFault(FaultKind.PROTOCOL, f"{name}: {error}")
    return PlaneFault(FaultKind.CONNECTION, f"{name}: {error}")


def _innermost(error: BaseException) -> str:
    """The last cause: the outer ones repeat the URL and say that something failed."""
    cause: BaseException = error
    while True:
        inner = getattr(cause, "reason", None) or cause.__cause__ or cause.__context__
        if not isinstance(inner, BaseException) or inner is cause:
            return f"{type(cause).__name__}: {cause}"
        cause = inner


def is_absence(error: ClientError) -> bool:
    """Whether an error says that the object is not there."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status == 404 and error_code(error) in _ABSENT_CODES


def error_code(error: ClientError) -> str:
    """The code of an error document."""
    return str(error.response.get("Error", {}).get("Code", ""))


def facts_beside(error: ClientError) -> BucketFacts:
    """What a refused look at a bucket tells all the same: AWS names the region of a bucket elsewhere."""
    facts = facts_of(error.response)
    if facts.region is None:
        raise error
    return facts


def is_beyond_end(error: ClientError) -> bool:
    """Whether a range began after the end of the object."""
    return bool(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 416)


class BotoPlane:
    """Both planes over boto3, whose calls block, on threads."""

    def __init__(self, session: BotoSession, threads: Threads) -> None:
        self._session = session
        self._threads = threads
        self._bucket = session.settings.bucket

    async def head(self, key: str) -> Found | None:
        """HEAD."""

        def work(_: IsStopped) -> Found | None:
            answer = self._or_none("head_object", Key=key)
            return None if answer is None else found_of_head(answer)

        return await self._run(work)

    async def get(self, key: str, span: tuple[int, int] | None, size_bytes: int) -> Body | Found | None:
        """GET, of a range where ``span`` is one."""

        def work(is_stopped: IsStopped) -> Body | Found | None:
            try:
                answer = self._or_none("get_object", Key=key, **range_arguments(span))
            except ClientError as error:
                if not is_beyond_end(error):
                    raise
                shorter = self._or_none("head_object", Key=key)
                return None if shorter is None else found_of_head(shorter)
            if answer is None:
                return None
            stream = answer["Body"]
            with contextlib.closing(stream):
                found, declared = found_of_get(answer, span)
                if found.size_bytes != size_bytes:
                    return found
                judge_length(declared, span, size_bytes)
                return Body(_drained(stream, declared, is_stopped), found.version)

        return await self._run(work)

    async def put(self, key: str, body: memoryview, condition: Condition) -> str | None:
        """PUT."""

        def work(_: IsStopped) -> str | None:
            arguments = condition_arguments(condition)
            answer = self._call("put_object", Key=key, Body=bytes(body), **arguments)
            return require_version(answer.get("ETag"))

        return await self._run(work)

    async def renew(self) -> None:
        """Run the credential chain again."""
        await self._run(lambda _: self._session.renew())

    async def check_bucket(self) -> BucketFacts:
        """HEAD of the bucket."""

        def work(_: IsStopped) -> BucketFacts:
            try:
                answer = self._or_none("head_bucket")
            except ClientError as error:
                return facts_beside(error)
            if answer is None:
                raise PlaneFault(FaultKind.NO_BUCKET, f"{self._bucket} is not there", status=404)
            return facts_of(answer)

        return await self._run(work)

    async def list_page(self, prefix: str, token: str | None) -> Page:
        """ListObjectsV2."""
        more = {} if token is None else {"ContinuationToken": token}
        return await self._run(lambda _: page_of(self._call("list_objects_v2", Prefix=prefix, **more)))

    async def delete(self, key: str, version: str | None) -> None:
        """DeleteObject."""
        arguments = {} if version is None else {"IfMatch": version}
        await self._run(lambda _: self._or_none("delete_object", Key=key, **arguments))

    async def delete_many(self, keys: Sequence[str]) -> list[PlaneFault | None]:
        """DeleteObjects."""
        body = delete_arguments(keys)
        return await self._run(lambda _: faults_of_delete(self._call("delete_objects", Delete=body), keys))

    async def set_expiry(self, prefix: str, days: int | None) -> None:
        """Read the lifecycle rules of the bucket, change ours and write them back."""

        def work(_: IsStopped) -> None:
            try:
                present = self._call("get_bucket_lifecycle_configuration").get("Rules", [])
            except ClientError as error:
                if error_code(error) != "NoSuchLifecycleConfiguration":
                    raise
                present = []
            rules = lifecycle_rules(present, prefix, days)
            if rules:
                rule_set = {"Rules": rules}
                self._call("put_bucket_lifecycle_configuration", LifecycleConfiguration=rule_set)
            elif present:
                self._call("delete_bucket_lifecycle")

        await self._run(work)

    async def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def _call(self, name: str, **arguments: Any) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = getattr(self._session.client, name)(Bucket=self._bucket, **arguments)
        return answer

    def _or_none(self, name: str, **arguments: Any) -> Mapping[str, Any] | None:
        try:
            return self._call(name, **arguments)
        except ClientError as error:
            if is_absence(error):
                return None
            raise

    async def _run(self, work: Callable[[IsStopped], T]) -> T:
        try:
            return await self._threads.run(work)
        except Exception as error:
            raise fault_of(error) from None


def _drained(stream: Any, size_bytes: int, is_stopped: IsStopped) -> memoryview:
    """The body, read piece by piece so that an abandoned one ends soon."""
    memory = np.empty(size_bytes, np.uint8).data
    at = 0
    while at < size_bytes:
        if is_stopped():
            raise PlaneFault(FaultKind.TIMED_OUT, "abandoned")
        count = stream.readinto(memory[at : at + MIB])
        if not count:
            raise PlaneFault(FaultKind.CONNECTION, f"the body ended after {at} of {size_bytes} bytes")
        at += count
    return memory
