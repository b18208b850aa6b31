"""Distils a network that reads handwritten digits into a much smaller one, and grows the teachers' pool meanwhile."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import timedelta
from pathlib import Path

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, Param

from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.sensors.teacher_pool import EdlTeacherPoolSensor
from edl_runtime.specs import TeacherSpec, TrainerSpec

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "mnist_distill"
FOLDER = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "mnist_distill"
DATA = FOLDER / "data"
MODEL = FOLDER / "teacher"

RUN = '{{ dag_run.run_after.strftime("%Y%m%dt%H%M%S%f") }}'
RUN_FOLDER = f"{FOLDER}/runs/quickstart-{RUN}"
POOL = f"quickstart-{RUN}"
MOST = "{{ [params.teachers_min, params.teachers_max] | max }}"

PARAMS = {
    "teachers_min": Param(
        1,
        type="integer",
        minimum=1,
        maximum=16,
        title="Teachers at first",
        description="How many the pool starts with.",
    ),
    "teachers_max": Param(
        3,
        type="integer",
        minimum=1,
        maximum=16,
        title="Teachers at last",
        description="How many the pool grows to while the student trains; it never shrinks.",
    ),
    "epochs": Param(
        24,
        type="integer",
        minimum=1,
        maximum=1000,
        title="Epochs",
        description="Passes over all images, for each seed.",
    ),
    "temperature": Param(
        4.0,
        type="number",
        exclusiveMinimum=0,
        maximum=100,
        title="Temperature",
        description="Softens the teachers' answers: the higher, the more the student hears of the less likely digits.",
    ),
    "weight": Param(
        0.9,
        type="number",
        minimum=0,
        maximum=1,
        title="Distillation weight",
        description="Of the teachers' answers against the few known labels: 1 is the answers alone.",
    ),
    "seed": Param(
        0,
        type="integer",
        minimum=0,
        maximum=2**31 - 1,
        title="Seed",
        description="The first of three seeds.",
    ),
}

with DAG(
    "edl_quickstart_distill",
    description=__doc__,
    schedule=None,
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 1, "retry_delay": timedelta(seconds=10)},
    params=PARAMS,
    tags=["edl", "distillation"],
    doc_md="""
### Service distillation on one machine

1. `train_teacher` trains a residual network on 4,000 digits, unless a run before has done so.
2. `distill` starts a pool that serves it, trains a student of a few weights three times on 100 labels alone and three
   times on the teachers' answers, and stops the pool.
3. Meanwhile `pool_in_use` waits until the student is there, and `grow_pool` adds teachers, which the student uses
   without a restart. Where the student has finished before that, these two are skipped.
4. `report` keeps a table of what came out with the run: accuracies, speeds, and who answered how much.

It runs only when somebody triggers it; the form has its parameters.
""",
):
    train_teacher = BashOperator(
        task_id="train_teacher",
        bash_command=shlex.join(
            [sys.executable, f"{EXAMPLE}/train_teacher.py", "--data-dir", f"{DATA}", "--model-dir", f"{MODEL}"]
        ),
    )

    distill = EdlDistillOperator(
        task_id="distill",
        teacher_pool=POOL,
        teacher=TeacherSpec(model=str(MODEL), outputs=("logits=fetch_name_0",)),
        teachers=f"{{{{ params.teachers_min }}}}:{MOST}",
        student=TrainerSpec(
            command=(
                *("python", f"{EXAMPLE}/student.py", "--use_distill_service", "--data-dir", str(DATA)),
                *("--epochs", "{{ params.epochs | int }}", "--temperature", "{{ params.temperature }}"),
                *("--weight", "{{ params.weight }}", "--seed", "{{ params.seed | int }}"),
                *("--checkpoint", f"{RUN_FOLDER}/student.safetensors"),
            ),
        ),
        deferrable=True,
    )

    pool_in_use = EdlTeacherPoolSensor(
        task_id="pool_in_use",
        teacher_pool=POOL,
        at_least="{{ params.teachers_min }}",
        students=1,
        timeout=300,
        soft_fail=True,
        deferrable=True,
    )

    grow_pool = EdlResizeOperator(task_id="grow_pool", teacher_pool=POOL, instances=MOST, deferrable=True)

    report = BashOperator(
        task_id="report",
        bash_command=shlex.join([sys.executable, f"{EXAMPLE}/report.py", "--keep", RUN_FOLDER]) + ' <<< "$RESULT"',
        env={"RESULT": "{{ ti.xcom_pull('distill') | tojson }}"},
        append_env=True,
        doc_md="Returns the path of the summary that it keeps.",
    )

    train_teacher >> [distill, pool_in_use]
    pool_in_use >> grow_pool
    distill >> report
