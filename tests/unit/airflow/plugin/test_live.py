"""The reader of a connection's state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from edl_airflow.plugin.clients import Clients
from edl_airflow.plugin.live import NO_JOBS, LiveReader


class NoClients:
    """Stands for the clients of a connection that is never edited."""

    @asynccontextmanager
    async def open(self, _: str) -> AsyncIterator[None]:
        yield None


@pytest.mark.parametrize("turns", range(6))
async def test_a_reader_ends_when_it_is_cancelled_while_it_is_told_to_read_again(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when Airflow's API server stops just after an action: in whatever turn of the loop, it reads no further."""

    async def take(*_: Any) -> Any:
        return NO_JOBS

    monkeypatch.setattr(LiveReader, "_take", take)
    reader = LiveReader("edl_default", cast("Clients", NoClients()))
    await reader.seen("digest")
    await asyncio.sleep(0)
    reader.read_now()
    for _ in range(turns):
        await asyncio.sleep(0)
    background = asyncio.all_tasks() - {asyncio.current_task()}
    for task in background:
        task.cancel()
    _, left = await asyncio.wait(background, timeout=60.0)
    assert not left
