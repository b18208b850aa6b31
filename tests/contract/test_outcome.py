"""Outcomes of jobs, the environment of instances, and results."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.backends.jobs import ended, job, lines, reach

from edl_runtime.backends.interface import Backend, JobStatus
from edl_runtime.exit_status import describe_exit

LEAVES_A_RESULT = """
from edl_runtime.result import write_result
write_result(checkpoint="/tmp/model", metrics={"accuracy": 0.5})
"""


@pytest.mark.on_pods
async def test_a_failing_trainer_fails_its_job_with_its_exit_status_and_last_lines(backend: Backend) -> None:
    """The first instance that fails ends the others."""
    code = """
import os, time
for n in range(100): print("line", n)
print("out of ideas", flush=True)
if os.environ["EDL_INSTANCE"] == "1": raise SystemExit(1)
time.sleep(600)
"""
    await backend.submit(job(code, kind="trainer", instances=2), token="mine", secrets={})
    status = await ended(backend)
    assert (status.phase, status.reason) == ("failed", "instance 1 exited with 1")
    assert status.last_lines[-2:] == ("line 99", "out of ideas")
    assert len(status.last_lines) == 30
    stopped = await reach(backend, "job", lambda status: all(one.phase == "failed" for one in status.instances))
    assert stopped.instances[-1].exit_code == 1


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("os.kill(os.getpid(), 9)", describe_exit(-9)),
        ("raise SystemExit(78)", "exited with 78"),
    ],
)
async def test_a_killed_or_misconfigured_trainer_fails_its_job(backend: Backend, end: str, reason: str) -> None:
    """A trainer that is not elastic is never restarted by the backend."""
    submitted = await backend.submit(
        job(f"import os; print('reading'); {end}", kind="trainer"), token="mine", secrets={}
    )
    status = await ended(backend)
    assert (status.phase, status.reason) == ("failed", f"instance 0 {reason}")
    assert (status.last_lines, status.instances[0].restarts) == (("reading",), 0)
    assert not submitted.elastic


@pytest.mark.on_pods
async def test_an_elastic_trainer_that_is_killed_is_restarted(backend: Backend, tmp_path: Path) -> None:
    """A signal, as of the out-of-memory killer, is no failure of the script."""
    code = f"""
import os, pathlib
was_here = pathlib.Path({str(tmp_path / "was-here")!r})
if os.environ["EDL_INSTANCE"] == "1" and not was_here.exists():
    was_here.touch()
    os.kill(os.getpid(), 9)
"""
    submitted = await backend.submit(job(code, kind="trainer", elastic=True, instances=2), token="mine", secrets={})
    status = await ended(backend)
    assert (status.phase, status.reason) == ("succeeded", "")
    assert submitted.elastic
    assert status.elastic
    assert [(instance.restarts, instance.exit_code) for instance in status.instances] == [(0, 0), (1, 0)]


async def test_a_command_that_does_not_exist_fails_the_job(backend: Backend) -> None:
    """With exit status 127 and the command's name in the last line."""
    spec = msgspec.structs.replace(job("", kind="trainer"), command=("no-such-program",))
    await backend.submit(spec, token="mine", secrets={})
    status = await ended(backend)
    assert (status.phase, status.instances[0].exit_code) == ("failed", 127)
    assert "no-such-program" in status.last_lines[-1]


@pytest.mark.on_pods
async def test_a_failed_instance_of_a_pool_is_restarted(backend: Backend, tmp_path: Path) -> None:
    """The status counts its restarts."""
    code = f"""
import sys, time
from pathlib import Path
been = Path({str(tmp_path / "been")!r})
if not been.exists(): been.touch(); sys.exit(1)
time.sleep(600)
"""
    await backend.submit(job(code), token="mine", secrets={})

    def is_back(status: JobStatus) -> bool:
        return [(instance.phase, instance.restarts > 0) for instance in status.instances] == [("running", True)]

    assert (await reach(backend, "job", is_back)).phase == "running"


@pytest.mark.on_pods
async def test_the_status_has_the_newest_result(backend: Backend, tmp_path: Path) -> None:
    """Of several instances the last that called `write_result` counts."""
    code = f"""
import os, time
from pathlib import Path
number, there = int(os.environ["EDL_INSTANCE"]), Path({str(tmp_path / "there")!r})
while number == 2 and not there.exists(): time.sleep(0.01)
if number:
    {LEAVES_A_RESULT.strip().replace("0.5", "number").replace(chr(10), chr(10) + "    ")}
    there.touch()
"""
    await backend.submit(job(code, kind="trainer", instances=3), token="mine", secrets={})
    assert (await ended(backend)).result == {"checkpoint": "/tmp/model", "metrics": {"accuracy": 2}}


@pytest.mark.on_pods
async def test_instances_get_their_environment_and_succeed_when_all_exit_with_0(backend: Backend) -> None:
    """Each has the job's name, its index, the spec's variables, and secrets, which no status contains."""
    code = "import os; print(*(os.environ[name] for name in ('EDL_JOB', 'EDL_INSTANCE', 'COLOUR', 'PASSWORD')))"
    spec = job(code, kind="trainer", instances=2, env={"COLOUR": "blue"})
    submitted = await backend.submit(spec, token="mine", secrets={"PASSWORD": "sesame"})
    status = await ended(backend)
    assert (status.phase, status.reason, status.last_lines, status.result) == ("succeeded", "", (), None)
    assert [(instance.phase, instance.exit_code) for instance in status.instances] == [("succeeded", 0)] * 2
    assert sorted(await lines(backend)) == [(0, "job 0 blue sesame"), (1, "job 1 blue sesame")]
    assert b"sesame" not in msgspec.json.encode([submitted, status])
