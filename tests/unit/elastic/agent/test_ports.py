"""Addresses at which workers are reached."""

from __future__ import annotations

import socket

import pytest

from edl_runtime.elastic.agent.entrypoint import check_host
from edl_runtime.errors import SpecError


@pytest.mark.parametrize(
    ("own", "host", "allowed"),
    [
        ("127.0.1.1", "127.0.0.1", True),
        ("127.0.1.1", "localhost", True),
        ("127.0.1.1", "192.0.2.7", False),
        ("192.0.2.7", "192.0.2.7", True),
        ("192.0.2.7", "127.0.0.1", True),
        (None, "192.0.2.7", False),
    ],
)
def test_other_machines_have_to_reach_gloo(
    monkeypatch: pytest.MonkeyPatch, own: str | None, host: str, *, allowed: bool
) -> None:
    """It listens where the machine's name resolves to, which is loopback on many: an error at the start."""

    def resolve(_: str) -> str:
        if own is None:
            raise socket.gaierror
        return own

    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    if allowed:
        check_host(host)
        return
    with pytest.raises(SpecError, match="'here'"):
        check_host(host)
