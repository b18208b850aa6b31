"""`dag.test()` of our DAGs, without a scheduler."""

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
from support.paths import DAGS, SUPPORT, TESTS
from support.teachers.process import running_teacher

from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.store.redis_server import RedisServer

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

OURS = TESTS / "system" / "dags"
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


def writes(name):
    return TrainerSpec(command=("python", "-c", f"open({tries!r}, 'a').write('{{name}};')"))


def record(name):
    with TRIES.open("a") as file:
        file.write(f"{{name}};")


with DAG("retries", schedule=None, default_args={{"retries": 2, "retry_delay": timedelta(0)}}):

    @task(retry_policy=EdlRetryPolicy())
    def mistaken():
        record("mistaken")
        Bounds(3, 1)

    @task(retry_policy=EdlRetryPolicy())
    def unlucky():
        record("unlucky")
        raise RegistryUnavailableError("redis:6379", "refused")

    @task
    def without_policy():
        record("without_policy")
        Bounds(3, 1)

    EdlTrainOperator(task_id="train", trainer=TrainerSpec(command=("python", "-c", SCRIPT)))
    mistaken()
    unlucky()
    without_policy()

with DAG("given", schedule=None, default_args={{"retries": 2, "retry_delay": timedelta(0)}}):

    @task
    def made():
        return writes("made")

    @task
    def several():
        record("several")
        return [writes("first"), writes("second").serialize(), {{"comand": "third"}}]

    EdlTrainOperator(task_id="train", trainer=made())
    EdlTrainOperator.partial(task_id="each", priority=1).expand(trainer=several())
"""

SERVERS = """
from airflow.sdk import DAG, Param
from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.operators.register_servers import EdlRegisterServersOperator
from edl_airflow.operators.teacher_pool import EdlStopTeacherPoolOperator
from edl_runtime.specs import TrainerSpec

with DAG("servers", schedule=None, params={{"server": Param(type="string")}}):
    join = EdlRegisterServersOperator(
        task_id="join", teacher_pool="theirs", servers=["{{{{ params.server }}}}"], deferrable=True
    )
    student = TrainerSpec(command=("python", {script!r}, {folder!r}))
    distill = EdlDistillOperator(task_id="distill", teacher_pool="theirs", student=student, deferrable=True)
    leave = EdlStopTeacherPoolOperator(task_id="leave", teacher_pool="theirs")
    join >> distill >> leave.as_teardown(setups=join)
