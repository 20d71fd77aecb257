"""Attaching to a bucket: which clients serve it, whether it can be reached, and what its server does.

One look at the bucket and one conditional PUT of a probe object that stays; nothing is ever listed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import TypeVar

from hicache_store.connectors.base import Capabilities
from hicache_store.connectors.s3_boto import BotoPlane, BotoSession, fault_of
from hicache_store.connectors.s3_engine import S3Engine
from hicache_store.connectors.s3_plane import (
    BucketFacts,
    Condition,
    ControlPlane,
    DataPlane,
    FaultKind,
    PlaneFault,
)
from hicache_store.connectors.s3_settings import PROBE_KEY, S3Settings
from hicache_store.connectors.s3_threads import Threads
from hicache_store.connectors.workers import usable_cpus
from hicache_store.errors import ConfigurationError
from hicache_store.limits import (
    S3_ATTACH_TIMEOUT_S,
    S3_LANDING_THREADS,
    S3_LOOKUP_CONCURRENCY,
    WORKERS_MAX,
)
from hicache_store.metrics import Metrics

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_PROBE_BODY = b"written by hicache-store to see whether the server refuses to overwrite it"
_TOLERATED = (FaultKind.DENIED, FaultKind.UNSUPPORTED, FaultKind.REFUSED, FaultKind.REDIRECT)


@dataclass(slots=True)
class Attached:
    """An open store on the loop that attached it."""

    engine: S3Engine
    capabilities: Capabilities
    facts: BucketFacts
    threads: tuple[Threads, ...]

    async def close(self) -> None:
        """Give the connections and threads back."""
        try:
            await self.engine.plane.close()
            await self.engine.control.close()
        finally:
            for pool in self.threads:
                pool.close()


async def attach(settings: S3Settings, metrics: Metrics) -> Attached:
    """Open the bucket on the running loop.

    Raises :class:`ConfigurationError`, naming the place and the cause. No step waits longer for the
    network than S3_ATTACH_TIMEOUT_S.
    """
    landing = Threads(min(S3_LANDING_THREADS, max(2, usable_cpus())), "s3-landing", metrics)
    requests = Threads(min(settings.concurrency, WORKERS_MAX), "s3-request", metrics)
    try:
        return await _attach(settings, metrics, landing, requests)
    except TimeoutError:
        error = ConfigurationError(f"{settings.place}: no answer within {S3_ATTACH_TIMEOUT_S:g} s")
    except PlaneFault as fault:
        error = ConfigurationError(f"{settings.place}: {fault}{_way_out(fault)}")
    except ConfigurationError as refused:
        error = refused
    landing.close()
    requests.close()
    raise error


async def _attach(settings: S3Settings, metrics: Metrics, landing: Threads, requests: Threads) -> Attached:
    session = await _in_time(requests.run(lambda _: BotoSession(settings)))
    facts = await _in_time(_look(BotoPlane(session, requests)))
    if (
        session.access.is_aws
        and settings.region is None
        and facts.region not in (None, session.access.region)
    ):
        session.close()
        session = await _in_time(requests.run(lambda _: BotoSession(replace(settings, region=facts.region))))
    plane, control = await requests.run(lambda _: _planes(session, requests))
    engine = S3Engine(settings, plane, control, landing, metrics)
    attached = Attached(engine, _capabilities(settings), facts, (landing, requests))
    try:
        await _in_time(_find_out(attached))
    except BaseException:
        await attached.close()
        raise
    return attached


async def _in_time(work: Awaitable[T]) -> T:
    async with asyncio.timeout(S3_ATTACH_TIMEOUT_S):
        return await work


async def _look(control: ControlPlane) -> BucketFacts:
    """What HEAD of the bucket tells. Not everybody may ask, so only what is certain is raised."""
    try:
        return await control.check_bucket()
    except PlaneFault as fault:
        if fault.kind not in _TOLERATED and fault.status != 400:
            raise
        return BucketFacts()


def _planes(session: BotoSession, requests: Threads) -> tuple[DataPlane, ControlPlane]:
    """The planes of the chosen client, whose module is imported by its first use."""
    settings = session.settings
    if settings.client == "aiobotocore":
        from hicache_store.connectors.s3_aio import AioPlane  # noqa: PLC0415

        session.close()
        aio = AioPlane(settings, session.access)
        return aio, aio
    boto = BotoPlane(session, requests)
    if settings.client == "boto3":
        return boto, boto
    from hicache_store.connectors.s3_obstore import ObstorePlane  # noqa: PLC0415

    try:
        return ObstorePlane(session, requests), boto
    except ConfigurationError:
        raise
    except Exception as error:
        raise fault_of(error) from error


def _capabilities(settings: S3Settings) -> Capabilities:
    return Capabilities(
        scheme="s3",
        stop="abandons",
        create_only=True,
        conditional_versions=False,  # an ETag names bytes, not the act of writing them
        request_cost_bytes=settings.request_cost_bytes,
        concurrency=settings.concurrency,
        is_read_only=settings.is_read_only,
        lookup_items=S3_LOOKUP_CONCURRENCY,
    )


async def _find_out(attached: Attached) -> None:
    """Write the probe, or where nothing may be written look at it."""
    engine = attached.engine
    settings = engine.settings
    key = settings.prefix + PROBE_KEY
    if settings.is_read_only or not settings.probes:
        await engine.ask(lambda: engine.plane.head(key))
        return
    try:
        creates = await _refuses_to_overwrite(engine, key)
    except PlaneFault as fault:
        if fault.kind is not FaultKind.DENIED:
            raise
        await _become_read_only(attached, key, fault)
        return
    if not creates:
        engine.conditions.creates = False
        attached.capabilities = replace(attached.capabilities, create_only=False)
        _LOG.warning(
            "%s: the server ignores If-None-Match, so of two writers of one object the last stays, not "
            "the first; objects are looked for before they are written",
            settings.place,
        )


async def _refuses_to_overwrite(engine: S3Engine, key: str) -> bool:
    """Whether a PUT with If-None-Match fails on a key that is taken."""
    body = memoryview(_PROBE_BODY)
    for _ in range(2):
        try:
            await engine.ask(lambda: engine.plane.put(key, body, Condition(creates=True)))
        except PlaneFault as fault:
            if fault.kind is FaultKind.CONDITION:
                return True
            if fault.kind is FaultKind.UNSUPPORTED:
                return False
            raise
    return False


async def _become_read_only(attached: Attached, key: str, denied: PlaneFault) -> None:
    """Go on without writing where reading works; else the denial is the cause."""
    engine = attached.engine
    try:
        await engine.ask(lambda: engine.plane.head(key))
    except PlaneFault:
        raise denied from None
    attached.capabilities = replace(attached.capabilities, is_read_only=True)
    _LOG.warning("%s can only be read: %s", engine.settings.place, denied)


def _way_out(fault: PlaneFault) -> str:
    ways = {
        FaultKind.DENIED: "grant s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket, or give "
        "readonly=1 and s3:GetObject and s3:ListBucket",
        FaultKind.CREDENTIALS: "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile",
        FaultKind.NO_BUCKET: "create it first",
        FaultKind.CONNECTION: "check the endpoint",
        FaultKind.TIMED_OUT: "check the endpoint",
        FaultKind.TLS: "check whether the endpoint speaks https, or give ca_file",
    }
    way = ways.get(fault.kind)
    return f"; {way}" if way else ""
