"""What operators take: templates in specs, and what is checked when the DAG is read."""

from __future__ import annotations

import inspect
import json
from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import DAG, BaseOperator
from airflow.sdk.exceptions import AirflowFailException
from airflow.serialization.serialized_objects import DagSerialization
from support.airflow.fakes import MadeUpSite, rendered
from support.airflow.templates import STUDENT, SURROUNDINGS, TEACHER, distill

from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.teacher_pool import EdlStopTeacherPoolOperator, EdlTeacherPoolOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_airflow.sensors.checkpoint import EdlCheckpointSensor
from edl_airflow.sensors.job import EdlJobSensor
from edl_airflow.sensors.teacher_pool import EdlTeacherPoolSensor
from edl_runtime.specs import Bounds, Checkpoint, TeacherSpec, TrainerSpec


def test_templates_inside_specs_are_rendered(context: Any) -> None:
    """Any text in a spec may hold one, and bounds may come from params."""
    operator = rendered(distill(teachers="{{ params.low }}:{{ params.high }}"), context)
    assert operator.teacher == TeacherSpec(model="/models/3", outputs=("logits",))
    assert operator.student == TrainerSpec(command=("python", "s.py", "manual__1"), env={"LOW": "1"})
    work = operator.plan(context, SURROUNDINGS)
    assert work.pool_job.bounds == Bounds(1, 3)


@pytest.mark.parametrize("teachers", ["{{ params.high }}:{{ params.low }}", "{{ run_id }}"])
def test_what_a_template_makes_is_checked_before_anything_starts(teachers: str, context: Any, site: MadeUpSite) -> None:
    """Bad params fail the task at once and leave nothing."""
    operator = rendered(distill(teachers=teachers), context)
    with pytest.raises(AirflowFailException, match="bounds"):
        operator.execute(context)
    assert site.backend.deeds == []


def test_templates_make_text_where_the_dag_makes_objects(context: Any) -> None:
    """`render_template_as_native_obj` would make a command's "24" a number."""
    with DAG("native", schedule=None, render_template_as_native_obj=True):
        student = TrainerSpec(command=("python", "s.py", "--epochs", "{{ params.high }}"), env={"N": "{{ 2 }}"})
        operator = rendered(distill(student=student, teacher_pool="{{ 20260101 }}", teachers="{{ 2 }}"), context)
        sensor = rendered(EdlTeacherPoolSensor(task_id="wait", teacher_pool="{{ 5 }}"), context)
    assert operator.student == TrainerSpec(command=("python", "s.py", "--epochs", "3"), env={"N": "2"})
    assert (operator.plan(context, SURROUNDINGS).pool, sensor.teacher_pool) == ("20260101", "5")


def test_an_empty_number_of_teachers_is_not_one(context: Any, site: MadeUpSite) -> None:  # noqa: ARG001
    """A template that makes nothing is a mistake."""
    with pytest.raises(AirflowFailException, match="bounds"):
        rendered(distill(teachers="{{ '' }}"), context).execute(context)


def _dag() -> DAG:
    with DAG("steps", schedule=None) as dag:
        start = EdlTeacherPoolOperator(task_id="start", teacher_pool="digits", teacher=TEACHER, teachers=Bounds(1, 3))
        stop = EdlStopTeacherPoolOperator(task_id="stop", teacher_pool="digits").as_teardown(setups=start)
        wait = EdlTeacherPoolSensor(task_id="wait", teacher_pool="digits")
        train = EdlDistillOperator(task_id="train", student=STUDENT, teacher_pool="digits")
        night = EdlTrainOperator(
            task_id="night", trainer=STUDENT, checkpoint=Checkpoint(url="c"), ends_by=timedelta(hours=1)
        )
        grow = EdlResizeOperator(task_id="grow", teacher_pool="digits", instances="{{ params.high }}")
        each = EdlDistillOperator.partial(task_id="each", student=STUDENT, teacher=TEACHER).expand(teachers=["1", "2"])
        start >> wait >> [train, grow] >> each >> stop
        start >> night >> stop
    return dag


def test_a_dag_serializes_the_same_each_time_and_shows_its_specs() -> None:
    """Airflow sees a new version only when the DAG has changed, and people can read the templates."""
    first, second = (json.dumps(DagSerialization.to_dict(_dag()), sort_keys=True) for _ in range(2))
    assert first == second
    assert "TeacherSpec(model='/models/{{ params.high }}', outputs=('logits',)" in first
    dag = DagSerialization.from_dict(json.loads(first))
    assert dag.get_task("train").operator_extra_links


@pytest.mark.parametrize(
    "operator",
    [
        EdlDistillOperator,
        EdlTeacherPoolOperator,
        EdlStopTeacherPoolOperator,
        EdlResizeOperator,
        EdlTrainOperator,
        EdlTeacherPoolSensor,
        EdlJobSensor,
        EdlCheckpointSensor,
    ],
)
def test_our_arguments_are_not_airflows(operator: type[Any]) -> None:
    """`pool`, for one, is the name of Airflow's slot pool: a task of ours would never be scheduled."""
    ours, airflows = (set(inspect.signature(one).parameters) - {"kwargs"} for one in (operator, BaseOperator))
    assert {"pool", "queue"} <= airflows
    assert "edl_conn_id" in ours
    assert not ours & airflows
