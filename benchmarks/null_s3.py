"""An S3 server that stores nothing, to measure clients by: ``python -m benchmarks.null_s3``.

It prints its port and answers at once. An object has as many bytes as the number in its key says
(``.../1048576-17``), all from one buffer; a PUT is received and forgotten; conditions fail on the probe.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading

BLOCK = memoryview(bytes(range(256)) * (64 * 1024))  # 16 MiB
LENGTH = re.compile(rb"/(\d+)-")
RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d+)", re.IGNORECASE)
BODY = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
TAG = b'etag: "0123456789abcdef0123456789abcdef"\r\nlast-modified: Mon, 02 Feb 2026 00:00:00 GMT\r\n'


def serve(connection: socket.socket) -> None:
    """Answer one connection until it ends."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    scratch = memoryview(bytearray(1 << 20))
    rest = b""
    while True:
        while b"\r\n\r\n" not in rest:
            data = connection.recv(65_536)
            if not data:
                return
            rest += data
        head, _, rest = rest.partition(b"\r\n\r\n")
        declared = BODY.search(head)
        if b"100-continue" in head.lower():
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        left = int(declared[1]) - len(rest) if declared else 0
        while left > 0:
            left -= connection.recv_into(scratch[: min(left, len(scratch))])
        if declared:
            rest = b""
        answer(connection, head)


def answer(connection: socket.socket, head: bytes) -> None:
    """Send one answer."""
    if head.startswith(b"PUT"):
        is_taken = b"/meta/probe/" in head.partition(b"\r\n")[0]
        status = b"412 Precondition Failed" if is_taken else b"200 OK"
        connection.sendall(b"HTTP/1.1 %b\r\ncontent-length: 0\r\n%b\r\n" % (status, TAG))
        return
    found = LENGTH.search(head)
    size = int(found[1]) if found else 0
    if head.startswith(b"HEAD"):
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%b\r\n" % (size, TAG))
        return
    span = RANGE.search(head)
    first, stop = (int(span[1]), int(span[2]) + 1) if span else (0, size)
    status = b"206 Partial Content\r\ncontent-range: bytes %d-%d/%d" % (first, stop - 1, size)
    line = b"HTTP/1.1 %b\r\ncontent-length: %d\r\n%b\r\n" % (status if span else b"200 OK", stop - first, TAG)
    body = BLOCK[: stop - first]
    sent = connection.sendmsg([line, body])
    if sent < len(line) + len(body):
        connection.sendall(body[max(0, sent - len(line)) :])


def main() -> None:
    """Listen on a free port of the loopback and print it."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()

        def work(accepted: socket.socket = connection) -> None:
            with contextlib.suppress(OSError), accepted:
                serve(accepted)

        threading.Thread(target=work, daemon=True).start()


if __name__ == "__main__":
    main()
