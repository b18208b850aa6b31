"""Distils one ResNet into a smaller one, by the flags of EDL's own example."""

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
EXAMPLES = ROOT / "examples"
FOLDER = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "resnet_distill"

RUN_FOLDER = f'{FOLDER}/runs/{{{{ dag_run.run_after.strftime("%Y%m%dt%H%M%S%f") }}}}'
TEACHER = "ResNet34_vd"
TRAIN = (
    *("python", f"{EXAMPLES}/resnet_distill/train.py", f"--data_dir={RUN_FOLDER}/pictures", "--class_dim=10"),
    *("--image_shape=3,32,32", "--resize_short_size=36", "--lower_scale=0.5", "--num_workers=0"),
    *("--batch_size={{ params.batch_size | int }}", f"--model_save_dir={RUN_FOLDER}/output"),
)

with DAG(
    "edl_resnet_distill",
    description=__doc__,
    schedule=None,
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 1, "retry_delay": timedelta(seconds=10)},
    params={
        "data_dir": Param(
            str(ROOT / ".datasets" / "fashion"),
            type="string",
            title="Pictures",
            description="A folder of IDX files; by default that of `make datasets`.",
        ),
        "rows": Param(2_000, type="integer", minimum=10, title="Pictures for training"),
        "teacher_epochs": Param(5, type="integer", minimum=1, maximum=1000, title="The teacher's epochs"),
        "epochs": Param(5, type="integer", minimum=1, maximum=1000, title="The student's epochs"),
        "batch_size": Param(32, type="integer", minimum=2, title="Batch"),
        "teachers": Param(1, type="integer", minimum=1, maximum=16, title="Teachers", description="In the pool."),
    },
    tags=["edl", "distillation"],
    doc_md="""
### ResNets

1. `write_folder` writes the pictures as an ImageFolder.
2. `train_teacher` trains a ResNet34_vd on their labels.
3. `distill` starts a pool of it, trains a ResNet18_vd on the teachers' answers, and stops the pool. Its result has
   top-1 and top-5 of held-out pictures.

EDL's own networks, ResNeXt101_32x16d_wsl and ResNet50_vd, need GPUs and ImageNet: change the flags `--model` here. Run
`make datasets` first, or give a folder of your own.
""",
):
    write_folder = BashOperator(
        task_id="write_folder",
        bash_command=shlex.join([sys.executable, f"{EXAMPLES}/collective_resnet/write_folder.py"])
        + f' --data_dir "$DATA_DIR" --rows {{{{ params.rows | int }}}} "{RUN_FOLDER}/pictures"',
        env={"DATA_DIR": "{{ params.data_dir }}"},
        append_env=True,
    )

    train_teacher = EdlTrainOperator(
        task_id="train_teacher",
        trainer=TrainerSpec(
            command=(*TRAIN, f"--model={TEACHER}", "--num_epochs={{ params.teacher_epochs | int }}"),
        ),
        deferrable=True,
    )

    distill = EdlDistillOperator(
        task_id="distill",
        teacher=TeacherSpec(model=f"{RUN_FOLDER}/output/{TEACHER}/teacher", outputs=("logits=fetch_name_0",)),
        teachers="{{ params.teachers }}",
        student=TrainerSpec(
            command=(
                *(*TRAIN, "--model=ResNet18_vd", "--num_epochs={{ params.epochs | int }}"),
                "--use_distill_service=True",
            ),
        ),
        deferrable=True,
    )

    write_folder >> train_teacher >> distill
