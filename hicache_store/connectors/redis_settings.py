"""What a Redis URL says, typed: where the servers are, how to log in, and the options.

``redis://[user:password@]host[:port][/db]``, the same with ``rediss`` for TLS, ``valkey`` and
``valkeys``; ``unix://[user:password@]/path/of/the.sock``; ``redis+cluster://host:port,host:port`` and
``redis+sentinel://host:port,host:port/service[/db]``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from hicache_store.config import (
    Option,
    OptionValues,
    StoreUrl,
    bool_option,
    duration_option,
    int_option,
    parse_bool,
    size_option,
)
from hicache_store.errors import ConfigurationError
from hicache_store.limits import (
    KIB,
    REDIS_CONNECT_TIMEOUT_S,
    REDIS_PREFIX_BYTES_MAX,
    REDIS_THREADS,
    REDIS_VALUE_BYTES,
    REDIS_VALUE_BYTES_MAX,
    WORKERS_MAX,
)

OPTIONS: Final = (
    Option("prefix", str, "what every key begins with"),
    duration_option("ttl", minimum=1.0),
    int_option("threads", None, 1, WORKERS_MAX),
    size_option("max_value", REDIS_VALUE_BYTES, 1),
    size_option("request_cost", 256 * KIB),
    duration_option("connect_timeout", REDIS_CONNECT_TIMEOUT_S, 0.01),
    bool_option("readonly", False),
    Option("cluster", parse_bool, "1 or 0"),
    int_option("db", None, 0, 1_000_000),
    Option("password_env", str, "the name of an environment variable"),
    Option("sentinel_password_env", str, "the name of an environment variable"),
    Option("tls", parse_bool, "1 or 0"),
    bool_option("tls_verify", True),
    Option("tls_ca", str, "the path of a PEM file of certificate authorities"),
    Option("tls_cert", str, "the path of the client's certificate, a PEM file"),
    Option("tls_key", str, "the path of the client's key, a PEM file"),
)

DEFAULT_PREFIX: Final = "hicache:"
_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
_TLS_SCHEMES: Final = frozenset({"rediss", "valkeys"})

Kind: TypeAlias = Literal["single", "cluster", "sentinel"]


class Address(NamedTuple):
    """A server: host and port, or the path of a unix socket with port 0."""

    host: str
    port: int

    def __str__(self) -> str:
        if self.port == 0:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Tls:
    """How TLS is spoken; ``None`` leaves a file to the system's defaults."""

    verifies: bool
    authorities: str | None
    certificate: str | None
    key: str | None


@dataclass(frozen=True, slots=True)
class Login:
    """Who we are. The password shows in no text of this object."""

    user: str | None
    password: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """The options of one URL. ``is_cluster=None`` takes what the server says of itself."""

    kind: Kind
    addresses: tuple[Address, ...]
    service: str
    login: Login
    sentinel_login: Login
    tls: Tls | None
    db: int
    prefix: bytes
    ttl_s: float | None
    threads: int
    is_threads_given: bool
    value_bytes_max: int
    request_cost_bytes: int
    connect_timeout_s: float
    is_read_only: bool
    is_cluster: bool | None

    @property
    def place(self) -> str:
        """The store in words, for messages; without a password."""
        where = ",".join(str(address) for address in self.addresses)
        if self.kind == "sentinel":
            return f"redis+sentinel://{where}/{self.service}/{self.db}"
        if self.kind == "cluster":
            return f"redis+cluster://{where}"
        if self.addresses[0].port == 0:
            return f"unix://{where}?db={self.db}"
        return f"{'redis' if self.tls is None else 'rediss'}://{where}/{self.db}"


def read_settings(url: StoreUrl) -> RedisSettings:
    """The settings of ``url``; raises :class:`ConfigurationError` naming what is not right."""
    values = url.options(OPTIONS)
    user, password, rest = _split_login(url.scheme, url.location)
    kind = _kind(url.scheme, values.optional("cluster", bool))
    addresses: tuple[Address, ...]
    if url.scheme == "unix":
        addresses, path = (Address(_socket_path(rest), 0),), ""
    else:
        hosts, _, path = rest.partition("/")
        addresses = _addresses(url.scheme, hosts, _SENTINEL_PORT if kind == "sentinel" else _PORT)
    service, db = _service_and_db(url.scheme, kind, path, values.optional("db", int))
    secret = _from_environment(url.scheme, "password_env", values)
    if secret is not None and password is not None:
        raise ConfigurationError(f"{url.scheme}: the password is given twice, in the URL and by password_env")
    threads = values.optional("threads", int)
    return RedisSettings(
        kind=kind,
        addresses=addresses,
        service=service,
        login=Login(user, password if secret is None else secret),
        sentinel_login=Login(None, _from_environment(url.scheme, "sentinel_password_env", values)),
        tls=_tls(url.scheme, values),
        db=db,
        prefix=_prefix(url.scheme, values.optional("prefix", str), kind),
        ttl_s=values.optional("ttl", float),
        threads=REDIS_THREADS if threads is None else threads,
        is_threads_given=threads is not None,
        value_bytes_max=min(values.get("max_value", int), REDIS_VALUE_BYTES_MAX),
        request_cost_bytes=values.get("request_cost", int),
        connect_timeout_s=values.get("connect_timeout", float),
        is_read_only=values.get("readonly", bool),
        is_cluster=True if kind == "cluster" else values.optional("cluster", bool),
    )


