"""aiobotocore: both planes for callers that live in an event loop, without a thread a request.

The only module that imports aiobotocore. Region, endpoint and certificates come from the resolved
access of :mod:`hicache_store.connectors.s3_boto`, so that it reaches the same place as the others;
credentials from aiobotocore's own chain, which follows the same rules without blocking the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import numpy as np
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession

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
from hicache_store.connectors.s3_boto import (
    Access,
    ClientError,
    client_options,
    error_code,
    fault_of,
    is_absence,
    make_plain,
    service_models,
)
from hicache_store.connectors.s3_plane import (
    Body,
    BucketFacts,
    Condition,
    FaultKind,
    Found,
    Page,
    PlaneFault,
    judge_length,
    require_version,
)
from hicache_store.connectors.s3_settings import S3Settings
from hicache_store.limits import MIB

T = TypeVar("T")


class AioPlane:
    """Both planes over aiobotocore; opened by the first request, on the loop that makes it."""

    def __init__(self, settings: S3Settings, access: Access) -> None:
        self._settings = settings
        self._access = access
        self._bucket = settings.bucket
        self._opening = asyncio.Lock()
        self._stack: AsyncExitStack | None = None
        self._retired: AsyncExitStack | None = None
        self._opened: Any = None

    async def head(self, key: str) -> Found | None:
        """HEAD."""
        answer = await self._or_none("head_object", Key=key)
        return None if answer is None else found_of_head(answer)

    async def get(self, key: str, span: tuple[int, int] | None, size_bytes: int) -> Body | Found | None:
        """GET, of a range where ``span`` is one."""
        try:
            answer = await self._or_none("get_object", Key=key, **range_arguments(span))
        except PlaneFault as fault:
            if fault.status != 416:
                raise
            return await self.head(key)
        if answer is None:
            return None
        return await _guarded(self._read_body(answer, span, size_bytes))

    async def put(self, key: str, body: memoryview, condition: Condition) -> str | None:
        """PUT."""
        arguments = condition_arguments(condition)
        answer = await self._call("put_object", Key=key, Body=bytes(body), **arguments)
        return require_version(answer.get("ETag"))

    async def renew(self) -> None:
        """Open another session, which runs the credential chain again.

        Requests on their way keep the old one until the next renewal.
        """
        async with self._opening:
            outdated, self._retired, self._stack = self._retired, self._stack, None
            self._opened = None
            if outdated is not None:
                await outdated.aclose()

    async def check_bucket(self) -> BucketFacts:
        """HEAD of the bucket."""
        answer = await self._or_none("head_bucket")
        if answer is None:
            raise PlaneFault(FaultKind.NO_BUCKET, f"{self._bucket} is not there", status=404)
        return facts_of(answer)

    async def list_page(self, prefix: str, token: str | None) -> Page:
        """ListObjectsV2."""
        more = {} if token is None else {"ContinuationToken": token}
        return page_of(await self._call("list_objects_v2", Prefix=prefix, **more))

    async def delete(self, key: str, version: str | None) -> None:
        """DeleteObject."""
        arguments = {} if version is None else {"IfMatch": version}
        await self._or_none("delete_object", Key=key, **arguments)

    async def delete_many(self, keys: Sequence[str]) -> list[PlaneFault | None]:
        """DeleteObjects."""
        return faults_of_delete(await self._call("delete_objects", Delete=delete_arguments(keys)), keys)

    async def set_expiry(self, prefix: str, days: int | None) -> None:
        """Read the lifecycle rules of the bucket, change ours and write them back."""
        try:
            present = (await self._request("get_bucket_lifecycle_configuration")).get("Rules", [])
        except ClientError as error:
            if error_code(error) != "NoSuchLifecycleConfiguration":
                raise fault_of(error) from None
            present = []
        rules = lifecycle_rules(present, prefix, days)
        if rules:
            await self._call("put_bucket_lifecycle_configuration", LifecycleConfiguration={"Rules": rules})
        elif present:
            await self._call("delete_bucket_lifecycle")

    async def close(self) -> None:
        """Close the connections."""
        async with self._opening:
            stacks, self._opened = (self._retired, self._stack), None
            self._retired = self._stack = None
            for stack in stacks:
                if stack is not None:
                    await stack.aclose()

    async def _client(self) -> Any:
        if self._opened is not None:
            return self._opened
        async with self._opening:
            if self._opened is None:
                settings, access = self._settings, self._access
                session = AioSession(profile=settings.profile)
                session.register_component("data_loader", service_models())
                options = client_options(settings, settings.concurrency, access.is_virtual)
                stack = AsyncExitStack()
                client = await stack.enter_async_context(
                    session.create_client(
                        "s3",
                        region_name=access.region,
                        endpoint_url=access.endpoint,
                        verify=access.verify,
                        config=AioConfig(**options),
                    )
                )
                make_plain(client)
                self._stack, self._opened = stack, client
        return self._opened

    async def _request(self, name: str, **arguments: Any) -> Mapping[str, Any]:
        client = await self._client()
        answer: Mapping[str, Any] = await getattr(client, name)(Bucket=self._bucket, **arguments)
        return answer

    async def _call(self, name: str, **arguments: Any) -> Mapping[str, Any]:
        return await _guarded(self._request(name, **arguments))

    async def _or_none(self, name: str, **arguments: Any) -> Mapping[str, Any] | None:
        try:
            return await self._request(name, **arguments)
        except ClientError as error:
            if is_absence(error):
                return None
            raise fault_of(error) from None
        except Exception as error:
            raise fault_of(error) from None

    @staticmethod
    async def _read_body(
        answer: Mapping[str, Any], span: tuple[int, int] | None, size_bytes: int
    ) -> Body | Found:
        async with answer["Body"] as stream:  # a body left half read closes its connection
            found, declared = found_of_get(answer, span)
            if found.size_bytes != size_bytes:
                return found
            judge_length(declared, span, size_bytes)
            memory = np.empty(declared, np.uint8).data
            at = 0
            while at < declared:
                piece = await stream.read(min(MIB, declared - at))
                if not piece:
                    raise PlaneFault(FaultKind.CONNECTION, f"the body ended after {at} of {declared} bytes")
                memory[at : at + len(piece)] = piece
                at += len(piece)
            return Body(memory, found.version)


async def _guarded(work: Awaitable[T]) -> T:
    try:
        return await work
    except Exception as error:
        raise fault_of(error) from None
