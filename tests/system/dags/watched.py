"""A pass of the policy, then a distillation and an elastic job that nobody ends: see test_plugin_page.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from airflow.sdk import DAG

from edl_airflow.operators.autoscale import EdlAutoscaleOperator
from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_runtime.pods import Pod
from edl_runtime.specs import Checkpoint, TeacherSpec, TrainerSpec

FOLDER = Path(os.environ.get("AIRFLOW_HOME", "")).parent / "watched"
STUDENT = Path(__file__).resolve().with_name("trains.py")
TRAINER = STUDENT.with_name("says_and_trains.py")
DATA = Path(os.environ.get("AIRFLOW_HOME", "")) / "mnist_distill" / "data"
ARGS = ("--data-dir", f"{DATA}", "--epochs", "100000", "--pause-s", "0.2")
SMALL = Pod(resources={"cpu": "1m"})
WINDOWS = """
windows:
  - {name: day, start: 07:00, end: 22:00, sizes: {cluster: {cpu: 0.9}}}
  - {name: night, start: 22:00, end: 07:00, sizes: {cluster: {cpu: 1}}}
"""
WATCHED: dict[str, Any] = {"edl_conn_id": "edl_watched", "deferrable": True}

with DAG("watched", schedule=None, default_args=WATCHED):
    rescale = EdlAutoscaleOperator(task_id="rescale", windows=WINDOWS, edl_conn_id=WATCHED["edl_conn_id"])
    distill = EdlDistillOperator(
        task_id="distill",
        job="watched-student",
        teacher_pool="watched-teachers",
        teacher=TeacherSpec(model="answers:double", pod=SMALL),
        student=TrainerSpec(command=("python", f"{STUDENT}", f"{FOLDER}"), pod=SMALL),
    )
    train = EdlTrainOperator(
        task_id="train",
        job="watched-training",
        trainer=TrainerSpec(command=("python", f"{TRAINER}", *ARGS), pod=SMALL),
        trainers="1:2",
        checkpoint=Checkpoint(url=f"{FOLDER}/checkpoints", every_s=20, keep_last=2),
    )
    rescale >> [distill, train]
