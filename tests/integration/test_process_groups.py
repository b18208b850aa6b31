"""Groups of Paddle's, one after the other in the same processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.network.ports import free_ports
from support.paths import SUPPORT

from edl_runtime.elastic.comm.process_group import MAX_LIVE_GROUPS

GROUP = SUPPORT / "elastic" / "group_process.py"
CUT = SUPPORT / "elastic" / "cut_network.py"


@pytest.mark.slow
def test_groups_follow_one_another_and_are_let_go_of(tmp_path: Path) -> None:
    """They talk right, free who waits, leave few descriptors behind and nobody listening, and shut nothing else."""
    (port,) = free_ports(1)
    environ = {**os.environ, "GLOG_minloglevel": "3", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(GROUP)]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(port), str(tmp_path)], stdout=subprocess.PIPE, env=environ)
        for rank in range(2)
    ]
    try:
        seen = [json.loads(process.communicate(timeout=110)[0].splitlines()[-1]) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert seen[0]["raised"] == len(seen[0]["descriptors"])
    assert not seen[0]["listens"]
    for rank in seen:
        assert rank["idle_share"] < 0.3
        first, *_, last = rank["descriptors"]
        assert (last - first) / (len(rank["descriptors"]) - 1) * MAX_LIVE_GROUPS < 500, seen


def test_a_network_that_is_cut_is_noticed() -> None:
    """Also while nothing is said: else ranks that can't reach each other wait for a quarter of an hour."""
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody make a network of their own (unshare --user --net)")
    done = subprocess.run([*alone, sys.executable, str(CUT)], capture_output=True, check=True, timeout=110)
    assert json.loads(done.stdout) == "TimeoutError"
