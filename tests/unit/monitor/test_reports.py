"""Whether a training stands still, by what Redis knows of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.autoscale.jobs import NOON
from support.autoscale.jobs import running_job as job

from edl_runtime.elastic.rendezvous.generation import JobOutcome
from edl_runtime.elastic.rendezvous.group_status import GroupStatus, LastFailure
from edl_runtime.monitor.reports import UNKNOWN, JobReport, Standstill, standstill, unknown_reports
from edl_runtime.monitor.snapshot import job_line
from edl_runtime.progress import Progress

STEPPED = Progress(step=23, total_steps=40, updated_at=NOON, samples_per_s=75.0, time_left_s=9.0, instances=3)


UNHEARD = (
    "no report in 1m 40s: its instances can't reach Redis, don't trust its certificate, or have another EDL_NAMESPACE; "
    "see `edl logs a`"
)


def report(idle_s: float, *, silent_s: float = 0.2, step_s: float = 0.1, **group: Any) -> JobReport:
    """Return what Redis has so long after the last step, and after the last heartbeat."""
    group = {"members": (0, 1, 2), "generation": 4, "read_at": NOON + idle_s, **group}
    return JobReport(
        progress=msgspec.structs.replace(STEPPED, step_s=step_s),
        group=GroupStatus(heard_at=NOON + idle_s - silent_s, **group),
    )


@pytest.mark.parametrize(
    ("seen", "still"),
    [
        (report(59.0), None),
        (report(200.0), Standstill("NoStep", "no step for 3m 20s")),
        (report(200.0, waits="no room"), Standstill("NoStep", "no step for 3m 20s: no room")),
        (report(200.0, forming=True), Standstill("NoStep", "no step for 3m 20s: generation 4 forms")),
        (report(90.0, stop="edl stop"), Standstill("NoStep", "no step for 1m 30s: ends with a checkpoint: edl stop")),
        (report(200.0, step_s=45.0), None),
        (report(226.0, step_s=45.0), Standstill("NoStep", "no step for 3m 46s")),
        (
            report(203.0, silent_s=203.0, waits="long over"),
            Standstill("NotHeard", "no report for 3m 23s: its instances can't reach Redis, or are stopped"),
        ),
        (report(200.0, outcome=JobOutcome("done")), None),
        (JobReport(), None),
        (JobReport(read_at=NOON - 4000 + 59), None),
        (JobReport(read_at=NOON - 4000 + 100), Standstill("NotHeard", UNHEARD)),
        (JobReport(group=GroupStatus(heard_at=NOON, read_at=NOON + 1)), None),
        (
            JobReport(group=GroupStatus(heard_at=NOON, read_at=NOON + 1, waits="1 of at least 2 instances is ready")),
            Standstill("NoStep", "no step so far: 1 of at least 2 instances is ready"),
        ),
        (JobReport(problem="the record can't be read"), Standstill("Unreadable", "the record can't be read")),
        (unknown_reports([job("a", 3)])["a"], Standstill("Unreadable", UNKNOWN)),
    ],
    ids=[
        "it has just made a step",
        "not for long",
        "and says what it waits for",
        "or that its trainers meet",
        "or why it ends",
        "its steps take as long",
        "not that long",
        "its trainers can't reach Redis",
        "it has ended",
        "nothing is known of it",
        "it has just begun",
        "its trainers could never reach Redis",
        "its script loads data",
        "it lacks instances for its first step",
        "its report is damaged",
        "Redis can't be reached from here",
    ],
)
def test_why_a_training_makes_no_step(seen: JobReport, still: Standstill | None) -> None:
    """By the time of its last step, that of its trainers' last heartbeat, and what these wait for."""
    assert standstill(job("a", 3), seen) == still


def test_only_a_training_that_runs_can_stand_still() -> None:
    """Neither a pool, nor one that has ended, is suspended or waits for a node."""
    seen = report(200.0)
    others = [job("a", 3, kind="pool"), job("a", 3, phase="failed"), job("a", 0, 0), job("a", 0, 3)]
    assert [standstill(one, seen) for one in others] == [None] * 4
    assert not unknown_reports(others[:2])


KILLED = LastFailure(step=23, instance=1, count=2, reason="its worker was killed by SIGKILL")
LOOPS = "instance 1: its worker was killed by SIGKILL; restarted 2 times without progress since step 23"


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (report(5.0, failure=KILLED), LOOPS),
        (report(5.0, failure=KILLED, forming=True, stragglers={2: 1.5}), LOOPS),
        (report(200.0, failure=KILLED, waits="no room"), f"no step for 3m 20s: {LOOPS}"),
        (report(5.0, failure=KILLED, stop="edl stop"), "ends with a checkpoint: edl stop"),
        (report(5.0, failure=KILLED, outcome=JobOutcome("failed", "no memory")), ""),
        (report(5.0, failure=msgspec.structs.replace(KILLED, step=22)), ""),
        (report(5.0, failure=msgspec.structs.replace(KILLED, reason="")), ""),
        (
            report(5.0, failure=msgspec.structs.replace(KILLED, count=1, reason="ValueError: 1\n2")),
            "instance 1: ValueError: 1; restarted 1 time without progress since step 23",
        ),
    ],
    ids=[
        "it repeats its steps",
        "or is about to",
        "or makes none",
        "it ends",
        "it has ended",
        "it has got further",
        "its script reports no steps",
        "its reason has two lines",
    ],
)
def test_a_line_says_that_workers_are_restarted_without_progress(seen: JobReport, says: str) -> None:
    """From the first restart on, until the job has got further than before."""
    assert job_line(job("a", 3), seen).trouble == says


def test_a_line_says_that_a_training_stands_still() -> None:
    """It has no speed then, and where it stands stays."""
    line = job_line(job("a", 3), report(200.0, waits="no room"))
    assert line.trouble == "no step for 3m 20s: no room"
    assert line.progress is not None
    assert (line.progress.step, line.progress.samples_per_s, line.progress.time_left_s) == (23, 0.0, None)
    assert line.last_step_at == NOON
    assert job_line(job("a", 3, reason="no image"), report(200.0)).trouble == "no image"
    trains = job_line(job("a", 3), report(5.0)).progress
    assert trains is not None
    assert trains.samples_per_s == 75.0
