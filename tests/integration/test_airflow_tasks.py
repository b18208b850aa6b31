"""Tasks on the real local backend, a real Redis and real teachers: what they return, and what they leave."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowTaskTimeout
from airflow.sdk.execution_time.task_runner import _run_execute_callable
from support.airflow.world import (
    World,
    defer,
    distill,
    fired,
    follow_until_started,
    registered,
    resume,
    run_task,
    trigger_of,
    until,
)

from edl_airflow.failures import TaskKilledError
from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.teacher_pool import EdlStopTeacherPoolOperator, EdlTeacherPoolOperator
from edl_airflow.sensors.teacher_pool import EdlTeacherPoolSensor
from edl_runtime.errors import JobFailedError, NoTeacherError, RegistryUnavailableError
from edl_runtime.specs import TrainerSpec
from edl_runtime.store.server import RedisServer


def _killed_when_started(world: World, operator: EdlDistillOperator) -> threading.Thread:
    """Send this process what Airflow sends a task, and react as Airflow's task runner does."""
    signal.signal(signal.SIGTERM, lambda *_: operator.on_kill())

    def kill() -> None:
        until(world.starts)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Give SIGTERM back its handler."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.parametrize("deferrable", [False, True])
def test_the_whole_in_one_task(world: World, deferrable: bool) -> None:  # noqa: FBT001
    """A pool of real teachers comes, the student trains, its result is returned, and everything is gone."""
    operator = distill(world, teacher_pool=None, teacher=world.teacher(), teachers="1:2", deferrable=deferrable)
    context = world.context()
    result = run_task(operator, context)
    assert result["checkpoint"] == str(world.folder / "model")
    assert result["metrics"] == {"accuracy": 0.5}
    assert result["job"].startswith("nightly-distill-")
    assert result["job"] in context["xcoms"]["_link_StudentLogLink"]
    assert world.jobs() == {}


@pytest.mark.slow
def test_a_pool_in_steps(world: World) -> None:
    """Start, wait, grow, shrink, stop: each returns the teachers that are registered."""
    context = world.context()
    start = EdlTeacherPoolOperator(
        task_id="start", dag=world.dag(), teacher_pool="digits", teacher=world.teacher(), teachers="1:2"
    )
    assert len(start.execute(context)["teachers"]) == 1
    grown = EdlResizeOperator(task_id="grow", teacher_pool="digits", instances="2", deferrable=True)
    assert len(run_task(grown, context)["teachers"]) == 2
    both = EdlTeacherPoolSensor(task_id="wait", teacher_pool="digits", at_least=2, deferrable=True).execute(context)
    assert len(both["teachers"]) == 2
    shrunk = EdlResizeOperator(task_id="shrink", teacher_pool="digits", instances=1).execute(context)
    assert len(shrunk["teachers"]) == 1
    with pytest.raises(AirflowFailException, match="1 to 2"):
        EdlResizeOperator(task_id="beyond", teacher_pool="digits", instances=3).execute(context)
    EdlStopTeacherPoolOperator(task_id="stop", teacher_pool="digits").execute(context)
    assert world.jobs() == {}


@pytest.mark.slow
@pytest.mark.parametrize("deferrable", [False, True])
def test_a_bad_model_fails_the_task_at_once_in_the_teachers_words(
    world: World,
    deferrable: bool,  # noqa: FBT001
) -> None:
    """Long before the wait limit, with no retry, and nothing is left."""
    operator = distill(
        world, teacher_pool=None, teacher=world.teacher("no/such/folder"), deferrable=deferrable, wait_timeout_s=600
    )
    started = time.monotonic()
    with pytest.raises(AirflowFailException, match="no/such/folder"):
        run_task(operator, world.context())
    assert time.monotonic() - started < 60
    assert world.jobs() == {}


def test_no_teacher_in_time(world: World) -> None:
    """The error names the pool, the seconds and where to look; no student was started."""
    with pytest.raises(NoTeacherError, match=r"'digits' after 1 s.*edl pools"):
        distill(world, wait_timeout_s=1).execute(world.context())
    assert world.starts() == []


def test_redis_down_at_the_start(world: World) -> None:
    """Infrastructure, so Airflow may retry; nothing was started, and the password is not in the message."""
    world.connect_to("redis://:top-secret@127.0.0.1:1/0")
    with pytest.raises(RegistryUnavailableError, match=r"127\.0\.0\.1:1") as caught:
        distill(world, teacher_pool=None, teacher=world.teacher()).execute(world.context())
    assert "top-secret" not in str(caught.value)
    assert world.jobs() == {}


@pytest.mark.parametrize("deferrable", [False, True])
def test_a_student_that_fails_says_why_in_the_tasks_error(world: World, deferrable: bool) -> None:  # noqa: FBT001
    """Its last lines are there, a retry is allowed, and nothing is left."""
    operator = distill(world, "fails", deferrable=deferrable)
    with registered(world, "digits", "a:1"), pytest.raises(JobFailedError, match="loss is not a number"):
        run_task(operator, world.context())
    assert world.jobs() == {}


