from __future__ import annotations

import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hicache_store.config import (
    bool_option,
    choice_option,
    duration_option,
    int_option,
    parse_bool,
    parse_duration,
    parse_size,
    parse_url,
    read_options,
    redacted,
    size_option,
)
from hicache_store.errors import ConfigurationError, HicacheError

OPTIONS = (
    size_option("quota", 2**30, minimum=4_096),
    size_option("floor"),
    duration_option("ttl", minimum=1.0),
    duration_option("grace", 0.5),
    int_option("threads", 4, 1, 64),
    int_option("depth", None, 0, 9),
    bool_option("fsync", False),
    choice_option("io", "auto", ("auto", "direct", "bounce")),
)


def read(query: str):
    return parse_url(f"file:///root?{query}" if query else "file:///root").options(OPTIONS)


def refusal(query: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        read(query)
    return str(caught.value)


def test_what_is_missing_has_its_default():
    values = read("")
    assert values.get("quota", int) == 2**30
    assert values.get("grace", float) == 0.5
    assert values.get("threads", int) == 4
    assert values.get("fsync", bool) is False
    assert values.get("io", str) == "auto"
    for name, kind in (("floor", int), ("ttl", float), ("depth", int)):
        assert values.optional(name, kind) is None
        with pytest.raises(ConfigurationError, match=f"option {name} has no value of type {kind.__name__}"):
            values.get(name, kind)


def test_what_is_given_is_typed():
    values = read("quota=10GiB&floor=0&ttl=12h&grace=250ms&threads=64&depth=0&fsync=yes&io=bounce")
    assert values.get("quota", int) == values.optional("quota", int) == 10 * 2**30
    assert values.get("floor", int) == 0
    assert values.get("ttl", float) == 43_200.0
    assert values.get("grace", float) == 0.25
    assert values.get("threads", int) == 64
    assert values.optional("depth", int) == 0
    assert values.get("fsync", bool) is True
    assert values.get("io", str) == "bounce"


def test_asking_for_another_type_is_refused():
    with pytest.raises(ConfigurationError, match="option io has no value of type int"):
        read("").get("io", int)


WRONG = {
    "quota": ["", "lots", "-1", "-4096", "4095B", "1KiB", "0", "nan", "inf", "1e400", "5 apples", "0x1000"],
    "floor": ["-1", "none", "1.5.5", "MiB"],
    "ttl": ["", "soon", "-5", "0", "999ms", "1 fortnight", "nan", "inf", "1e999d", "1e300s", "366d"],
    "grace": ["-0.1", "-1ms"],
    "threads": ["", "0", "-1", "65", "four", "1.0", "1e1", "4k"],
    "depth": ["-1", "10"],
    "fsync": ["", "2", "maybe", "truee", "-1"],
    "io": ["", "Direct", "auto,direct", "1"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRONG.items() for text in texts])
def test_what_is_not_accepted_is_named_with_the_way_out(name, text):
    message = refusal(f"{name}={text}")
    assert message.startswith(f"file: option {name}={text!r} is not accepted; give ")
    option = next(option for option in OPTIONS if option.name == name)
    assert option.accepts in message


@pytest.mark.parametrize(
    ("query", "value"),
    [("quota=4096B", 4_096), ("quota=4KiB", 4_096), ("threads=1", 1), ("ttl=1s", 1.0), ("ttl=1000ms", 1.0),
     ("ttl=365d", 31_536_000.0)],
)  # fmt: skip
def test_bounds_are_inclusive(query, value):
    name = query.partition("=")[0]
    assert read(query).get(name, type(value)) == value


def test_the_accepted_range_is_in_words():
    assert "a size such as 512MiB, at least 4096" in refusal("quota=1B")
    assert "a time such as 500ms or 12h, at least 1 s and at most 365d" in refusal("ttl=0")
    assert "a whole number from 1 to 64" in refusal("threads=65")
    assert "1 or 0" in refusal("fsync=x")
    assert "one of auto, direct, bounce" in refusal("io=x")


@pytest.mark.parametrize(
    ("given", "closest"),
    [("qouta", "quota"), ("thread", "threads"), ("fsinc", "fsync"), ("TTL", None), ("zzz", None), ("", None)],
)
def test_an_unknown_option_names_the_closest(given, closest):
    message = refusal(f"{given}=1")
    assert f"unknown option {given!r}" in message
    if closest:
        assert message.endswith(f"did you mean {closest}?")
    else:
        assert message.endswith("known: depth, floor, fsync, grace, io, quota, threads, ttl")


def test_an_option_given_twice_is_refused():
    assert "option quota is given twice" in refusal("quota=1GiB&quota=1GiB")
    assert "option fsync is given twice" in refusal("fsync=1&io=auto&fsync=0")


@pytest.mark.parametrize(
    "query", ["quota", "quota=1GiB&", "&", "=", "quota=1GiB&fsync", "quota=1GiB;io=auto"]
)
def test_a_query_that_is_not_pairs_is_refused(query):
    with pytest.raises(ConfigurationError):
        read(query)


def test_a_connector_without_options_takes_none():
    read_options("mine", [], [])
    with pytest.raises(ConfigurationError, match=r"mine: unknown option 'x'; known: $"):
        read_options("mine", [("x", "1")], [])


@pytest.mark.parametrize(
    ("url", "scheme", "location", "query"),
    [
        ("file:///a/b", "file", "/a/b", ()),
        ("file:/a/b", "file", "/a/b", ()),
        ("file:///a%20b/%C3%BC?quota=1%20GiB", "file", "/a b/\u00fc", (("quota", "1 GiB"),)),
        ("file:///a%3Fb%23c?ttl=1h", "file", "/a?b#c", (("ttl", "1h"),)),
        ("memory:", "memory", "", ()),
        ("memory://", "memory", "", ()),
        ("memory://Name", "memory", "Name", ()),
        ("memory:?ttl=1h&quota=", "memory", "", (("ttl", "1h"), ("quota", ""))),
        ("S3://bucket/prefix/x?region=eu", "s3", "bucket/prefix/x", (("region", "eu"),)),
        ("redis://user@host:6379/0", "redis", "user@host:6379/0", ()),
    ],
)
def test_urls_split(url, scheme, location, query):
    parsed = parse_url(url)
    assert (parsed.scheme, parsed.location, parsed.query) == (scheme, location, query)


@pytest.mark.parametrize("text", ["", "/absolute", "relative/path", "//host/path", "?quota=1B", "1:x", ":x"])
def test_a_text_without_scheme_is_refused(text):
    with pytest.raises(ConfigurationError, match=re.escape(repr(text))):
        parse_url(text)


@pytest.mark.parametrize("url", ["file:///a#b?quota=1GiB", "file:///a?quota=1GiB#", "memory:#x"])
def test_a_fragment_is_refused_because_it_would_swallow_the_options(url):
    with pytest.raises(ConfigurationError, match=r"write it as %23"):
        parse_url(url)


SECRET = "hunter2"

WITH_SECRETS = [
    ("redis://me@corp.com:hunter2@host/0", "redis://me%40corp.com:***@host/0"),
    ("redis://me%40corp.com:hunter2@host/0", "redis://me%40corp.com:***@host/0"),
    ("redis://a%2Fb:hunter2@host/0", "redis://a%2Fb:***@host/0"),
    ("redis://a/b:hunter2@host/0", "redis://a%2Fb:***@host/0"),
    ("redis://u:x/hunter2@host", "redis://u:***@host"),
    ("redis://u:hunter2%40host", "redis://u:***@host"),
    ("redis://u:x@y:hunter2@[::1]:7/0", "redis://u:***@[::1]:7/0"),
    ("redis:u:hunter2@host", "redis:u:***@host"),
    ("redis://hunter2@host", "redis://***@host"),
    ("redis://h,u:hunter2@h2", "redis://h%2Cu:***@h2"),
    ("redis://u:hun\nter2@h", "redis://u:***@h"),
    (" redis://u:hunter2@h", "redis://u:***@h"),
    ("redis://u:a?hunter2@h", "redis:***"),
    ("redis://u:hunter2@[::1", "redis://u:***@[::1"),
    ("redis://u:\u2100hunter2@h\u2100", "redis://u:***@h%E2%84%80"),
    ("unix://u:hunter2@/run/r.sock", "unix://u:***@/run/r.sock"),
    ("redis://h?password=hunter2&db=1", "redis://h?password=***&db=1"),
    ("redis://h?pass%77ord=hunter2", "redis://h?pass%77ord=***"),
    ("redis://h?u:hunter2%40h=1", "redis://h?***"),
    ("file://u:hunter2@h/x", "file://u:***@h/x"),
    ("s3://b?endpoint=http%3A%2F%2Fu%3Ahunter2%40h%3A9/", "s3://b?endpoint=http://u:***@h:9/"),
    (
        "layered:?fast=redis%3A%2F%2Fu%3Ahunter2%40h&slow=memory:",
        "layered:?fast=redis://u:***@h&slow=memory:",
    ),
    ("layered:?fast=hunter2%40h", "layered:?fast=***"),
    ("layered:?fast=redis://h?password=hunter2", "layered:?fast=redis://h?password=***"),
    ("//u:hunter2@h", "***"),
    ("u:hunter2@h", "u:***@h"),
]


@pytest.mark.parametrize(("url", "shown"), WITH_SECRETS)
def test_no_text_of_a_url_holds_a_password(url, shown):
    """Neither a redacted one, nor what stands for a parsed one, nor the refusal of one."""
    assert redacted(url) == shown
    for text in (url, f"{url}#x", f"{url}#", f"{url}&quota", url.replace("://", "", 1)):
        try:
            said = repr(parse_url(text))
        except ConfigurationError as error:
            said = str(error)
        assert SECRET not in said.replace("\n", ""), text


@pytest.mark.parametrize(
    "url",
    ["file:///srv/a@b:c/kv?quota=1GiB", "memory:", "redis://h:6379/0?ttl=1h&password_env=NAME",
     "unix:///run/r@x.sock?db=1", "s3://bucket/a%20b", "not a url", "file:///a%3Fb"],
)  # fmt: skip
def test_what_holds_no_secret_is_shown_as_it_is(url):
    assert redacted(url) == url


def test_a_parsed_url_shows_its_scheme_and_the_names_of_its_options():
    assert repr(parse_url("redis://h/0?ttl=1h&db=3")) == "StoreUrl(scheme='redis', options=['ttl', 'db'])"


def test_a_url_that_cannot_be_split_is_refused():
    with pytest.raises(ConfigurationError, match="is not a store URL: Invalid IPv6 URL"):
        parse_url("s3://[half/bucket")


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("0", 0), ("0.0", 0), ("1B", 1), ("512b", 512), ("1k", 1_000), ("1kB", 1_000), ("1KiB", 1_024),
        ("1.5 MiB", 1_572_864), (" 2 GB ", 2 * 10**9), ("3TiB", 3 * 2**40),
        ("1e3b", 1_000), ("0.5kib", 512), ("7t", 7 * 10**12),
    ],
)  # fmt: skip
def test_sizes(text, bytes_):
    assert parse_size(text) == bytes_


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("0.0", 0.0),
        ("30s", 30.0),
        ("1.5s", 1.5),
        ("500ms", 0.5),
        ("2m", 120.0),
        ("12 h", 43_200.0),
        ("7d", 604_800.0),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("option", "text", "way_out"),
    [
        (size_option("quota"), "4096", "give a unit, 4096B if you mean bytes"),
        (size_option("quota"), "4", "give a unit, 4GiB, or 4B if you mean bytes"),
        (duration_option("ttl"), "7", "give a unit, 7d, or 7s if you mean seconds"),
        (duration_option("ttl"), "0.5 ", "give a unit, 0.5d, or 0.5s if you mean seconds"),
    ],
)
def test_a_number_without_a_unit_is_refused_with_the_way_out(option, text, way_out):
    """Read as bytes or seconds, a quota of 4 or a lifetime of 7 would empty a store."""
    with pytest.raises(ConfigurationError) as refused:
        read_options("file", [(option.name, text)], [option])
    assert str(refused.value) == f"file: option {option.name}={text!r} is not accepted; {way_out}"
    assert not read_options("file", [(option.name, "0")], [option]).get(option.name, object)


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_true(text):
    assert parse_bool(text) is True


@pytest.mark.parametrize("text", ["0", "false", "No", "off"])
def test_false(text):
    assert parse_bool(text) is False


@given(st.one_of(st.text(max_size=20), st.from_regex(r"[0-9.e+-]{1,6} ?[a-z]{0,3}", fullmatch=True)))
@example("-1")
@example("1e308d")
@example("1e308tib")
def test_any_text_is_a_number_or_a_value_error(text):
    """Nothing else comes out: no other exception, no negative, no infinity."""
    for parse in (parse_size, parse_duration):
        try:
            value = parse(text)
        except (ValueError, OverflowError):
            continue
        assert math.isfinite(value)
        assert value >= 0


@given(st.integers(0, 2**50))
def test_whole_bytes_survive_any_way_of_writing_them(size):
    assert parse_size(f"{size} B") == parse_size(f"{size}b") == size
    assert parse_size(f"{size}KiB") == size * 1_024


def test_refusals_are_errors_of_the_package():
    with pytest.raises(HicacheError):
        parse_url("nothing")
    with pytest.raises(ValueError, match="not a store URL"):
        parse_url("nothing")
