"""The `edl` command while it imports, as a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.paths import ROOT

SLOW = """
import os, signal, sys, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as for the first process of a container

class Slow:
    def find_spec(self, name, path, target=None):
        if name == os.environ["SLOW"]:
            print("imports", flush=True)
            time.sleep(600)

sys.meta_path.insert(0, Slow())
"""
"""A `sitecustomize` that takes long to import one module."""

COMMANDS = {
    "agent": ("edl_runtime.elastic.agent.agent", ["--instances", "1:1", "--", "true"]),
    "controller": ("edl_runtime.controller.run", []),
    "discovery": ("edl_runtime.discovery.server", []),
    "gateway": ("edl_runtime.gateway.server", []),
    "teacher": ("edl_runtime.teacher.service", ["--model", "m"]),
}


@pytest.mark.parametrize("slow", ["click", "its own"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_sigterm_that_comes_while_a_command_imports_ends_it(command: str, slow: str, tmp_path: Path) -> None:
    """A controller that would ignore it could be elected, and lead, though its pod is being deleted."""
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    module, arguments = COMMANDS[command]
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["edl"]
    script = "import sys; from {} import {}; sys.exit({})".format(*entry.split(":"), f"{entry.split(':')[1]}()")
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "SLOW": module if slow == "its own" else slow,
        "EDL_REDIS_URL": "redis://127.0.0.1:1/0",
        "EDL_JOB": "job",
    }
    words = [sys.executable, "-c", script, command, *arguments]
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "imports\n"
            process.terminate()
            assert process.wait(60) == -signal.SIGTERM
        finally:
            process.kill()
