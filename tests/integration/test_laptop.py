"""The launcher of Airflow on one machine: its components, its folder and `edl.sh`."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from laptop.components import Component, ComponentError
from laptop.launcher import Laptop, LaptopInUseError
from redis import Redis
from support.paths import ROOT
from support.teachers.process import wait_until

from edl_runtime import locks

STARTS_A_COMPONENT = """
import os, sys, time
from pathlib import Path
from laptop.components import Component
from edl_runtime import locks

folder = Path(sys.argv[1])
command = ["sh", "-c", f"trap '' TERM; sleep 600 & echo $! > {folder}/pid; wait; sleep 600"]
component = Component("stubborn", command, env=os.environ, log=folder / "log", lock=locks.take(folder / "lock"))
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[int]:
    """The taken lock of the folder."""
    taken = locks.take(tmp_path / "lock")
    assert taken is not None
    yield taken
    os.close(taken)


def test_components_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    """With the processes that they have started."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    command = [sys.executable, "-c", STARTS_A_COMPONENT, str(tmp_path)]
    launcher = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE)
    assert launcher.stdout
    with launcher.stdout as output:
        assert output.readline() == b"started\n"
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
        sleeper = psutil.Process(int((tmp_path / "pid").read_text()))
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        wait_until(lambda: not sleeper.is_running())
        wait_until(lambda: not locks.is_held(tmp_path / "lock"))


def test_a_component_that_ends_is_an_error_with_its_last_lines(tmp_path: Path, lock: int) -> None:
    """Which is raised to a caller that waits for Airflow."""
    command = ["sh", "-c", "echo the port is taken; exit 3"]
    component = Component("api-server", command, env=os.environ, log=tmp_path / "log", lock=lock)
    with pytest.raises(ComponentError, match=r"`airflow api-server` ended with 3;[^$]*the port is taken"):
        component.finish()


@pytest.mark.usefixtures("lock")
def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """Two launchers never share a folder and its database."""
    laptop = Laptop(tmp_path, dags=tmp_path, environ=os.environ, say=print)
    with pytest.raises(LaptopInUseError, match="stop it first"):
        laptop.__enter__()


def test_edl_sh_sets_the_variables_of_this_airflow_and_redis(tmp_path: Path) -> None:
    """In place of those of another Airflow, also in a folder with a quote in its name; only the owner may read it."""
    more = {"other": {"conn_type": "http", "host": "it's"}}
    laptop = Laptop(tmp_path / "it's a folder", dags=tmp_path, environ=os.environ, say=print, connections=more)
    with laptop.redis:
        laptop._write_edl_variables()
        command = ["sh", "-c", '. "$0"; exec "$1" -c "import json, os; print(json.dumps(dict(os.environ)))"']
        environ = {**os.environ, "AIRFLOW_HOME": "/another", "AIRFLOW__CORE__LOAD_EXAMPLES": "True"}
        shell = [*command, laptop.edl_variables, sys.executable]
        env = json.loads(subprocess.run(shell, env=environ, capture_output=True, check=True, text=True).stdout)
        assert (env["AIRFLOW_HOME"], env["EDL_WORK_DIR"]) == (str(laptop.airflow_home), str(laptop.work_dir))
        assert Redis.from_url(env["EDL_REDIS_URL"]).ping()
        assert (env["AIRFLOW__CORE__DAGS_FOLDER"], env["AIRFLOW__CORE__LOAD_EXAMPLES"]) == (str(tmp_path), "False")
        default = json.loads(env["AIRFLOW_CONN_EDL_DEFAULT"])
        assert (default["port"], default["extra"]["work_dir"]) == (laptop.redis.port, str(laptop.work_dir))
        assert json.loads(env["AIRFLOW_CONN_OTHER"]) == more["other"]
    assert stat.S_IMODE(laptop.edl_variables.stat().st_mode) == 0o600


class _OtherServer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(401)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_another_server_on_the_port_is_not_taken_for_airflow(tmp_path: Path, lock: int) -> None:
    """It refuses the password; the error is that the own API server could not start."""
    command = ["sh", "-c", "sleep 1; echo address already in use; exit 3"]
    laptop = Laptop(tmp_path, dags=tmp_path, environ=os.environ, say=print)
    with HTTPServer(("127.0.0.1", 0), _OtherServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        laptop.url = f"http://127.0.0.1:{server.server_port}"
        component = Component("api-server", command, env=os.environ, log=tmp_path / "log", lock=lock)
        laptop._components.append(component)
        with pytest.raises(ComponentError, match="address already in use"):
            laptop._wait_for_api()
        server.shutdown()
        thread.join()
    component.cut()
