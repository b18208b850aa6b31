"""The quickstart's distillation from single steps: a pool as a setup task, its teardown, a student between them."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import timedelta
from pathlib import Path

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, Param

from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.operators.teacher_pool import EdlStopTeacherPoolOperator, EdlTeacherPoolOperator
from edl_airflow.sensors.teacher_pool import EdlTeacherPoolSensor
from edl_runtime.specs import TeacherSpec, TrainerSpec

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "mnist_distill"
FOLDER = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "mnist_distill"
DATA = FOLDER / "data"
MODEL = FOLDER / "teacher"

RUN = '{{ dag_run.run_after.strftime("%Y%m%dt%H%M%S%f") }}'
RUN_FOLDER = f"{FOLDER}/runs/steps-{RUN}"
POOL = f"steps-{RUN}"

with DAG(
    "edl_distill_steps",
    description=__doc__,
    schedule=None,
    default_args={"retries": 1, "retry_delay": timedelta(seconds=10)},
    params={
        "teachers": Param(2, type="integer", minimum=1, maximum=16, title="Teachers", description="In the pool."),
        "epochs": Param(
            24, type="integer", minimum=1, maximum=1000, title="Epochs", description="Passes over all images."
        ),
        "seed": Param(
            0, type="integer", minimum=0, maximum=2**31 - 1, title="Seed", description="The first of three seeds."
        ),
    },
    tags=["edl", "distillation"],
    doc_md="""
### Service distillation, step by step

`start_pool` is a setup task and `stop_pool` its teardown: the pool goes away when anything between them fails, and
comes up again when what lies between them is cleared. Any number of tasks may use the pool meanwhile; here it is one
student.
""",
):
    train_teacher = BashOperator(
        task_id="train_teacher",
        bash_command=shlex.join(
            [sys.executable, f"{EXAMPLE}/train_teacher.py", "--data-dir", f"{DATA}", "--model-dir", f"{MODEL}"]
        ),
    )

    start_pool = EdlTeacherPoolOperator(
        task_id="start_pool",
        teacher_pool=POOL,
        teacher=TeacherSpec(model=str(MODEL), outputs=("logits=fetch_name_0",)),
        teachers="{{ params.teachers }}",
        deferrable=True,
    )

    pool_ready = EdlTeacherPoolSensor(
        task_id="pool_ready", teacher_pool=POOL, at_least="{{ params.teachers }}", timeout=300, deferrable=True
    )

    distill = EdlDistillOperator(
        task_id="distill",
        teacher_pool=POOL,
        student=TrainerSpec(
            command=(
                *("python", f"{EXAMPLE}/student.py", "--use_distill_service", "--data-dir", str(DATA)),
                *("--epochs", "{{ params.epochs | int }}", "--seed", "{{ params.seed | int }}"),
                *("--checkpoint", f"{RUN_FOLDER}/student.safetensors"),
            ),
        ),
        deferrable=True,
    )

    stop_pool = EdlStopTeacherPoolOperator(task_id="stop_pool", teacher_pool=POOL)

    report = BashOperator(
        task_id="report",
        bash_command=shlex.join([sys.executable, f"{EXAMPLE}/report.py", "--keep", RUN_FOLDER]) + ' <<< "$RESULT"',
        env={"RESULT": "{{ ti.xcom_pull('distill') | tojson }}"},
        append_env=True,
        doc_md="Returns the path of the summary that it keeps.",
    )

    train_teacher >> start_pool >> pool_ready >> distill >> stop_pool.as_teardown(setups=start_pool)
    distill >> report
