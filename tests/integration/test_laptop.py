"""The launcher: nothing that it starts outlives it, and it minds its folder."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from laptop.components import Component, ComponentError
from laptop.launcher import Laptop, LaptopInUseError
from redis import Redis
from support.paths import ROOT

from edl_runtime import locks

STARTS_AND_WAITS = """
import os, sys, time
from pathlib import Path
from laptop.components import Component
from edl_runtime import locks

folder = Path(sys.argv[1])
words = ["sh", "-c", f"trap '' TERM; sleep 600 & echo $! > {folder}/pid; wait; sleep 600"]
component = Component("stubborn", words, env=os.environ, log=folder / "log", lock=locks.take(folder / "lock"))
print("started", flush=True)
time.sleep(600)
"""


def test_components_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL of the launcher takes its components along, and the processes that those have started."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    words = [sys.executable, "-c", STARTS_AND_WAITS, str(tmp_path)]
    launcher = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE)
    assert launcher.stdout
    with launcher.stdout as said:
        assert said.readline() == b"started\n"
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
        sleeper = psutil.Process(int((tmp_path / "pid").read_text()))
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        until(lambda: not sleeper.is_running())
        until(lambda: not locks.is_held(tmp_path / "lock"))


def test_a_component_that_ends_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    """Whoever waits for Airflow learns at once that a part of it is gone, and why."""
    lock = locks.take(tmp_path / "lock")
    assert lock is not None
    words = ["sh", "-c", "echo the port is taken; exit 3"]
    component = Component("api-server", words, env=os.environ, log=tmp_path / "log", lock=lock)
    with pytest.raises(ComponentError, match=r"`airflow api-server` ended with 3;[^$]*the port is taken"):
        component.finish()
    os.close(lock)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """Two launchers never share a folder, and so never a database."""
    lock = locks.take(tmp_path / "lock")
    assert lock is not None
    laptop = Laptop(tmp_path, dags=tmp_path, environ=os.environ, say=print)
    with pytest.raises(LaptopInUseError, match="stop it first"):
        laptop.__enter__()
    os.close(lock)


def test_a_shell_that_reads_edl_sh_means_this_airflow_and_this_redis(tmp_path: Path) -> None:
    """Whatever Airflow the shell meant before, and whatever the folder is called: its DAGs, and its connections."""
    more = {"other": {"conn_type": "http", "host": "it's"}}
    laptop = Laptop(tmp_path / "it's a folder", dags=tmp_path, environ=os.environ, say=print, connections=more)
    with laptop.redis:
        laptop._write_edl_variables()
        words = ["sh", "-c", '. "$0"; exec "$1" -c "import json, os; print(json.dumps(dict(os.environ)))"']
        environ = {**os.environ, "AIRFLOW_HOME": "/another", "AIRFLOW__CORE__LOAD_EXAMPLES": "True"}
        shell = [*words, laptop.edl_variables, sys.executable]
        seen = json.loads(subprocess.run(shell, env=environ, capture_output=True, check=True, text=True).stdout)
        assert (seen["AIRFLOW_HOME"], seen["EDL_WORK_DIR"]) == (str(laptop.airflow_home), str(laptop.work_dir))
        assert Redis.from_url(seen["EDL_REDIS_URL"]).ping()
        assert (seen["AIRFLOW__CORE__DAGS_FOLDER"], seen["AIRFLOW__CORE__LOAD_EXAMPLES"]) == (str(tmp_path), "False")
        default = json.loads(seen["AIRFLOW_CONN_EDL_DEFAULT"])
        assert (default["port"], default["extra"]["work_dir"]) == (laptop.redis.port, str(laptop.work_dir))
        assert json.loads(seen["AIRFLOW_CONN_OTHER"]) == more["other"]
    assert stat.S_IMODE(laptop.edl_variables.stat().st_mode) == 0o600


class _Stranger(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(401)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_strangers_server_on_our_port_is_not_ours(tmp_path: Path) -> None:
    """Whoever took the port first may refuse our password; the error is that our own server could not start."""
    lock = locks.take(tmp_path / "lock")
    assert lock is not None
    words = ["sh", "-c", "sleep 1; echo address already in use; exit 3"]
    laptop = Laptop(tmp_path, dags=tmp_path, environ=os.environ, say=print)
    with HTTPServer(("127.0.0.1", 0), _Stranger) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        laptop.url = f"http://127.0.0.1:{server.server_port}"
        component = Component("api-server", words, env=os.environ, log=tmp_path / "log", lock=lock)
        laptop._components.append(component)
        with pytest.raises(ComponentError, match="address already in use"):
            laptop._wait_for_api()
        server.shutdown()
        thread.join()
    component.cut()
    os.close(lock)


def until(condition: object, timeout_s: float = 60) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
