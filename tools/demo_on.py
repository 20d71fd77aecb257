"""``make demo STORE=s3`` and ``STORE=redis``: the demo on a real server that lives as long as the run.

``python tools/demo_on.py s3|redis [arguments of hicache demo]`` starts SeaweedFS, or Redis (Valkey where
there is no Redis), on loopback in a directory of its own, runs ``hicache demo`` on it, and stops it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hicache_store.testing.processes import Daemon, MissingServerError, StartError
from hicache_store.testing.redis_servers import redis_server
from hicache_store.testing.servers import seaweedfs

_BUCKET: Final = "hicache"
_LIMITS: Final = {"maxmemory": "1gb", "maxmemory-policy": "allkeys-lru"}
"""As a cache is run; the demo's default model stores 45 MiB."""


@dataclass(frozen=True, slots=True)
class Place:
    """A running server as a store. ``environment`` is what its client needs beside the URL."""

    url: str
    daemon: Daemon
    environment: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def s3_place() -> Iterator[Place]:
    """An empty bucket of SeaweedFS."""
    with seaweedfs() as endpoint:
        endpoint.make_bucket(_BUCKET)
        assert endpoint.daemon is not None
        url = f"s3://{_BUCKET}/demo?endpoint={endpoint.url}"
        yield Place(url, endpoint.daemon, endpoint.environment)


@contextlib.contextmanager
def redis_place() -> Iterator[Place]:
    """An empty Redis server with a memory limit."""
    with redis_server(settings=_LIMITS) as server:
        yield Place(f"redis://{server.address}/0", server.daemon)


PLACES: Final[Mapping[str, Callable[[], contextlib.AbstractContextManager[Place]]]] = {
    "s3": s3_place,
    "redis": redis_place,
}


def main(argv: Sequence[str]) -> int:
    """Run the demo on the server that ``argv`` names first; the exit code is the demo's."""
    if not argv or argv[0] not in PLACES:
        print(f"demo_on: give one of {', '.join(PLACES)}, then arguments of hicache demo", file=sys.stderr)
        return 2
    try:
        with PLACES[argv[0]]() as place:
            program = Path(place.daemon.command[0]).name
            print(f"demo_on: {program} runs as process {place.daemon.pid}", file=sys.stderr)
            command = [sys.executable, "-m", "hicache_store.cli.main", "demo", "--store", place.url]
            command.append("--store-ends")
            environment = {**os.environ, **place.environment}
            return subprocess.run([*command, *argv[1:]], env=environment, check=False).returncode
    except (MissingServerError, StartError) as error:
        print(f"demo_on: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
