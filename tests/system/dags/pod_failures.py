"""Jobs on pods that wait, fail or are evicted: see test_pod_failures.py."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG

from edl_airflow.operators.teacher_pool import EdlTeacherPoolOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_runtime.pods import Pod
from edl_runtime.specs import TeacherSpec, TrainerSpec

NEAR: dict[str, Any] = {"edl_conn_id": "edl_near", "deferrable": True}


SLEEPS = """
import signal, sys, time

def end(*_):
    time.sleep(20)  # why it is evicted is told by its pod alone, which goes with it
    sys.exit(143)

signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(600)
"""


def python(code: str, **pod: Any) -> TrainerSpec:
    """Return a trainer that runs Python code in a pod."""
    return TrainerSpec(command=("python", "-c", code), pod=Pod(**pod))


with DAG("mistaken", schedule=None, default_args={"retries": 2, "retry_delay": timedelta(0), **NEAR}):
    EdlTrainOperator(task_id="script", trainer=python("print('no such data set'); raise SystemExit(78)"))
    EdlTrainOperator(task_id="image", trainer=python("pass", image="Not/An:Image:Name"))

with DAG("waits", schedule=None, default_args=NEAR):
    EdlTrainOperator(task_id="train", job="waits", trainer=python("pass", resources={"gpu": 1000}))
    EdlTeacherPoolOperator(
        task_id="pool",
        teacher_pool="waiting-pool",
        teacher=TeacherSpec(model="/models/none", pod=Pod(resources={"gpu": 1000})),
        teachers="1",
    )

with DAG("evicted", schedule=None, default_args=NEAR):
    sleeps = python(SLEEPS, disruptions=1)
    EdlTrainOperator(task_id="train", job="evicted", trainer=sleeps)
