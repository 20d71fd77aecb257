"""The servers that tests start: they answer, listen on loopback only, and end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hicache_store.testing import processes
from hicache_store.testing.certificates import Certificates
from hicache_store.testing.processes import Daemon, MissingServerError, StartError, daemon, free_ports
from hicache_store.testing.redis_servers import (
    RedisCluster,
    RedisServer,
    redis_program,
    redis_sentinel,
    redis_server,
    supports_tls,
)
from hicache_store.testing.resp import RespClient, RespError
from hicache_store.testing.servers import S3Endpoint, program

PATIENCE_S = 60.0


def listening_addresses(pid: int) -> set[str]:
    """The local addresses, in the kernel's hexadecimal, on which a process listens."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F"}


def test_redis_listens_on_loopback_only(redis_single: RedisServer, redis_three: RedisCluster) -> None:
    for server in (redis_single, *redis_three.nodes):
        assert listening_addresses(server.daemon.pid) == LOOPBACK
        assert Path(server.socket_path).stat().st_mode & 0o077 == 0
        assert server.daemon.directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["moto_endpoint", "seaweedfs_endpoint", "juicefs_endpoint"])
def test_s3_servers_listen_on_loopback_and_take_objects(name: str, request: pytest.FixtureRequest) -> None:
    endpoint: S3Endpoint = request.getfixturevalue(name)
    assert endpoint.daemon is not None
    assert listening_addresses(endpoint.daemon.pid) == LOOPBACK
    endpoint.make_bucket("servers-answer")
    client = endpoint.client()
    client.put_object(Bucket="servers-answer", Key="a/b", Body=b"bytes")
    assert client.get_object(Bucket="servers-answer", Key="a/b")["Body"].read() == b"bytes"


def test_a_cluster_moves_a_slot(redis_three: RedisCluster) -> None:
    key = "a"
    slot = redis_three.nodes[0].ask("CLUSTER", "KEYSLOT", key)
    assert isinstance(slot, int)
    source = redis_three.owner(slot)
    target = (source + 1) % 3
    redis_three.nodes[source].ask("SET", key, "value")
    redis_three.open_migration(slot, source, target)
    assert redis_three.move_keys(slot, source, target) == 1
    with pytest.raises(RespError, match="ASK"):
        redis_three.nodes[source].ask("GET", key)
    redis_three.close_migration(slot, target)
    with pytest.raises(RespError, match="MOVED"):
        redis_three.nodes[source].ask("GET", key)
    assert redis_three.owner(slot) == target
    assert redis_three.nodes[target].ask("GET", key) == b"value"
    redis_three.open_migration(slot, target, source)
    redis_three.move_keys(slot, target, source)
    redis_three.close_migration(slot, source)
    redis_three.flush()


def test_passwords_replicas_restarts_and_sentinel() -> None:
    with redis_server(password="secret") as master:
        with pytest.raises(RespError, match="NOAUTH"), RespClient(master.socket_path) as client:
            client.ask("GET", "key")
        assert master.ask("SET", "key", "value") == "OK"
        with redis_server(replica_of=master, name="replica") as replica:
            assert master.ask("WAIT", 1, 20_000) == 1
            assert replica.ask("GET", "key") == b"value"
            with redis_sentinel(master) as sentinel:
                found = sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster")
                assert found == [b"127.0.0.1", str(master.port).encode()]
        master.restart()
        assert master.ask("GET", "key") is None


def test_a_tls_port_answers(certificates: Certificates) -> None:
    import ssl  # noqa: PLC0415

    if not supports_tls(redis_program()):
        pytest.skip("NOT RUN: this redis-server was built without TLS")
    with redis_server(certificates=certificates) as server:
        context = ssl.create_default_context(cafile=certificates.authority)
        plain = socket.create_connection(("127.0.0.1", server.tls_port), PATIENCE_S)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped:
            wrapped.sendall(b"PING\r\n")
            assert wrapped.recv(16) == b"+PONG\r\n"


def sleeper(directory: Path, ports: Sequence[int]) -> list[str]:
    """A server that ignores TERM."""
    code = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(600)
    """
    return [sys.executable, "-c", textwrap.dedent(code)]


def is_gone(pid: int) -> bool:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_a_server_that_ignores_term_is_killed_and_its_directory_removed() -> None:
    def is_ready(server: Daemon) -> bool:
        return "deaf" in server.log_tail()

    with daemon("sleeper", sleeper, is_ready) as server:
        assert server.is_running
        directory = server.directory
    assert is_gone(server.pid)
    assert not directory.exists()


def test_a_server_that_ends_at_once_tells_its_log() -> None:
    tries: list[Sequence[int]] = []

    def command(directory: Path, ports: Sequence[int]) -> list[str]:
        tries.append(ports)
        return [sys.executable, "-c", "raise SystemExit('Address already in use')"]

    start = daemon("broken", command, lambda _: False, ports=2)
    with pytest.raises(StartError, match=r"(?s)exited with 1.*Address already in use"), start:
        raise AssertionError("never ready")
    assert len(tries) == 3
    assert all(len(set(ports)) == 2 for ports in tries)


def test_a_killed_run_leaves_no_server() -> None:
    code = """
        import sys, time
        from hicache_store.testing.redis_servers import redis_server
        with redis_server() as server:
            print(server.daemon.pid, server.daemon.directory, flush=True)
            time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().decode().split()
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert is_gone(int(pid))
    shutil.rmtree(Path(directory).parent)


def test_ports_are_free_and_apart() -> None:
    ports = free_ports(8)
    assert len(set(ports)) == 8
    with socket.socket() as taken:
        taken.bind((processes.HOST, ports[0]))
        assert ports[0] not in free_ports(64)


def test_a_program_that_is_missing_says_how_to_get_it() -> None:
    with pytest.raises(MissingServerError, match="no-such-program is not installed; ask for it"):
        program("no-such-program", "ask for it")
