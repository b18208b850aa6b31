"""Addresses, and who may use them."""

from __future__ import annotations

import pytest

from edl_runtime.protocol.address import has_token


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