"""

Runs = Sequence[tuple[str, dict[str, Any], str]]
"""DAG ids with their conf and a pattern of tasks that are marked as successful without running."""


@pytest.fixture(scope="module")
def environ(
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: RedisServer,
    trained: Path,
    new_airflow: Callable[[Path], None],
) -> Iterator[dict[str, str]]:
    """The environment of an Airflow that is only a database; jobs of a failed test are stopped."""
    home = tmp_path_factory.mktemp("airflow")
    dags = tmp_path_factory.mktemp("dags")
    for file in DAGS.iterdir():
        (dags / file.name).symlink_to(file)
    (dags / "retries.py").write_text(RETRIES.format(tries=str(dags / "tries")))
    (dags / "go").touch()  # the student ends after its first batch
    (dags / "servers.py").write_text(SERVERS.format(script=str(OURS / "trains.py"), folder=str(dags)))
    environ = components_environment(
        os.environ,
        home=home,
        dags=dags,
        port=1,
        redis_url=redis_server.url,
        work_dir=home / "jobs",
        passwords=home / "passwords.json",
        options={"CORE__DAGBAG_IMPORT_TIMEOUT": "300"},  # a slow import is no error
    )
    new_airflow(home)
    shutil.copytree(trained, home / "mnist_distill")
    yield environ
    for job in jobs(environ):
        asyncio.run(LocalBackend(home / "jobs").delete(job))


@pytest.mark.usefixtures("airflow")  # other tests use it meanwhile
def test_dags_with_deferred_tasks_succeed_and_mistakes_are_not_retried(environ: dict[str, str]) -> None:
    """Deferred tasks run in one process. Transient errors are retried, mistakes are not.

    In the user's tasks by EdlRetryPolicy, in our operators always; without it Airflow tries three times.
    """
    states, output = run_dags(environ, [("edl_distill_steps", {"epochs": 1, "teachers": 1}, ""), ("retries", {}, "")])
    assert {"run", "train_teacher", "distill", "report"} <= set(states["edl_distill_steps"])
    assert set(states["edl_distill_steps"].values()) == {"success"}, output[-6000:]
    assert set(states["retries"].values()) == {"failed"}
    made = Counter((Path(environ["AIRFLOW__CORE__DAGS_FOLDER"]) / "tries").read_text().split(";")[:-1])
    assert made == {"mistaken": 1, "unlucky": 3, "without_policy": 3, "train": 1}
    assert "bounds: got '3:1', allowed is min at most max" in output
    assert "no such data set" in output


@pytest.mark.usefixtures("airflow")
def test_specs_come_from_upstream_tasks(environ: dict[str, str]) -> None:
    """As specs and as dicts, one or a list; an invalid one fails at once with its field."""
    tries = Path(environ["AIRFLOW__CORE__DAGS_FOLDER"]) / "tries"
    tries.unlink(missing_ok=True)
    states, output = run_dags(environ, [("given", {}, "")])
    assert (states["given"]["made"], states["given"]["train"]) == ("success", "success"), output[-6000:]
    made = Counter(tries.read_text().split(";")[:-1])
    assert made == {"made": 1, "several": 1, "first": 1, "second": 1}
    assert "trainer: got 'comand', allowed is the fields of TrainerSpec" in output
    assert output.count("Retry policy decision") == 1


@pytest.mark.usefixtures("airflow")
def test_a_dag_trains_with_a_server_that_it_did_not_start(environ: dict[str, str]) -> None:
    """The server joins a pool for the student, leaves it afterwards, and serves on."""
    with running_teacher("answers:double", env={"PYTHONPATH": str(OURS)}) as server:
        states, output = run_dags(environ, [("servers", {"server": f"oip+http://{server.address}/teacher"}, "")])
        assert set(states["servers"]) == {"run", "join", "distill", "leave"}
        assert set(states["servers"].values()) == {"success"}, output[-6000:]
        assert server.process.poll() is None


@pytest.mark.deep
def test_the_quickstart_nightly_and_evaluation_dags_succeed(environ: dict[str, str]) -> None:
    """Tasks that would resize the job too late are skipped; the evaluation gets the checkpoint in its conf."""
    night = {"epochs": 1, "pause_s": 0, "ends_by": "PT10M"}
    runs = [
        ("edl_quickstart_distill", {"epochs": 1}, "pool_in_use|grow_pool"),
        ("edl_nightly_elastic_training", night, "training|grow"),
    ]
    states, output = run_dags(environ, runs)
    assert {"run", "train_teacher", "distill", "report"} <= set(states["edl_quickstart_distill"])
    assert {"run", "train"} <= set(states["edl_nightly_elastic_training"])
    assert {state for tasks in states.values() for state in tasks.values()} == {"success"}, output[-6000:]
    *_, newest = sorted((Path(environ["AIRFLOW_HOME"]) / "elastic_train" / "checkpoints").iterdir())
    states, _ = run_dags(environ, [("edl_evaluate_on_checkpoint", {"checkpoint": str(newest)}, "")])
    assert states == {"edl_evaluate_on_checkpoint": {"run": "success", "evaluate": "success"}}


@pytest.mark.deep
def test_the_burst_dag_starts_and_stops_a_pool_in_both_places(environ: dict[str, str]) -> None:
    """Its tasks run one after the other here, so that nobody waits for teachers when that is looked for."""
    home = json.loads(environ["AIRFLOW_CONN_EDL_DEFAULT"])
    elsewhere = Path(environ["AIRFLOW_HOME"]) / "elsewhere"
    burst = {**home, "extra": {**home["extra"], "work_dir": str(elsewhere)}}
    both = {**environ, "AIRFLOW_CONN_EDL_BURST": json.dumps(burst)}
    runs = [("edl_burst_pool", {"teachers": 1, "burst": 1, "epochs": 1}, "students_wait")]
    states, output = run_dags(both, runs)
    assert {"run", "distill", "burst", "stop_burst", "stop_pool"} <= set(states["edl_burst_pool"])
    assert set(states["edl_burst_pool"].values()) == {"success"}, output[-6000:]
    assert [run.name for run in (elsewhere / "runs").iterdir()] != []
    assert asyncio.run(LocalBackend(elsewhere).list()) == []


@pytest.mark.deep
def test_the_vision_dag_draws_both_students(environ: dict[str, str]) -> None:
    """One alone and one of a pool, from the data that the form names."""
    conf = {"data_dir": str(SUPPORT / "pictures"), "rows": 500, "labels": 20, "teacher_epochs": 4, "epochs": 2}
    states, output = run_dags(environ, [("edl_vision_distill", conf, "")])
    assert set(states["edl_vision_distill"]) == {"run", "train_teacher", "alone", "distill", "draw"}
    assert set(states["edl_vision_distill"].values()) == {"success"}, output[-6000:]
    (picture,) = (Path(environ["AIRFLOW_HOME"]) / "vision_distill" / "runs").glob("*/curves.svg")
    assert all(f"{way}, 20 labels" in picture.read_text() for way in ("alone", "distilled"))


@pytest.mark.deep
def test_the_text_dag_draws_both_students(environ: dict[str, str]) -> None:
    """One alone and one of a pool, from the data that the form names."""
    conf = {"data_dir": str(SUPPORT / "texts" / "wordnet"), "rows": 500, "labels": 60, "teacher_epochs": 2, "epochs": 2}
    states, output = run_dags(environ, [("edl_text_distill", conf, "")])
    assert set(states["edl_text_distill"]) == {"run", "train_teacher", "alone", "distill", "draw"}
    assert set(states["edl_text_distill"].values()) == {"success"}, output[-6000:]
    (picture,) = (Path(environ["AIRFLOW_HOME"]) / "text_distill" / "runs").glob("*/curves.svg")
    assert all(f"{way}, 60 labels" in picture.read_text() for way in ("alone", "distilled"))


@pytest.mark.deep
def test_the_word2vec_dag_lists_nearest_words(environ: dict[str, str]) -> None:
    """Its tasks run one after the other here, so those that would resize the job are left out."""
    conf = {"data_dir": str(SUPPORT / "texts" / "wordnet"), "rows": 500, "passes": 1, "word": "a"}
    states, output = run_dags(environ, [("edl_word2vec_nightly", conf, "alone|grow|shrink")])
    assert {"run", "prepare", "train", "nearest"} <= set(states["edl_word2vec_nightly"])
    assert set(states["edl_word2vec_nightly"].values()) == {"success"}, output[-6000:]
    (table,) = (Path(environ["AIRFLOW_HOME"]) / "word2vec" / "runs").glob("*/model/embedding_table")
    assert table.stat().st_size > 16


@pytest.mark.deep
def test_the_resnet_dag_tests_what_it_has_trained(environ: dict[str, str]) -> None:
    """From the pictures that the form names, with two instances."""
    conf = {"data_dir": str(SUPPORT / "pictures"), "rows": 64, "epochs": 2, "trainers_min": 2}
    states, output = run_dags(environ, [("edl_collective_resnet", conf, "")])
    assert states["edl_collective_resnet"] == {"run": "success", "write_folder": "success", "train": "success"}, output
    (run,) = (Path(environ["AIRFLOW_HOME"]) / "collective_resnet" / "runs").iterdir()
    assert (run / "output" / "ResNet18" / "weights.safetensors").exists()
    assert list((run / "checkpoints").glob("step-*/manifest.json"))
    assert "acc5" in output


SMALL = {"data_dir": str(SUPPORT / "pictures"), "rows": 64}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("dag", "conf", "left_out"),
    [
        ("edl_training_job", {}, ""),
        ("edl_paddle_serving", {"epochs": 1}, ""),
        ("edl_resnet_distill", {**SMALL, "teacher_epochs": 1, "epochs": 1, "batch_size": 16}, ""),
        ("edl_job_server", {**SMALL, "epochs": 1}, "alone|join|leave"),
    ],
)
def test_a_dag_of_an_example_of_edl_succeeds(
    environ: dict[str, str], dag: str, conf: dict[str, Any], left_out: str
) -> None:
    """Its tasks run one after the other here, so those that would resize the job are left out."""
    states, output = run_dags(environ, [(dag, conf, left_out)])
    assert len(states[dag]) > 1
    assert set(states[dag].values()) == {"success"}, output[-6000:]


def run_dags(environ: dict[str, str], runs: Runs) -> tuple[dict[str, dict[str, str]], str]:
    """Run `dag.test()` of each; return the states of runs and tasks, and the output. No job remains."""
    command = [sys.executable, str(RUN), environ["AIRFLOW__CORE__DAGS_FOLDER"], json.dumps(runs)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert jobs(environ) == []
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def jobs(environ: dict[str, str]) -> list[str]:
    return [job.name for job in asyncio.run(LocalBackend(Path(environ["AIRFLOW_HOME"]) / "jobs").list())]
