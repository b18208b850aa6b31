"""Addresses of servers, and who may use them."""

from __future__ import annotations

import hmac
import ipaddress

from edl_runtime.errors import SpecError


def endpoint_of(address: object, field: str = "teacher address") -> tuple[str, int]:
    """Return host and port of "host:port", the host without brackets. Raises SpecError that names `field`."""
    if isinstance(address, str):
        host, _, port = address.rpartition(":")
        if host and "/" not in host and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536:
            return host.strip("[]"), int(port)
    raise SpecError(field, address, "host:port, as in 127.0.0.1:9000")


def check_exposure(host: str, token: str, variable: str) -> None:
    """Raise SpecError, which names `variable`, if other machines can reach `host` without a token."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and not token:
        raise SpecError("host", host, f"127.0.0.1 (or ::1), unless {variable} holds a token")


def has_token(given: bytes | str, token: str) -> bool:
    """Whether an Authorization header holds the bearer token, compared in constant time; always for an empty token."""
    header = given.encode(errors="surrogateescape") if isinstance(given, str) else given
    return not token or hmac.compare_digest(header, f"Bearer {token}".encode())
