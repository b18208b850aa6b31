"""The public API as users write it. Never run: mypy checks that it stays valid."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
from airflow.sdk import DAG, Asset, AssetWatcher, task
from prometheus_client import REGISTRY

from edl_airflow.assets import jobs_asset
from edl_airflow.hooks.edl import EdlHook
from edl_airflow.operators.autoscale import EdlAutoscaleOperator
from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.operators.register_servers import EdlRegisterServersOperator
from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.teacher_pool import EdlStopTeacherPoolOperator, EdlTeacherPoolOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_airflow.retry_policy import EdlRetryPolicy
from edl_airflow.sensors.checkpoint import EdlCheckpointSensor
from edl_airflow.sensors.job import EdlJobSensor
from edl_airflow.sensors.teacher_pool import EdlTeacherPoolSensor
from edl_airflow.sensors.traffic import EdlTrafficSensor
from edl_airflow.timetables.traffic_window import TrafficWindowTimetable
from edl_airflow.traffic_windows import load_windows
from edl_airflow.triggers.checkpoint import EdlCheckpointTrigger
from edl_runtime.compat.cloud_reader import cloud_reader
from edl_runtime.distill import AnswerCache, Discovered, DistillReader, Fixed, JobReporter
from edl_runtime.distill.metrics import ReaderCollector
from edl_runtime.result import write_result
from edl_runtime.specs import Bounds, Checkpoint, TeacherSpec, TrainerSpec

teacher = TeacherSpec(model="/models/teacher", outputs=["logits=fetch_name_0"], gpu_ids=[0], mem_optim=True)
student = TrainerSpec(command=["python", "student.py"], env={"EPOCHS": "3"}, cwd="jobs")

EdlTrainOperator(task_id="plain", trainer={"command": ["python", "train.py"]}, trainers={"min": 1, "max": 4})
EdlDistillOperator(task_id="all", teacher=teacher, teachers=Bounds(1, 3), student=student, deferrable=True)
EdlDistillOperator(task_id="given", teacher_pool="digits", student=student)
EdlTeacherPoolOperator(task_id="start", teacher_pool="digits", teacher=teacher, teachers="1:{{ params.most }}")
EdlRegisterServersOperator(task_id="join", teacher_pool="digits", servers=["oip+http://triton:8000/net"], at_least=1)
EdlTeacherPoolSensor(task_id="ready", teacher_pool="digits", at_least=2, students=1, deferrable=True)
EdlResizeOperator(task_id="grow", teacher_pool="digits", instances="{{ params.most }}")
EdlStopTeacherPoolOperator(task_id="stop", teacher_pool="digits")
kept = Checkpoint(url="s3://runs/digits", every_steps=500)
EdlTrainOperator(
    task_id="t", trainer=student, trainers="1:4", checkpoint=kept, gear="warm", ends_by="07:00", job="night"
)
EdlTrainOperator(task_id="u", trainer=student, trainers=2, checkpoint="/runs/digits", ends_by=timedelta(hours=8))
EdlTrainOperator.from_manifest(Path("examplejob.yaml"), task_id="m", checkpoint=kept, ends_by="07:00")
EdlDistillOperator(task_id="d", teacher_pool="digits", student=student, students=Bounds(1, 4), checkpoint=kept, job="d")
EdlResizeOperator(task_id="more", job="night", instances=4)
EdlJobSensor(task_id="runs", job="night", phase="running", at_least=2, deferrable=True)
windows = load_windows({"windows": [], "default": {"cluster": "40%", "jobs": {"night": 2}}})
DAG("nights", schedule=TrafficWindowTimetable(Path("traffic_windows.yaml"), only=("night",), run_immediately=False))
EdlTrafficSensor(task_id="quiet", windows="variable:traffic", window="night", at_least={"gpu": 4}, deferrable=True)
EdlResizeOperator(task_id="follow", job="night", windows=windows)
EdlResizeOperator(
    task_id="shut", teacher_pool="digits", windows=Path("traffic_windows.yaml"), window="{{ params.window }}"
)
EdlAutoscaleOperator(task_id="all_of_it", windows=windows, max_load="{{ params.most }}")
EdlAutoscaleOperator(task_id="show", policy="mine.policies:decide", dry_run="{{ params.dry_run }}")
DAG("rescales", schedule=[jobs_asset("edl_default")])
EdlCheckpointSensor(task_id="good", stream="nightly/t", metric="accuracy>=0.9", max_age=timedelta(hours=1))
Asset("digits", watchers=[AssetWatcher(name="landed", trigger=EdlCheckpointTrigger(stream="nightly/t"))])


@task(retries=3, retry_policy=EdlRetryPolicy(first_delay=timedelta(seconds=10)))
def evaluate() -> None: ...


works: tuple[bool, str] = EdlHook("edl_default").test_connection()


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield np.zeros((4, 1, 28, 28), np.float32), np.zeros(4, np.int64)


with JobReporter(total_steps=10) as reporter:
    for teachers in (None, Fixed.parse("127.0.0.1:9000"), Discovered("digits", at_most=2)):
        with DistillReader(
            batches, inputs=["image", None], outputs=["logits"], format="batch", teachers=teachers, reporter=reporter
        ) as reader:
            for batch in reader:
                reporter.report(loss=float(batch[-1].sum()), note="first")
    REGISTRY.register(ReaderCollector(reporter.stats))

for cache in (None, AnswerCache("id"), AnswerCache(sample_id="id", folder="answers", limit_mb=1000)):
    with DistillReader(batches, inputs=["image", "id"], outputs=["logits"], cache=cache, tokenizer="t.json") as reader:
        asked_nobody: int = reader.stats().cached
write_result(checkpoint="/runs/1/student.safetensors", metrics={"accuracy": 0.9})

for _image, _label in cloud_reader("s3://bucket/digits", "redis://r", shards_per_task=8, timeout_s=60, retries=0):
    pass
for _line in cloud_reader(["a"], "redis://r", read=str.splitlines, commit=lambda task: task.number, job="j"):
    pass