def _kind(scheme: str, is_cluster: bool | None) -> Kind:
    if scheme == "redis+sentinel":
        if is_cluster:
            raise ConfigurationError(f"{scheme}: sentinels watch single servers; leave cluster=1 out")
        return "sentinel"
    if scheme == "redis+cluster":
        if is_cluster is False:
            raise ConfigurationError(f"{scheme}: the scheme says cluster and the option cluster=0 does not")
        return "cluster"
    return "cluster" if is_cluster else "single"


def _split_login(scheme: str, location: str) -> tuple[str | None, str | None, str]:
    """User, password and the rest. A password may hold any character but must be percent-encoded."""
    if scheme == "unix":
        if location.startswith("/"):
            return None, None, location
        login, at, path = location.rpartition("@/")
        rest = f"/{path}" if at else location
    else:
        login, at, rest = location.rpartition("@")
    if not at:
        return None, None, location
    user, colon, password = login.partition(":")
    return user or None, password if colon else None, rest


def _socket_path(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ConfigurationError(
            "unix: what follows is not the absolute path of a socket; write unix:///run/redis/redis.sock"
        )
    return path


def _addresses(scheme: str, hosts: str, default_port: int) -> tuple[Address, ...]:
    found: list[Address] = []
    for text in hosts.split(","):
        host, colon, port = text.rpartition(":")
        if not colon or text.endswith("]"):
            host, port = text, str(default_port)
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigurationError(  # without the text, which may be a part of a password
                f"{scheme}: the address is not host or host:port; "
                "write '@', ':', '/', '?' and '#' in a password as %40, %3A, %2F, %3F and %23"
            )
        found.append(Address(host, int(port)))
    if len(found) > 1 and scheme not in ("redis+cluster", "redis+sentinel"):
        raise ConfigurationError(
            f"{scheme}: {len(found)} hosts are given; several need redis+cluster:// or redis+sentinel://"
        )
    return tuple(found)


def _service_and_db(scheme: str, kind: Kind, path: str, db: int | None) -> tuple[str, int]:
    service = ""
    if kind == "sentinel":
        service, _, path = path.partition("/")
        if not service:
            raise ConfigurationError(
                f"{scheme}: name the service that the sentinels watch, as in ://host/mymaster"
            )
    if path:
        if not path.isascii() or not path.isdigit():
            raise ConfigurationError(f"{scheme}: {path!r} is not the number of a database, as in ://host/0")
        if db is not None and db != int(path):
            raise ConfigurationError(f"{scheme}: the database is given twice, as {path} and as db={db}")
        db = int(path)
    if kind == "cluster" and db:
        raise ConfigurationError(f"{scheme}: a cluster has the database 0 only, not {db}")
    return service, db or 0


def _from_environment(scheme: str, option: str, values: OptionValues) -> str | None:
    name = values.optional(option, str)
    if name is None:
        return None
    if name not in os.environ:
        raise ConfigurationError(f"{scheme}: {option} names the variable {name!r}, which is not set")
    return os.environ[name]


def _tls(scheme: str, values: OptionValues) -> Tls | None:
    wanted = values.optional("tls", bool)
    if scheme in _TLS_SCHEMES and wanted is False:
        raise ConfigurationError(f"{scheme}: the scheme says TLS and the option tls=0 does not")
    if scheme not in _TLS_SCHEMES and not wanted:
        return None
    if scheme == "unix":
        raise ConfigurationError("unix: there is no TLS over a unix socket")
    files = [values.optional(name, str) for name in ("tls_ca", "tls_cert", "tls_key")]
    for path in files:
        if path is not None and not os.path.isfile(path):
            raise ConfigurationError(f"{scheme}: {path!r} is not a file")
    return Tls(values.get("tls_verify", bool), *files)


def _prefix(scheme: str, given: str | None, kind: Kind) -> bytes:
    text = DEFAULT_PREFIX if given is None else given
    if kind == "cluster" and "{" in text:
        raise ConfigurationError(
            f"{scheme}: the prefix {text!r} holds a brace: a hash tag would put every key on one node"
        )
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) > REDIS_PREFIX_BYTES_MAX:
        raise ConfigurationError(f"{scheme}: the prefix has more than {REDIS_PREFIX_BYTES_MAX} bytes")
    return encoded
