"""What is said of pods that the cluster does not create."""

from __future__ import annotations

from typing import Any

import pytest

from edl_runtime.backends.base import JobStatus
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.status import job_status, refusals

QUOTA = 'pods "job-1" is forbidden: exceeded quota: tight, requested: pods=1, used: pods=1, limited: pods=1'
SECURITY = 'pods "job-1" is forbidden: violates PodSecurity "restricted:latest": host namespaces (hostNetwork=true)'


def trainer(told: dict[str, str], *, pods_since: str = "") -> JobStatus:
    """Return the status of a trainer job of two, of which one is there, by refusals and the minutes of the day."""
    annotations = {names.WANTED: "2", names.BOUNDS: "1:4", names.INDEX: "0"}
    metadata = {"name": "job", "labels": {names.JOB: "job"}, "annotations": annotations}
    owner = {"kind": "Job", "metadata": metadata, "spec": {"completions": 2}}
    created = {**metadata, "creationTimestamp": f"2026-01-01T12:{pods_since}:00Z"}
    running = {"phase": "Running", "containerStatuses": [{"name": names.CONTAINER, "state": {"running": {}}}]}
    pods: list[Any] = [{"metadata": created, "status": running}] if pods_since else []
    events = [{"lastTimestamp": f"2026-01-01T12:{at}:00Z", "message": message} for at, message in told.items()]
    return job_status(owner, pods, 0.0, refusals(events, pods))


def test_the_last_refusal_is_told() -> None:
    """Whatever order the cluster gives them in."""
    status = trainer({"02": QUOTA, "01": "no such service account"}, pods_since="01")
    assert (status.phase, status.reason) == ("running", f"its pods can't be created: {QUOTA}")


def test_a_refusal_from_before_the_newest_pod_is_not_told() -> None:
    """The cluster keeps events for an hour; since then it has created one."""
    assert trainer({"01": QUOTA}, pods_since="02").reason == ""


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
