"""The heads of HTTP/1.1 requests and responses."""

from __future__ import annotations

import pytest

from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.http_heads import RequestHead, ResponseHead, render_request, render_response


def test_a_request_head_is_read() -> None:
    """Method, path without its query, and headers in lower case."""
    head = RequestHead(render_request("POST", "/v2/models/m/infer?x=1", {"Content-Length": 12, "X-Y": "z"}))
    assert (head.method, head.path, head.keep_alive) == ("POST", "/v2/models/m/infer", True)
    assert (head.size(b"content-length"), head.size(b"absent"), head.headers[b"x-y"]) == (12, None, b"z")


def test_a_response_head_is_read() -> None:
    """Status, sizes, and whether the connection stays."""
    head = ResponseHead(render_response(503, {"Content-Length": 0, "Connection": "close"}))
    assert (head.status, head.keep_alive, head.size(b"content-length")) == (503, False, 0)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"GET / HTTP/1.1\r\n",
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthorization: a\r\nauthorization: b\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET / HTTP/0.9\r\n\r\n",
        b"GET /\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    ],
)
def test_a_malformed_head_is_refused(head: bytes) -> None:
    """Garbage, ambiguous heads and other protocols raise ProtocolError."""
    with pytest.raises(ProtocolError):
        RequestHead(head)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_wish_for_another_protocol_is_ignored(method: str) -> None:
    """HTTP/1.1 goes on for clients that would rather speak HTTP/2, and their connections stay."""
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "", "Content-Length": 2}
    head = RequestHead(render_request(method, "/v2", headers))
    assert (head.method, head.path, head.keep_alive, head.size(b"content-length")) == (method, "/v2", True, 2)


def test_an_answer_in_another_protocol_is_refused() -> None:
    """Nobody has asked for one."""
    with pytest.raises(ProtocolError, match="another protocol"):
        ResponseHead(render_response(101, {"Connection": "Upgrade", "Upgrade": "h2c"}))
    with pytest.raises(ProtocolError, match=r"HTTP/2\.0"):
        ResponseHead(b"HTTP/2.0 200 OK\r\n\r\n")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://host:80/v2/health/live?x=http://y/z", "/v2/health/live"),
        ("HTTPS://[::1]:80/v2", "/v2"),
        ("http://host", "/"),
        ("http://host?x", "/"),
        ("/http://host/v2", "/http://host/v2"),
    ],
)
def test_a_whole_url_is_a_path_too(target: str, path: str) -> None:
    """Clients that think they talk to a proxy name scheme and host."""
    assert RequestHead(render_request("GET", target, {})).path == path


@pytest.mark.parametrize("size", ["-1", "1e3", "0x10", "+1", "9" * 30, "1 2"])
def test_a_size_is_a_plain_number(size: str) -> None:
    """What is not digits is no number of bytes."""
    with pytest.raises(ProtocolError):
        RequestHead(render_request("POST", "/", {"Inference-Header-Content-Length": size})).size(
            b"inference-header-content-length"
        )


@pytest.mark.parametrize(
    ("head", "stays"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nConnection: Close\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        (b"POST / HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 3\r\n\r\n", True),
    ],
)
def test_a_connection_stays_as_its_client_wishes(head: bytes, *, stays: bool) -> None:
    """HTTP/1.1 keeps connections unless the head closes them, HTTP/1.0 closes them."""
    assert RequestHead(head).keep_alive is stays
