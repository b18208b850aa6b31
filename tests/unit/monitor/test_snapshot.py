"""The snapshot of `edl monitor`, and the point that is recorded."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from support.autoscale.jobs import NOON, capacity, node, pool
from support.autoscale.jobs import running_job as job

from edl_runtime.autoscale.history import HistoryPoint, JobPoint, ResourceUse, history_point
from edl_runtime.autoscale.planner import JobTarget, RescalingPlan
from edl_runtime.backends.interface import Capacity, JobStatus
from edl_runtime.elastic.rendezvous.generation import JobOutcome
from edl_runtime.elastic.rendezvous.group_status import GroupStatus, LastCheckpoint, LastResize
from edl_runtime.monitor.reports import JobReport
from edl_runtime.monitor.snapshot import (
    HEADINGS,
    JobLine,
    MonitorSnapshot,
    PoolLine,
    TeacherLine,
    build_snapshot,
    job_line,
    summary_row,
)
from edl_runtime.monitor.terminal import picture
from edl_runtime.pool_reports import StudentReport, TeacherReport
from edl_runtime.progress import Progress
from edl_runtime.registry.pools import PoolInfo, Quarantine
from edl_runtime.specs import Bounds


def look(
    *jobs: JobStatus,
    there: Capacity = capacity(),  # noqa: B008 - nothing is known of it
    plan: RescalingPlan | None = None,
    pools: Mapping[str, PoolInfo] | None = None,
    **more: Any,
) -> MonitorSnapshot:
    return build_snapshot(jobs, there, plan, pools or {}, more.pop("at", 5.0), **more)


TUTORIAL = {"example": 0.036, "example1": 0.040, "example2": 0.108}
"""The CPUs of a trainer of each of the tutorial's jobs."""


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ({}, "0 0 - 18.40% -"),
        ({"example": 0}, "1 1 example:0 18.40% -"),
        ({"example": 10}, "1 0 example:10 54.40% -"),
        ({"example": 10, "example1": 5}, "2 0 example:10|example1:5 74.40% -"),
        ({"example": 10, "example1": 8}, "2 0 example:10|example1:8 86.40% -"),
        ({"example": 10, "example1": 8, "example2": 0}, "3 1 example:10|example1:8|example2:0 86.40% -"),
        ({"example": 3, "example1": 4, "example2": 0}, "3 1 example:3|example1:4|example2:0 45.20% -"),
        ({"example": 3, "example1": 4, "example2": 4}, "3 0 example:3|example1:4|example2:4 88.40% -"),
    ],
)
def test_the_tutorials_rows(jobs: dict[str, int], expected: str) -> None:
    """Other load of 184m in a cluster of one CPU, and the tutorial's jobs as they come: its columns by the letter."""
    used = 0.184 + sum(TUTORIAL[name] * count for name, count in jobs.items())
    seen = look(
        *(job(name, count, max(count, 1), resources={"cpu": TUTORIAL[name]}) for name, count in jobs.items()),
        there=capacity(node(total={"cpu": 1.0, "gpu": 0.0}, used={"cpu": used})),
    )
    assert HEADINGS[:4] == ("SUBMITTED-JOBS", "PENDING-JOBS", "RUNNING-TRAINERS", "CPU-UTILS")
    assert " ".join(summary_row(seen)) == expected
    assert seen.use["cpu"].ours == pytest.approx(used - 0.184)


def test_all_nodes_count_together() -> None:
    """Of each resource what nodes have, what all and what ours reserve, and what training may use by the plan."""
    seen = look(
        job("a", 2, 5, resources={"cpu": 2.0, "gpu": 1.0}),
        job("done", 4, phase="succeeded", resources={"cpu": 50.0}),
        there=capacity(
            node("n0", total={"cpu": 8.0, "gpu": 4.0}, used={"cpu": 5.0, "gpu": 2.0}),
            node("n1", total={"cpu": 8.0, "memory": 100.0}, used={"memory": 25.0}),
        ),
        plan=RescalingPlan(at=1.0, capacity={"cpu": 6.4}),
    )
    assert seen.use == {
        "cpu": ResourceUse(total=16.0, reserved=5.0, ours=4.0, allowed=6.4),
        "gpu": ResourceUse(total=4.0, reserved=2.0, ours=2.0),
        "memory": ResourceUse(total=100.0, reserved=25.0),
    }
    assert summary_row(seen)[3:] == ("31.25%", "50.00%")


def test_a_cluster_of_which_nothing_is_known_has_no_use() -> None:
    """Then the columns say so, and jobs are shown all the same."""
    seen = look(job("a", 1), lacks=["what nodes have is unknown"])
    assert summary_row(seen) == ("1", "0", "a:1", "-", "-")
    assert (seen.use, seen.lacks) == ({}, ("what nodes have is unknown",))


