"""Addresses of servers, and who may use them."""

from __future__ import annotations

import base64
import hmac
import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from edl_runtime.errors import SpecError


def endpoint_of(address: object, field: str = "teacher address") -> tuple[str, int]:
    """Return host and port of "host:port", the host without brackets. Raises SpecError that names `field`."""
    if isinstance(address, str):
        host, _, port = address.rpartition(":")
        if host and "/" not in host and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536:
            return host.strip("[]"), int(port)
    raise SpecError(field, address, "host:port, as in 127.0.0.1:9000")


def check_http_url(url: str, field: str) -> str:
    """Return the URL of a server, without a slash at its end.

    Raises SpecError, which names `field`, for one that is not http or https, or has a user, a password or a query.
    """
    allowed = "http:// or https:// with host and port, as in https://edl.example:8443; the token has its own variable"
    no_url = SpecError(field, "no URL", allowed)
    if not url.isprintable():
        raise no_url
    try:
        parts = urlsplit(url)
        safe = f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
    except ValueError:  # a malformed IPv6 address or port
        raise no_url from None
    if not parts.scheme or not parts.hostname:  # show nothing of it: any part may be a secret
        raise SpecError(field, "a URL without a host" if parts.scheme else "a URL without http:// or https://", allowed)
    if parts.scheme not in ("http", "https") or parts.username or parts.password or parts.query:
        raise SpecError(field, safe, allowed)
    return url.rstrip("/")


def check_exposure(host: str, token: str, variable: str) -> None:
    """Raise SpecError, which names `variable`, if other machines can reach `host` without a token."""
    if not is_loopback(host) and not token:
        raise SpecError("host", host, f"127.0.0.1 (or ::1), unless {variable} holds a token")


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's, which no other can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


_AUTHORITY = re.compile(rb"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]{0,5})?")
"""Host and port, as in a Host header: nothing of a user or a path."""


def is_meant_for_loopback(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether a request's Host and Origin, where it has them, are loopback names; of each there is one at most.

    Others are sent by a browser whose page is another site's, or whose name server has lied about one.
    """
    hosts = [value for name, value in headers if name == b"host"]
    origins = [value for name, value in headers if name == b"origin"]
    if len(hosts) > 1 or len(origins) > 1:
        return False
    named = hosts + [origin.partition(b"://")[2] for origin in origins]
    return all(_is_loopback_authority(authority) for authority in named)


def _is_loopback_authority(authority: bytes) -> bool:
    found = _AUTHORITY.fullmatch(authority)
    return found is not None and is_loopback((found[1] or found[2]).decode())


def password_of(given: bytes) -> bytes:
    """Return the password of an Authorization header by the scheme Basic; empty without one."""
    scheme, _, encoded = given.partition(b" ")
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def has_token(given: bytes | str, token: str) -> bool:
    """Whether an Authorization header holds the bearer token, compared in constant time; always for an empty token."""
    header = given.encode(errors="surrogateescape") if isinstance(given, str) else given
    return not token or hmac.compare_digest(header, f"Bearer {token}".encode())
