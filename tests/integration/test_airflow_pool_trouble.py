"""Pools of which some teachers come up and some can't: what tasks say, and what goes on."""

from __future__ import annotations

import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.airflow.world import World, run_task

from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.teacher_pool import EdlStopTeacherPoolOperator, EdlTeacherPoolOperator

pytestmark = pytest.mark.slow


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
