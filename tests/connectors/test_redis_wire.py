"""The protocol on one connection: deadlines, unclean connections, replies that are none."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_store.clock import Deadline
from hicache_store.connectors.redis_channel import Channel, PlainChannel, open_channel
from hicache_store.connectors.redis_topology import key_slot
from hicache_store.connectors.redis_wire import ErrorReply, ProtocolError, Wire, command
from hicache_store.testing.certificates import Certificates

SOON = 30.0


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def tls_pair(certificates: Certificates) -> tuple[socket.socket, socket.socket]:
    near, far = tcp_pair()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificates.certificate, certificates.key)
    client = ssl.create_default_context(cafile=certificates.authority)
    wrapped: list[socket.socket] = []
    thread = threading.Thread(target=lambda: wrapped.append(server.wrap_socket(far, server_side=True)))
    thread.start()
    near = client.wrap_socket(near, server_hostname="localhost")
    thread.join(SOON)
    return near, wrapped[0]


@pytest.fixture(params=["tcp", "unix", "tls"])
def pair(
    request: pytest.FixtureRequest, certificates: Certificates
) -> Iterator[tuple[Channel, socket.socket]]:
    """A channel and the socket at its other end."""
    if request.param == "tls":
        near, far = tls_pair(certificates)
    else:
        near, far = tcp_pair() if request.param == "tcp" else socket.socketpair()
    yield open_channel(near), far
    near.close()
    far.close()


def soon() -> Deadline:
    return Deadline.after(SOON)


def shortly() -> Deadline:
    return Deadline.after(0.1)


Pair = tuple[Channel, socket.socket]


def test_bytes_pass_whole_and_in_order(pair: Pair) -> None:
    channel, far = pair
    pieces = [
        b"a" * 10,
        b"",
        b"b" * 700_000,
        b"c" * 300_000,
        b"d",
        *[bytes([i % 256]) * 3 for i in range(2_000)],
    ]
    whole = b"".join(pieces)

    def echo() -> None:
        received = bytearray()
        while len(received) < len(whole):
            received += far.recv(1 << 20)
        far.sendall(received)

    thread = threading.Thread(target=echo)
    thread.start()
    channel.send([memoryview(piece) for piece in pieces], soon())
    back = [bytearray(len(piece)) for piece in reversed(pieces)]
    channel.receive([memoryview(each) for each in back], soon())
    thread.join(SOON)
    assert b"".join(back) == whole


def test_silence_ends_at_the_deadline(pair: Pair) -> None:
    channel, _ = pair
    memory = memoryview(bytearray(100))
    with pytest.raises(TimeoutError):
        channel.receive([memory], shortly())
    with pytest.raises(TimeoutError):
        channel.receive_some(memory, shortly())
    with pytest.raises(TimeoutError):
        channel.receive([memory], Deadline.after(-1.0))


def test_a_drip_ends_at_the_deadline(pair: Pair) -> None:
    """A limit a read would let a byte every few milliseconds go on for hours."""
    channel, far = pair
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.02):
            far.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            channel.receive([memoryview(bytearray(1 << 20))], Deadline.after(0.3))
    finally:
        stop.set()
        thread.join(SOON)


def test_a_peer_that_sips_ends_at_the_deadline(pair: Pair) -> None:
    """Sending too: the peer takes a little every now and then."""
    channel, far = pair
    stop = threading.Event()

    def sip() -> None:
        while not stop.wait(0.02):
            far.recv(10_000)

    thread = threading.Thread(target=sip)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            channel.send([memoryview(bytes(64 << 20))], Deadline.after(0.3))
    finally:
        stop.set()
        thread.join(SOON)


def test_the_end_of_the_connection_is_an_error(pair: Pair) -> None:
    channel, far = pair
    far.sendall(b"only this")
    far.close()
    memory = bytearray(9)
    channel.receive([memoryview(memory)], soon())
    assert memory == b"only this"
    with pytest.raises(OSError, match=r".") as caught:
        channel.receive([memoryview(memory)], soon())
    assert not isinstance(caught.value, TimeoutError)


def test_an_interrupted_channel_wakes_whoever_waits(pair: Pair) -> None:
    channel, _ = pair
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            channel.receive([memoryview(bytearray(10))], soon())
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    channel.interrupt()
    thread.join(SOON)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_freshness(pair: Pair) -> None:
    channel, far = pair
    assert channel.is_fresh()
    far.close()
    for _ in range(1_000):
        if not channel.is_fresh():
            break
        threading.Event().wait(0.01)
    assert not channel.is_fresh()


def test_a_plain_channel_with_unread_bytes_is_not_fresh() -> None:
    near, far = socket.socketpair()
    far.sendall(b"+late\r\n")
    assert not PlainChannel(near).is_fresh()
    near.close()
    far.close()


# -- the wire ------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    near, far = socket.socketpair()
    yield Wire(PlainChannel(near)), far
    near.close()
    far.close()


Ends = tuple[Wire, socket.socket]


def test_commands_are_counted_words() -> None:
    assert command(b"SET", b"", b"a\r\nb") == b"*3\r\n$3\r\nSET\r\n$0\r\n\r\n$4\r\na\r\nb\r\n"


def test_short_replies_of_every_kind(ends: Ends) -> None:
    wire, far = ends
    far.sendall(b"+OK\r\n:-7\r\n$-1\r\n$0\r\n\r\n-ERR no\r\n*2\r\n:1\r\n$1\r\nx\r\n*-1\r\n")
    found = wire.ask(b"", 7, soon())
    assert found == [b"OK", -7, None, b"", ErrorReply("ERR no"), [1, b"x"], None]
    assert wire.is_clean


def test_a_value_lands_in_place_with_its_version(ends: Ends) -> None:
    wire, far = ends
    body, version = bytes(range(256)) * 40, b"v" * 16
    far.sendall(b"$%d\r\n%b%b\r\n:3\r\n" % (len(body) + 16, body, version))
    wire.send([b""], 2, soon())
    assert wire.head(soon()) == ("$", len(body) + 16, str(len(body) + 16))
    memory = [bytearray(1), bytearray(5_000), bytearray(len(body) - 5_001)]
    assert wire.fill_and_version([memoryview(each) for each in memory], soon()) == version.hex()
    assert b"".join(memory) == body
    assert not wire.is_clean
    assert wire.head(soon()).number == 3
    assert wire.is_clean


def test_a_wire_that_was_cut_is_never_clean(ends: Ends) -> None:
    wire, far = ends
    wire.send([b""], 1, soon())
    far.sendall(b"$100\r\nonly some of it")
    wire.head(soon())
    with pytest.raises(TimeoutError):
        wire.fill_and_version([memoryview(bytearray(84))], shortly())
    far.sendall(b"x" * 100)
    assert not wire.is_clean
    for use in (lambda: wire.skip_rest(soon()), lambda: wire.head(soon())):
        with pytest.raises(ProtocolError):
            use()


def test_a_request_that_was_cut_makes_unclean() -> None:
    near, far = socket.socketpair()
    wire = Wire(PlainChannel(near))
    with pytest.raises(TimeoutError):
        wire.send([bytes(64 << 20)], 0, shortly())
    assert not wire.is_clean
    with pytest.raises(ProtocolError):
        wire.send([b"more"], 0, soon())
    near.close()
    far.close()


def test_a_reply_that_nobody_waits_for_makes_unclean(ends: Ends) -> None:
    wire, far = ends
    far.sendall(b":1\r\n:2\r\n")
    with pytest.raises(ProtocolError, match="more than was asked for"):
        wire.ask(b"", 1, soon())
    assert not wire.is_clean
    with pytest.raises(ProtocolError, match="no reply is due"):
        wire.head(soon())


@pytest.mark.parametrize(
    "line",
    [b"nonsense\r\n", b"$\r\n", b"$abc\r\n", b"$-2\r\n", b"*-5\r\n", b":x\r\n", b"!3\r\n", b"x" * 5_000],
)
def test_lines_that_begin_no_reply(ends: Ends, line: bytes) -> None:
    wire, far = ends
    far.sendall(line)
    wire.send([b""], 1, soon())
    with pytest.raises(ProtocolError):
        wire.head(soon())


def test_a_value_without_its_end(ends: Ends) -> None:
    wire, far = ends
    far.sendall(b"$16\r\n0123456789abcdefXX")
    wire.send([b""], 1, soon())
    wire.head(soon())
    with pytest.raises(ProtocolError, match="does not end"):
        wire.version(soon())


@given(st.binary(max_size=200), st.integers(0, 64))
def test_no_bytes_make_a_wire_lie(noise: bytes, length: int) -> None:
    """Whatever a server sends: a value of the announced length, another reply, or an error."""
    near, far = socket.socketpair()
    try:
        wire = Wire(PlainChannel(near))
        far.sendall(noise)
        far.shutdown(socket.SHUT_WR)
        wire.send([b""], 1, soon())
        try:
            head = wire.head(soon())
            if head.kind == "$" and head.number == length + 16:
                memory = bytearray(length)
                version = wire.fill_and_version([memoryview(memory)], soon())
                whole = b"$%d\r\n%b%b\r\n" % (length + 16, memory, bytes.fromhex(version))
                assert noise.startswith(whole)
                assert wire.is_clean == (len(noise) == len(whole) or not wire._stop - wire._start)
        except OSError:
            pass
    finally:
        near.close()
        far.close()


@pytest.mark.parametrize(
    ("key", "same_as"),
    [
        (b"{user}.a", b"user"),
        (b"a{user}b{other}", b"user"),
        (b"a{}b{user}", None),
        (b"a{b", None),
        (b"{{x}}", b"{x"),
    ],
)
def test_hash_tags(key: bytes, same_as: bytes | None) -> None:
    import binascii  # noqa: PLC0415

    whole = binascii.crc_hqx(key, 0) % 16_384
    assert key_slot(key) == (whole if same_as is None else key_slot(same_as))


def test_the_slot_of_the_specification() -> None:
    """The check value of CRC16/XMODEM: "123456789" gives 0x31C3."""
    assert key_slot(b"123456789") == 0x31C3
