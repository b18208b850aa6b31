"""What Kueue says about a job in its queue, from the Workloads that it makes for Jobs and for pods of a pool. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from edl_runtime.backends.kubernetes.pod_status import condition, created_at, message_of
from edl_runtime.backends.kubernetes.pod_template import mapping_at
from edl_runtime.pods import Manifest

_JOB_UID = "kueue.x-k8s.io/job-uid"


def uid_of_queued(workload: Manifest) -> str:
    """Return the uid of the Job or pod that the Workload is for, empty if it is for another kind."""
    return str(mapping_at(workload, "metadata", "labels").get(_JOB_UID) or "")


def waiting_message(workloads: Iterable[Manifest]) -> str:
    """Return why Kueue has not admitted the newest of these Workloads that waits, empty if it does not say.

    That is why it was evicted or preempted, if it was, and what it waits for now.
    """
    waiting = [one for one in workloads if not condition(one, "Finished") and not condition(one, "Admitted")]
    if not waiting:
        return ""
    newest = max(waiting, key=created_at)
    found = (
        condition(newest, "Evicted"),
        condition(newest, "QuotaReserved", status="False") or condition(newest, "Admitted", status="False"),
    )
    return "; ".join(dict.fromkeys(message_of(one).rstrip(".") for one in found if one))
