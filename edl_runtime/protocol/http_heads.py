"""The heads of HTTP/1.1 requests and responses, and the buffer from which a server takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from string import ascii_uppercase
from typing import Any

import httptools

from edl_runtime.protocol.errors import ProtocolError

HEAD_LIMIT = 16 * 1024
"""Most bytes of a head, its empty line included."""

END_OF_HEAD = b"\r\n\r\n"
CONTENT_LENGTH = b"content-length"
TRANSFER_ENCODING = b"transfer-encoding"
JSON_SIZE = b"inference-header-content-length"

RUN_ALONE = b"edl-run-alone"
"""Header of a request under which a predictor died: it must not be joined with others."""

PREDICTOR_DIED = b"edl-predictor-died"
"""Header of an error: a predictor died, or hung and was killed, while it read or ran this request."""

_UNIQUE = frozenset({CONTENT_LENGTH, JSON_SIZE, b"authorization"})
_ORIGIN = re.compile(rb"^https?://[^/?#]*", re.IGNORECASE)
_REASONS = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n" for status in HTTPStatus}


class Head:
    """Base of both kinds of head; header names are lower case."""

    __slots__ = ("headers", "keep_alive")

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.keep_alive = True

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in self.headers and name in _UNIQUE:
            raise ProtocolError(f"header {name.decode('latin-1')!r} comes twice")
        self.headers[name] = value

    def size(self, name: bytes) -> int | None:
        """Return the number of bytes in header `name`, None without it. Raises ProtocolError."""
        text = self.headers.get(name)
        if text is None:
            return None
        if not text.isdigit() or len(text) > 18:
            raise ProtocolError(f"header {name.decode()!r}: got {text[:40]!r}, allowed is a number of bytes")
        return int(text)

    def _feed(self, parser: Any, head: bytes) -> None:
        if not head.endswith(END_OF_HEAD):
            raise ProtocolError("the head does not end")
        try:
            parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            if not isinstance(self, RequestHead) or parser.get_method() == b"CONNECT":
                raise ProtocolError("the connection switches to another protocol, allowed is HTTP/1.1") from None
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, ProtocolError):
                raise error.__context__ from None
            raise ProtocolError(f"not HTTP/1.1: {error}") from None
        version = parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise ProtocolError(f"got HTTP/{version}, allowed is HTTP/1.1")
        # The parser's own should_keep_alive is wrong once a message without a body is complete.
        connection = self.headers.get(b"connection", b"").lower()
        self.keep_alive = b"close" not in connection if version == "1.1" else b"keep-alive" in connection


class RequestHead(Head):
    """The head of a request. `path` has neither query nor, if the request's target is a whole URL, scheme and host.

    A request to switch protocols, as from Java's client and `curl --http2`, is ignored, which HTTP allows.
    """

    __slots__ = ("method", "path")

    def __init__(self, head: bytes) -> None:
        """Read `head`, its empty line included. Raises ProtocolError."""
        super().__init__()
        self.path = ""
        parser = httptools.HttpRequestParser(self)
        self._feed(parser, head)
        self.method: str = parser.get_method().decode("ascii")

    def on_url(self, url: bytes) -> None:
        self.path = _ORIGIN.sub(b"", url).partition(b"?")[0].decode("latin-1") or "/"


class ResponseHead(Head):
    """The head of a response."""

    __slots__ = ("status",)

    def __init__(self, head: bytes) -> None:
        """Read `head`, its empty line included. Raises ProtocolError."""
        super().__init__()
        parser = httptools.HttpResponseParser(self)
        self._feed(parser, head)
        self.status: int = parser.get_status_code()


class ChunkedBody:
    """The body of a response that comes in chunks: feed it until it is `complete`, then `content` is all of it."""

    def __init__(self, head: bytes, limit: int) -> None:
        """Begin with the response's head; `limit` is the most bytes of the body."""
        self.content = bytearray()
        self.complete = False
        self._limit = limit
        self._parser = httptools.HttpResponseParser(self)
        self.feed(head)

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes. Raises ProtocolError when they are no chunks, too many, or go on behind the last."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, ProtocolError):
                raise error.__context__ from None
            raise ProtocolError(f"not a body in chunks: {error}") from None

    def on_message_begin(self) -> None:
        if self.complete:
            raise ProtocolError("bytes follow the last chunk")

    def on_body(self, part: bytes) -> None:
        if len(self.content) + len(part) > self._limit:
            raise ProtocolError(f"the chunks have more than {self._limit} bytes")
        self.content += part

    def on_message_complete(self) -> None:
        self.complete = True


def render_request(method: str, path: str, headers: Mapping[str, str | int]) -> bytes:
    return _render(f"{method} {path} HTTP/1.1\r\n", headers)


def render_response(status: int, headers: Mapping[str, str | int]) -> bytes:
    return _render(_REASONS[status], headers)


def _render(first_line: str, headers: Mapping[str, str | int]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{first_line}{lines}\r\n".encode("latin-1")


_READ_BUFFER_SIZE = 64 * 1024
_FIRST_BYTES = f"{ascii_uppercase}\r\n".encode()


class ReadBuffer:
    """Input that has no other place yet: heads, and beginnings of bodies. Its length is the number of unused bytes."""

    def __init__(self) -> None:
        self._bytes = bytearray(_READ_BUFFER_SIZE)
        self._view = memoryview(self._bytes)
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def full(self) -> bool:
        return len(self) == _READ_BUFFER_SIZE

    @property
    def may_be_http(self) -> bool:
        """Whether a request may begin with the first byte: a method's letter, or a line end that some clients send."""
        return not self or self._bytes[self._start] in _FIRST_BYTES

    def room(self) -> memoryview:
        """Return where the next bytes go; pass their number to `grow`."""
        rest = len(self)
        if self._start:
            self._bytes[:rest] = self._bytes[self._start : self._end]
            self._start, self._end = 0, rest
        return self._view[rest:]

    def grow(self, size: int) -> None:
        self._end += size

    def clear(self) -> None:
        self._start = self._end = 0

    def take_head(self) -> bytes | None:
        """Return the next head with its empty line, None while it is incomplete."""
        end = self._bytes.find(END_OF_HEAD, self._start, min(self._end, self._start + HEAD_LIMIT))
        if end < 0:
            return None
        start, self._start = self._start, end + len(END_OF_HEAD)
        return bytes(self._view[start : self._start])

    def take_into(self, area: memoryview) -> int:
        """Move as many bytes as fit into `area`; return their number."""
        size = min(len(self), len(area))
        area[:size] = self._view[self._start : self._start + size]
        self._start += size
        return size
