"""Starting a job's supervisor, from the caller's side."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from edl_runtime.backends.base import JobStatus
from edl_runtime.backends.local.environment import base_environment
from edl_runtime.backends.local.folders import WorkFolder
from edl_runtime.backends.local.messages import Start
from edl_runtime.errors import SubmitError

START_WITHIN_S = 30.0


def launch(start: Start) -> JobStatus:
    """Start a supervisor and return its job's status once it is up. Blocks for some tenths of a second.

    Raises SubmitError or OSError. Whatever happens to the caller, there is then a job that is up or nothing.
    """
    name = start.spec.name
    folder = WorkFolder(Path(start.work_folder)).job(name).path
    command = [sys.executable, "-P", "-m", "edl_runtime.backends.local.supervisor", str(folder)]
    try:
        run = subprocess.run(
            command,
            input=msgspec.json.encode(start),
            capture_output=True,
            check=False,
            cwd=start.work_folder,
            env=base_environment(os.environ),
            pass_fds=(start.held,),
            start_new_session=True,
            timeout=START_WITHIN_S,
        )
    except subprocess.TimeoutExpired as error:
        raise SubmitError(name, f"its supervisor was not up within {START_WITHIN_S:.0f} s") from error
    if not run.stdout:
        lines = run.stderr.decode(errors="replace").strip().splitlines() or ["its supervisor ended without a word"]
        raise SubmitError(name, lines[-1])
    return msgspec.json.decode(run.stdout, type=JobStatus)