@pytest.mark.parametrize("deferrable", [False, True])
def test_progress_is_in_the_log_and_answers_in_the_result(
    world: World,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    deferrable: bool,  # noqa: FBT001
) -> None:
    """As the student reports it, while it runs, in the worker and in the triggerer; who is the limit is said once."""
    monkeypatch.setattr("edl_airflow.conductor.LOOK_EVERY_S", 0.05)  # so that no report is missed on a busy machine
    script = TrainerSpec(command=("python", str(world.folder / "reports.py")))
    operator = distill(world, student=script, progress_every_s=0.05, deferrable=deferrable)
    with registered(world, "digits", "a:1"):
        result = run_task(operator, world.context())
    assert result["answered"] == {"a:1": 3}
    logged = capsys.readouterr().out
    assert "step 1/3 · loss 0.2500" in logged
    assert "step 2/3 · loss 0.2500" in logged
    assert "1 in quarantine" in logged
    assert logged.count("the teachers are the limit: the student waits 38 % of the time") == 1
    assert logged.count("in quarantine: b:1 (timed out)") == 1


@pytest.mark.usefixtures("sigterm")
def test_a_killed_task_leaves_nothing(world: World) -> None:
    """SIGTERM while the student runs: `execute` ends only when the last process is gone."""
    operator = distill(world, "waits")
    thread = _killed_when_started(world, operator)
    with registered(world, "digits", "a:1"), pytest.raises(TaskKilledError):
        operator.execute(world.context())
    thread.join()
    assert world.jobs() == {}
    assert world.processes() == []


def test_a_timed_out_task_leaves_nothing(world: World) -> None:
    """Airflow's own timer goes off, in Airflow's own runner."""
    operator = distill(world, "waits", execution_timeout=timedelta(seconds=6))
    context = world.context()
    with registered(world, "digits", "a:1"), pytest.raises(AirflowTaskTimeout):
        _run_execute_callable(context, operator.execute, operator)
    assert len(world.starts()) == 1
    assert world.jobs() == {}


def test_a_deferred_task_times_out_too(world: World) -> None:
    """Airflow has no timer for it, so the trigger has."""
    operator = distill(world, "waits", deferrable=True, execution_timeout=timedelta(seconds=6))
    context = world.context()
    with registered(world, "digits", "a:1"):
        deferred = defer(operator, context)
        event = asyncio.run(fired(trigger_of(deferred)))
    assert len(world.starts()) == 1
    with pytest.raises(AirflowTaskTimeout):
        resume(distill(world, "waits"), context, deferred, event)
    assert world.jobs() == {}


def test_a_deferred_task_that_is_marked_failed_leaves_nothing(world: World) -> None:
    """All of the trigger's on_kill works from its serialized form."""
    operator = distill(world, "waits", deferrable=True)
    with registered(world, "digits", "a:1"):
        deferred = defer(operator, world.context())
        asyncio.run(follow_until_started(world, deferred))
        asyncio.run(trigger_of(deferred).on_kill())
    assert world.jobs() == {}
    assert world.processes() == []


@pytest.mark.slow
def test_training_goes_on_while_redis_is_away(world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The trigger rides it out, and the result arrives."""
    with RedisServer(tmp_path_factory.mktemp("own-redis")) as server:
        world.redis_url = server.url
        world.connect_to(server.url)
        operator, context = distill(world, "waits", deferrable=True), world.context()
        with registered(world, "digits", "a:1"):
            deferred = defer(operator, context)

            async def lose_redis() -> dict[str, Any]:
                running = asyncio.ensure_future(fired(trigger_of(deferred)))
                await asyncio.to_thread(until, world.starts)
                await asyncio.to_thread(server.kill)
                await asyncio.sleep(2)
                assert not running.done()
                world.go()
                return await running

            event = asyncio.run(lose_redis())
        result = resume(distill(world, "waits"), context, deferred, event)
    assert result["metrics"] == {"accuracy": 0.5}
    assert world.jobs() == {}


def test_a_trigger_never_blocks_its_loop(world: World) -> None:
    """Other triggers share it: none waits over 50 ms, in the best of ten runs on a machine that is busy."""
    operator = distill(world, "waits", deferrable=True, progress_every_s=0.1)
    with registered(world, "digits", "a:1"):
        deferred = defer(operator, world.context())

        async def longest_wait_s() -> float:
            running = asyncio.ensure_future(fired(trigger_of(deferred)))
            longest, ends = 0.0, time.monotonic() + 1.5
            while time.monotonic() < ends:
                before = time.monotonic()
                await asyncio.sleep(0.005)
                longest = max(longest, time.monotonic() - before - 0.005)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return longest

        waits: list[float] = []
        while len(waits) < 10 and min(waits, default=1.0) >= 0.05:
            waits.append(asyncio.run(longest_wait_s()))
        asyncio.run(trigger_of(deferred).on_kill())
    assert min(waits) < 0.05, waits
