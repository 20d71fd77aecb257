"""Ending while work is on its way: closing is bounded, and a process ends whatever hangs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_store.testing.redis_servers import redis_server
from hicache_store.testing.s3_server import Broken, S3Server, on_operations

SCRIPT = """
import faulthandler, sys, threading, time
faulthandler.enable()
sys.path.insert(0, {tests!r})
from dataclasses import dataclass
from store_rig import attach_rank, chain, tiny
from hicache_store.connectors.registry import open_connector
from hicache_store.layout.parallel import Rank

@dataclass
class UrlPlace:
    url: str
    def open(self):
        return open_connector(self.url)

rig = attach_rank(UrlPlace({url!r}), tiny(2, 2, 2).pool(4), "tp1pp1", Rank(), pages=40, timeout_s=1.0)
rig.fill(range(40))
print("attached", flush=True)
sys.stdin.readline()
backups = [rig.store.submit_backup(chain(40, 4, b"%032d" % index), rig.placements) for index in range(20)]
restores = [rig.store.submit_restore(chain(40, 4), rig.placements) for _ in range(20)]
if {closes}:
    rig.store.close()
    rig.store.close()
    assert {{str(ticket.poll()) for ticket in backups + restores}} == {{"done"}}
    assert all(ticket.wait(0.0).pages == 0 for ticket in backups + restores)
print("leaving", flush=True)
"""


def run(url: str, closes: bool, stall: Callable[[], None]) -> None:
    """Attach in a process of its own, let the storage hang, and see that process end."""
    code = SCRIPT.format(tests=str(Path(__file__).parent), url=url, closes=closes)
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "attached\n"
            stall()
            out, errors = child.communicate("go\n", timeout=120)
        finally:
            child.kill()
    assert out == "leaving\n", errors
    assert child.returncode == 0, errors


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "left open"])
@pytest.mark.parametrize("client", ["obstore", pytest.param("boto3", marks=pytest.mark.soak)])
def test_e07_a_process_with_tickets_before_a_stuck_s3_server_ends(
    client: str, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tickets end at their deadline, closing after them; nothing keeps the interpreter."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
    with S3Server() as server:

        def stall() -> None:
            server.plan = on_operations(
                Broken(before_headers=True, ending="stall"), "GET", "HEAD", "PUT", "LIST"
            )

        run(f"s3://bucket/kv?endpoint={server.endpoint}&client={client}", closes, stall)


@pytest.mark.parametrize(
    "closes", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["closed", "left open"]
)
def test_e07_a_process_with_tickets_before_a_stuck_redis_ends(closes: bool) -> None:
    with redis_server() as server:
        try:
            run(f"redis://{server.address}", closes, server.daemon.pause)
        finally:
            server.daemon.resume()
