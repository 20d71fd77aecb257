"""Where the tests of the S3 connector run, and the asynchronous store behind the synchronous protocol."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

import pytest

from hicache_store.clock import Deadline
from hicache_store.config import parse_url
from hicache_store.connectors.base import Capabilities, Entry, Outcome, Read, Touch, Write
from hicache_store.connectors.s3 import S3Connector, connect
from hicache_store.connectors.s3_async import AsyncS3
from hicache_store.connectors.s3_threads import LoopThread
from hicache_store.errors import HandleError

CLIENTS = ("obstore", "boto3", "aiobotocore")


class AsyncAdapter:
    """An :class:`AsyncS3` on a loop of its own, driven from threads as the contract asks."""

    def __init__(self, url: str) -> None:
        self._loop = LoopThread("async adapter")
        self.store: AsyncS3 = self._loop.submit(AsyncS3.connect(url)).result()

    @property
    def capabilities(self) -> Capabilities:
        return self.store.capabilities

    def sizes(self, keys: Sequence[str], deadline: Deadline) -> list[int | None]:
        return self._wait(self.store.sizes(keys, deadline))

    def read_into(self, reads: Sequence[Read], deadline: Deadline) -> list[Outcome]:
        return self._wait(self.store.read_into(reads, deadline))

    def write_from(self, writes: Sequence[Write], deadline: Deadline) -> list[Outcome]:
        return self._wait(self.store.write_from(writes, deadline))

    def delete(
        self, keys: Sequence[str], deadline: Deadline, versions: Sequence[str | None] | None = None
    ) -> list[Outcome]:
        return self._wait(self.store.delete(keys, deadline, versions))

    def touch(self, touches: Sequence[Touch], deadline: Deadline) -> list[Outcome]:
        return self._wait(self.store.touch(touches, deadline))

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        async def collect() -> list[Entry]:
            return [entry async for entry in self.store.scan(prefix)]

        return iter(self._wait(collect()))

    def close(self) -> None:
        self._loop.close(self.store.close)

    def _wait(self, work: Any) -> Any:
        try:
            return self._loop.submit(work).result()
        except CancelledError:
            raise HandleError("closed while the call ran") from None


def soak(*names: str) -> Callable[[type], type]:
    """Mark inherited tests of a class as long runs: those named, or with ``but`` first all others."""
    chosen = set(names) - {"but"}

    def decorate(cls: type) -> type:
        for name in dir(cls):
            if name.startswith("test_") and (name in chosen) != ("but" in names):
                setattr(cls, name, pytest.mark.soak(_copy_of(getattr(cls, name))))
        return cls

    return decorate


def _copy_of(test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*given: Any, **fixtures: Any) -> None:
        test(*given, **fixtures)

    return run


def open_s3_at(
    endpoint: str, client: str = "obstore", bucket: str = "bucket", **options: object
) -> S3Connector:
    """The bare connector, without the wrappers that a store URL brings."""
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return connect(parse_url(f"s3://{bucket}/store?endpoint={endpoint}&client={client}&{query}".rstrip("&")))
