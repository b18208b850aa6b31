"""A triggerer's runner with an asset watcher, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.jobs.triggerer_job_runner import TriggerRunner
from airflow.sdk import Asset
from airflow.sdk.exceptions import ErrorType
from airflow.sdk.execution_time.comms import AssetStateStoreResult, ErrorResponse, GetAssetStateStoreByName
from airflow.sdk.execution_time.context import AssetStateStoreAccessors
from airflow.triggers.base import BaseEventTrigger

TRIGGER_ID = 1


class AssetStates:
    """The asset state store, by asset and key: the server side of `AssetStateStoreAccessors`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[tuple[str, str], Any] = {}
        server = SimpleNamespace(asend=self._answer)
        monkeypatch.setattr("airflow.sdk.execution_time.task_runner.SUPERVISOR_COMMS", server, raising=False)

    async def _answer(self, request: Any) -> Any:
        key = (request.name, request.key)
        if not isinstance(request, GetAssetStateStoreByName):
            self.values[key] = request.value
            return None
        if key not in self.values:
            return ErrorResponse(error=ErrorType.ASSET_STORE_NOT_FOUND)
        return AssetStateStoreResult(value=self.values[key])


class Watching:
    """A running trigger. Its events wait here until `store`, which the triggerer's supervisor does in Airflow."""

    def __init__(self, runner: TriggerRunner, running: asyncio.Task[None]) -> None:
        self._runner = runner
        self._running = running

    async def fired(self, count: int) -> list[dict[str, Any]]:
        """Wait for `count` events; they are not stored."""
        async with asyncio.timeout(60):
            while len(self._runner.events) < count:  # noqa: ASYNC110 (a deque has no events)
                await asyncio.sleep(0.01)
        return [dict(entry.event.payload) for entry in self._runner.events]

    def store(self, count: int) -> None:
        """Mark the `count` oldest events as stored in Airflow's database."""
        entries = [self._runner.events.popleft() for _ in range(count)]
        self._runner._shared_streams.confirm_persisted([entry.persist_seq for entry in entries])

    def hold_next(self) -> tuple[asyncio.Event, asyncio.Event]:
        """Stop the next event on its way into Airflow; the first one returned tells that, the second lets it go on."""
        reached, goes_on = asyncio.Event(), asyncio.Event()

        async def log(text: str, **_: Any) -> None:
            if text == "Trigger fired event":
                reached.set()
                await goes_on.wait()

        self._runner.log = SimpleNamespace(ainfo=log)
        return reached, goes_on

    async def cancel(self) -> None:
        """End the trigger as another triggerer is to run it; what it has fired is not stored."""
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running


@asynccontextmanager
async def watching(trigger: BaseEventTrigger, assets: Sequence[str] = ("digits",)) -> AsyncIterator[Watching]:
    """Run a trigger of these assets; at the end the triggerer is lost with all events that were not stored."""
    trigger.asset_state_store = AssetStateStoreAccessors(inlets=[Asset(name) for name in assets])
    runner = TriggerRunner()
    running = asyncio.create_task(runner.run_trigger(TRIGGER_ID, trigger))
    runner.triggers[TRIGGER_ID] = {"task": running, "is_watcher": True, "name": "watch", "events": 0}
    try:
        yield Watching(runner, running)
        assert running.cancelled() or not running.done(), running.exception()
    finally:
        await runner._shared_streams.stop_all()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
