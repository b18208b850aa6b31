"""`dag.test()` of our DAGs: how an author tries one, without a scheduler."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.paths import DAGS, SUPPORT

from edl_airflow.laptop.environment import components_environment
from edl_runtime.backends.local import LocalBackend
from edl_runtime.store.server import RedisServer

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

RUN = SUPPORT / "airflow" / "run_dag_test.py"


@pytest.fixture(scope="module")
def environ(
    tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer, trained: Path
) -> Iterator[dict[str, str]]:
    """The environment of an Airflow that is nothing but a database; jobs that a failed test leaves are stopped."""
    home = tmp_path_factory.mktemp("airflow")
    environ = components_environment(
        os.environ,
        home=home,
        dags=DAGS,
        port=1,
        redis_url=redis_server.url,
        work_dir=home / "jobs",
        passwords=home / "passwords.json",
    )
    shutil.copytree(trained, home / "mnist_distill")
    subprocess.run([sys.executable, "-m", "airflow", "db", "migrate"], env=environ, check=True)
    yield environ
    for job in jobs(environ):
        asyncio.run(LocalBackend(home / "jobs").delete(job))


@pytest.mark.parametrize(
    ("dag_id", "conf", "assumed"),
    [
        # Its pool grows beside the student, and dag.test() runs one task after the other.
        ("edl_quickstart_distill", {"epochs": 1}, "pool_in_use|grow_pool"),
        ("edl_distill_steps", {"epochs": 1, "teachers": 1}, ""),
    ],
)
def test_every_task_succeeds(environ: dict[str, str], dag_id: str, conf: dict[str, int], assumed: str) -> None:
    """dag.test() runs the DAG to its end in one process, deferred tasks among it, and leaves no job."""
    assert {"run", "train_teacher", "distill", "report"} <= succeeded(environ, dag_id, conf, assumed)


def test_a_night_and_the_evaluation_of_its_checkpoint_succeed(environ: dict[str, str]) -> None:
    """The training is over before it could grow; by hand, an evaluation is told which checkpoint."""
    night = {"epochs": 1, "pause_s": 0, "ends_by": "PT10M"}
    assert succeeded(environ, "edl_nightly_elastic_training", night, "training|grow") >= {"run", "train"}
    *_, newest = sorted((Path(environ["AIRFLOW_HOME"]) / "elastic_train" / "checkpoints").iterdir())
    assert succeeded(environ, "edl_evaluate_on_checkpoint", {"checkpoint": str(newest)}) == {"run", "evaluate"}


RETRIES = """
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, task
from edl_airflow.operators.train import EdlTrainOperator
from edl_airflow.retry_policy import EdlRetryPolicy
from edl_runtime.errors import RegistryUnavailableError, SpecError
from edl_runtime.specs import Bounds, TrainerSpec

TRIES = Path({tries!r})
SCRIPT = f"open({tries!r}, 'a').write('train;'); print('no such data set'); raise SystemExit(78)"


def tries(what):
    with TRIES.open("a") as file:
        file.write(f"{{what}};")


with DAG("retries", schedule=None, default_args={{"retries": 2, "retry_delay": timedelta(0)}}):

    @task(retry_policy=EdlRetryPolicy())
    def mistaken():
        tries("mistaken")
        Bounds(3, 1)

    @task(retry_policy=EdlRetryPolicy())
    def unlucky():
        tries("unlucky")
        raise RegistryUnavailableError("redis:6379", "refused")

    @task
    def without_policy():
        tries("without_policy")
        Bounds(3, 1)

    EdlTrainOperator(task_id="train", trainer=TrainerSpec(command=("python", "-c", SCRIPT)))
    mistaken()
    unlucky()
    without_policy()
"""


def test_mistakes_have_one_try_and_what_passes_has_all(environ: dict[str, str], tmp_path: Path) -> None:
    """In tasks of one's own by the policy, in ours without a word; Airflow alone would try each three times."""
    tries = tmp_path / "tries"
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "retries.py").write_text(RETRIES.format(tries=str(tries)))
    run = run_of(environ, tmp_path / "dags", "retries")
    states = json.loads(run.stdout.splitlines()[-1])
    assert set(states.values()) == {"failed"}
    made = Counter(tries.read_text().split(";")[:-1])
    assert made == {"mistaken": 1, "unlucky": 3, "without_policy": 3, "train": 1}
    assert "bounds: got '3:1', allowed is min at most max" in run.stdout
    assert "no such data set" in run.stdout
    assert jobs(environ) == []


def succeeded(environ: dict[str, str], dag_id: str, conf: dict[str, Any], assumed: str = "") -> set[str]:
    """Return what has succeeded, the run and its tasks, which all of it must have; `assumed`: what is not run."""
    run = run_of(environ, DAGS, dag_id, conf, assumed)
    states = json.loads(run.stdout.splitlines()[-1])
    assert set(states.values()) == {"success"}, run.stdout[-6000:]
    assert jobs(environ) == []
    return set(states)


def run_of(
    environ: dict[str, str], dags: Path, dag_id: str, conf: dict[str, Any] | None = None, assumed: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `dag.test()` to the end of the run, whatever that is."""
    command = [sys.executable, str(RUN), str(dags), dag_id, json.dumps(conf or {}), assumed]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run


def jobs(environ: dict[str, str]) -> list[str]:
    return [job.name for job in asyncio.run(LocalBackend(Path(environ["AIRFLOW_HOME"]) / "jobs").list())]
