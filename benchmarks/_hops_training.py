"""Trains for `hops.py` with checkpoints or a resize, by `edl run`. Started with --script it is the training script."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock
from urllib.parse import urlsplit

FOLDER = Path(os.environ["EDL_HOPS"])
STEPS, EVERY, QUIET = 100_000, 20, 10
LIMIT_S = 60.0


def say(number: int) -> None:
    with (FOLDER / "phase").open("r+b") as phase:
        phase.write(bytes([number]))


def script(measured: str) -> None:
    """Train until nothing is left to measure: steps without a checkpoint, steps with one; or steps of two trainers."""
    import numpy as np
    import paddle

    from edl_runtime import elastic

    if measured == "checkpoint":
        (FOLDER / "only").write_text(str(os.getpid()))
    run = elastic.init()
    net = paddle.nn.Linear(4, 1)
    model, _ = run.wrap(net, paddle.optimizer.Adam(parameters=net.parameters()))
    samples = [(np.ones(4, np.float32),)] * 64
    for (inputs,) in run.data(samples, global_batch=8, epochs=STEPS):
        loss = model(inputs).mean()
        loss.backward()
        run.step(loss=loss)
        time.sleep(0.01)  # as long as a small model takes
        at = run.step_number
        if measured == "checkpoint" and at == 3 * EVERY + 2:
            say(2)
        elif measured == "checkpoint" and at == 4 * EVERY - 2:
            say(1)
        elif measured == "checkpoint" and at == 4 * EVERY + QUIET:
            say(0)
            run.finish()
        elif measured == "resize" and at == EVERY:
            (FOLDER / "begun").touch()
        elif measured == "resize" and run.world_size == 2:
            (FOLDER / "together").touch()


@contextlib.contextmanager
def training(measured: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start this script by `edl run`: detached for a resize, through which its terminal does not go."""
    flags = ["--instances", "1:2", "--name", "hops", "--checkpoint", str(FOLDER / "kept")]
    flags += ["--every-steps", str(EVERY if measured == "checkpoint" else STEPS)]
    if measured == "resize":
        flags.append("--detach")
    edl = [sys.executable, __file__, "--edl"]
    environ = {**os.environ, "EDL_WORK_DIR": str(FOLDER / "work")}
    job = subprocess.Popen([*edl, "run", *flags, "--", "python", __file__, "--script", measured], env=environ)
    try:
        yield job
    finally:
        job.terminate()
        job.wait(LIMIT_S)
        if measured == "resize":
            subprocess.run([*edl, "stop", "hops"], env=environ, check=True, timeout=LIMIT_S)


def resize() -> None:
    """Run `EdlResizeOperator` on the training, and wait until two trainers have made a step together."""
    from edl_airflow.operators.resize import EdlResizeOperator

    url = urlsplit(os.environ["EDL_REDIS_URL"])
    place = {
        "conn_type": "edl",
        "host": url.hostname,
        "port": url.port,
        "login": url.username,
        "password": url.password,
    }
    os.environ["AIRFLOW_CONN_EDL_DEFAULT"] = json.dumps({**place, "extra": {"work_dir": str(FOLDER / "work")}})
    operator = EdlResizeOperator(task_id="resize", job="hops", instances=2)
    say(1)
    with mock.patch("edl_airflow.operators.resize.push_links"):  # a task instance's, which is none here
        operator.execute({})
    await_file(FOLDER / "together")
    say(0)


def await_file(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} is not there after {LIMIT_S:g} s")
        time.sleep(0.05)


def main(measured: str) -> None:
    with training(measured) as job:
        if measured == "checkpoint":
            if status := job.wait(LIMIT_S):
                raise SystemExit(f"edl run ended with {status}")
            return
        await_file(FOLDER / "begun")
        resize()


def edl(arguments: list[str]) -> None:
    """Run `edl`, whose supervisor inherits all variables, so that its calls are noted, too."""
    from edl_runtime.backends.local import backend
    from edl_runtime.cli import edl as command

    backend.inherited_environment = dict
    command(arguments)


if __name__ == "__main__":
    if sys.argv[1] == "--script":
        script(sys.argv[2])
    elif sys.argv[1] == "--edl":
        edl(sys.argv[2:])
    else:
        main(sys.argv[1])
