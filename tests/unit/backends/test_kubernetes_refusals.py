"""What is said of pods that the cluster does not create."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from edl_runtime.backends.base import JobStatus
from edl_runtime.backends.kubernetes import backend, names
from edl_runtime.backends.kubernetes.api import Change
from edl_runtime.backends.kubernetes.mirror import Mirror
from edl_runtime.backends.kubernetes.outage import Outage

QUOTA = 'pods "job-1" is forbidden: exceeded quota: tight, requested: pods=1, used: pods=1, limited: pods=1'
SECURITY = 'pods "job-1" is forbidden: violates PodSecurity "restricted:latest": host namespaces (hostNetwork=true)'


Listed = dict[str, list[Any]]


def by_watches(listed: Listed) -> JobStatus:
    """Return the status that a process tells which watches all jobs."""
    known = Mirror(NotImplemented, "default", Outage())
    for view in known._views:
        view.learn(Change("LISTED", "1", listed[view.kind]))
    status = known._status("job")
    assert status
    return status


def by_lists(listed: Listed) -> JobStatus:
    """Return the status that a process tells which asks about this job alone."""

    class Cluster:
        async def list(self, kind: str, **_: str) -> tuple[list[Any], str]:
            return listed[kind], "1"

    cluster: Any = Cluster()
    return asyncio.run(backend._status(cluster, listed["Job"][0]))


def trainer(
    told: dict[str, str], *, pods_since: str = "", look: Callable[[Listed], JobStatus] = by_watches
) -> JobStatus:
    """Return the status of a trainer job of two, of which one is there, by refusals and the minutes of the day."""
    annotations = {names.WANTED: "2", names.BOUNDS: "1:4", names.INDEX: "0"}
    metadata = {"name": "job", "uid": "1", "labels": {names.JOB: "job"}, "annotations": annotations}
    metadata["resourceVersion"] = "1"
    owner = {"kind": "Job", "metadata": metadata, "spec": {"completions": 2}}
    created = {**metadata, "creationTimestamp": f"2026-01-01T12:{pods_since}:00Z"}
    running = {"phase": "Running", "containerStatuses": [{"name": names.CONTAINER, "state": {"running": {}}}]}
    pods: list[Any] = [{"metadata": created, "status": running}] if pods_since else []
    events: list[Any] = [
        {
            "metadata": {"name": message, "resourceVersion": "1"},
            "involvedObject": {"kind": "Job", "uid": "1"},
            "lastTimestamp": f"2026-01-01T12:{at}:00Z",
            "message": message,
        }
        for at, message in told.items()
    ]
    return look({"Job": [owner], "Deployment": [], "Pod": pods, "Event": events})


def test_the_last_refusal_is_told() -> None:
    """Whatever order the cluster gives them in."""
    status = trainer({"02": QUOTA, "01": "no such service account"}, pods_since="01")
    assert (status.phase, status.reason) == ("running", f"its pods can't be created: {QUOTA}")


@pytest.mark.parametrize("look", [by_watches, by_lists])
@pytest.mark.parametrize(("refused", "is_told"), [("01", False), ("02", True), ("03", True)])
def test_a_refusal_from_before_the_newest_pod_is_not_told(
    look: Callable[[Listed], JobStatus], refused: str, *, is_told: bool
) -> None:
    """The cluster keeps events for an hour, and has created a pod since; it counts in seconds, so one may be equal."""
    assert (QUOTA in trainer({refused: QUOTA}, pods_since="02", look=look).reason) is is_told


@pytest.mark.parametrize(("refusal", "phase"), [(QUOTA, "running"), (SECURITY, "failed")])
def test_what_is_refused_for_ever_fails_the_job(refusal: str, phase: str) -> None:
    """Nobody can mend it but whoever wrote the job; a quota may be raised."""
    status = trainer({"01": refusal})
    assert (status.phase, status.mistaken) == (phase, phase == "failed")


def test_a_job_that_runs_goes_on_though_no_more_pods_are_created() -> None:
    """A rule that came later does not end what has begun before."""
    status = trainer({"02": SECURITY}, pods_since="01")
    assert (status.phase, status.mistaken) == ("running", False)
    assert SECURITY in status.reason
