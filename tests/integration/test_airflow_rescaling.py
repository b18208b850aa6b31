"""Rescaling tasks on the real local backend and a real Redis: what they change, say and return."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.airflow.rescaling_task import context, supervisor
from support.airflow.world import World
from support.backends.jobs import WAITS
from support.paths import SUPPORT
from support.teachers.process import wait_until

from edl_airflow.operators.autoscale import EdlAutoscaleOperator
from edl_runtime.autoscale.history import last_pass
from edl_runtime.autoscale.policy.decide import decide
from edl_runtime.autoscale.policy.model import Node, Target, Workload
from edl_runtime.pods import Pod
from edl_runtime.specs import Bounds, JobSpec
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect

TASK = SUPPORT / "airflow" / "rescaling_task.py"
LITTLE = "1m"
"""The CPU that an instance reserves: rules leave a few thousandths."""


class Jobs:
    """Jobs of real processes that may have between one and nine instances."""

    def __init__(self, world: World) -> None:
        self._world = world

    def submit(self, **sizes: int) -> None:
        """Start jobs with so many instances each, and wait until these run."""
        for name, instances in sizes.items():
            asyncio.run(self._world.backend.submit(self._spec(name, instances), token="test/1", secrets={}))
        wait_until(lambda: self._running() == {**self._running(), **sizes})

    def wanted(self) -> dict[str, int]:
        return {job.name: job.wanted for job in asyncio.run(self._world.backend.list())}

    def load_of(self, instances: int) -> float:
        """Return the highest load under which so many instances have room."""
        (node,) = asyncio.run(self._world.backend.capacity()).nodes
        return (instances + 0.5) * 0.001 / node.total["cpu"]

    def _spec(self, name: str, instances: int) -> JobSpec:
        return JobSpec(
            name=name,
            kind="trainer",
            command=("python", "-c", WAITS),
            bounds=Bounds(1, 9),
            instances=instances,
            elastic=True,
            env={"EDL_NAMESPACE": self._world.namespace},
            pod=Pod(resources={"cpu": LITTLE}),
        )

    def _running(self) -> dict[str, int]:
        found = asyncio.run(self._world.backend.list())
        return {job.name: sum(one.phase == "running" for one in job.instances) for job in found}


@pytest.fixture
def jobs(world: World) -> Iterator[Jobs]:
    """None are left when the test is over."""
    yield Jobs(world)
    for name in world.jobs():
        asyncio.run(world.backend.delete(name))


def _task(world: World, **given: Any) -> EdlAutoscaleOperator:
    return EdlAutoscaleOperator(task_id="rescale", dag=world.dag(), **given)


def _begun(world: World, **given: Any) -> subprocess.Popen[str]:
    """Start the task in a process of its own."""
    environ = {**os.environ, "PYTHONPATH": str(TASK.parent), "EDL_WORK": str(world.work_dir), "EDL_HALTED": "second"}
    words = [sys.executable, str(TASK), json.dumps(given)]
    return subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)


def _targets(result: Mapping[str, Any]) -> dict[str, int]:
    return {one["name"]: one["target"] for one in result["targets"]}


def test_a_pass_resizes_jobs_and_says_why(
    world: World, jobs: Jobs, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A dry run says the same and changes nothing; the result is plain data, and the page shows the plan."""
    jobs.submit(first=5, second=1)
    load = jobs.load_of(6)
    windows = {"windows": [{"name": "day", "start": "00:00", "end": "24:00", "sizes": {"jobs": {"thrid": 1}}}]}
    dry = _task(world, max_load=str(load), windows=windows, dry_run="True").execute(context())
    assert jobs.wanted() == {"first": 5, "second": 1}
    assert (dry["dry_run"], dry["window"], _targets(dry)) == (True, "day", {"first": 3, "second": 3})

    made = _task(world, max_load=load, windows=windows)
    operator_context = context()
    result = made.execute(operator_context)
    assert jobs.wanted() == {"first": 3, "second": 3}
    assert json.loads(json.dumps(result)) == result
    assert {**result, "at": dry["at"], "dry_run": True} == dry
    assert result["refused"] == {}
    logged = caplog.text + capsys.readouterr().out
    assert "NAME    NOW  TARGET  REASON" in logged
    assert "first     5       3  shrinks from 5 to 3" in logged
    assert "second    1       3  grows from 1 to 3" in logged
    assert "has a size for job 'thrid'" in logged
    assert "Dry run: nothing is changed" in logged

    async def kept() -> dict[str, int]:
        async with connect(world.redis_url) as client:
            done = await last_pass(client, world.namespace, world.backend.place)
            plan = done.plan if done else None
            return {one.name: one.target for one in plan.targets} if plan else {}

    assert asyncio.run(kept()) == _targets(result)


