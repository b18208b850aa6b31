"""Trains a ResNet on an ImageFolder with as many instances as there is room for."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import timedelta
from pathlib import Path

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, Param

from edl_airflow.operators.train import EdlTrainOperator
from edl_runtime.specs import Checkpoint, TrainerSpec

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "collective_resnet"
FOLDER = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "collective_resnet"

RUN = '{{ dag_run.run_after.strftime("%Y%m%dt%H%M%S%f") }}'
PICTURES = f"{FOLDER}/runs/{RUN}/pictures"

PARAMS = {
    "data_dir": Param(
        str(ROOT / ".datasets" / "fashion"),
        type="string",
        title="Pictures",
        description="A folder of IDX files; by default that of `make datasets`.",
    ),
    "rows": Param(2_000, type="integer", minimum=10, title="Pictures for training"),
    "trainers_min": Param(1, type="integer", minimum=1, maximum=16, title="Instances, at least"),
    "trainers_max": Param(2, type="integer", minimum=1, maximum=16, title="Instances, at most"),
    "epochs": Param(5, type="integer", minimum=1, maximum=1000, title="Epochs"),
    "batch_size": Param(
        64, type="integer", minimum=16, title="Batch", description="Pictures of a step, over all instances."
    ),
}

with DAG(
    "edl_collective_resnet",
    description=__doc__,
    schedule=None,
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 1, "retry_delay": timedelta(seconds=10)},
    params=PARAMS,
    tags=["edl", "elastic training"],
    doc_md="""
### An elastic ResNet

1. `write_folder` writes the pictures as an ImageFolder.
2. `train` trains a ResNet18 on them, with warm-up, smoothed labels and checkpoints. Its result has top-1 and top-5 of
   held-out pictures. `edl resize`, or the DAG `edl_rescale_by_traffic`, changes its instances while it trains.

Run `make datasets` first, or give a folder of your own.
""",
):
    write_folder = BashOperator(
        task_id="write_folder",
        bash_command=shlex.join([sys.executable, f"{EXAMPLE}/write_folder.py"])
        + f' --data_dir "$DATA_DIR" --rows {{{{ params.rows | int }}}} {shlex.quote(str(FOLDER))}/runs/{RUN}/pictures',
        env={"DATA_DIR": "{{ params.data_dir }}"},
        append_env=True,
    )

    train = EdlTrainOperator(
        task_id="train",
        trainer=TrainerSpec(
            command=(
                *("python", f"{EXAMPLE}/train.py", "--model=ResNet18", f"--data_dir={PICTURES}", "--class_dim=10"),
                *("--image_shape=3,32,32", "--resize_short_size=36", "--lower_scale=0.5", "--num_workers=0"),
                *("--use_label_smoothing=True", "--label_smoothing_epsilon=0.1"),
                *("--batch_size={{ params.batch_size | int }}", "--total_batch_size={{ params.batch_size | int }}"),
                *("--num_epochs={{ params.epochs | int }}", f"--model_save_dir={FOLDER}/runs/{RUN}/output"),
            ),
        ),
        trainers="{{ params.trainers_min }}:{{ [params.trainers_min, params.trainers_max] | max }}",
        checkpoint=Checkpoint(url=f"{FOLDER}/runs/{RUN}/checkpoints", every_steps=20),
        deferrable=True,
    )

    write_folder >> train
