"""What an ``s3://`` URL says, typed, and how keys become keys of a bucket.

Credentials never stand in the URL: they come from the environment, a profile or the instance, as every
S3 tool takes them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, cast
from urllib.parse import urlsplit

from hicache_store.config import Option as UrlOption
from hicache_store.config import (
    StoreUrl,
    bool_option,
    choice_option,
    duration_option,
    int_option,
    redacted,
    size_option,
)
from hicache_store.connectors.base import META_PREFIX
from hicache_store.errors import ConfigurationError, NameFormatError
from hicache_store.layout.names import FORMAT
from hicache_store.limits import (
    MIB,
    S3_CONCURRENCY,
    S3_CONCURRENCY_MAX,
    S3_KEY_BYTES_MAX,
    S3_OPERATION_TIMEOUT_S,
    S3_PART_BYTES_MAX,
)

PROBE_PREFIX: Final = META_PREFIX + "probe/"
"""Keys written to find out what a server does; no listing of the store shows them."""

PROBE_KEY: Final = PROBE_PREFIX + "conditions"

Client = Literal["obstore", "boto3", "aiobotocore"]
Addressing = Literal["auto", "path", "virtual"]


def text_option(name: str, accepts: str) -> UrlOption:
    """An option taken as it is."""
    return UrlOption(name, str, accepts)


OPTIONS: Final = (
    text_option("endpoint", "the address of the server, such as http://127.0.0.1:9000"),
    text_option("region", "the name of a region"),
    text_option("profile", "the name of a profile of the AWS configuration files"),
    choice_option("addressing", "auto", ("auto", "path", "virtual")),
    choice_option("client", "obstore", ("obstore", "boto3", "aiobotocore")),
    bool_option("tls_verify", True),
    text_option("ca_file", "the path of a PEM file of certificate authorities"),
    bool_option("sign_payload", False),
    int_option("concurrency", S3_CONCURRENCY, 1, S3_CONCURRENCY_MAX),
    duration_option("operation_timeout", S3_OPERATION_TIMEOUT_S, 0.01),
    bool_option("readonly", False),
    bool_option("probe", True),
    size_option("request_cost", MIB),
)

_OWN_PARTS: Final = frozenset({FORMAT, META_PREFIX.partition("/")[0]})
"""What the keys of a store begin with: a store below such a part would lie among another one's keys, and
expire with its objects."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_PART = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*")


@dataclass(frozen=True, slots=True)
class S3Settings:
    """The options of one ``s3://`` URL. ``None`` leaves a choice to the environment."""

    bucket: str
    prefix: str
    endpoint: str | None
    region: str | None
    profile: str | None
    addressing: Addressing
    client: Client
    verifies_tls: bool
    ca_file: str | None
    signs_payload: bool
    concurrency: int
    operation_timeout_s: float
    is_read_only: bool
    probes: bool
    request_cost_bytes: int

    @property
    def place(self) -> str:
        """The store in words, for messages."""
        where = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.bucket}/{self.prefix}{where}"


def read_settings(url: StoreUrl) -> S3Settings:
    """The settings of ``url``; raises :class:`ConfigurationError` naming what is not right."""
    if "@" in url.location:
        raise ConfigurationError(
            "s3: credentials do not belong into the URL, where logs would show them; "
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or name a profile"
        )
    bucket, _, prefix = url.location.partition("/")
    if _BUCKET.fullmatch(bucket) is None:
        raise ConfigurationError(f"s3: {bucket!r} is not the name of a bucket; write s3://bucket/prefix")
    prefix = prefix.strip("/")
    if prefix and (_KEY.fullmatch(prefix) is None or len(prefix) > S3_KEY_BYTES_MAX // 2):
        raise ConfigurationError(
            f"s3: the prefix {prefix!r} is not made of parts of letters, digits, '.', '_' and '-' "
            f"joined by '/', at most {S3_KEY_BYTES_MAX // 2} characters together"
        )
    for part in prefix.split("/"):
        if part in _OWN_PARTS:
            raise ConfigurationError(
                f"s3: the prefix {prefix!r} has a part {part!r}, below which a store further up keeps its "
                "own keys; give the part another name"
            )
    values = url.options(OPTIONS)
    return S3Settings(
        bucket=bucket,
        prefix=f"{prefix}/" if prefix else "",
        endpoint=_endpoint(values.optional("endpoint", str)),
        region=values.optional("region", str),
        profile=values.optional("profile", str),
        addressing=cast(Addressing, values.get("addressing", str)),
        client=cast(Client, values.get("client", str)),
        verifies_tls=values.get("tls_verify", bool),
        ca_file=values.optional("ca_file", str),
        signs_payload=values.get("sign_payload", bool),
        concurrency=values.get("concurrency", int),
        operation_timeout_s=values.get("operation_timeout", float),
        is_read_only=values.get("readonly", bool),
        probes=values.get("probe", bool),
        request_cost_bytes=values.get("request_cost", int),
    )


def _endpoint(text: str | None) -> str | None:
    if text is None:
        return None
    parts = urlsplit(text)
    if parts.username is not None or parts.password is not None:
        raise ConfigurationError("s3: credentials do not belong into the endpoint")
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/") or parts.query:
        raise ConfigurationError(
            f"s3: endpoint={redacted(text)!r} is not like http://host:port or https://host"
        )
    return f"{parts.scheme}://{parts.netloc}"


def object_key(prefix: str, key: str) -> str:
    """The key of a bucket under which ``key`` is stored; :class:`NameFormatError` for no key.

    The grammar is that of the other connectors. Clients rewrite what lies outside it, each in its way.
    """
    if _KEY.fullmatch(key) is None:
        raise NameFormatError(
            f"{key[:80]!r} is not a key; use parts of letters, digits, '.', '_' and '-' joined by '/', "
            "none of them empty, '.' or '..'"
        )
    if len(prefix) + len(key) > S3_KEY_BYTES_MAX or len(max(key.split("/"), key=len)) > S3_PART_BYTES_MAX:
        raise NameFormatError(
            f"{key[:80]!r}... is too long: {len(prefix) + len(key)} bytes of {S3_KEY_BYTES_MAX}, parts of "
            f"at most {S3_PART_BYTES_MAX}"
        )
    return prefix + key
