"""`edl autoscale`, on a job of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from support.backends.jobs import WAITS, eventually, job, reach
from support.edl_command import Edl, edl_command

from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.errors import EX_CONFIG
from edl_runtime.pods import Pod

HANGS_S = 100.0

MINE = """
import os, signal
from edl_runtime.autoscale.policy.model import Target
from edl_runtime.autoscale.policy.decide import decide

def two_each(jobs, nodes, capacity, *, now_s, pause_s):
    return {job.name: Target(instances=2, reason="two are enough") for job in jobs}

def the_last_time(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGTERM)
    return decide(*args, **kwargs)

number = 2
"""


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The work folder of one job of 1 to 4 trainers."""
    folder = tmp_path_factory.mktemp("work")
    spec = job(WAITS, kind="trainer", elastic=True, instances=3)
    spec = msgspec.structs.replace(spec, pod=Pod(resources={"cpu": "1m"}))
    asyncio.run(LocalBackend(folder).submit(spec, token="", secrets={}))
    yield folder
    asyncio.run(LocalBackend(folder).delete("job"))


@pytest.fixture
def backend(work_dir: Path) -> LocalBackend:
    """Where three trainers of the job run."""
    backend = LocalBackend(work_dir)
    asyncio.run(backend.resize("job", 3))
    asyncio.run(reach(backend, "job", lambda job: [one.phase for one in job.instances] == ["running"] * 3))
    return backend


@pytest.fixture
def environ(tmp_path: Path, work_dir: Path, redis_url: str, namespace: str) -> dict[str, str]:
    """What leads the command to the job; `tmp_path` has policies of one's own."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("def policy(:")
    return {"EDL_WORK_DIR": str(work_dir), "EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace}


@pytest.fixture
def edl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, environ: dict[str, str]
) -> Iterator[Edl]:
    """Runs `edl autoscale` in that folder."""
    with edl_command(monkeypatch, capsys, "autoscale") as run:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        yield run
        sys.modules.pop("mine", None)


def wanted(backend: LocalBackend) -> int:
    return asyncio.run(backend.get("job")).wanted


def test_a_pass_shows_what_each_job_has_and_gets_and_why(edl: Edl, backend: LocalBackend, tmp_path: Path) -> None:
    """First what it would do, then the same by doing it; nothing is left for another pass."""
    (tmp_path / "windows.yaml").write_text("windows: []\ndefault: {jobs: {job: 2}}\n")
    words = ("--windows", "windows.yaml")
    for dry_run, has in ((("--dry-run",), 3), ((), 2)):
        status, printed, _ = edl(*words, *dry_run)
        assert status == 0
        why, _, row = printed.splitlines()
        assert why == "the default sizes hold"
        reason = "shrinks from 3 to 2: the time between windows allows 2"
        assert row.split(maxsplit=4) == ["job", "trainer", "3", "2", reason]
        assert wanted(backend) == has
    status, printed, _ = edl(*words, "--json")
    assert status == 0
    (target,) = json.loads(printed)["plan"]["targets"]
    assert (target["instances"], target["target"]) == (2, 2)
    status, shown, _ = edl("--last")
    assert status == 0
    assert shown.startswith("pass of ")
    assert "window 'default'" in shown
    assert target["reason"] in shown
    assert json.loads(edl("--last", "--json")[1]) == json.loads(printed)
    assert edl("--last", "--dry-run")[0] == 2


def test_without_a_pass_there_is_none_to_show(edl: Edl) -> None:
    """As when nothing rescales, or nothing has for a day."""
    assert edl("--last") == (0, "", "edl: nothing has rescaled within a day\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "mine:three_each"], "mine:three_each"),
        (["--policy", "mine:number"], "a function"),
        (["--policy", "two_each"], "'package.module:function'"),
        (["--policy", "broken:policy"], "broken.py"),
        (["--every", "0"], "--every"),
        (["--every", "14340"], "less than 14340"),
        (["--max-load", "1.5"], "max_load"),
        (["--windows", "none.yaml"], "none.yaml"),
        (["--windows", "mine.py"], "mine.py"),
    ],
)
def test_a_mistake_is_an_error_and_changes_nothing(
    edl: Edl, backend: LocalBackend, words: list[str], said: str
) -> None:
    """With the status of what a restart can't mend."""
    status, printed, complaint = edl(*words)
    assert (status, printed) == (EX_CONFIG, "")
    assert said in complaint
    assert wanted(backend) == 3


def test_a_redis_that_is_not_set_or_down_is_an_error(
    edl: Edl, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to do."""
    for url, status, said in (("", EX_CONFIG, "EDL_REDIS_URL"), ("redis://127.0.0.1:1/0", 1, "check that it runs")):
        monkeypatch.setenv("EDL_REDIS_URL", url)
        found, _, complaint = edl()
        assert found == status
        assert said in complaint
    assert wanted(backend) == 3


def test_jobs_shrink_by_the_last_pass_before_a_window(edl: Edl, tmp_path: Path) -> None:
    """With passes five minutes apart that is one up to six minutes before; one pass alone is made a minute before."""
    begins, ends = (datetime.now(UTC) + timedelta(minutes=minutes) for minutes in (5, 60))
    window = f"{{name: soon, start: '{begins:%H:%M}', end: '{ends:%H:%M}', sizes: {{jobs: {{job: 1}}}}}}"
    (tmp_path / "windows.yaml").write_text(f"windows: [{window}]\ndefault: {{}}\n")
    found = []
    for words in ((), ("--every", "300", "--policy", "mine:the_last_time")):
        status, printed, _ = edl("--windows", "windows.yaml", "--dry-run", "--json", *words)
        assert status == 0
        (target,) = json.loads(printed)["plan"]["targets"]
        found.append(target["target"])
    alone, one_of_many = found
    assert alone > one_of_many == 1


def test_passes_repeat_until_sigterm(environ: dict[str, str], backend: LocalBackend, tmp_path: Path) -> None:
    """Each change is a line, once; and SIGTERM is an end in order."""
    command = [sys.executable, "-m", "edl_runtime.cli", "autoscale", "--policy", "mine:two_each", "--every", "0.2"]
    going = subprocess.Popen(command, env={**os.environ, **environ}, cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    async def is_resized() -> bool:
        return (await backend.get("job")).wanted == 2

    try:
        asyncio.run(eventually(is_resized, "the first pass", HANGS_S))
        asyncio.run(backend.resize("job", 4))
        asyncio.run(eventually(is_resized, "a later pass", HANGS_S))
        going.terminate()
        printed, _ = going.communicate()
    finally:
        going.kill()
        going.wait()
    assert going.returncode == 0
    assert [line.partition(" ")[2] for line in printed.splitlines()] == ["job: two are enough"] * 2
