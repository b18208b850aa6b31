"""Names, labels and annotations of our objects."""

from __future__ import annotations

from collections.abc import Mapping

from edl_runtime import pods

MANAGER = "edl-airflow"
"""Our label value and our field manager in server-side apply."""

MANAGED_BY = "app.kubernetes.io/managed-by"
JOB = f"{MANAGER}/job"
KIND = f"{MANAGER}/kind"
LOG_OF = f"{MANAGER}/log-of"

TOKEN = f"{MANAGER}/token"
ORIGIN = f"{MANAGER}/origin"
"""JSON of the job's `Origin`, empty for none: ids of DAGs and runs are no label values."""
DIGEST = f"{MANAGER}/digest"
BOUNDS = f"{MANAGER}/bounds"
PRIORITY = f"{MANAGER}/priority"
WEIGHT = f"{MANAGER}/weight"
RESIZED_AT = f"{MANAGER}/resized-at"
RESIZED_FOR = f"{MANAGER}/resized-for"
WANTED = f"{MANAGER}/wanted"
ELASTIC = f"{MANAGER}/elastic"
CREATED_AT = f"{MANAGER}/created-at"
CWD = f"{MANAGER}/cwd"
STARTED = f"{MANAGER}/started"
MOST_DISRUPTIONS = f"{MANAGER}/most-disruptions"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
QUEUE = pods.QUEUE_LABEL
ELASTIC_IN_QUEUE = "kueue.x-k8s.io/elastic-job"
"""The annotation that asks Kueue to let a Job be resized while it runs. A Kueue that supports it puts a scheduling gate
of that name on the Job's pods, until the queue has admitted each."""
QUEUE_GATES = frozenset({ELASTIC_IN_QUEUE, "kueue.x-k8s.io/admission"})
"""Kueue's scheduling gates of pods that wait for their queue: of an elastic Job, and of a Deployment."""

INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
DISRUPTIONS = "batch.kubernetes.io/job-index-ignored-failure-count"
TRACKED = "batch.kubernetes.io/job-tracking"
"""The finalizer of pods that the Job controller has yet to count."""
RUN = "batch.kubernetes.io/controller-uid"

CONTAINER = "instance"
"""The name of an instance's container."""

HOME = pods.HOME

PORT = 8000
"""The port of instances that serve HTTP."""


def labels(job: str, kind: str) -> dict[str, str]:
    """Return the labels of a job's objects."""
    return {MANAGED_BY: MANAGER, JOB: job, KIND: kind}


def selector(job: str = "") -> str:
    """Return the label selector of a job's objects, or of those of all jobs."""
    ours = f"{MANAGED_BY}={MANAGER}"
    return f"{ours},{JOB}={job}" if job else f"{ours},{JOB}"


def is_job(labels: Mapping[str, str], job: str) -> bool:
    """Whether these labels are of the job's Job or Deployment, as `selector` selects it."""
    return labels.get(MANAGED_BY) == MANAGER and labels.get(JOB) == job


def is_of(labels: Mapping[str, str], job: str) -> bool:
    """Whether these labels are of the job's objects, or of the archived log of a job of that name."""
    return job in (labels.get(JOB), labels.get(LOG_OF))


def secret_name(job: str) -> str:
    return f"{job}-env"


def archive_name(job: str) -> str:
    return f"{job}-log"
