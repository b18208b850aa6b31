"""Trains word2vec every night, by one instance that becomes three and one again, and lists nearest words."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import timedelta
from pathlib import Path

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, Param

from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_airflow.sensors.job import EdlJobSensor
from edl_airflow.timetables.traffic_window import TrafficWindowTimetable
from edl_runtime.specs import Checkpoint, TrainerSpec

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "word2vec"
WINDOWS = Path(__file__).resolve().with_name("traffic_windows.yaml")
FOLDER = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "word2vec"

RUN = '{{ dag_run.run_after.strftime("%Y%m%dt%H%M%S%f") }}'
RUN_FOLDER = f"{FOLDER}/runs/{RUN}"
JOB = f"word2vec-{RUN}"

with DAG(
    "edl_word2vec_nightly",
    description=__doc__,
    schedule=TrafficWindowTimetable(WINDOWS, only="night", run_immediately=False),  # nightly, not at once
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
        "rows": Param(105_322, type="integer", minimum=10, title="Texts", description="105,322 of WordNet are all."),
        "passes": Param(3, type="integer", minimum=1, maximum=1000, title="Passes"),
        "trainers": Param(3, type="integer", minimum=1, maximum=16, title="Instances", description="At most."),
        "word": Param(
            "water", type="string", pattern="^[a-z]+$", title="Word", description="Whose nearest are listed."
        ),
        "seed": Param(0, type="integer", minimum=0, maximum=2**31 - 1, title="Seed"),
    },
    tags=["edl", "elastic training"],
    doc_md="""
### The N-gram model of Paddle's word2vec tutorial, elastic

1. `prepare` makes the dictionary, and shards of n-grams.
2. `train` starts with one instance. Meanwhile `alone` waits until it trains, `grow` asks for more and waits until they
   train together, and `shrink` goes back to one. Where the training has ended before, these are skipped.
3. `nearest` lists in its log the words that are nearest to *Word*.

The folder of the run keeps the dictionary and the embeddings, in the tutorial's files. A night is the traffic window
`night` of `traffic_windows.yaml`. Run `make datasets` first, or give a folder of your own.
""",
):
    prepare = BashOperator(
        task_id="prepare",
        bash_command=shlex.join([sys.executable, f"{EXAMPLE}/prepare.py"])
        + f' --data_dir "$DATA_DIR" --rows {{{{ params.rows | int }}}} --out "{RUN_FOLDER}/grams"',
        env={"DATA_DIR": "{{ params.data_dir }}"},
        append_env=True,
    )

    train = EdlTrainOperator(
        task_id="train",
        job=JOB,
        trainer=TrainerSpec(
            command=(
                *("python", f"{EXAMPLE}/train.py", "--data", f"{RUN_FOLDER}/grams"),
                *("--model_dir", f"{RUN_FOLDER}/model", "--passes", "{{ params.passes | int }}"),
                *("--seed", "{{ params.seed | int }}"),
            ),
        ),
        trainers="1:{{ params.trainers }}",
        checkpoint=Checkpoint(url=f"{RUN_FOLDER}/checkpoints", every_s=60),
        deferrable=True,
    )

    alone = EdlJobSensor(task_id="alone", job=JOB, at_least=1, timeout=3600, soft_fail=True, deferrable=True)
    grow = EdlResizeOperator(task_id="grow", job=JOB, instances="{{ params.trainers }}", deferrable=True)
    shrink = EdlResizeOperator(task_id="shrink", job=JOB, instances=1, wait=False)

    nearest = BashOperator(
        task_id="nearest",
        bash_command=shlex.join([sys.executable, f"{EXAMPLE}/nearest.py"])
        + f' --model_dir "{RUN_FOLDER}/model" "$WORD"',
        env={"WORD": "{{ params.word }}"},
        append_env=True,
    )

    prepare >> [train, alone]
    alone >> grow >> shrink
    train >> nearest
