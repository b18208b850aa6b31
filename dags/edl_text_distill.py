"""Distils a transformer that tells what texts are about into a bag of words, and draws the accuracies of both ways."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import timedelta
from pathlib import Path

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, Param

from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_runtime.specs import TeacherSpec, TrainerSpec

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "text_distill"
FOLDER = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "text_distill"
MODEL = FOLDER / "teacher"

RUN = '{{ dag_run.run_after.strftime("%Y%m%dt%H%M%S%f") }}'
RUN_FOLDER = f"{FOLDER}/runs/{RUN}"

ROWS = ("--rows", "{{ params.rows | int }}")
STUDENT = (
    *("python", f"{EXAMPLE}/student.py", "--data_dir", "{{ params.data_dir }}", *ROWS),
    *("--tokenizer", f"{MODEL}/tokenizer.json", "--student", "{{ params.student }}"),
    *("--num_epochs", "{{ params.epochs | int }}", "--labels", "{{ params.labels | int }}"),
    *("--seed", "{{ params.seed | int }}", "--curves", f"{RUN_FOLDER}/curves"),
)

with DAG(
    "edl_text_distill",
    description=__doc__,
    schedule=None,
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 1, "retry_delay": timedelta(seconds=10)},
    params={
        "data_dir": Param(
            str(ROOT / ".datasets" / "wordnet"),
            type="string",
            title="Texts",
            description="WordNet's files, or a folder of CLASS.txt with a text a line; by default that of "
            "`make datasets`.",
        ),
        "tokens": Param(
            "words",
            enum=["words", "characters", "pairs"],
            title="Tokens",
            description="What texts are split into; characters or pairs of them for Chinese.",
        ),
        "length": Param(
            24,
            type="integer",
            minimum=1,
            maximum=1024,
            title="Length",
            description="Tokens of a text that count; about 64 for Chinese.",
        ),
        "rows": Param(
            15_000,
            type="integer",
            minimum=10,
            title="Texts",
            description="For training; 105,322 of WordNet are all, 15,627 of the Chinese reviews.",
        ),
        "labels": Param(
            2_000,
            type="integer",
            minimum=1,
            title="Labels",
            description="That the student knows; the teacher knows all.",
        ),
        "student": Param("bow", enum=["bow", "cnn"], title="Student", description="Bag of words, or convolutions."),
        "teacher_epochs": Param(3, type="integer", minimum=1, maximum=1000, title="The teacher's epochs"),
        "epochs": Param(4, type="integer", minimum=1, maximum=1000, title="The student's epochs"),
        "teachers": Param(2, type="integer", minimum=1, maximum=16, title="Teachers", description="In the pool."),
        "seed": Param(0, type="integer", minimum=0, maximum=2**31 - 1, title="Seed"),
    },
    tags=["edl", "distillation"],
    doc_md="""
### Service distillation of texts

1. `train_teacher` trains a transformer on all labels, unless a run before has trained the same one.
2. `alone` trains a student on the few labels that it knows.
3. `distill` starts a pool of the teacher, trains the same student on the teachers' answers to all texts, of which other
   words are left out each time, and stops the pool.
4. `draw` keeps a picture of both students' accuracies by epoch; the log has them as a table.

The form's defaults take about three minutes on two cores. Run `make datasets` first, or give a folder of your own.
""",
):
    train_teacher = BashOperator(
        task_id="train_teacher",
        bash_command=shlex.join([sys.executable, f"{EXAMPLE}/train_teacher.py", "--model_dir", str(MODEL), *ROWS])
        + ' --data_dir "$DATA_DIR" --tokens "$TOKENS" --length {{ params.length | int }}'
        " --num_epochs {{ params.teacher_epochs | int }}",
        env={"DATA_DIR": "{{ params.data_dir }}", "TOKENS": "{{ params.tokens }}"},
        append_env=True,
    )

    alone = EdlTrainOperator(
        task_id="alone",
        trainer=TrainerSpec(command=(*STUDENT, "--checkpoint", f"{RUN_FOLDER}/alone.safetensors")),
        deferrable=True,
    )

    distill = EdlDistillOperator(
        task_id="distill",
        teacher=TeacherSpec(model=str(MODEL), outputs=("logits=fetch_name_0",)),
        teachers="{{ params.teachers }}",
        student=TrainerSpec(
            command=(*STUDENT, "--use_distill_service", "--checkpoint", f"{RUN_FOLDER}/distilled.safetensors")
        ),
        deferrable=True,
    )

    draw = BashOperator(
        task_id="draw",
        bash_command=shlex.join(
            [
                *(sys.executable, str(ROOT / "examples" / "vision_distill" / "curves.py")),
                *(f"{RUN_FOLDER}/curves", f"{RUN_FOLDER}/curves.svg"),
            ]
        ),
        doc_md="Returns the path of the picture.",
    )

    train_teacher >> [alone, distill] >> draw
