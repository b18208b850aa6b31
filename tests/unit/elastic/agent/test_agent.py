"""What an agent says while Redis is away, and what it refuses without asking."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from edl_runtime.elastic.agent.agent import Agent, AgentExit
from edl_runtime.elastic.agent.launch import parse_entrypoint
from edl_runtime.elastic.errors import InitNotCalledError
from edl_runtime.errors import EX_DATAERR
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds
from edl_runtime.store.redis_client import connect


@pytest.mark.slow
async def test_an_agent_says_again_and_again_that_redis_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for as long as that takes, and says for how long it has."""
    monkeypatch.setattr("edl_runtime.elastic.agent.agent.REDIS_AWAY_LOG_EVERY_S", 0.5)
    script = tmp_path / "train.py"
    script.touch()
    settings = RuntimeSettings(job="training")
    with capture_logs() as logs:
        async with connect("redis://127.0.0.1:1/0") as nobody, asyncio.timeout(60):
            agent = Agent(
                parse_entrypoint([str(script)]),
                settings,
                nobody,
                bounds=Bounds(1, 1),
                gear="live",
                communication="gloo",
            )
            began = time.monotonic()
            running = asyncio.ensure_future(agent.run(os.environ))
            while len(told := [log["for_s"] for log in logs if log["event"] == "redis.disconnected"]) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert time.monotonic() - began >= 2 * 0.5, "not each time it tries"
            agent.leave(signal.SIGTERM)
            assert (await running).status == -signal.SIGTERM
    assert told == sorted(told)
    assert told[-1] >= 1


@pytest.mark.parametrize("most", [1, 2])
async def test_a_script_that_can_not_call_init_is_refused_before_it_runs_where_there_may_be_others(
    tmp_path: Path, most: int
) -> None:
    """Its job has wrong input; an only instance may train alone, and runs it."""
    script = tmp_path / "train.py"
    script.write_text("from edl_runtime import elastic")
    with capture_logs() as logs:
        async with connect("redis://127.0.0.1:1/0") as nobody, asyncio.timeout(60):
            agent = Agent(
                parse_entrypoint([str(script)]),
                RuntimeSettings(job="training"),
                nobody,
                bounds=Bounds(1, most),
                gear="live",
                communication="gloo",
            )
            running = asyncio.ensure_future(agent.run(os.environ))
            while not running.done() and not any(log["event"] == "worker.started" for log in logs):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            agent.leave(signal.SIGTERM)
            ending = await running
    begun = any(log["event"] == "worker.started" for log in logs)
    refused = AgentExit(EX_DATAERR, f"instance 0: {InitNotCalledError()}")
    assert (begun, ending) == ((True, AgentExit(-signal.SIGTERM)) if most == 1 else (False, refused))
