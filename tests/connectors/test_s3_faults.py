"""What a server can do wrong: one item fails with a clear word, nothing hangs, and it passes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from s3_places import CLIENTS, open_s3_at

from hicache_store.clock import Deadline
from hicache_store.connectors.base import BufferSource, Outcome, Read, Status, Write
from hicache_store.connectors.s3 import S3Connector
from hicache_store.testing.probes import ProbeTarget, content, read_of, write_of
from hicache_store.testing.s3_server import Broken, Fault, Reply, S3Server, error_reply, etag, on_operations

KEY, OTHER = "v1/aa/kv.bad", "v1/bb/kv.good"
SIZE = 5_000
PATIENCE_S = 20.0
"""Far above what any call below may take, far below the limits that would end it otherwise."""


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")


@pytest.fixture(scope="module")
def module_server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture
def server(module_server: S3Server) -> S3Server:
    """One server for the module, so that a handle of the class can stay open."""
    module_server.plan = None
    module_server.objects.clear()
    return module_server


@pytest.fixture(scope="module", params=CLIENTS)
def handle(module_server: S3Server, request: pytest.FixtureRequest) -> Iterator[S3Connector]:
    """One handle for all faults of a client: each must leave it usable for the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "AK")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
        module_server.plan = None
        opened = open_s3_at(module_server.endpoint, request.param, operation_timeout="1s")
    yield opened
    opened.close()


@pytest.fixture
def connector(handle: S3Connector, server: S3Server) -> S3Connector:
    server.objects.update({f"store/{key}": content(key, SIZE) for key in (KEY, OTHER)})
    return handle


def soon() -> Deadline:
    return Deadline.after(60.0)


def read_both(connector: S3Connector) -> tuple[Outcome, ProbeTarget]:
    """The outcome of the bad object; the good one beside it must not suffer."""
    (bad, target), (good, beside) = read_of(KEY, SIZE), read_of(OTHER, SIZE)
    outcomes = connector.read_into([bad, good], soon())
    assert outcomes[1].status is Status.OK, outcomes[1]
    assert beside.delivered() == content(OTHER, SIZE)
    return outcomes[0], target


def assert_recovers(connector: S3Connector, server: S3Server) -> None:
    """Once the fault is over the same handle reads and writes as ever."""
    server.plan = None
    server.objects[f"store/{KEY}"] = content(KEY, SIZE)
    outcome, target = read_both(connector)
    assert outcome.status is Status.OK, outcome
    assert target.delivered() == content(KEY, SIZE)
    assert connector.sizes([KEY, OTHER], soon()) == [SIZE, SIZE]
    (written,) = connector.write_from([write_of("v1/cc/new", b"n" * 500)], soon())
    assert written.status is Status.OK, written


