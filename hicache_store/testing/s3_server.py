"""A small S3-like server on loopback that fails on purpose.

It keeps objects in memory and answers the calls a store makes: GET with ranges, HEAD, PUT and DELETE
with conditions, DeleteObjects, ListObjectsV2, lifecycle rules and HEAD of the bucket. A plan, asked
before each answer, may return a fault instead: a status, a broken, short, long or slow body, the bytes
of another object. Every request is recorded. It speaks HTTP over plain sockets, because libraries for
servers take care not to send what the faults need to send.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, Final, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

BUCKET: Final = "bucket"
DRIP_S: Final = 0.05
_NAMESPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it arrived. ``key`` is empty for the bucket itself."""

    method: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    connection: int

    @property
    def operation(self) -> str:
        """``GET``, ``HEAD``, ``PUT`` and ``DELETE`` of objects, else ``LIST``, ``BULK`` or ``BUCKET``."""
        if self.key:
            return self.method
        if self.method == "GET" and "list-type" in self.query:
            return "LIST"
        return "BULK" if "delete" in self.query else "BUCKET"

    @property
    def access_key(self) -> str:
        """The key id of the signature, empty for an unsigned request."""
        found = re.search(r"Credential=([^/]+)/", self.headers.get("authorization", ""))
        return found[1] if found else ""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: status, headers, body."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Broken:
    """The right answer, sent wrongly.

    ``keep`` bytes of the body are sent (all by default) under the full length, then ``extra`` more.
    Then, ``ending``: go on with the connection, ``close`` it, ``reset`` it, or ``stall`` until the
    server stops. ``drips`` sends the body byte by byte. ``declares`` is the Content-Length that is
    told instead; ``-1`` tells none, so that the end of the connection ends the body.
    """

    keep: int | None = None
    extra: int = 0
    ending: str = "go on"
    drips: bool = False
    declares: int | None = None
    before_headers: bool = False


Fault: TypeAlias = Reply | Broken
Plan: TypeAlias = Callable[[Request], Fault | None]