def test_pending_is_who_has_no_instance_that_runs() -> None:
    """Not jobs that have some, have ended, or are pools; suspended ones are marked, also as their instances leave."""
    seen = look(
        job("waits", 0, 2),
        job("told-to-wait", 0, 0, phase="pending"),
        job("leaves", 1, 0),
        job("grows", 1, 4),
        job("over", 0, 2, phase="failed"),
        job("pool", 0, 1, kind="pool"),
    )
    assert seen.submitted == ("grows", "leaves", "told-to-wait", "waits")
    assert (seen.pending, seen.suspended) == (("leaves", "told-to-wait", "waits"), ("leaves", "told-to-wait"))
    assert summary_row(seen)[:3] == ("4", "3", "grows:1|leaves:suspended|told-to-wait:suspended|waits:0")
    assert [(line.name, line.state) for line in seen.jobs if line.kind == "pool"] == [("pool", "pending")]


def test_targets_stand_with_their_reasons() -> None:
    """A job that the plan does not know yet has none; a job's error is shown as well."""
    targets = (JobTarget(name="a", kind="trainer", instances=2, target=4, reason="grows: more is free"),)
    plan = RescalingPlan(at=3.0, window="night", until=9.0, capacity={}, targets=targets, notes=("an odd window",))
    seen = look(job("b", 0, 1, reason="no image"), job("a", 2), plan=plan)
    common: dict[str, Any] = {"kind": "trainer", "bounds": Bounds(1, 100)}
    a = JobLine(name="a", state="running", running=2, wanted=2, target=4, reason="grows: more is free", **common)
    b = JobLine(name="b", state="pending", running=0, wanted=1, trouble="no image", **common)
    assert seen.jobs == (a, b)
    assert (seen.planned_at, seen.window, seen.until, seen.notes) == (3.0, "night", 9.0, ("an odd window",))


def test_what_could_not_be_done_stands_in_place_of_the_reason() -> None:
    """Of a job that the last pass could not resize."""
    targets = (JobTarget(name="a", kind="trainer", instances=2, target=4, reason="grows: more is free"),)
    plan = RescalingPlan(at=3.0, capacity={}, targets=targets)
    (line,) = look(job("a", 2), plan=plan, refused={"a": "its supervisor does not answer", "gone": "ended"}).jobs
    assert (line.target, line.reason) == (4, "its supervisor does not answer")


def test_pools_are_those_of_the_backend_and_those_of_redis() -> None:
    """One that is known to both is one; teachers started by hand have no number that is wanted."""
    seen = look(
        job("both", 1, 3, kind="pool"),
        job("quiet", 1, kind="pool"),
        job("a", 1),
        pools={
            "both": pool(
                "both",
                {"t": TeacherReport(busy=0.9, over_s=10.0, answered=7)},
                {"s": StudentReport(waiting=0.25, over_s=10.0), "u": None},
                t=Quarantine("answers NaN", 1),
            ),
            "by-hand": pool("by-hand", {"t0": None, "t1": None}),
        },
        reports={"a": JobReport(progress=Progress(step=1, updated_at=1.0, answered={"t0:1": 5, "t:1": 6}))},
    )
    ours = TeacherLine(id="t", address="t:1", busy=0.9, answered=7, quarantine="answers NaN (by 1 student)")
    others = (TeacherLine(id="t0", address="t0:1", answered=5), TeacherLine(id="t1", address="t1:1"))
    silent = "not known yet: 1 of 2 students have reported nothing of late"
    assert seen.pools == (
        PoolLine(
            name="both",
            running=1,
            wanted=3,
            teachers=1,
            students=2,
            busy=0.9,
            waiting=0.25,
            limit=silent,
            members=(ours,),
        ),
        PoolLine(name="by-hand", teachers=2, students=0, limit="it has no students", members=others),
        PoolLine(name="quiet", running=1, wanted=1),
    )
    assert seen.submitted == ("a",)


TRAINED = Progress(
    step=300, total_steps=1200, updated_at=1.0, loss=0.25, samples_per_s=1234.0, time_left_s=4000.0, limit="student"
)
GROUP = GroupStatus(
    members=(0, 1, 2),
    generation=4,
    checkpoint=LastCheckpoint(step=250, url="/c/250", at=NOON - 65),
    resize=LastResize(before=2, after=3, at=NOON - 30, pause_s=0.43, gear="live", reason="instance 2 has joined"),
)


