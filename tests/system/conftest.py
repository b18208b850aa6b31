"""One Airflow for all system tests: starting it takes the better part of a minute."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import skip_on_a_laptop
from support.airflow.interrupted_runs import OPTIONS
from support.paths import ROOT

from edl_airflow.laptop.client import AirflowClient
from edl_airflow.laptop.launcher import Laptop
from edl_runtime.store.server import find_redis_server

EXAMPLE = ROOT / "examples" / "mnist_distill"

FAILS = """
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

with DAG("fails", schedule=None):
    BashOperator(task_id="give_up", bash_command="echo no digits today; exit 3")
"""


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an example that has trained its teacher: `data` and `teacher`."""
    folder = tmp_path_factory.mktemp("trained")
    where = ["--data_dir", str(folder / "data"), "--model_dir", str(folder / "teacher")]
    subprocess.run([sys.executable, str(EXAMPLE / "train_teacher.py"), *where], check=True, timeout=240)
    return folder


@pytest.fixture(scope="session")
def dags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our DAGs, and those of the tests."""
    folder = tmp_path_factory.mktemp("dags")
    for file in (*(ROOT / "dags").glob("*.py"), *(ROOT / "tests" / "system" / "dags").glob("*.py")):
        (folder / file.name).symlink_to(file)
    (folder / "fails.py").write_text(FAILS)
    return folder


@pytest.fixture(scope="session")
def laptop(tmp_path_factory: pytest.TempPathFactory, trained: Path, dags: Path) -> Iterator[Laptop]:
    """A running Airflow; when it ends, every process that it ever started must have ended too."""
    if find_redis_server() is None:
        skip_on_a_laptop("redis-server is missing")
    laptop = Laptop(tmp_path_factory.mktemp("laptop"), dags=dags, environ=os.environ, say=print, options=OPTIONS)
    shutil.copytree(trained, laptop.airflow_home / "mnist_distill")
    with laptop:
        yield laptop
        started = psutil.Process().children(recursive=True)
    assert [process.name() for process in started if process.is_running() and process.status() != "zombie"] == []
    assert belonging_to(laptop.home) == []


@pytest.fixture
def client(laptop: Laptop) -> Iterator[AirflowClient]:
    """A logged-in client of the running Airflow."""
    with laptop.client() as client:
        yield client


def belonging_to(home: Path) -> list[str]:
    """The commands of all processes that work in `home`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.status() != "zombie" and Path(process.cwd()).is_relative_to(home):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
