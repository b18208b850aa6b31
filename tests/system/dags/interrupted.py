"""One DAG for each test of interrupted tasks, of the same name; each run has its own pool and student.

The tests: test_interrupted_tasks.py and, of the same runs on pods, tests/kubernetes/test_interrupted_on_pods.py.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG

from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.operators.teacher_pool import EdlStopTeacherPoolOperator, EdlTeacherPoolOperator
from edl_runtime.specs import TeacherSpec, TrainerSpec

FOLDER = Path(os.environ.get("AIRFLOW_HOME", "")).parent / "interrupted"
TEACHER = TeacherSpec(model="answers:double")
TIME = timedelta(seconds=45)


def student(dag_id: str, *words: str) -> TrainerSpec:
    """Train in the DAG's own folder."""
    return TrainerSpec(command=("python", f"{Path(__file__).parent}/trains.py", f"{FOLDER}/{dag_id}", *words))


def distil(dag_id: str, *words: str, **given: Any) -> None:
    """Make a DAG of one task that does all of it."""
    with DAG(dag_id, schedule=None):
        EdlDistillOperator(
            task_id="distill",
            teacher=TEACHER,
            student=student(dag_id, *words),
            retry_delay=timedelta(seconds=1),
            **given,
        )


distil("marked_failed_while_running", "--saves_for_s", "8", deferrable=False)
distil("marked_failed_while_deferred", "--saves_for_s", "8", deferrable=True)
distil("cleared_while_running", deferrable=False)
distil("cleared_while_deferred", deferrable=True)
distil("timed_out_while_running", deferrable=False, execution_timeout=TIME)
distil("timed_out_while_deferred", deferrable=True, execution_timeout=TIME)
distil("lost_worker", deferrable=False, retries=1)
distil("lost_supervisor", deferrable=False, retries=1)
distil("lost_task_process", deferrable=False, retries=1)
distil("lost_triggerer", deferrable=True)
distil("stopped_triggerer", deferrable=True)
distil("stopped_task_process", "--saves_for_s", "8", deferrable=False, retries=1)
distil("lost_scheduler_while_running", deferrable=False)
distil("lost_scheduler_while_deferred", deferrable=True)
distil("marked_failed_while_unreachable", deferrable=True, edl_conn_id="edl_far")
distil("unreachable_while_running", deferrable=False, edl_conn_id="edl_far")
distil("unreachable_while_deferred", deferrable=True, edl_conn_id="edl_far")

with DAG("failed_between_setup_and_teardown", schedule=None) as steps:
    pool = steps.dag_id.replace("_", "-")
    start = EdlTeacherPoolOperator(task_id="start", teacher_pool=pool, teacher=TEACHER, teachers="1", deferrable=True)
    distill = EdlDistillOperator(
        task_id="distill", teacher_pool=pool, student=student(steps.dag_id, "--exit_status", "3"), deferrable=True
    )
    stop = EdlStopTeacherPoolOperator(task_id="stop", teacher_pool=pool)
    start >> distill >> stop.as_teardown(setups=start)
