"""Runs the quick start of EDL: a teacher in Paddle Serving's format, and a student of the old DistillReader."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import timedelta
from pathlib import Path

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, Param

from edl_airflow.operators.distill import EdlDistillOperator
from edl_runtime.specs import TeacherSpec, TrainerSpec

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPT = EXAMPLES / "paddle_serving" / "train_with_fleet.py"
FOLDER = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "paddle_serving"

RUN_FOLDER = f'{FOLDER}/runs/{{{{ dag_run.run_after.strftime("%Y%m%dt%H%M%S%f") }}}}'
TRAIN = (str(SCRIPT), f"--data-dir={FOLDER}/data", f"--curves={RUN_FOLDER}/curves")

with DAG(
    "edl_paddle_serving",
    description=__doc__,
    schedule=None,
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 1, "retry_delay": timedelta(seconds=10)},
    params={
        "epochs": Param(5, type="integer", minimum=1, maximum=1000, title="Epochs", description="Of both trainings."),
        "teachers": Param(1, type="integer", minimum=1, maximum=16, title="Teachers", description="In the pool."),
    },
    tags=["edl", "distillation"],
    doc_md="""
### The quick start of EDL

1. `save_teacher` trains a network on digits and saves it as a Paddle Serving model.
2. `distill` starts a pool that serves it, trains the same network on the teachers' answers with EDL's own
   `DistillReader`, and stops the pool.
3. `draw` keeps a picture of both accuracies by epoch.
""",
):
    save_teacher = BashOperator(
        task_id="save_teacher",
        bash_command=f'mkdir -p "{RUN_FOLDER}" && cd "{RUN_FOLDER}" && '
        + shlex.join([sys.executable, str(SCRIPT), f"--data-dir={FOLDER}/data", "--save_serving_model=True"])
        + f' --curves="{RUN_FOLDER}/curves" --num_epochs={{{{ params.epochs | int }}}}',
    )

    distill = EdlDistillOperator(
        task_id="distill",
        teacher=TeacherSpec(model=f"{RUN_FOLDER}/mnist_cnn_model"),
        teachers="{{ params.teachers }}",
        student=TrainerSpec(
            command=(
                *("python", *TRAIN, "--num_epochs={{ params.epochs | int }}"),
                *("--use_distill_service=True", "--distill_teachers="),  # those of the pool
            ),
        ),
        deferrable=True,
    )

    draw = BashOperator(
        task_id="draw",
        bash_command=shlex.join([sys.executable, str(EXAMPLES / "vision_distill" / "curves.py")])
        + f' "{RUN_FOLDER}/curves" "{RUN_FOLDER}/curves.svg"',
        doc_md="Returns the path of the picture.",
    )

    save_teacher >> distill >> draw
