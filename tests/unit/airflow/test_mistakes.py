"""What is wrong with an operator's or a sensor's arguments is found when the DAG is read."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from support.airflow.templates import STUDENT, TEACHER

from edl_airflow.operators.autoscale import EdlAutoscaleOperator
from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.teacher_pool import EdlTeacherPoolOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_airflow.sensors.checkpoint import EdlCheckpointSensor
from edl_airflow.sensors.job import EdlJobSensor
from edl_airflow.sensors.teacher_pool import EdlTeacherPoolSensor
from edl_airflow.sensors.traffic import EdlTrafficSensor
from edl_runtime.errors import SpecError

DAY = {"name": "day", "start": "08:00", "end": "20:00", "sizes": {"cluster": "50%"}}
WINDOWS = {"windows": [DAY], "default": {}}
MARS = {**WINDOWS, "time_zone": "Mars/Phobos"}

Mistakes = list[tuple[dict[str, Any], str]]

MISTAKES: list[tuple[Callable[..., Any], dict[str, Any], Mistakes]] = [
    (
        EdlTrainOperator,
        {"trainer": STUDENT, "trainers": "1:3"},
        [
            ({"trainers": "3:1"}, "bounds"),
            ({"trainers": 0}, "bounds"),
            ({"gear": "fast"}, "gear"),
            ({"job": "No Name"}, "job"),
            ({"ends_by": "soon"}, "ends_by"),
            ({"stop_grace_s": 0}, "stop_grace_s"),
            ({"priority": 1.5}, "priority"),
            ({"weight": 0}, "weight"),
            ({"progress_every_s": "5"}, "progress_every_s"),
            ({"checkpoint": ""}, "checkpoint"),
        ],
    ),
    (
        EdlDistillOperator,
        {"student": STUDENT, "teacher": TEACHER, "teachers": "1:3"},
        [
            ({"teachers": "3:1"}, "bounds"),
            ({"teachers": "0:1"}, "bounds"),
            ({"teachers": "few"}, "bounds"),
            ({"teacher_pool": "No Name"}, "teacher_pool"),
            ({"teacher": None}, "teacher_pool"),
            ({"wait_timeout_s": 0}, "wait_timeout_s"),
            ({"wait_timeout_s": "300"}, "wait_timeout_s"),
            ({"progress_every_s": -1}, "progress_every_s"),
            ({"priority": "high"}, "priority"),
            ({"weight": -1}, "weight"),
        ],
    ),
    (
        EdlTeacherPoolOperator,
        {"teacher_pool": "digits", "teacher": TEACHER, "teachers": 1},
        [
            ({"wait_timeout_s": float("nan")}, "wait_timeout_s"),
            ({"priority": "high"}, "priority"),
            ({"weight": -1}, "weight"),
        ],
    ),
    (
        EdlResizeOperator,
        {"job": "student"},
        [
            *(({"instances": count}, "instances") for count in (0, -1, "many", "1.5")),
            ({"instances": 1, "wait_timeout_s": float("inf")}, "wait_timeout_s"),
            ({"instances": 1, "job": None}, "teacher_pool, job"),
            ({"instances": 1, "teacher_pool": "digits"}, "teacher_pool, job"),
            ({"instances": 2, "windows": WINDOWS}, "instances, windows: got"),
            ({}, "instances, windows: got (None, None), allowed is a number or traffic windows, one of them"),
            ({"instances": 2, "window": "day"}, "window: got 'day', allowed is the name of one of `windows`"),
            ({"windows": WINDOWS, "window": "dya"}, "window: got 'dya', allowed is one of 'day', 'default'"),
            ({"windows": MARS}, "windows, time_zone: got 'Mars/Phobos'"),
            ({"windows": {"windows": [DAY]}}, "windows: got 'none on mon from 00:00 to 08:00'"),
            ({"windows": {**WINDOWS, "windows": [DAY, {**DAY, "name": "twin"}]}}, "windows[1]: got"),
        ],
    ),
    (
        EdlAutoscaleOperator,
        {},
        [
            ({"windows": {"windows": [DAY]}}, "windows"),
            ({"windows": MARS}, "Mars/Phobos"),
            ({"max_load": 1.5}, "max_load"),
            ({"max_load": "high"}, "max_load"),
            *(({"lead_s": seconds}, "lead_s") for seconds in (-1, "soon", None)),
            ({"lead_s": -1, "max_load": "{{ params.max_load }}"}, "lead_s"),
            ({"lead_s": -1, "windows": "variable:windows"}, "lead_s"),
            ({"max_load": 1.5, "windows": "{{ params.windows }}"}, "max_load"),
            ({"policy": "decide"}, "policy"),
            ({"policy": print}, "policy"),
            ({"dry_run": "perhaps"}, "dry_run"),
            ({"approve_shrinks": 2}, "approve_shrinks"),
            ({"approval_timeout_s": 0}, "approval_timeout_s"),
            ({"unanswered": "ask again"}, "unanswered"),
        ],
    ),
    (EdlTeacherPoolSensor, {"teacher_pool": "digits"}, [({"students": each}, "students") for each in (-1, "one")]),
    (
        EdlJobSensor,
        {"job": "student"},
        [({"job": "No Name"}, "job"), ({"phase": "failed"}, "phase"), ({"at_least": 0}, "at_least")],
    ),
    (
        EdlCheckpointSensor,
        {"stream": "s"},
        [
            ({"stream": ""}, "stream"),
            ({"stream": "a {b}"}, "stream"),
            ({"job": "No Name"}, "job"),
            ({"step": -1}, "step"),
            ({"epoch": "first"}, "epoch"),
            ({"metric": "accuracy"}, "metric"),
            *(({"max_age": age}, "max_age") for age in (0, timedelta(0), "1 h")),
        ],
    ),
    (
        EdlTrafficSensor,
        {"windows": WINDOWS},
        [
            ({}, "window, at_least: got None"),
            ({"window": "dya"}, "window: got 'dya', allowed is one of 'day', 'default'"),
            ({"at_least": {}}, "at_least: got {}"),
            ({"at_least": {"gpu": 0}}, "at_least.gpu: got 0"),
            ({"at_least": {"gpu": "four"}}, "at_least.gpu: got 'four'"),
            ({"at_least": 4}, "at_least: got 4"),
            ({"window": "day", "windows": {"windows": []}}, "windows: got 'none on mon from 00:00 to 24:00'"),
            ({"window": "day", "windows": MARS}, "windows, time_zone: got 'Mars/Phobos'"),
        ],
    ),
]


@pytest.mark.parametrize(
    ("operator", "given", "words"),
    [(operator, {**base, **mistake}, words) for operator, base, found in MISTAKES for mistake, words in found],
)
def test_the_dags_import_error_names_the_argument(
    operator: Callable[..., Any], given: dict[str, Any], words: str
) -> None:
    """Before any run, also where other arguments are known only when the task runs."""
    with pytest.raises(SpecError) as caught:
        operator(task_id="t", **given)
    assert words in str(caught.value)


@pytest.mark.parametrize(("operator", "given"), [(operator, base) for operator, base, _ in MISTAKES])
def test_without_the_mistake_there_is_none(operator: Callable[..., Any], given: dict[str, Any]) -> None:
    """What is beside each of them is good."""
    also = {EdlResizeOperator: {"instances": 1}, EdlTrafficSensor: {"window": "day"}}.get(operator, {})  # type: ignore[call-overload]
    assert operator(task_id="t", **given, **also)
