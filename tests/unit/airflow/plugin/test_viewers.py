"""What all viewers share: one reader of each connection."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest

from edl_airflow.plugin.clients import Clients
from edl_airflow.plugin.live import NO_JOBS, LiveReader
from edl_runtime.errors import BackendError

with warnings.catch_warnings():  # of a test client that Airflow's own imports drag in
    warnings.simplefilter("ignore")
    from edl_airflow.plugin import viewers
    from edl_airflow.plugin.viewers import Kept


class KnownClients:
    """Stands for the clients of the connections whose names begin with "known"; looking one up takes a while."""

    async def digest(self, conn_id: str) -> str:
        await asyncio.sleep(0)
        if not conn_id.startswith("known"):
            raise LookupError(conn_id)
        return conn_id

    @asynccontextmanager
    async def open(self, _: str) -> AsyncIterator[None]:
        yield None


@pytest.fixture
async def kept(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kept]:
    """Room for two readers, whose readings take no time and are made all the time."""

    async def take(*_: Any) -> Any:
        return NO_JOBS

    monkeypatch.setattr(LiveReader, "_take", take)
    monkeypatch.setattr(viewers, "MOST_CONNECTIONS", 2)
    made = Kept()
    made.clients = cast("Clients", KnownClients())
    yield made
    for reader in made._readers.values():
        reader.close()


async def readings(before: set[asyncio.Task[Any]]) -> int:
    """Return how many tasks go on that were made after these; those that were cancelled end."""
    tasks = asyncio.all_tasks() - before
    ending = {task for task in tasks if task.cancelling()}
    await asyncio.gather(*ending, return_exceptions=True)
    return len(tasks - ending)


async def test_names_that_are_no_connections_take_no_reader_s_place(kept: Kept) -> None:
    """Whoever asks for invented ones, the others' reader goes on, and is the only one."""
    before = asyncio.all_tasks()
    await kept.seen("known")
    first = kept.reader("known")
    for number in range(5):
        with suppress(LookupError):
            await kept.seen(f"invented-{number}")
    await kept.seen("known")
    assert kept.reader("known") is first
    assert await readings(before) == 1


async def test_a_reader_that_loses_its_place_ends(kept: Kept) -> None:
    """So there are no more of them than places, whichever connections are asked for in turn."""
    before = asyncio.all_tasks()
    for number in range(6):
        await kept.seen(f"known-{number % 3}")
    assert await readings(before) == 2


async def test_who_waits_for_a_reader_that_loses_its_place_is_told(kept: Kept) -> None:
    """Also before it has begun to read."""
    reader = kept.reader("known")
    waiting = asyncio.create_task(reader.seen("known"))
    await asyncio.sleep(0)  # its task is made, and has not begun
    reader.close()
    with pytest.raises(BackendError, match="ask again"):
        await waiting
