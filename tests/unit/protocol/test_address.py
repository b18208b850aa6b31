"""Addresses, and who may use them."""

from __future__ import annotations

import pytest

from edl_runtime.protocol.address import has_token, is_meant_for_loopback


@pytest.mark.parametrize(
    ("given", "token", "expected"),
    [
        (b"Bearer secret", "secret", True),
        ("Bearer secret", "secret", True),
        (b"secret", "secret", False),
        (b"", "secret", False),
        ("Bearer \udcff", "secret", False),  # a byte that is no UTF-8, as servers decode headers
        (b"Bearer \xff", "secret", False),
        (b"anything", "", True),
    ],
)
def test_a_bearer_token_is_compared_whole(given: bytes | str, token: str, *, expected: bool) -> None:
    assert has_token(given, token) is expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], True),
        ([(b"host", b"localhost:8300"), (b"origin", b"http://localhost:3000")], True),
        ([(b"host", b"[::1]:8300"), (b"origin", b"https://127.0.0.1")], True),
        ([(b"host", b"127.1.2.3")], True),
        ([(b"host", b"edl.example")], False),
        ([(b"host", b"evil@localhost")], False),
        ([(b"host", b"localhost/evil")], False),
        ([(b"host", b"localhost:1:2")], False),
        ([(b"host", b"localhost:")], True),
        ([(b"host", b"localhost"), (b"host", b"localhost")], False),
        ([(b"origin", b"http://evil@localhost")], False),
        ([(b"origin", b"http://localhost/evil")], False),
        ([(b"origin", b"http://https://localhost")], False),
        ([(b"origin", b"null")], False),
        ([(b"origin", b"http://evil.example"), (b"origin", b"http://localhost")], False),
        ([(b"host", b"[::1")], False),
        ([(b"host", b"")], False),
    ],
)
def test_host_and_origin_are_loopback_names_and_nothing_else(
    headers: list[tuple[bytes, bytes]], *, expected: bool
) -> None:
    """A part that another program may take for the host is refused, and so is a second header."""
    assert is_meant_for_loopback(headers) is expected
