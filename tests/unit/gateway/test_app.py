"""The gateway's routes, without teachers or Redis."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import httpx
from structlog.testing import capture_logs

from edl_runtime.gateway.app import build_app
from edl_runtime.gateway.gateway import Gateway


async def test_a_name_that_no_pool_can_have_is_logged_as_a_literal() -> None:
    """As anybody may send escape sequences of terminals; its refusal is short, too."""
    gateway: Any = MagicMock(spec=Gateway, pools={}, wait_s=0.0)
    transport = httpx.ASGITransport(build_app(gateway, MagicMock(), token=""))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        with capture_logs() as lines:
            answers = [await client.get(f"/pools/{name}/health") for name in ("%1b%5b31mred", "a" * 60_000)]
    assert [(answer.status_code, len(answer.content) < 1000) for answer in answers] == [(400, True)] * 2
    assert [line["pool"] for line in lines] == ["", ""]
    assert all(line["cause"].isprintable() for line in lines)