@pytest.mark.deep
@pytest.mark.slow
def test_a_pass_that_is_killed_half_way_is_completed_by_the_next(world: World, jobs: Jobs) -> None:
    """The task's process is killed when it has resized the first job: the next run reaches what the first meant to."""
    jobs.submit(first=4, second=4, third=1)
    load = jobs.load_of(6)
    meant = _targets(_task(world, max_load=load, dry_run=True).execute(context()))
    assert meant == {"first": 2, "second": 2, "third": 2}
    killed = _begun(world, max_load=load, policy="rescaling_task:halts_one")
    try:
        wait_until(lambda: jobs.wanted()["first"] == 2, within_s=60)
        assert jobs.wanted() == {"first": 2, "second": 4, "third": 1}
    finally:
        killed.kill()
        killed.communicate()
        os.kill(supervisor(world.work_dir, "second"), signal.SIGCONT)
    assert jobs.wanted()["third"] == 1
    asyncio.run(_let_time_pass(world, keys.rescaling(world.namespace, world.backend.place), most_s=65))
    result = _task(world, max_load=load).execute(context())
    assert _targets(result) == meant
    assert jobs.wanted() == meant
    settled = _task(world, max_load=load).execute(context())["targets"]
    assert all(one["instances"] == one["target"] for one in settled)


async def _let_time_pass(world: World, key: str, *, most_s: int) -> None:
    """Let the time be over for which something is kept, which is no longer than that."""
    async with connect(world.redis_url) as client:
        assert 0 < await client.pttl(key) <= most_s * 1000
        await client.delete(key)


_meanwhile: Callable[[], None] = print


def is_slow(
    given: Sequence[Workload], nodes: Sequence[Node], capacity: Mapping[str, float], *, now_s: float, pause_s: float
) -> Mapping[str, Target]:
    """Decide, and let something happen before anybody is resized."""
    _meanwhile()
    return decide(given, nodes, capacity, now_s=now_s, pause_s=pause_s)


def _slowly(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> str:
    """Return the name of a policy during whose decision this happens."""
    monkeypatch.setattr(sys.modules[__name__], "_meanwhile", meanwhile)
    return f"{__name__}:is_slow"


def test_two_runs_at_once_come_one_after_the_other(world: World, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both reach the same targets: one resizes, and the other finds all as it should be."""
    jobs.submit(first=5, second=1)
    results: list[dict[str, Any]] = []
    other = threading.Thread(target=lambda: results.append(_task(world, **given).execute(context())))

    def waits() -> list[Any]:
        return [line for line in logged if line["event"] == "rescaling.lock_held"]

    def another_begins() -> None:
        if not other.ident:
            other.start()
            wait_until(lambda: waits() or not other.is_alive())

    given = {"max_load": jobs.load_of(6), "policy": _slowly(monkeypatch, another_begins)}
    with capture_logs() as logged:
        results.append(_task(world, **given).execute(context()))
        other.join()
    assert len(waits()) == 1
    earlier, later = sorted(results, key=lambda result: float(result["at"]))
    assert _targets(earlier) == _targets(later) == {"first": 3, "second": 3}
    assert [one["instances"] for one in (*earlier["targets"], *later["targets"])] == [5, 1, 3, 3]
    assert jobs.wanted() == {"first": 3, "second": 3}


def test_a_job_that_ends_meanwhile_is_told_and_keeps_nobody(
    world: World, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task succeeds, and the others are resized."""
    jobs.submit(first=5, second=1)

    def first_ends() -> None:
        ending = threading.Thread(target=asyncio.run, args=[world.backend.delete("first")])
        ending.start()
        ending.join()

    result = _task(world, max_load=jobs.load_of(6), policy=_slowly(monkeypatch, first_ends)).execute(context())
    assert jobs.wanted() == {"second": 3}
    assert list(result["refused"]) == ["first"]
    assert "no job or pool named 'first'" in result["refused"]["first"]
