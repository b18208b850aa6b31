"""A triggerer's runner that watches for assets, without the processes around it."""

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
    """What Airflow keeps with each asset, by its name and a key: the other end of `AssetStateStoreAccessors`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: dict[tuple[str, str], Any] = {}
        other_end = SimpleNamespace(asend=self._answer)
        monkeypatch.setattr("airflow.sdk.execution_time.task_runner.SUPERVISOR_COMMS", other_end, raising=False)

    async def _answer(self, asked: Any) -> Any:
        place = (asked.name, asked.key)
        if not isinstance(asked, GetAssetStateStoreByName):
            self.kept[place] = asked.value
            return None
        if place not in self.kept:
            return ErrorResponse(error=ErrorType.ASSET_STORE_NOT_FOUND)
        return AssetStateStoreResult(value=self.kept[place])


class Watching:
    """A trigger that runs. What it has fired waits here until it is stored, as the triggerer's other half does that."""

    def __init__(self, runner: TriggerRunner) -> None:
        self._runner = runner

    async def fired(self, count: int) -> list[dict[str, Any]]:
        """Wait for so many events; they stay, and go no further."""
        async with asyncio.timeout(60):
            while len(self._runner.events) < count:  # noqa: ASYNC110 (a deque has no events)
                await asyncio.sleep(0.01)
        return [dict(entry.event.payload) for entry in self._runner.events]

    def store(self, count: int) -> None:
        """Let so many events, the oldest, be in Airflow's database."""
        entries = [self._runner.events.popleft() for _ in range(count)]
        self._runner._shared_streams.confirm_persisted([entry.persist_seq for entry in entries])


@asynccontextmanager
async def watching(trigger: BaseEventTrigger, assets: Sequence[str] = ("digits",)) -> AsyncIterator[Watching]:
    """Run a trigger of these assets; at the end the triggerer is lost, with what was not stored."""
    trigger.asset_state_store = AssetStateStoreAccessors(inlets=[Asset(name) for name in assets])
    runner = TriggerRunner()
    running = asyncio.create_task(runner.run_trigger(TRIGGER_ID, trigger))
    runner.triggers[TRIGGER_ID] = {"task": running, "is_watcher": True, "name": "watch", "events": 0}
    try:
        yield Watching(runner)
        assert not running.done(), running.exception()
    finally:
        await runner._shared_streams.stop_all()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
