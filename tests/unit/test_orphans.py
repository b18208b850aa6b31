"""Which jobs their tasks have left, by what Airflow says of the tasks."""

from __future__ import annotations

import msgspec
import pytest
from airflow.utils.state import TaskInstanceState
from support.autoscale.jobs import running_job

from edl_runtime.backends.interface import JobStatus, Origin
from edl_runtime.orphans import GONE, GRACE_S, OVER, Orphan, find_orphans, why_left

ORIGIN = Origin(airflow="a", dag_id="nightly", run_id="manual__1", task_id="train")
POOL = msgspec.structs.replace(ORIGIN, outlives_task=True)
MAPPED = msgspec.structs.replace(ORIGIN, map_index=3)


def job(token: str = "nightly/x/1", origin: Origin | None = ORIGIN) -> JobStatus:
    return running_job("job", 1, token=token, origin=origin)


@pytest.mark.parametrize(
    ("origin", "state", "why"),
    [
        (ORIGIN, "failed", "task nightly.train of run manual__1 is failed"),
        (MAPPED, "upstream_failed", "task nightly.train[3] of run manual__1 is upstream_failed"),
        (ORIGIN, "success", "task nightly.train of run manual__1 is success"),
        (ORIGIN, "skipped", "task nightly.train of run manual__1 is skipped"),
        (ORIGIN, "removed", "task nightly.train of run manual__1 is removed"),
        (ORIGIN, GONE, "task nightly.train of run manual__1 exists no more"),
        *((ORIGIN, state, "") for state in ("running", "queued", "deferred", "scheduled", "restarting", None)),
        *((ORIGIN, state, "") for state in ("up_for_retry", "up_for_reschedule", "a state of a later Airflow")),
        *((POOL, state, "") for state in ("success", GONE, "running", None)),
        (POOL, "failed", "task nightly.train of run manual__1 is failed"),
    ],
)
def test_a_task_leaves_its_jobs_when_it_is_over(origin: Origin, state: str | None, why: str) -> None:
    """Not while a try of it may still take them over; and a pool that outlives its task also outlives its run."""
    assert why_left(origin, state) == why


def test_these_are_the_states_of_tasks_that_are_over() -> None:
    """As Airflow has them."""
    ended = {TaskInstanceState(state) for state in OVER - {GONE}}
    assert {state.value for state in ended} == {"success", "failed", "upstream_failed", "skipped", "removed"}


def test_a_job_is_an_orphan_since_it_was_first_seen_to_be_one() -> None:
    """Its grace begins again when a try has adopted it, whose token is another one."""
    first = find_orphans([job()], {ORIGIN: "failed"}, {}, now=100.0)
    assert first == {"job": Orphan(token="nightly/x/1", why=why_left(ORIGIN, "failed"), since=100.0)}
    later = find_orphans([job()], {ORIGIN: "failed"}, first, now=100.0 + GRACE_S)
    assert later == first
    assert later["job"].is_over(100.0 + GRACE_S)
    assert not later["job"].is_over(99.9 + GRACE_S)
    again = find_orphans([job("nightly/x/2")], {ORIGIN: "failed"}, first, now=500.0)
    assert again["job"].since == 500.0


@pytest.mark.parametrize("states", [{}, {MAPPED: "failed"}, {msgspec.structs.replace(ORIGIN, airflow="b"): "failed"}])
def test_what_airflow_has_not_told_makes_no_orphan(states: dict[Origin, str | None]) -> None:
    """Neither the state of another task instance, nor of the same one in another Airflow."""
    noted = {"job": Orphan(token="nightly/x/1", why="its task was failed", since=0.0)}
    assert find_orphans([job(), job(origin=None)], states, noted, now=1e9) == {}
