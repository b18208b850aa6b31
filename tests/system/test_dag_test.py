"""`dag.test()` of our DAGs: how an author tries one, without a scheduler."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from laptop.environment import components_environment
from support.paths import DAGS, SUPPORT

from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.store.redis_server import RedisServer

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

RUN = SUPPORT / "airflow" / "run_dag_test.py"

RETRIES = """
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, task
from edl_airflow.operators.train import EdlTrainOperator
from edl_airflow.retry_policy import EdlRetryPolicy
from edl_runtime.errors import SpecError
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.specs import Bounds, TrainerSpec

TRIES = Path({tries!r})
SCRIPT = f"open({tries!r}, 'a').write('train;'); print('no such data set'); raise SystemExit(78)"


def leaves(word):
    return TrainerSpec(command=("python", "-c", f"open({tries!r}, 'a').write('{{word}};')"))


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

with DAG("given", schedule=None, default_args={{"retries": 2, "retry_delay": timedelta(0)}}):

    @task
    def made():
        return leaves("made")

    @task
    def several():
        tries("several")
        return [leaves("first"), leaves("second").serialize(), {{"comand": "third"}}]

    EdlTrainOperator(task_id="train", trainer=made())
    EdlTrainOperator.partial(task_id="each", priority=1).expand(trainer=several())
"""

Runs = Sequence[tuple[str, dict[str, Any], str]]
"""Of DAGs, with the values of their forms and a pattern of tasks that are only assumed to have succeeded."""


@pytest.fixture(scope="module")
def environ(
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: RedisServer,
    trained: Path,
    new_airflow: Callable[[Path], None],
) -> Iterator[dict[str, str]]:
    """The environment of an Airflow that is nothing but a database; jobs that a failed test leaves are stopped."""
    home = tmp_path_factory.mktemp("airflow")
    dags = tmp_path_factory.mktemp("tried")
    for file in DAGS.iterdir():
        (dags / file.name).symlink_to(file)
    (dags / "retries.py").write_text(RETRIES.format(tries=str(dags / "tries")))
    environ = components_environment(
        os.environ,
        home=home,
        dags=dags,
        port=1,
        redis_url=redis_server.url,
        work_dir=home / "jobs",
        passwords=home / "passwords.json",
        options={"CORE__DAGBAG_IMPORT_TIMEOUT": "300"},  # a DAG file that is only read slowly has no error
    )
    new_airflow(home)
    shutil.copytree(trained, home / "mnist_distill")
    yield environ
    for job in jobs(environ):
        asyncio.run(LocalBackend(home / "jobs").delete(job))


@pytest.mark.usefixtures("airflow")  # which other tests use meanwhile
def test_steps_succeed_and_mistakes_have_one_try(environ: dict[str, str]) -> None:
    """Deferred tasks run in one process, too. What passes has all tries, a mistake has one.

    In tasks of one's own that is by the policy, in ours without a word; Airflow alone would try each three times.
    """
    states, said = tried(environ, [("edl_distill_steps", {"epochs": 1, "teachers": 1}, ""), ("retries", {}, "")])
    assert {"run", "train_teacher", "distill", "report"} <= set(states["edl_distill_steps"])
    assert set(states["edl_distill_steps"].values()) == {"success"}, said[-6000:]
    assert set(states["retries"].values()) == {"failed"}
    made = Counter((Path(environ["AIRFLOW__CORE__DAGS_FOLDER"]) / "tries").read_text().split(";")[:-1])
    assert made == {"mistaken": 1, "unlucky": 3, "without_policy": 3, "train": 1}
    assert "bounds: got '3:1', allowed is min at most max" in said
    assert "no such data set" in said


@pytest.mark.usefixtures("airflow")
def test_specs_come_from_upstream_tasks(environ: dict[str, str]) -> None:
    """As they are and as dicts, one or a list; what is none fails at once and says so."""
    tries = Path(environ["AIRFLOW__CORE__DAGS_FOLDER"]) / "tries"
    tries.unlink(missing_ok=True)
    states, said = tried(environ, [("given", {}, "")])
    assert (states["given"]["made"], states["given"]["train"]) == ("success", "success"), said[-6000:]
    made = Counter(tries.read_text().split(";")[:-1])
    assert made == {"made": 1, "several": 1, "first": 1, "second": 1}
    assert "trainer: got 'comand', allowed is the fields of TrainerSpec" in said
    assert said.count("Retry policy decision") == 1


@pytest.mark.deep
def test_the_quickstart_a_night_and_the_evaluation_of_its_checkpoint_succeed(environ: dict[str, str]) -> None:
    """What grows beside the training is assumed, as it would grow too late; the evaluation is told its checkpoint."""
    night = {"epochs": 1, "pause_s": 0, "ends_by": "PT10M"}
    runs = [
        ("edl_quickstart_distill", {"epochs": 1}, "pool_in_use|grow_pool"),
        ("edl_nightly_elastic_training", night, "training|grow"),
    ]
    states, said = tried(environ, runs)
    assert {"run", "train_teacher", "distill", "report"} <= set(states["edl_quickstart_distill"])
    assert {"run", "train"} <= set(states["edl_nightly_elastic_training"])
    assert {state for tasks in states.values() for state in tasks.values()} == {"success"}, said[-6000:]
    *_, newest = sorted((Path(environ["AIRFLOW_HOME"]) / "elastic_train" / "checkpoints").iterdir())
    states, _ = tried(environ, [("edl_evaluate_on_checkpoint", {"checkpoint": str(newest)}, "")])
    assert states == {"edl_evaluate_on_checkpoint": {"run": "success", "evaluate": "success"}}


def tried(environ: dict[str, str], runs: Runs) -> tuple[dict[str, dict[str, str]], str]:
    """Run `dag.test()` of each; return their states and those of their tasks, and what was said. No job is left."""
    command = [sys.executable, str(RUN), environ["AIRFLOW__CORE__DAGS_FOLDER"], json.dumps(runs)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert jobs(environ) == []
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def jobs(environ: dict[str, str]) -> list[str]:
    return [job.name for job in asyncio.run(LocalBackend(Path(environ["AIRFLOW_HOME"]) / "jobs").list())]
