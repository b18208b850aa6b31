"""`edl autoscale`, as a person runs it, on jobs of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.backends.jobs import WAITS, eventually, reach

from edl_runtime.backends.local import LocalBackend
from edl_runtime.errors import EX_CONFIG
from edl_runtime.pods import Pod
from edl_runtime.specs import Bounds, JobSpec

WAITS_S = 60.0

MINE = """
from edl_runtime.autoscale.jobs import Target

def two_each(jobs, nodes, capacity, *, now_s, pause_s):
    return {job.name: Target(instances=2, reason="two are enough") for job in jobs}

number = 2
"""


class Autoscaling:
    """`edl autoscale` in a folder of its own that has a policy, with one job of 3 out of 1 to 4 trainers."""

    def __init__(self, folder: Path, work_dir: Path, redis_url: str, namespace: str) -> None:
        self.folder = folder
        self.backend = LocalBackend(work_dir)
        self.environ = {
            **os.environ,
            "EDL_WORK_DIR": str(work_dir),
            "EDL_REDIS_URL": redis_url,
            "EDL_NAMESPACE": namespace,
        }
        (folder / "mine.py").write_text(MINE)
        (folder / "broken.py").write_text("def policy(:")

    def __call__(self, *words: str, **environ: str) -> tuple[int, str, str]:
        """Return the exit status, what was printed and what was complained of."""
        done = subprocess.run(
            self._command(*words),
            env=self.environ | environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAITS_S,
        )
        return done.returncode, done.stdout, done.stderr

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command(*words), env=self.environ, cwd=self.folder, stdout=subprocess.PIPE, text=True
        )

    def wanted(self) -> int:
        return asyncio.run(self.backend.get("job")).wanted

    async def begin(self) -> None:
        spec = JobSpec(
            name="job",
            kind="trainer",
            command=("python", "-c", WAITS),
            bounds=Bounds(1, 4),
            instances=3,
            elastic=True,
            pod=Pod(resources={"cpu": "1m"}),
        )
        await self.backend.submit(spec, token="", secrets={})
        await reach(self.backend, "job", lambda status: sum(one.phase == "running" for one in status.instances) == 3)

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "edl_runtime.cli", "autoscale", *words]


@pytest.fixture
def autoscale(tmp_path: Path, work_dir: Path, redis_url: str, namespace: str) -> Iterator[Autoscaling]:
    (tmp_path / "here").mkdir()
    autoscaling = Autoscaling(tmp_path / "here", work_dir, redis_url, namespace)
    asyncio.run(autoscaling.begin())
    yield autoscaling
    asyncio.run(autoscaling.backend.delete("job"))


def test_a_pass_says_what_each_job_has_and_gets_and_why(autoscale: Autoscaling) -> None:
    """First what it would do, then the same by doing it; nothing is left for another pass."""
    (autoscale.folder / "windows.yaml").write_text("windows: []\ndefault: {jobs: {job: 2}}\n")
    words = ("--windows", "windows.yaml")
    for dry_run, has in ((("--dry_run",), 3), ((), 2)):
        status, printed, _ = autoscale(*words, *dry_run)
        assert status == 0
        why, _, row = printed.splitlines()
        assert why == "the default sizes hold"
        reason = "shrinks from 3 to 2: the time between windows allows 2"
        assert row.split(maxsplit=4) == ["job", "trainer", "3", "2", reason]
        assert autoscale.wanted() == has
    status, printed, _ = autoscale(*words, "--json")
    assert status == 0
    (target,) = json.loads(printed)["plan"]["targets"]
    assert (target["instances"], target["target"]) == (2, 2)


def test_a_policy_of_ones_own_decides(autoscale: Autoscaling) -> None:
    """It may be in the folder that the command is called in."""
    status, printed, _ = autoscale("--policy", "mine:two_each")
    assert status == 0
    assert "two are enough" in printed
    assert autoscale.wanted() == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "mine:three_each"], "mine:three_each"),
        (["--policy", "mine:number"], "a function"),
        (["--policy", "two_each"], "'package.module:function'"),
        (["--policy", "broken:policy"], "broken.py"),
        (["--every", "0"], "--every"),
        (["--every", "14340"], "less than 14340"),
        (["--max_load", "1.5"], "max_load"),
        (["--windows", "none.yaml"], "none.yaml"),
        (["--windows", "mine.py"], "mine.py"),
    ],
)
def test_what_is_mistaken_is_said_and_changes_nothing(autoscale: Autoscaling, words: list[str], said: str) -> None:
    """Without a traceback."""
    status, printed, complaint = autoscale(*words)
    assert (status, printed) == (EX_CONFIG, "")
    assert said in complaint
    assert "Traceback" not in complaint
    assert autoscale.wanted() == 3


def test_a_redis_that_is_not_named_or_away_is_said(autoscale: Autoscaling) -> None:
    """With what to do."""
    status, _, complaint = autoscale(EDL_REDIS_URL="")
    assert status == EX_CONFIG
    assert "EDL_REDIS_URL" in complaint
    status, _, complaint = autoscale(EDL_REDIS_URL="redis://127.0.0.1:1/0")
    assert status == 1
    assert "check that it runs" in complaint
    assert autoscale.wanted() == 3


async def test_jobs_shrink_by_the_last_pass_before_a_window(autoscale: Autoscaling) -> None:
    """Which with passes five minutes apart is one that is made two minutes before, and alone is none yet."""
    begins, ends = (datetime.now(UTC) + timedelta(minutes=minutes) for minutes in (3, 60))
    window = f"{{name: soon, start: '{begins:%H:%M}', end: '{ends:%H:%M}', sizes: {{jobs: {{job: 1}}}}}}"
    (autoscale.folder / "windows.yaml").write_text(f"windows: [{window}]\ndefault: {{}}\n")
    status, printed, _ = await asyncio.to_thread(autoscale, "--windows", "windows.yaml", "--dry_run", "--json")
    assert status == 0
    (target,) = json.loads(printed)["plan"]["targets"]
    assert target["target"] != 1
    with autoscale.start("--windows", "windows.yaml", "--every", "300") as going:

        async def is_resized() -> bool:
            return (await autoscale.backend.get("job")).wanted == 1

        try:
            await eventually(is_resized, "the pass before the window")
        finally:
            going.terminate()


async def test_passes_go_on_until_they_are_told_to_end(autoscale: Autoscaling) -> None:
    """Each change is a line, once; and SIGTERM is an end in order."""
    going = autoscale.start("--policy", "mine:two_each", "--every", "0.2")
    try:

        async def is_resized() -> bool:
            return (await autoscale.backend.get("job")).wanted == 2

        await eventually(is_resized, "the first pass")
        await autoscale.backend.resize("job", 4)
        await eventually(is_resized, "a later pass")
        going.send_signal(signal.SIGTERM)
        printed, _ = await asyncio.to_thread(going.communicate, timeout=WAITS_S)
    finally:
        going.kill()
        going.wait()
    assert going.returncode == 0
    assert [line.partition(" ")[2] for line in printed.splitlines()] == ["job: two are enough"] * 2