def test_a_line_has_all_that_is_known_of_a_job() -> None:
    """How far it is, its last checkpoint and resize, and what limits it."""
    line = job_line(job("a", 3), JobReport(progress=TRAINED, group=GROUP))
    assert (line.state, line.share, line.generation, line.trouble) == ("running", 0.25, 4, "")
    assert (line.progress, line.checkpoint, line.resize) == (TRAINED, GROUP.checkpoint, GROUP.resize)
    assert line.limit == "the student is the limit: teachers are idle 100 % of the time"
    unknown = job_line(job("a", 3), JobReport(progress=Progress(step=3, updated_at=1.0)))
    assert (unknown.share, unknown.checkpoint, unknown.resize, unknown.limit) == (None, None, None, "")


@pytest.mark.parametrize(
    ("changes", "trouble"),
    [
        ({"stop": "its time is over"}, "ends with a checkpoint: its time is over"),
        ({"forming": True}, "generation 4 forms"),
        ({"waits": "1 of at least 2 instances is ready"}, "1 of at least 2 instances is ready"),
        ({"waits": "instance 3 has yet to report a step", "heard_at": TRAINED.updated_at + 5}, ""),
        (
            {"stragglers": {2: 1.84, 0: 3.0}, "heard_at": TRAINED.updated_at},
            "instance 0 computes 3.0 times as long and instance 2 computes 1.8 times as long as its peers",
        ),
        ({"stragglers": {2: 1.84}}, ""),
        ({"stop": "its time is over", "outcome": JobOutcome("stopped", "its time is over")}, ""),
    ],
)
def test_what_a_group_waits_for_is_a_jobs_trouble(changes: dict[str, Any], trouble: str) -> None:
    """Unless the backend knows of an error: that comes first."""
    report = JobReport(progress=TRAINED, group=msgspec.structs.replace(GROUP, **{"heard_at": NOON, **changes}))
    assert job_line(job("a", 1), report).trouble == trouble
    assert job_line(job("a", 1, reason="no image"), report).trouble == "no image"


def test_ended_jobs_have_lines_of_their_own() -> None:
    """They are not among those that run, and keep their reason."""
    seen = look(job("a", 1), job("b", 0, phase="failed", reason="instance 0 exited with 1"))
    assert [line.name for line in seen.jobs] == ["a"]
    assert [(line.name, line.state, line.trouble) for line in seen.ended] == [
        ("b", "failed", "instance 0 exited with 1")
    ]


def test_a_training_fits_a_terminal() -> None:
    """At 100 columns nothing of how it trains is cut."""
    from rich.console import Console

    console = Console(width=100, file=io.StringIO())
    seen = look(
        job("resnet-distill-2026", 3),
        at=NOON,
        reports={"resnet-distill-2026": JobReport(progress=TRAINED, group=GROUP)},
    )
    console.print(picture(seen))
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    cells = "resnet-distill-2026 300 25% 1h 6m 1,234 0.25 250, 1m 5s ago 2→3 in 0.43 s student"
    assert cells in [" ".join(line.split()) for line in shown]


def test_a_point_says_what_ran_and_what_was_reserved() -> None:
    """Of all that had not ended, by name; with the window and what training might use by the plan."""
    found = history_point(
        [job("b", 0, 2), job("a", 2, resources={"cpu": 0.1}), job("p", 1, kind="pool"), job("x", 0, phase="failed")],
        capacity(node(total={"cpu": 2.0}, used={"cpu": 0.3})),
        RescalingPlan(at=1.0, window="night", capacity={"cpu": 1.5}),
    )
    assert found == HistoryPoint(
        jobs={"a": JobPoint(running=2), "b": JobPoint(state="pending"), "p": JobPoint(running=1, kind="pool")},
        use={"cpu": ResourceUse(total=2.0, reserved=0.3, ours=0.2, allowed=1.5)},
        window="night",
    )
    assert list(found.jobs) == ["a", "b", "p"]


def test_a_report_that_nothing_can_be_made_of_is_that_job_s_trouble() -> None:
    """And what is reported in a pool is told in its place: all others are shown, on the page and in the terminal."""
    report = JobReport(progress=Progress(step=10**400, total_steps=1, updated_at=1.0))
    hostile = TeacherReport(busy=1e308, over_s=10.0)
    student = StudentReport(asked=1e308, over_s=10.0)
    pools = {
        "bad": pool("bad", {"t": hostile, "u": hostile}, {"s": student}),
        "fine": pool("fine", {"t": None}),
    }
    seen = look(job("evil", 1), job("good", 1), reports={"evil": report, "good": JobReport()}, pools=pools)
    evil, good = seen.jobs
    assert evil.trouble.startswith("what Redis has of job 'evil' can't be handled: OverflowError")
    assert (evil.progress, evil.running, good.trouble) == (None, 1, "")
    bad, fine = seen.pools
    assert bad.limit.startswith("what is reported in pool 'bad' can't be handled: OverflowError")
    assert (bad.teachers, fine.limit) == (2, "it has no students")
