"""Elastic training in a task that keeps its checkpoints in an object store: S3's protocol, on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
from typing import Any

import pytest
from support.airflow.world import World, defer, fired, resume, run_task, trigger_of
from support.object_store import SECRET, files

from edl_airflow.operators.train import EdlTrainOperator
from edl_runtime.checkpoint.manifest import MANIFEST
from edl_runtime.specs import Checkpoint, TrainerSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TRAINS = """
import sys
import numpy as np
import paddle
from edl_runtime import elastic

samples = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
run = elastic.init()
model = paddle.nn.Linear(2, 1)
model, optimizer = run.wrap(model, paddle.optimizer.SGD(0.01, parameters=model.parameters()))
for batch in run.data(list(samples), global_batch=8, epochs=int(sys.argv[1])):
    loss = (model(batch) ** 2).mean()
    loss.backward()
    run.step(loss=loss)
    print("stepped", run.step_number, flush=True)
"""


@pytest.fixture
def place(bucket: str, world: World, monkeypatch: pytest.MonkeyPatch) -> str:
    """That bucket; what is needed to use it is passed on from the worker's environment."""
    connection = json.loads(os.environ["AIRFLOW_CONN_EDL_DEFAULT"])
    connection["extra"]["pass_on"] = "AWS_*"
    monkeypatch.setenv("AIRFLOW_CONN_EDL_DEFAULT", json.dumps(connection))
    (world.folder / "trains.py").write_text(TRAINS)
    return bucket


def _train(world: World, place: str, epochs: int) -> EdlTrainOperator:
    return EdlTrainOperator(
        task_id="distill",
        dag=world.dag(),
        trainer=TrainerSpec(command=("python", str(world.folder / "trains.py"), str(epochs))),
        checkpoint=Checkpoint(url=place, every_steps=10),
        job="digits",
        progress_every_s=0.5,
        deferrable=True,
    )


def _steps_shown(log: str) -> list[int]:
    return [int(step) for step in re.findall(r"\[0 rank 0\] stepped (\d+)", log)]


def _written(world: World) -> bytes:
    """All that stands in the work folder."""
    return b"".join(file.read_bytes() for file in world.work_dir.rglob("*") if file.is_file())


def test_a_training_goes_on_from_an_object_store(world: World, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The next run goes on from the last one's checkpoint; what opens the store is in no spec, trigger, file or log."""
    context: Any = world.context("night-1")
    deferred = defer(_train(world, place, 3), context)
    event = asyncio.run(fired(trigger_of(deferred)))
    written = _written(world)
    result = resume(_train(world, place, 3), context, deferred, event)
    assert (result["job"], result["step"]) == ("digits", 24)
    assert result["checkpoint"].startswith(f"{place}/step-000000024-")
    assert files().exists(f"{result['checkpoint']}/{MANIFEST}")
    shown = capsys.readouterr().out
    assert _steps_shown(shown) == list(range(1, 25))

    again = run_task(_train(world, place, 5), world.context("night-2"))
    assert again["step"] == 40
    shown_again = capsys.readouterr().out
    assert _steps_shown(shown_again) == list(range(25, 41))

    assert b"digits" in written
    told = json.dumps([deferred.trigger.serialize(), event, result, context["xcoms"]])
    assert SECRET not in told + shown + shown_again
    assert SECRET.encode() not in written + _written(world)
    assert world.jobs() == {}