def error_reply(status: int, code: str, headers: Mapping[str, str] | None = None) -> Reply:
    """An S3 error document."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>scripted {code}</Message></Error>"
    return Reply(status, body.encode(), {"content-type": "application/xml", **(headers or {})})


class S3Server:
    """The server; a context manager. ``plan`` may be replaced at any time.

    ``ignores_conditions``: If-None-Match and If-Match have no effect, as on older servers.
    ``refuses_bulk_without_md5``: DeleteObjects wants Content-MD5. ``is_strict``: bodies in chunks with
    trailers, checksum headers and Expect are refused, as servers do that do not know them.
    ``ignores_ranges``: a ranged GET is answered with the whole object and status 200.
    ``before_body`` is called with method and target when the headers of a request are read and its body
    is not.
    """

    def __init__(self, plan: Plan | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.plan = plan
        self.objects: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.ignores_conditions = False
        self.ignores_ranges = False
        self.refuses_bulk_without_md5 = False
        self.is_strict = False
        self.before_body: Callable[[str, str], None] = lambda _method, _target: None
        self.lifecycle = b""
        self.page_keys = 1000
        self.stopped = threading.Event()
        self._tls = tls
        self._lock = threading.Lock()
        self._modified: dict[str, float] = {}
        self._sockets: set[socket.socket] = set()
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, name="s3-server", daemon=True).start()

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop every connection and stop listening."""
        self.stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def count(self, operation: str | None = None) -> int:
        """Requests of one operation so far, or of all."""
        with self._lock:
            return sum(operation in (None, request.operation) for request in self.requests)

    def counts(self) -> Counter[str]:
        """Requests so far by operation."""
        with self._lock:
            return Counter(request.operation for request in self.requests)

    def forget_requests(self) -> None:
        """Start counting anew."""
        with self._lock:
            self.requests.clear()

    # -- connections -----------------------------------------------------------------------

    def _accept(self) -> None:
        while not self.stopped.is_set():
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                number = self.connections
            threading.Thread(target=self._serve, args=(accepted, number), daemon=True).start()

    def _serve(self, accepted: socket.socket, number: int) -> None:
        with self._lock:
            self._sockets.add(accepted)
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = accepted
            if self._tls is not None:
                connection = self._tls.wrap_socket(accepted, server_side=True)
            with connection.makefile("rb") as reader:
                while not self.stopped.is_set() and self._answer_one(connection, reader, number):
                    pass
        except (OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._sockets.discard(accepted)
            accepted.close()

    def _answer_one(self, connection: socket.socket, reader: BinaryIO, number: int) -> bool:
        request = _read_request(connection, reader, number, self._hook)
        if request is None:
            return False
        with self._lock:
            self.requests.append(request)
        plan = self.plan
        fault = None if plan is None else plan(request)
        if isinstance(fault, Broken):
            reply = _absent() if fault.before_headers else self._answer(request)
            return self._send_broken(connection, request, reply, fault)
        reply = self._answer(request) if fault is None else fault
        connection.sendall(_head(reply, len(reply.body)) + (b"" if request.method == "HEAD" else reply.body))
        return True

    def _hook(self, method: str, target: str) -> None:
        self.before_body(method, target)  # as it is now: this connection may have waited a while

    def _send_broken(self, connection: socket.socket, request: Request, reply: Reply, fault: Broken) -> bool:
        body = b"" if request.method == "HEAD" else reply.body
        if not fault.before_headers:
            declared = len(reply.body) if fault.declares is None else fault.declares
            connection.sendall(_head(reply, None if declared < 0 else declared))
            sent = body[: fault.keep] + b"\xee" * fault.extra
            if fault.drips:
                for index in range(len(sent)):
                    connection.sendall(sent[index : index + 1])
                    if self.stopped.wait(DRIP_S):
                        return False
            else:
                connection.sendall(sent)
        if fault.ending == "reset":
            time.sleep(0.02)  # let what was sent be read before the reset throws it away
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif fault.ending == "stall":
            self.stopped.wait()
        return fault.ending == "go on"

    # -- answers ---------------------------------------------------------------------------

    def _answer(self, request: Request) -> Reply:
        if self.is_strict:
            refusal = _strict_refusal(request)
            if refusal is not None:
                return refusal
        with self._lock:
            handler = getattr(self, f"_on_{request.operation.lower()}")
            reply: Reply = handler(request)
            return reply

    def _on_get(self, request: Request) -> Reply:
        data = self.objects.get(request.key)
        if data is None:
            return _absent()
        wanted = request.headers.get("if-match")
        if wanted is not None and not self.ignores_conditions and wanted != etag(data):
            return error_reply(412, "PreconditionFailed")
        headers = {
            "etag": etag(data),
            "last-modified": _http_date(self._modified.get(request.key, 0.0)),
            "accept-ranges": "bytes",
        }
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if span is None or self.ignores_ranges:
            return Reply(200, data, headers)
        start, stop = int(span[1]), min(int(span[2] or len(data)) + 1, len(data))
        if start >= len(data):
            return error_reply(416, "InvalidRange", {"content-range": f"bytes */{len(data)}"})
        headers["content-range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return Reply(206, data[start:stop], headers)

    def _on_head(self, request: Request) -> Reply:
        return self._on_get(request)

    def _on_put(self, request: Request) -> Reply:
        refusal = self._check_conditions(request)
        if refusal is not None:
            return refusal
        self.objects[request.key] = request.body
        self._modified[request.key] = time.time()
        return Reply(200, b"", {"etag": etag(request.body)})

    def _check_conditions(self, request: Request) -> Reply | None:
        if self.ignores_conditions:
            return None
        there = self.objects.get(request.key)
        if request.headers.get("if-none-match") == "*" and there is not None:
            return error_reply(412, "PreconditionFailed")
        wanted = request.headers.get("if-match")
        if wanted is None:
            return None
        if there is None:
            return _absent()
        return None if wanted == etag(there) else error_reply(412, "PreconditionFailed")

    def _on_delete(self, request: Request) -> Reply:
        if request.key in self.objects:
            refusal = self._check_conditions(request)
            if refusal is not None:
                return refusal
            del self.objects[request.key]
        return Reply(204)

    def _on_bulk(self, request: Request) -> Reply:
        if self.refuses_bulk_without_md5 and "content-md5" not in request.headers:
            return error_reply(400, "MissingContentMD5")
        root = ElementTree.fromstring(request.body)  # noqa: S314  the caller is our own client
        keys = [node.findtext(f"{{{_NAMESPACE}}}Key") or "" for node in root if node.tag.endswith("Object")]
        for key in keys:
            self.objects.pop(key, None)
        return _document("DeleteResult", "".join(f"<Deleted><Key>{escape(k)}</Key></Deleted>" for k in keys))

    def _on_list(self, request: Request) -> Reply:
        prefix = request.query.get("prefix", "")
        after = request.query.get("continuation-token", request.query.get("start-after", ""))
        most = min(int(request.query.get("max-keys", self.page_keys)), self.page_keys)
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        page, rest = keys[:most], keys[most:]
        rows = [
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size>"
            f"<ETag>{escape(etag(self.objects[key]))}</ETag>"
            f"<LastModified>{_iso_date(self._modified.get(key, 0.0))}</LastModified></Contents>"
            for key in page
        ]
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
        truncated = f"<IsTruncated>{str(bool(rest)).lower()}</IsTruncated>"
        return _document(
            "ListBucketResult", f"{truncated}{more}<KeyCount>{len(page)}</KeyCount>" + "".join(rows)
        )

    def _on_bucket(self, request: Request) -> Reply:
        if "lifecycle" in request.query:
            if request.method == "PUT":
                self.lifecycle = request.body
                return Reply(200)
            if not self.lifecycle:
                return error_reply(404, "NoSuchLifecycleConfiguration")
            return Reply(200, self.lifecycle, {"content-type": "application/xml"})
        return Reply(200, b"", {"x-amz-bucket-region": "us-east-1"})


def etag(data: bytes) -> str:
    """The ETag of an object, with its quotes."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def on_operations(fault: Fault, *operations: str, times: int | None = None, key: str = "") -> Plan:
    """A plan: ``fault`` for these operations on keys that hold ``key``, for the first ``times`` of them."""
    left = [times]
    lock = threading.Lock()

    def plan(request: Request) -> Fault | None:
        if request.operation not in operations or key not in request.key:
            return None
        with lock:
            if left[0] is not None:
                if left[0] <= 0:
                    return None
                left[0] -= 1
        return fault

    return plan


def _read_request(
    connection: socket.socket, reader: BinaryIO, number: int, before_body: Callable[[str, str], None]
) -> Request | None:
    line = reader.readline(65_536)
    if not line:
        return None
    method, target, _ = line.decode("latin-1").split(" ", 2)
    headers: dict[str, str] = {}
    while (raw := reader.readline(65_536)) not in (b"\r\n", b"\n", b""):
        name, _, value = raw.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    before_body(method, target)
    if headers.get("expect", "").lower() == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = b"".join(iter(lambda: _read_chunk(reader), b""))
    else:
        declared = int(headers.get("content-length", "0"))
        body = reader.read(declared)
        if len(body) < declared:
            return None
    parts = urlsplit(target)
    path = unquote(parts.path).lstrip("/")
    key = path.partition("/")[2]
    return Request(method, key, dict(parse_qsl(parts.query, True)), headers, body, number)


def _read_chunk(reader: BinaryIO) -> bytes:
    length = int(reader.readline().split(b";")[0], 16)
    data = reader.read(length)
    reader.readline()
    return data


def _head(reply: Reply, length: int | None) -> bytes:
    headers = dict(reply.headers)
    if length is not None and reply.status != 204:
        headers["content-length"] = str(length)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {reply.status} Scripted\r\n{lines}\r\n".encode("latin-1")


def _strict_refusal(request: Request) -> Reply | None:
    names = [name for name in request.headers if name.startswith(("x-amz-checksum", "x-amz-sdk-checksum"))]
    is_chunked = "aws-chunked" in request.headers.get("content-encoding", "")
    is_chunked = is_chunked or "transfer-encoding" in request.headers or "x-amz-trailer" in request.headers
    if names or is_chunked or "expect" in request.headers:
        return error_reply(400, "NotImplemented")
    return None


def _absent() -> Reply:
    return error_reply(404, "NoSuchKey")


def _document(name: str, content: str) -> Reply:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{name} xmlns="{_NAMESPACE}">{content}</{name}>'
    return Reply(200, text.encode(), {"content-type": "application/xml"})


def _http_date(at_s: float) -> str:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(at_s))


def _iso_date(at_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(at_s))
