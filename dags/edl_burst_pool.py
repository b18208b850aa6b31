"""A student whose pool bursts into a second cluster: a second connection, while its own has too few teachers."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from datetime import timedelta
from pathlib import Path

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, Param, task
from airflow.sdk.exceptions import AirflowSkipException

from edl_airflow.client import open_client
from edl_airflow.hooks.edl import EdlHook
from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.operators.teacher_pool import EdlStopTeacherPoolOperator, EdlTeacherPoolOperator
from edl_runtime.specs import TeacherSpec, TrainerSpec

BURST_CONN_ID = "edl_burst"
"""A connection to another cluster, with the same Redis and namespace; see examples/burst_pool."""

WAITING_SHARE = 0.2
"""More teachers are started once students wait for so much of their time."""

LOOKS_FOR_S, LOOKS_EVERY_S = 600.0, 5.0
"""How long that is looked for, and how often."""

STOP_RETRIES = 20
"""How often the second pool's stop is tried again: hours. A run whose teardown has failed is a success to Airflow."""

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "mnist_distill"
FOLDER = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "burst_pool"
DATA, MODEL = FOLDER / "data", FOLDER / "teacher"

POOL = 'burst-{{ dag_run.run_after.strftime("%Y%m%dt%H%M%S%f") }}'

with DAG(
    "edl_burst_pool",
    description=__doc__,
    schedule=None,
    catchup=False,
    default_args={"retries": 1, "retry_delay": timedelta(seconds=10)},
    params={
        "teachers": Param(
            1, type="integer", minimum=1, maximum=64, title="Teachers", description="In the own cluster."
        ),
        "burst": Param(2, type="integer", minimum=1, maximum=64, title="Burst", description="In the second cluster."),
        "epochs": Param(
            24, type="integer", minimum=1, maximum=1000, title="Epochs", description="Passes over all images."
        ),
    },
    tags=["edl", "distillation"],
    doc_md="""
### A pool in two clusters

`start_pool` starts teachers on the connection `edl_default`, and `distill` a student. `students_wait` succeeds once the
student waits for teachers; then `burst` starts more of them, under the same name, on the connection `edl_burst`, and
the student uses all. If it does not wait within ten minutes, `students_wait` is skipped, and `burst` with it. Both
pools are stopped when the student has ended.
""",
):
    train_teacher = BashOperator(
        task_id="train_teacher",
        bash_command=shlex.join(
            [sys.executable, f"{EXAMPLE}/train_teacher.py", "--data-dir", f"{DATA}", "--model-dir", f"{MODEL}"]
        ),
    )

    teacher = TeacherSpec(model=str(MODEL), outputs=("logits=fetch_name_0",))
    start_pool = EdlTeacherPoolOperator(
        task_id="start_pool",
        teacher_pool=POOL,
        teacher=teacher,
        teachers="{{ params.teachers }}",
        deferrable=True,
    )

    distill = EdlDistillOperator(
        task_id="distill",
        teacher_pool=POOL,
        student=TrainerSpec(
            command=(
                *("python", f"{EXAMPLE}/student.py", "--use_distill_service", "--data-dir", str(DATA)),
                *("--epochs", "{{ params.epochs | int }}"),
            ),
        ),
        deferrable=True,
    )

    @task
    def students_wait(pool: str) -> None:
        """Wait until students of the pool wait for teachers; skip what follows if they don't."""
        edl_connection = EdlHook().edl_connection()

        async def wait() -> None:
            async with open_client(edl_connection) as client, asyncio.timeout(LOOKS_FOR_S):
                while ((await client.demand(pool)).waiting or 0.0) < WAITING_SHARE:  # noqa: ASYNC110 - Redis knows it
                    await asyncio.sleep(LOOKS_EVERY_S)

        try:
            asyncio.run(wait())
        except TimeoutError:
            raise AirflowSkipException("No student has waited for teachers") from None

    burst = EdlTeacherPoolOperator(
        task_id="burst",
        teacher_pool=POOL,
        teacher=teacher,
        teachers="{{ params.burst }}",
        edl_conn_id=BURST_CONN_ID,
        deferrable=True,
    )

    stop_burst = EdlStopTeacherPoolOperator(
        task_id="stop_burst", teacher_pool=POOL, edl_conn_id=BURST_CONN_ID, retries=STOP_RETRIES
    )
    stop_pool = EdlStopTeacherPoolOperator(task_id="stop_pool", teacher_pool=POOL)

    train_teacher >> start_pool >> distill
    start_pool >> students_wait(POOL) >> burst
    distill >> [stop_burst.as_teardown(setups=burst), stop_pool.as_teardown(setups=start_pool)]
