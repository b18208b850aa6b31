"""The snapshot of `edl monitor`, and the point that is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from support.autoscale.jobs import capacity, node
from support.autoscale.jobs import running_job as job

from edl_runtime.autoscale.history import HistoryPoint, JobPoint, ResourceUse, history_point
from edl_runtime.autoscale.planner import JobTarget, RescalingPlan
from edl_runtime.backends.interface import Capacity, JobStatus
from edl_runtime.monitor.snapshot import HEADINGS, JobLine, MonitorSnapshot, PoolLine, build_snapshot, summary_row
from edl_runtime.pool_reports import PoolDemand, StudentReport, TeacherReport


def look(
    *jobs: JobStatus,
    there: Capacity = capacity(),  # noqa: B008 - nothing is known of it
    plan: RescalingPlan | None = None,
    pools: Mapping[str, PoolDemand] | None = None,
    **more: Any,
) -> MonitorSnapshot:
    return build_snapshot(jobs, there, plan, pools or {}, 5.0, **more)


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
    """Not jobs that have some, have ended, or are pools; suspended ones are marked."""
    seen = look(
        job("waits", 0, 2),
        job("told-to-wait", 0, 0, phase="pending"),
        job("leaves", 1, 0),
        job("grows", 1, 4),
        job("over", 0, 2, phase="failed"),
        job("pool", 0, 1, kind="pool"),
    )
    assert seen.submitted == ("grows", "leaves", "told-to-wait", "waits")
    assert (seen.pending, seen.suspended) == (("told-to-wait", "waits"), ("told-to-wait",))
    assert summary_row(seen)[:3] == ("4", "2", "grows:1|leaves:1|told-to-wait:suspended|waits:0")
    assert [(line.name, line.state) for line in seen.jobs if line.kind == "pool"] == [("pool", "pending")]


def test_targets_stand_with_their_reasons() -> None:
    """A job that the plan does not know yet has none; a job's error is shown as well."""
    targets = (JobTarget(name="a", kind="trainer", instances=2, target=4, reason="grows: more is free"),)
    plan = RescalingPlan(at=3.0, window="night", until=9.0, capacity={}, targets=targets, notes=("an odd window",))
    seen = look(job("b", 0, 1, reason="no image"), job("a", 2), plan=plan)
    a = JobLine(name="a", kind="trainer", state="running", running=2, wanted=2, target=4, reason="grows: more is free")
    b = JobLine(name="b", kind="trainer", state="pending", running=0, wanted=1, trouble="no image")
    assert seen.jobs == (a, b)
    assert (seen.planned_at, seen.window, seen.until, seen.notes) == (3.0, "night", 9.0, ("an odd window",))


def test_pools_are_those_of_the_backend_and_those_of_redis() -> None:
    """One that is known to both is one; teachers started by hand have no number that is wanted."""
    seen = look(
        job("both", 1, 3, kind="pool"),
        job("quiet", 1, kind="pool"),
        job("a", 1),
        pools={
            "both": PoolDemand(
                teachers={"t": TeacherReport(busy=0.9, over_s=10.0)},
                students={"s": StudentReport(waiting=0.25, over_s=10.0), "t": None},
            ),
            "by-hand": PoolDemand(teachers={"t0": None, "t1": None}),
        },
    )
    assert seen.pools == (
        PoolLine(name="both", running=1, wanted=3, teachers=1, students=2, busy=0.9, waiting=0.25),
        PoolLine(name="by-hand", teachers=2, students=0),
        PoolLine(name="quiet", running=1, wanted=1),
    )
    assert seen.submitted == ("a",)


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
