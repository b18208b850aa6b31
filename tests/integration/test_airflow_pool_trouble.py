"""Pools of which some teachers come up and some can't: what tasks say, and what goes on."""

from __future__ import annotations

import asyncio

import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.airflow.world import World, defer, distill, fired, resume, run_task, trigger_of, until

from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.teacher_pool import EdlStopTeacherPoolOperator, EdlTeacherPoolOperator

pytestmark = pytest.mark.slow

SECOND_FAILS = """
import os
if os.environ["EDL_INSTANCE"] == "1":
    raise ImportError("no second licence")
"""


def _let_the_second_fail(world: World) -> None:
    module = world.folder / "answers.py"
    module.write_text(SECOND_FAILS + module.read_text())


@pytest.mark.parametrize("deferrable", [pytest.param(False, marks=pytest.mark.deep), True])
def test_growing_by_another_model_fails_at_once_and_spares_the_teachers_there_are(
    world: World,
    deferrable: bool,  # noqa: FBT001
) -> None:
    """The model has changed on disk since the pool was started; the error says so, and the old teacher serves on."""
    context = world.context()
    start = EdlTeacherPoolOperator(
        task_id="start", dag=world.dag(), teacher_pool="digits", teacher=world.teacher(), teachers="1:2"
    )
    (before,) = start.execute(context)["teachers"]
    module = world.folder / "answers.py"
    module.write_text(module.read_text().replace("* 2", "* 3"))
    grow = EdlResizeOperator(
        task_id="grow", teacher_pool="digits", instances=2, wait_timeout_s=1e6, deferrable=deferrable
    )
    with pytest.raises(AirflowFailException, match=r"differs from pool 'digits'"):
        run_task(grow, context)
    shrunk = EdlResizeOperator(task_id="shrink", teacher_pool="digits", instances=1).execute(context)
    assert shrunk["teachers"] == [before]
    EdlStopTeacherPoolOperator(task_id="stop", teacher_pool="digits").execute(context)


@pytest.mark.deep
def test_a_failed_students_error_tells_what_is_wrong_with_its_pool(world: World) -> None:
    """The student knows only its own end of it."""
    _let_the_second_fail(world)
    context = world.context()
    changes = {"teacher": world.teacher(), "teachers": "1:2"}
    deferred = defer(distill(world, "waits-and-fails", deferrable=True, **changes), context)

    async def trouble() -> dict[str, object]:
        running = asyncio.ensure_future(fired(trigger_of(deferred)))
        await asyncio.to_thread(until, world.starts)
        await world.backend.resize("digits", 2)
        while not (await world.backend.get("digits")).reason:  # noqa: ASYNC110 (another process's news)
            await asyncio.sleep(0.1)
        world.go()
        return await running

    event = asyncio.run(trouble())
    with pytest.raises(Exception, match=r"(?s)its pool 'digits'.*loss is not a number.*no second licence"):
        resume(distill(world), context, deferred, event)
