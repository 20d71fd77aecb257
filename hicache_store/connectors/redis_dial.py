"""Opening a connection: address, TLS, login and database, by redis-py.

The only module that imports redis-py, and only when a connection is opened. What a handshake needs is
old and well tested there; once it is done the bare socket is taken over, because redis-py copies every
value and cannot receive into given memory.
"""

from __future__ import annotations

import importlib.util
import socket
from typing import Any

from hicache_store.connectors.redis_settings import Address, Login, Tls
from hicache_store.errors import ConfigurationError


class DialError(OSError):
    """A connection that did not come about; ``is_refused`` when the server refused the login."""

    def __init__(self, text: str, is_refused: bool = False) -> None:
        super().__init__(text)
        self.is_refused = is_refused


def require_client() -> None:
    """Raise :class:`ConfigurationError` unless redis-py and hiredis are installed."""
    for module in ("redis", "hiredis"):
        if importlib.util.find_spec(module) is None:
            raise ConfigurationError(
                f"the Redis connector needs the module {module!r}; install 'hicache-store[redis]'"
            )


def dial(address: Address, login: Login, tls: Tls | None, db: int, timeout_s: float) -> socket.socket:
    """A connected socket, logged in, with the database selected, speaking version 2 of the protocol.

    ``timeout_s`` bounds each step of the handshake. Raises :class:`DialError`, which never tells a
    password.
    """
    from redis import exceptions  # noqa: PLC0415

    connection = _connection(address, login, tls, db, timeout_s)
    try:
        connection.connect()
    except exceptions.AuthenticationError as error:
        raise DialError(f"{address} refuses the login: {error}", is_refused=True) from None
    except exceptions.ResponseError as error:
        is_refused = str(error).startswith(("NOAUTH", "WRONGPASS", "NOPERM", "ERR AUTH"))
        raise DialError(f"{address} refuses the connection: {error}", is_refused) from None
    except (exceptions.RedisError, OSError, ValueError) as error:
        raise DialError(f"{address} cannot be reached: {error}") from None
    taken: socket.socket = connection._sock
    connection._sock = None
    return taken


def _connection(address: Address, login: Login, tls: Tls | None, db: int, timeout_s: float) -> Any:
    from redis import connection  # noqa: PLC0415
    from redis.backoff import NoBackoff  # noqa: PLC0415
    from redis.retry import Retry  # noqa: PLC0415

    classes: Any = connection
    common: dict[str, Any] = {
        "db": db,
        "username": login.user,
        "password": login.password,
        "socket_timeout": timeout_s,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    if address.port == 0:
        return classes.UnixDomainSocketConnection(path=address.host, **common)
    common |= {"host": address.host, "port": address.port, "socket_connect_timeout": timeout_s}
    if tls is None:
        return classes.Connection(**common)
    return classes.SSLConnection(
        ssl_cert_reqs="required" if tls.verifies else "none",
        ssl_check_hostname=tls.verifies,
        ssl_ca_certs=tls.authorities,
        ssl_certfile=tls.certificate,
        ssl_keyfile=tls.key,
        **common,
    )
