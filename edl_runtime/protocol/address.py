"""Where a teacher listens."""

from __future__ import annotations

from edl_runtime.errors import SpecError


def endpoint_of(address: object, field: str = "teacher address") -> tuple[str, int]:
    """Return host and port of "host:port", the host without brackets. Raises SpecError that names `field`."""
    if isinstance(address, str):
        host, _, port = address.rpartition(":")
        if host and port.isdecimal() and 0 < int(port) < 65536:
            return host.strip("[]"), int(port)
    raise SpecError(field, address, "host:port, as in 127.0.0.1:9000")
