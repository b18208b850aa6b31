"""Completion of `edl` by a real bash at a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.backends.jobs import WAITS, job

from edl_runtime.backends.local.backend import LocalBackend

END = "typed-until-here"
DEADLINE_S = 200

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="bash is missing")


def completed(line: str, environ: dict[str, str]) -> str:
    """Type the line and a tab into bash; return the line that is then there."""
    ours, theirs = pty.openpty()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={"PATH": path, "TERM": "dumb", "PS1": "$ ", **environ},
        start_new_session=True,
    )
    os.close(theirs)
    typed = f'eval "$(_EDL_COMPLETE=bash_source edl)"\n{line}\t\x01echo {END}"" \n'  # at its start, as text
    os.write(ours, typed.encode())
    shown, until = b"", time.monotonic() + DEADLINE_S
    try:
        while f"\n{END} ".encode() not in shown.replace(b"\r", b"\n") or not shown.endswith(b"$ "):
            assert time.monotonic() < until, shown.decode()
            shown += os.read(ours, 4096)
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
    (answer,) = (each for each in shown.decode().replace("\r", "\n").split("\n") if each.startswith(f"{END} "))
    return answer.removeprefix(f"{END} ").rstrip()


def test_commands_are_completed() -> None:
    assert completed("edl discov", {}) == "edl discovery"


@pytest.mark.slow
async def test_names_of_jobs_are_completed(backend: LocalBackend, work_dir: Path) -> None:
    """Of those in the work folder."""
    await backend.submit(job(WAITS, name="nightly-digits"), token="", secrets={})
    environ = {"EDL_WORK_DIR": str(work_dir)}
    assert await asyncio.to_thread(completed, "edl resize nigh", environ) == "edl resize nightly-digits"
    assert await asyncio.to_thread(completed, "edl resize other", environ) == "edl resize other"


def test_nothing_is_said_where_names_are_unknown() -> None:
    """Without a Redis, with one that is away, and with a setting that is wrong."""
    for environ in ({}, {"EDL_REDIS_URL": "redis://127.0.0.1:1/0"}, {"EDL_LEASE_TTL_S": "soon"}):
        assert completed("edl pools digi", environ) == "edl pools digi"
