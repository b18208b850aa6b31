"""Several tries of a task, and several tasks: who owns what, who takes what over, what is left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from support.airflow.world import World, defer, distill, fired, follow_until_started, registered, resume, trigger_of

from edl_airflow.failures import GoneError
from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.teacher_pool import EdlStopTeacherPoolOperator, EdlTeacherPoolOperator
from edl_airflow.sensors.teacher_pool import EdlTeacherPoolSensor


def test_clearing_a_deferred_task_spares_the_next_try(world: World) -> None:
    """Airflow runs try 2's execute before try 1's on_kill: try 2 has the student by then, the same process."""
    with registered(world, "digits", "a:1"):
        first = defer(distill(world, "waits", deferrable=True), world.context("try-1"))

        asyncio.run(follow_until_started(world, first))
        context = world.context("try-2")
        second = defer(distill(world, "waits", deferrable=True), context)
        asyncio.run(trigger_of(first).on_kill())
        assert set(world.jobs().values()) == {"running"}
        world.go()
        event = asyncio.run(fired(trigger_of(second)))
        result = resume(distill(world, "waits"), context, second, event)
    assert result["metrics"] == {"accuracy": 0.5}
    assert len(world.starts()) == 1
    assert world.jobs() == {}


@pytest.mark.deep
def test_mapped_tasks_do_not_share_a_pool_by_its_name(world: World) -> None:
    """The second is refused, in words that say what to do; the first goes on and stops its pool."""
    changes: dict[str, Any] = {"teacher": world.teacher(), "teachers": "1:1"}
    context = world.context("try-1", map_index=0)
    first = defer(distill(world, deferrable=True, **changes), context)
    with pytest.raises(AirflowFailException, match=r"'digits' belongs to 'nightly-distill-0-.*ti\.map_index"):
        distill(world, **changes).execute(world.context("try-2", map_index=1))
    assert world.jobs() == {"digits": "running"}
    result = resume(distill(world), context, first, asyncio.run(fired(trigger_of(first))))
    assert result["metrics"] == {"accuracy": 0.5}
    assert world.jobs() == {}


@pytest.mark.deep
@pytest.mark.slow
def test_waits_end_with_the_pool_that_they_wait_for(world: World) -> None:
    """A sensor fails and a resize is skipped, long before their time is up; so is a resize that comes too late."""
    context = world.context()
    start: dict[str, Any] = {"teacher_pool": "digits", "teacher": world.teacher(), "teachers": "1:2"}
    EdlTeacherPoolOperator(task_id="start", dag=world.dag(), **start).execute(context)
    sensor = EdlTeacherPoolSensor(task_id="wait", teacher_pool="digits", at_least=5, deferrable=True)
    waits = defer(sensor, context)
    grow = EdlResizeOperator(task_id="grow", teacher_pool="digits", instances=2, deferrable=True)
    grows = defer(grow, context)

    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        running = asyncio.gather(fired(trigger_of(waits)), fired(trigger_of(grows)))
        stop = EdlStopTeacherPoolOperator(task_id="stop", teacher_pool="digits")
        await asyncio.to_thread(stop.execute, context)
        return await running

    waited, grown = asyncio.run(both())
    with pytest.raises(GoneError):
        resume(sensor, context, waits, waited)
    with pytest.raises(AirflowSkipException):
        resume(grow, context, grows, grown)
    with pytest.raises(AirflowSkipException):
        grow.execute(context)
