"""The DAGs of test_interrupted_tasks.py, "BACKEND_TEST_while_STATE", each with its own pool and student."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG

from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.operators.teacher_pool import EdlStopTeacherPoolOperator, EdlTeacherPoolOperator
from edl_runtime.specs import TeacherSpec, TrainerSpec

FOLDER = Path(os.environ.get("AIRFLOW_HOME", "")).parent / "interrupted"
STUDENT = Path(__file__).resolve().with_name("trains.py")  # pods have the folder at the same path
TEACHER = TeacherSpec(model="answers:double")
TIME = timedelta(seconds=90)
"""By then the student trains; on a slow machine by twice this time."""

CONNECTIONS = {"local": "edl_default", "pods": "edl_near"}
SAVES = ("--saves-for-s", "8")  # longer than the five seconds that Airflow gives a task


def distil(dag_id: str, *flags: str, deferrable: bool, conn_id: str, **given: Any) -> None:
    """Make a DAG with one distill task."""
    with DAG(dag_id, schedule=None):
        EdlDistillOperator(
            task_id="distill",
            teacher=TEACHER,
            student=TrainerSpec(command=("python", f"{STUDENT}", f"{FOLDER}/{dag_id}", *flags)),
            retry_delay=timedelta(seconds=1),
            deferrable=deferrable,
            edl_conn_id=conn_id,
            **given,
        )


def hang_at_the_end_of_the_first_try(context: Any, _: object) -> None:
    """Stay between the end of the work and its success, for a test to kill the process there."""
    ti = context["ti"]
    if ti.try_number == 1:
        (FOLDER / ti.dag_id / "ending").touch()
        time.sleep(3600)


for backend, conn_id in CONNECTIONS.items():
    for deferrable, state in ((False, "running"), (True, "deferred")):
        options: dict[str, Any] = {"deferrable": deferrable, "conn_id": conn_id}
        distil(f"{backend}_marked_failed_while_{state}", *SAVES, **options)
        distil(f"{backend}_cleared_while_{state}", **options)
        distil(f"{backend}_timed_out_while_{state}", execution_timeout=TIME, **options)
        distil(f"{backend}_timed_out_later_while_{state}", execution_timeout=2 * TIME, **options)
        options |= {"retries": 1, "post_execute": hang_at_the_end_of_the_first_try}
        distil(f"{backend}_lost_at_the_end_while_{state}", **options)
    running: dict[str, Any] = {"deferrable": False, "conn_id": conn_id, "retries": 1}
    distil(f"{backend}_lost_worker_while_running", **running)
    distil(f"{backend}_lost_supervisor_while_running", **running)
    distil(f"{backend}_lost_task_process_while_running", **running)
    distil(f"{backend}_stopped_task_process_while_running", *SAVES, **running)
    distil(f"{backend}_lost_triggerer_while_deferred", deferrable=True, conn_id=conn_id)

distil("local_orphaned_while_deferred", *SAVES, deferrable=True, conn_id="edl_default")
distil("local_bystander_while_deferred", deferrable=True, conn_id="edl_default")
distil("pods_lost_scheduler_while_running", deferrable=False, conn_id="edl_near")
distil("pods_lost_scheduler_while_deferred", deferrable=True, conn_id="edl_near")
distil("pods_stopped_triggerer_while_deferred", deferrable=True, conn_id="edl_near")
distil("pods_unreachable_while_running", deferrable=False, conn_id="edl_far")
distil("pods_unreachable_while_deferred", deferrable=True, conn_id="edl_far")
distil("pods_marked_unreachable_while_deferred", deferrable=True, conn_id="edl_far")

with DAG("local_failed_steps_while_deferred", schedule=None) as steps:
    pool = steps.dag_id.replace("_", "-")
    command = ("python", f"{STUDENT}", f"{FOLDER}/{steps.dag_id}", "--exit-status", "3")
    start = EdlTeacherPoolOperator(task_id="start", teacher_pool=pool, teacher=TEACHER, teachers="1", deferrable=True)
    distill = EdlDistillOperator(
        task_id="distill", teacher_pool=pool, student=TrainerSpec(command=command), deferrable=True
    )
    stop = EdlStopTeacherPoolOperator(task_id="stop", teacher_pool=pool)
    start >> distill >> stop.as_teardown(setups=start)
