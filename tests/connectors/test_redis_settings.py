"""What a Redis URL may say, and that no text ever tells a password."""

from __future__ import annotations

import importlib.util

import pytest

from hicache_store.config import parse_url, redacted
from hicache_store.connectors.redis_settings import Address, RedisSettings, read_settings
from hicache_store.connectors.registry import known_schemes, open_connector
from hicache_store.errors import ConfigurationError


def settings(url: str) -> RedisSettings:
    return read_settings(parse_url(url))


@pytest.mark.parametrize(
    ("url", "kind", "addresses", "place"),
    [
        ("redis://h", "single", [("h", 6379)], "redis://h:6379/0"),
        ("redis://h:7/3", "single", [("h", 7)], "redis://h:7/3"),
        ("redis://h?db=3", "single", [("h", 6379)], "redis://h:6379/3"),
        ("rediss://h", "single", [("h", 6379)], "rediss://h:6379/0"),
        ("valkeys://h", "single", [("h", 6379)], "rediss://h:6379/0"),
        ("redis://h?tls=1", "single", [("h", 6379)], "rediss://h:6379/0"),
        ("redis://[::1]:7", "single", [("::1", 7)], "redis://[::1]:7/0"),
        ("redis://[::1]", "single", [("::1", 6379)], "redis://[::1]:6379/0"),
        ("unix:///run/r.sock?db=2", "single", [("/run/r.sock", 0)], "unix:///run/r.sock?db=2"),
        ("unix://u:p@/run/a@b.sock", "single", [("/run/a@b.sock", 0)], "unix:///run/a@b.sock?db=0"),
        ("redis+cluster://a:1,b:2,c", "cluster", [("a", 1), ("b", 2), ("c", 6379)], "redis+cluster://a:1,b:2,c:6379"),
        ("redis://a?cluster=1", "cluster", [("a", 6379)], "redis+cluster://a:6379"),
        (
            "redis+sentinel://a,b:5/main/2",
            "sentinel",
            [("a", 26379), ("b", 5)],
            "redis+sentinel://a:26379,b:5/main/2",
        ),
    ],
)  # fmt: skip
def test_addresses(url: str, kind: str, addresses: list[tuple[str, int]], place: str) -> None:
    found = settings(url)
    assert found.kind == kind
    assert found.addresses == tuple(Address(*each) for each in addresses)
    assert found.place == place


@pytest.mark.parametrize(
    ("url", "user", "password"),
    [
        ("redis://h", None, None),
        ("redis://:secret@h", None, "secret"),
        ("redis://me:secret@h", "me", "secret"),
        ("redis://me@h", "me", None),
        ("redis://me:@h", "me", ""),
        ("redis://me:s%40%2F%3A%3F%23%25@h/1", "me", "s@/:?#%"),
        ("redis://me:s/@cret@h/1", "me", "s/@cret"),
        ("unix://:secret@/run/r.sock", None, "secret"),
        ("redis+sentinel://:secret@h/main", None, "secret"),
    ],
)
def test_logins(url: str, user: str | None, password: str | None) -> None:
    found = settings(url)
    assert (found.login.user, found.login.password) == (user, password)
    if password:
        assert password not in repr(found)
        assert password not in found.place
        assert password not in repr(parse_url(url))
        assert redacted(url).count("***") == 1


def test_a_password_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_PASSWORD", "secret")
    assert settings("redis://h?password_env=CACHE_PASSWORD").login.password == "secret"
    found = settings("redis+sentinel://h/main?sentinel_password_env=CACHE_PASSWORD")
    assert (found.login.password, found.sentinel_login.password) == (None, "secret")
    with pytest.raises(ConfigurationError, match="given twice"):
        settings("redis://:other@h?password_env=CACHE_PASSWORD")
    with pytest.raises(ConfigurationError, match="'NO_SUCH_VARIABLE', which is not set"):
        settings("redis://h?password_env=NO_SUCH_VARIABLE")


def test_options() -> None:
    found = settings("redis://h?prefix=a%2Fb&ttl=2h&threads=9&max_value=8MiB&request_cost=1MiB&readonly=1")
    assert (found.prefix, found.ttl_s, found.threads, found.value_bytes_max) == (b"a/b", 7200.0, 9, 8 << 20)
    assert found.is_read_only
    assert found.is_cluster is None
    assert settings("redis://h").prefix == b"hicache:"
    assert settings("redis://h?prefix=").prefix == b""
    assert settings("redis://h?max_value=4GiB").value_bytes_max < 512 << 20


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://", "not host or host:port"),
        ("redis://h:0", "not host or host:port"),
        ("redis://h:65536", "not host or host:port"),
        ("redis://a,b", "several need redis"),
        ("redis://h/x", "'x' is not the number of a database"),
        ("redis://h/1?db=2", "given twice, as 1 and as db=2"),
        ("redis+cluster://h/1", "a cluster has the database 0 only, not 1"),
        ("redis+cluster://h?cluster=0", "the option cluster=0 does not"),
        ("redis+cluster://h?prefix=%7Bx%7D", "holds a brace"),
        ("redis+sentinel://h", "name the service"),
        ("redis+sentinel://h/main?cluster=1", "leave cluster=1 out"),
        ("rediss://h?tls=0", "the option tls=0 does not"),
        ("rediss://h?tls_ca=/no/such.pem", "'/no/such.pem' is not a file"),
        ("unix://relative/path", "not the absolute path"),
        ("unix:///run/r.sock?tls=1", "no TLS over a unix socket"),
        ("redis://h?ttl=0.5s", "at least 1 s"),
        ("redis://h?prefx=a", "did you mean prefix"),
        ("redis://h?prefix=" + "x" * 1025, "more than 1024 bytes"),
    ],
)
def test_what_cannot_work_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        settings(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:sec?ret@h/0",
        "redis://me:sec#ret@h/0",
        "redis://me:[secret@h/0",
        "redis://me:sec/ret",
        "redis://me:secret@h:port/0",
        "redis://me:secret@h/x",
        "redis://me:secret@h?nothing=1",
        "unix://me:secret@relative",
        "redis+sentinel://me:secret@h",
    ],
)
def test_a_refused_url_does_not_tell_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings(url)
    for text in (str(caught.value), repr(caught.value), repr(caught.value.__cause__)):
        assert "sec" not in text.replace("second", "")
        assert "ret@" not in text


def test_every_scheme_is_known() -> None:
    wanted = {"redis", "rediss", "redis+cluster", "redis+sentinel", "unix", "valkey", "valkeys"}
    assert wanted <= set(known_schemes())


@pytest.mark.parametrize("missing", ["redis", "hiredis"])
def test_a_client_that_is_not_installed_is_told_with_its_extra(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> object:
        return None if name == missing else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigurationError, match=rf"'{missing}'; install 'hicache-store\[redis\]'"):
        open_connector("redis://127.0.0.1:1")
