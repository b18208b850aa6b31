"""Elastic training in a task that keeps its checkpoints in an object store: S3's protocol, on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import fsspec  # type: ignore[import-untyped]
import pytest
from integration.airflow_world import World, defer, fired, resume, run_task, trigger_of
from moto.server import ThreadedMotoServer

from edl_airflow.operators.train import EdlTrainOperator
from edl_runtime.checkpoint.manifest import MANIFEST
from edl_runtime.specs import Checkpoint, TrainerSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SECRET = "never-written-down"

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


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedMotoServer]:
    """A server that talks S3, on a port of its own."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def place(server: ThreadedMotoServer, world: World, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL in an empty bucket; what is needed to use it stands in the worker's environment and is passed on."""
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    connection = json.loads(os.environ["AIRFLOW_CONN_EDL_DEFAULT"])
    connection["extra"]["pass_on"] = "AWS_*"
    monkeypatch.setenv("AIRFLOW_CONN_EDL_DEFAULT", json.dumps(connection))
    (world.folder / "trains.py").write_text(TRAINS)
    with urlopen(f"http://{host}:{port}/moto-api/reset", data=b"") as answer:
        assert answer.status == 200
    _files().mkdir("bucket")
    return "s3://bucket/nightly"


def _files() -> fsspec.AbstractFileSystem:
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


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
    assert _files().exists(f"{result['checkpoint']}/{MANIFEST}")
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
