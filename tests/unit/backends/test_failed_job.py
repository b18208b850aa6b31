"""What a failed job says first, and whether it is submitted again."""

from __future__ import annotations

import msgspec
import pytest

from edl_runtime.backends.errors import JobFailedError
from edl_runtime.backends.interface import InstanceStatus, JobStatus, Phase

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 1, in <module>',
    "    import nets",
    "ModuleNotFoundError: No module named 'nets'",
)
AGENT = (
    "2026-11-28 17:00:00 [warning  ] worker.failed                  exit_code=1",
    "edl: instance 0: its worker exited with 1",
)


@pytest.mark.parametrize(
    ("lines", "first"),
    [
        (TRACEBACK, ": ModuleNotFoundError: No module named 'nets'"),
        ((*TRACEBACK, *AGENT), ": ModuleNotFoundError: No module named 'nets'"),
        (("/usr/bin/python3: No module named edl_runtime", *AGENT), ": /usr/bin/python3: No module named edl_runtime"),
        (("edl: model 'm': there is no such folder",), ": model 'm': there is no such folder"),
        (("reading", "edl: instance 0: it lags; no step in 300 s", AGENT[0]), ": it lags; no step in 300 s"),
        (("reading", "edl: instance 0: its worker was killed by SIGKILL (lack of memory)"), ": reading"),
        (AGENT, ""),
        ((), ""),
    ],
)
def test_the_first_line_has_the_cause(lines: tuple[str, ...], first: str) -> None:
    """Rather than the agent's last words where they only repeat the reason; for Airflow as for the commands."""
    reason = "instance 0 exited with 1: its worker exited with 1"
    assert str(JobFailedError("job", reason, lines)).splitlines()[0] == f"'job' failed: {reason}{first}"
    job = JobStatus(
        name="job", kind="trainer", phase="failed", token="", digest="", wanted=1, created_at=1.0,
        reason=reason, last_lines=lines,
    )  # fmt: skip
    assert job.why == f"{reason}{first}"
    assert msgspec.structs.replace(job, phase="running").why == reason


@pytest.mark.parametrize(
    ("lines", "phase", "permanent"),
    [
        (TRACEBACK, "failed", True),
        ((*TRACEBACK[:3], "ImportError: cannot import name 'net' from 'nets'"), "failed", True),
        ((*TRACEBACK[:3], "MemoryError"), "failed", False),
        ((*TRACEBACK, *TRACEBACK[:3], "ConnectionError: lost"), "failed", False),
        (TRACEBACK, "running", False),
        (("ImportError: not of a traceback",), "failed", False),
    ],
)
def test_a_job_that_cant_import_what_it_needs_is_not_tried_again(
    lines: tuple[str, ...], phase: Phase, *, permanent: bool
) -> None:
    """By the exception of its last traceback."""
    one = InstanceStatus(index=0, phase="failed", started_at=1.0, exit_code=1)
    status = JobStatus(
        name="job",
        kind="trainer",
        phase=phase,
        token="t",
        digest="d",
        wanted=1,
        created_at=1.0,
        instances=(one,),
        last_lines=lines,
    )
    assert status.failed_permanently is permanent
