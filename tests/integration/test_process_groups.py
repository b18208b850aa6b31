"""A group in a network that is cut."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from support.paths import SUPPORT

CUT = SUPPORT / "elastic" / "cut_network.py"


def test_a_network_that_is_cut_is_noticed() -> None:
    """Also while nothing is said: else ranks that can't reach each other wait for a quarter of an hour."""
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody make a network of their own (unshare --user --net)")
    done = subprocess.run([*alone, sys.executable, str(CUT)], capture_output=True, check=True, timeout=280)
    assert json.loads(done.stdout) == "TimeoutError"
