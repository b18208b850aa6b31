"""What is new of jobs between two looks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.autoscale.jobs import job

from edl_runtime.autoscale.cluster.changes import job_changes, jobs_seen
from edl_runtime.backends.interface import JobStatus
from edl_runtime.specs import Bounds

BOUNDS = Bounds(2, 8)


def heard(before: list[JobStatus], now: list[JobStatus]) -> dict[str, str]:
    return {one.job: one.what for one in job_changes(jobs_seen(before), jobs_seen(now))}


def test_jobs_come_and_go() -> None:
    """One that was submitted again under its name has come; at the first look all have."""
    a, b = job("a", BOUNDS, 1, 4), job("b", BOUNDS, 1, 2)
    again = msgspec.structs.replace(a, created_at=a.created_at + 60)
    over = msgspec.structs.replace(a, phase="succeeded", scaling=None)
    assert heard([], [b, a]) == {"a": "submitted", "b": "submitted"}
    assert heard([a, b], [a, b]) == {}
    assert heard([a, b], [b]) == heard([a, b], [over, b]) == {"a": "ended"}
    assert heard([over, b], [b]) == {}
    assert heard([a, b], [again, b]) == heard([over], [again]) == {"a": "submitted"}


def test_a_pool_has_ended_once_it_is_gone() -> None:
    """One whose teachers crash has failed and runs in turn, for as long as it is there."""
    runs = job("a", BOUNDS, 1, 2, kind="pool")
    failed = msgspec.structs.replace(runs, phase="failed", scaling=None)
    assert heard([runs], [failed]) == heard([failed], [runs]) == {}
    assert heard([failed], []) == {"a": "ended"}


def test_one_is_pending_once_fewer_than_it_needs_have_a_place() -> None:
    """Said once; one that is to grow and can't has what it needs."""
    runs, grows, pends = (job("a", BOUNDS, 1, have, pending=4 - have) for have in (4, 2, 1))
    assert heard([runs], [pends]) == heard([grows], [pends]) == {"a": "pending"}
    assert heard([runs], [grows]) == heard([pends], [pends]) == heard([pends], [runs]) == {}
    assert heard([], [pends]) == {"a": "submitted"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"phase": "pending"}, {}),
        ({"phase": "running"}, {}),
        ({"phase": "succeeded"}, {}),
        ({"phase": "failed", "exit_code": -9}, {}),
        ({"leaving": True}, {"a": "pending"}),
        ({"phase": "failed"}, {"a": "pending"}),
        ({"phase": "failed", "exit_code": -15, "disrupted": True}, {"a": "pending"}),
        ({"node": ""}, {"a": "pending"}),
    ],
)
def test_who_loses_its_place_lacks_room(change: dict[str, Any], said: dict[str, str]) -> None:
    """As by an eviction; not who is not up yet, is to be started again, or has done its part already."""
    runs = job("a", BOUNDS, 1, 2)
    changed = msgspec.structs.replace(runs.instances[0], **change)
    assert heard([runs], [msgspec.structs.replace(runs, instances=(changed, runs.instances[1]))]) == said


def test_who_is_not_to_run_now_is_not_pending() -> None:
    """One that is suspended, whose queue has it wait, or of which the rest was given up."""
    runs = job("a", BOUNDS, 1, 2)
    suspended = msgspec.structs.replace(runs, wanted=0, instances=())
    queue = job("a", BOUNDS, 1, 2, queue="nightly")
    waits = msgspec.structs.replace(queue, phase="pending", instances=())
    given_up = msgspec.structs.replace(runs.instances[1], phase="failed", given_up=True)
    short = msgspec.structs.replace(runs, instances=(runs.instances[0], given_up))
    assert heard([runs], [suspended]) == heard([queue], [waits]) == heard([runs], [short]) == {}
