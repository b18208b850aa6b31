"""Scripts that can't begin: the cause comes first, and nothing is tried again that can't help."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.backends.jobs import ended

from edl_runtime.backends.errors import JobFailedError
from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.elastic.agent.entrypoint import agent_command
from edl_runtime.specs import Bounds, JobSpec

Run = Callable[..., Awaitable[tuple[JobStatus, str, list[str]]]]


@pytest.fixture
def run(backend: LocalBackend, redis_url: str, namespace: str) -> Run:
    """Runs a command as a job of one agent: returns its last status, the first line of its error, and its log."""

    async def run(*command: object) -> tuple[JobStatus, str, list[str]]:
        spec = JobSpec(
            name="job",
            kind="trainer",
            command=agent_command([*map(str, command)], Bounds(1, 2)),
            bounds=Bounds(1, 2),
            instances=1,
            elastic=True,
            env={"EDL_NAMESPACE": namespace},
        )
        await backend.submit(spec, token="mine", secrets={"EDL_REDIS_URL": redis_url})
        status = await ended(backend)
        first = str(JobFailedError("job", status.reason, status.last_lines)).splitlines()[0]
        return status, first, [line.text async for line in backend.logs("job")]

    return run


@pytest.mark.parametrize(
    ("source", "cause", "permanent"),
    [
        ("import nets", "ModuleNotFoundError: No module named 'nets'", True),
        ("raise MemoryError", "MemoryError", False),
        ("from edl_runtime import elastic\nimport nets", "ModuleNotFoundError: No module named 'nets'", True),
    ],
    ids=["no module", "no memory", "elastic"],
)
async def test_a_script_that_cant_begin_is_run_once(
    run: Run, tmp_path: Path, source: str, cause: str, *, permanent: bool
) -> None:
    """Elastic or not, and its error is the first that is said."""
    script = tmp_path / "train.py"
    script.write_text(f"print('begun', flush=True)\n{source}")
    status, first, lines = await run("python", script)
    assert lines.count("begun") == 1
    assert cause in first
    assert status.failed_permanently is permanent


async def test_an_interpreter_without_this_project_is_named(run: Run, tmp_path: Path) -> None:
    """Before anything is run, where the script needs it."""
    other = tmp_path / "python3"
    other.symlink_to(sys.executable)
    script = tmp_path / "train.py"
    script.write_text("from edl_runtime import elastic")
    status, first, _ = await run(other, script)
    assert f"got '{other}', allowed is an interpreter with edl-airflow installed" in first
    assert "No module named 'edl_runtime'" in first
    assert status.failed_permanently