ANSWERS = {
    "301": (error_reply(301, "PermanentRedirect"), "redirected", False),
    "400": (error_reply(400, "BadRequest"), "", False),
    "403": (error_reply(403, "AccessDenied"), "access denied", False),
    "409": (error_reply(409, "OperationAborted"), "condition", False),
    "412": (error_reply(412, "PreconditionFailed"), "condition", False),
    "429": (error_reply(429, "TooManyRequests"), "slow down", True),
    "500": (error_reply(500, "InternalError"), "server failed", True),
    "503": (error_reply(503, "SlowDown", {"retry-after": "120"}), "slow down", True),
    "bucket": (error_reply(404, "NoSuchBucket"), "no such bucket", False),
    "200 with an error": (Reply(200, b"<Error><Code>InternalError</Code></Error>"), "", True),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a11_an_answer_that_is_an_error_fails_its_read(
    connector: S3Connector, server: S3Server, name: str
) -> None:
    """Status and body are judged by whoever awaits them: no buffer is handed out as read."""
    fault, words, is_transient = ANSWERS[name]
    server.plan = on_operations(fault, "GET", "HEAD", key=KEY)
    outcome, target = read_both(connector)
    assert outcome.status is Status.FAILED, outcome
    assert words in outcome.detail
    assert outcome.is_transient == is_transient
    assert target.events == []
    assert target.is_untouched
    assert connector.sizes([KEY, OTHER], soon()) == [None, SIZE]
    assert_recovers(connector, server)


@pytest.mark.parametrize("name", ANSWERS)
def test_a11_an_answer_that_is_an_error_fails_its_write(
    connector: S3Connector, server: S3Server, name: str
) -> None:
    """A failed PUT is never remembered as done."""
    fault, words, is_transient = ANSWERS[name]
    server.plan = on_operations(fault, "PUT", key="v1/dd")
    writes = [write_of("v1/dd/x", content(KEY, SIZE)), write_of("v1/ee/y", b"x" * 99)]
    outcomes = connector.write_from(writes, soon())
    assert outcomes[0].status is Status.FAILED, outcomes[0]
    assert outcomes[1].status is Status.OK
    if name not in ("409", "412"):  # which mean that another object is there, and there is none
        assert words in outcomes[0].detail
        assert outcomes[0].is_transient == is_transient
    server.plan = None
    assert connector.sizes(["v1/dd/x", "v1/ee/y"], soon()) == [None, 99]
    assert_recovers(connector, server)


@pytest.mark.parametrize(("times", "found"), [(1, [SIZE, SIZE]), (None, [None, SIZE])])
def test_a_look_up_outlives_one_broken_connection(
    connector: S3Connector, server: S3Server, times: int | None, found: list[int | None]
) -> None:
    """It would cut a whole prefix short. A missing object is told at once."""
    broken = Broken(before_headers=True, ending="reset")
    server.plan = on_operations(broken, "HEAD", times=times, key=KEY)
    assert connector.sizes([KEY, OTHER], soon()) == found
    server.plan = None
    before = server.count("HEAD")
    assert connector.sizes(["v1/ab/none"], soon()) == [None]
    assert server.count("HEAD") == before + 1
    assert_recovers(connector, server)


def test_d11_retry_after_is_handed_on(connector: S3Connector, server: S3Server) -> None:
    """The wait that a server asks for is the caller's to honour; obstore does not tell it."""
    server.plan = on_operations(ANSWERS["503"][0], "GET", "PUT")
    (read,) = connector.read_into([read_of(KEY, SIZE)[0]], soon())
    (write,) = connector.write_from([write_of("v1/dd/x", b"x" * 99)], soon())
    wanted = None if connector.settings.client == "obstore" else 120.0
    assert [read.retry_after_s, write.retry_after_s] == [wanted, wanted]
    assert connector.metrics.get("s3.fault.throttled") >= 2


BODIES = {
    "reset before the headers": Broken(before_headers=True, ending="reset"),
    "closed before the headers": Broken(before_headers=True, ending="close"),
    "reset in the body": Broken(keep=SIZE // 2, ending="reset"),
    "closed in the body": Broken(keep=SIZE // 2, ending="close"),
    "a longer body, declared": Broken(extra=10, declares=SIZE + 10),
    "a shorter body, declared": Broken(keep=SIZE - 10, declares=SIZE - 10),
    "a body without a length": Broken(declares=-1, ending="close"),
    "half a body without a length": Broken(keep=SIZE // 2, declares=-1, ending="close"),
    "silence instead of headers": Broken(before_headers=True, ending="stall"),
    "silence in the body": Broken(keep=SIZE // 2, ending="stall"),
    "a byte now and then": Broken(drips=True, ending="stall"),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("is_part", [False, True], ids=["whole", "part"])
def test_a31_a_body_that_is_not_the_object_fails_its_read(
    connector: S3Connector, server: S3Server, name: str, is_part: bool
) -> None:
    """Reset, cut off, too long, too short, without a length, stalled, dripping: never passed on."""
    fault = BODIES[name]
    server.plan = on_operations(fault, "GET", key=KEY)
    bad, target = read_of(KEY, SIZE)
    if is_part:
        target = ProbeTarget([(100, [SIZE - 100])])
        bad = Read(KEY, SIZE, target, [(100, SIZE)])
    good, beside = read_of(OTHER, SIZE)
    began = time.monotonic()
    outcomes = connector.read_into([bad, good], soon())
    assert time.monotonic() - began < PATIENCE_S
    assert not outcomes[0].is_ok, outcomes[0]
    assert outcomes[0].status in (Status.FAILED, Status.TIMED_OUT, Status.WRONG_SIZE)
    assert outcomes[0].detail
    assert outcomes[1].status is Status.OK
    assert beside.delivered() == content(OTHER, SIZE)
    assert target.events == []
    assert target.is_untouched
    assert_recovers(connector, server)


@pytest.mark.parametrize("name", [name for name in BODIES if "instead" in name or "before" in name])
def test_a_write_that_gets_no_answer_fails(connector: S3Connector, server: S3Server, name: str) -> None:
    """Whether it took effect is unknown, so it is not a success."""
    server.plan = on_operations(BODIES[name], "PUT", key="v1/dd")
    (outcome,) = connector.write_from([write_of("v1/dd/x", b"x" * 99)], soon())
    assert outcome.status in (Status.FAILED, Status.TIMED_OUT), outcome
    assert outcome.is_transient
    assert_recovers(connector, server)


LIES = {
    "ten bytes more": (100, SIZE + 10, f"bytes 100-{SIZE - 1}/{SIZE}"),
    "ten bytes fewer": (100, SIZE - 10, f"bytes 100-{SIZE - 1}/{SIZE}"),
    "another range": (0, SIZE - 100, f"bytes 0-{SIZE - 101}/{SIZE}"),
    "no range told": (100, SIZE, ""),
}


@pytest.mark.parametrize("name", LIES)
def test_a31_a_part_that_is_not_the_one_asked_for(
    connector: S3Connector, server: S3Server, name: str
) -> None:
    """Length and place of a part must be those of the request, whatever else is right."""
    start, stop, told = LIES[name]
    data = content(KEY, SIZE) + bytes(100)
    headers = {"etag": etag(content(KEY, SIZE)), "last-modified": "Mon, 02 Feb 2026 00:00:00 GMT"}
    if told:
        headers["content-range"] = told
    server.plan = on_operations(Reply(206, data[start:stop], headers), "GET", key=KEY)
    target = ProbeTarget([(100, [SIZE - 100])])
    (outcome,) = connector.read_into([Read(KEY, SIZE, target, [(100, SIZE)])], soon())
    assert outcome.status in (Status.FAILED, Status.TIMED_OUT), outcome
    assert target.events == []
    assert_recovers(connector, server)


def test_a_request_holds_memory_of_its_own(connector: S3Connector, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request left behind still sends must not be what the caller fills its memory with next."""
    held: list[memoryview] = []

    async def hang(_key: str, body: memoryview, _condition: object) -> None:
        held.append(body)
        await asyncio.Event().wait()

    monkeypatch.setattr(connector._engine.plane, "put", hang)
    memory = bytearray(content("v1/own", SIZE))
    write = Write("v1/own", SIZE, BufferSource.of(memory))
    assert connector.write_from([write], Deadline.after(0.2))[0].status is Status.TIMED_OUT
    memory[:] = b"\xee" * SIZE
    monkeypatch.undo()
    assert connector.write_from([write_of("v1/next", b"x" * SIZE)], soon())[0].status is Status.OK
    assert [bytes(body) for body in held] == [content("v1/own", SIZE)]


def test_a_body_longer_than_its_length_spoils_no_later_read(connector: S3Connector, server: S3Server) -> None:
    """Bytes behind the body belong to no answer; whoever gets the connection next must not take them."""
    server.plan = on_operations(Broken(extra=2_000), "GET", key=KEY)
    for _ in range(5):
        read, target = read_of(KEY, SIZE)
        (outcome,) = connector.read_into([read], soon())
        assert not outcome.is_ok or target.delivered() == content(KEY, SIZE)
        beside, other = read_of(OTHER, SIZE)
        (outcome,) = connector.read_into([beside], soon())
        assert not outcome.is_ok or other.delivered() == content(OTHER, SIZE)
    assert_recovers(connector, server)


def test_the_wrong_object_is_told_by_its_length(connector: S3Connector, server: S3Server) -> None:
    """The bytes of another object have another length; of the same length the sums would tell them."""
    data = content("another", SIZE - 1)
    server.plan = on_operations(Reply(200, data, {"etag": etag(data)}), "GET", key=KEY)
    outcome, target = read_both(connector)
    assert outcome.status is Status.WRONG_SIZE
    assert target.events == []
    assert_recovers(connector, server)


def test_ranges_of_two_versions_are_not_one_object(connector: S3Connector, server: S3Server) -> None:
    """Replaced between two ranges of one read: half old, half new would verify nowhere, or worse."""
    seen = threading.Barrier(2)

    def replace_under_the_read(request: object) -> Fault | None:
        if getattr(request, "operation", "") == "GET" and KEY in getattr(request, "key", ""):
            first = seen.wait(PATIENCE_S) == 0
            data = content(KEY, SIZE, variant=int(first))
            headers = {"etag": etag(data)}
            span = request.headers["range"].removeprefix("bytes=").split("-")  # type: ignore[attr-defined]
            start, stop = int(span[0]), int(span[1]) + 1
            headers["content-range"] = f"bytes {start}-{stop - 1}/{SIZE}"
            return Reply(206, data[start:stop], headers)
        return None

    server.plan = replace_under_the_read
    target = ProbeTarget([(0, [100]), (4_000, [1_000])])
    (outcome,) = connector.read_into([Read(KEY, SIZE, target, [(0, 100), (4_000, SIZE)])], soon())
    assert outcome.status is Status.FAILED
    assert "replaced" in outcome.detail
    assert outcome.is_transient
    assert target.events == []
    assert_recovers(connector, server)


def test_a_server_that_ignores_ranges_is_told(connector: S3Connector, server: S3Server) -> None:
    """The whole object in answer to a part is not that part."""
    server.ignores_ranges = True
    try:
        target = ProbeTarget([(100, [50])])
        (outcome,) = connector.read_into([Read(KEY, SIZE, target, [(100, 150)])], soon())
        assert outcome.status is Status.FAILED
        assert target.is_untouched
        outcome, _ = read_both(connector)
        assert outcome.status is Status.OK
    finally:
        server.ignores_ranges = False


def test_a_range_behind_the_end_is_a_wrong_size(connector: S3Connector, server: S3Server) -> None:
    """A truncated object has no such range: the object's length tells, not a refused request."""
    server.objects[f"store/{KEY}"] = content(KEY, 300)
    target = ProbeTarget([(4_000, [1_000])])
    (outcome,) = connector.read_into([Read(KEY, SIZE, target, [(4_000, SIZE)])], soon())
    assert outcome.status is Status.WRONG_SIZE
    assert "300" in outcome.detail
    assert outcome.version == etag(content(KEY, 300))


def test_d06_calls_return_at_their_deadline(connector: S3Connector, server: S3Server) -> None:
    """The deadline of the call counts, whatever the server does, and no thread stays behind."""
    for name in ("silence instead of headers", "silence in the body", "a byte now and then"):
        server.plan = on_operations(BODIES[name], "GET")
        read, target = read_of(KEY, SIZE)
        assert connector.read_into([read], Deadline.after(0.1))[0].status is Status.TIMED_OUT
        assert target.is_untouched
    server.plan = on_operations(BODIES["silence instead of headers"], "HEAD", "PUT", "BULK")
    (written,) = connector.write_from([write_of("v1/ee/x", b"x" * 99)], Deadline.after(0.1))
    assert written.status is Status.TIMED_OUT
    assert connector.sizes([KEY], Deadline.after(0.1)) == [None]
    # Another key: what was left behind may still be done when the server answers again.
    assert connector.delete(["v1/ee/y"], Deadline.after(0.1))[0].status is Status.TIMED_OUT
    assert_recovers(connector, server)


def test_d06_stalled_calls_leave_nothing_behind(connector: S3Connector, server: S3Server) -> None:
    """A hundred calls into silence: no more threads than before, and no target is touched later."""
    server.plan = on_operations(Broken(keep=10, ending="stall"), "GET", key=KEY)

    def stalled() -> ProbeTarget:
        read, target = read_of(KEY, SIZE)
        assert connector.read_into([read], Deadline.after(0.02))[0].status in (
            Status.TIMED_OUT,
            Status.REFUSED,
        )
        return target

    stalled()
    own = {thread for thread in threading.enumerate() if "s3" in thread.name and "server" not in thread.name}
    targets = [stalled() for _ in range(100)]
    threads = {t for t in threading.enumerate() if "s3" in t.name and "server" not in t.name}
    assert len(threads) <= len(own) + connector.settings.concurrency
    end = time.monotonic() + PATIENCE_S
    server.plan = None
    while time.monotonic() < end and not connector.read_into([read_of(KEY, SIZE)[0]], soon())[0].is_ok:
        time.sleep(0.05)  # threads of a blocking client come back at its own limit
    assert_recovers(connector, server)
    assert all(target.is_untouched for target in targets)


def test_a_late_put_is_whole_or_absent(connector: S3Connector, server: S3Server) -> None:
    """A PUT left behind at the deadline may appear, but only with the bytes given, never refilled ones."""
    size, release, arrived = 8_000_000, threading.Event(), threading.Event()

    def hold(method: str, target: str) -> None:
        if method == "PUT" and "/v1/late/x" in target:
            arrived.set()
            release.wait(PATIENCE_S)

    server.before_body = hold
    try:
        memory = bytearray(content("v1/late/x", size))
        write = Write("v1/late/x", size, BufferSource.of(memory))
        (outcome,) = connector.write_from([write], Deadline.after(0.7))
        assert arrived.is_set()
        assert outcome.status is Status.TIMED_OUT
        memory[:] = b"\xee" * size
        release.set()
        (outcome,) = connector.write_from([write_of("v1/after/x", b"x" * 99)], soon())
        assert outcome.status is Status.OK, outcome
    finally:
        release.set()
        server.before_body = lambda _method, _target: None
    late = server.objects.get("store/v1/late/x")
    assert late is None or late == content("v1/late/x", size)


def test_d24_garbage_on_a_reused_connection(connector: S3Connector, server: S3Server) -> None:
    """A server that answers the second request of a connection with nonsense costs one request."""
    read_both(connector)
    nonsense = Reply(200, b"", {"content-length": "7", "etag": '"x"'})
    server.plan = on_operations(nonsense, "GET", "PUT", times=2)
    connector.read_into([read_of(KEY, SIZE)[0]], Deadline.after(2.0))
    connector.write_from([write_of("v1/ff/x", b"x" * 99)], Deadline.after(2.0))
    assert_recovers(connector, server)


def test_e09_deletes_that_fail_are_told_one_by_one(connector: S3Connector, server: S3Server) -> None:
    """The status of a bulk delete says nothing of its keys: each has its own outcome."""
    keys = [f"v1/gg/{index:03d}" for index in range(100)]
    server.objects.update({f"store/{key}": b"x" for key in keys})
    rows = "".join(
        f"<Error><Key>store/{key}</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
        for key in keys[:3]
    )
    body = f'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{rows}</DeleteResult>'
    server.plan = on_operations(Reply(200, body.encode(), {"content-type": "application/xml"}), "BULK")
    outcomes = connector.delete(keys, soon())
    assert [outcome.is_ok for outcome in outcomes] == [False] * 3 + [True] * 97
    assert "AccessDenied" in outcomes[0].detail
