"""Trains every night with as many instances as there is room for, and continues where the last night ended."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_airflow.sensors.job import EdlJobSensor
from edl_airflow.timetables.traffic_window import TrafficWindowTimetable
from edl_runtime.specs import Checkpoint, TrainerSpec

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "elastic_train"
WINDOWS = Path(__file__).resolve().with_name("traffic_windows.yaml")
NIGHT = "night"
FOLDER = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "elastic_train"

JOB = 'nightly-{{ dag_run.run_after.strftime("%Y%m%dt%H%M%S%f") }}'
MOST = "{{ [params.trainers_min, params.trainers_max] | max }}"
ENDS_BY = '{{ params.ends_by or (data_interval_end.isoformat() if dag_run.run_type == "scheduled" else "PT10M") }}'

PARAMS = {
    "trainers_min": Param(
        1, type="integer", minimum=1, maximum=16, title="Instances at first", description="How many begin to train."
    ),
    "trainers_max": Param(
        2,
        type="integer",
        minimum=1,
        maximum=16,
        title="Instances at last",
        description="To how many it grows as soon as it trains, where there is room. Where jobs are rescaled, at most.",
    ),
    "ends_by": Param(
        "",
        type="string",
        title="Ends by",
        description="A time of day (UTC), or for how long, as PT1H for an hour. Then it ends with a checkpoint. "
        "Empty: a night ends when its traffic window does, and a run by hand after ten minutes.",
    ),
    "epochs": Param(
        100_000,
        type="integer",
        minimum=1,
        title="Epochs",
        description="Passes over all images, of all nights together; when they are over there is nothing left to do.",
    ),
    "pause_s": Param(
        0.05,
        type="number",
        minimum=0,
        maximum=10,
        title="Pause",
        description="Seconds that each step takes longer: the digits are few and the network is small.",
    ),
}

with DAG(
    "edl_nightly_elastic_training",
    description=__doc__,
    schedule=TrafficWindowTimetable(WINDOWS, only=NIGHT, run_immediately=False),  # nightly, not at once
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 1, "retry_delay": timedelta(seconds=10)},
    params=PARAMS,
    tags=["edl", "elastic training"],
    doc_md="""
### Elastic training, night after night

1. `train` starts with few instances and continues from the newest checkpoint of any night, as the checkpoint folder is
   the same for all runs. When the night is over, or at `ends_by`, it ends with a checkpoint; its result has the step,
   the metrics, and that it was stopped.
2. Meanwhile `training` waits until the first instances train together, and `grow` asks for the others, which load while
   the training continues; it does not wait for them. Where it has ended before that, these two are skipped.

Where `edl_rescale_by_traffic` is switched on, that decides from then on how many it has, from *Instances at first* to
*Instances at last*: it takes instances back, gives them again, and may suspend the training.

A retry of a training that has failed begins with few again; clear `grow` to add the others.

Each checkpoint starts a run of `edl_evaluate_on_checkpoint`, if that is switched on.

A night is the traffic window `night` of `traffic_windows.yaml`, which lies beside this file and which other DAGs read
too: 22:00 to 07:00 UTC, until you change it there. To let people change windows in the Airflow UI, set `WINDOWS` to
`"variable:edl_traffic_windows"` and put the content of the file into that Variable; it is read whenever this file is.

Runs never overlap. A manual run takes ten minutes unless *Ends by* is set (PT1M: a short night). A night that
could not begin before its end, for a run by hand or an outage, is skipped; the next one begins with its window.
""",
):
    train = EdlTrainOperator(
        task_id="train",
        job=JOB,
        trainer=TrainerSpec(
            command=(
                *("python", f"{EXAMPLE}/train.py", "--data-dir", f"{FOLDER}/data"),
                *("--epochs", "{{ params.epochs | int }}", "--pause-s", "{{ params.pause_s }}"),
            ),
        ),
        trainers=f"{{{{ params.trainers_min }}}}:{MOST}",
        checkpoint=Checkpoint(url=f"{FOLDER}/checkpoints", every_s=20, keep_last=5),
        ends_by=ENDS_BY,
        deferrable=True,
    )

    training = EdlJobSensor(
        task_id="training",
        job=JOB,
        at_least="{{ params.trainers_min }}",
        timeout=600,
        soft_fail=True,
        deferrable=True,
    )

    grow = EdlResizeOperator(task_id="grow", job=JOB, instances=MOST, wait=False)  # who rescales may give it less

    training >> grow
