"""What objects of ours are called, and the labels and annotations by which they are known."""

from __future__ import annotations

from collections.abc import Mapping

from edl_runtime import pods

MANAGER = "edl-airflow"
"""Who writes our objects, in labels and in the fields that server-side apply keeps of each writer."""

MANAGED_BY = "app.kubernetes.io/managed-by"
JOB = f"{MANAGER}/job"
KIND = f"{MANAGER}/kind"
LOG_OF = f"{MANAGER}/log-of"

TOKEN = f"{MANAGER}/token"
DIGEST = f"{MANAGER}/digest"
BOUNDS = f"{MANAGER}/bounds"
PRIORITY = f"{MANAGER}/priority"
WEIGHT = f"{MANAGER}/weight"
RESIZED_AT = f"{MANAGER}/resized-at"
WANTED = f"{MANAGER}/wanted"
ELASTIC = f"{MANAGER}/elastic"
CREATED_AT = f"{MANAGER}/created-at"
CWD = f"{MANAGER}/cwd"
STARTED = f"{MANAGER}/started"
MOST_DISRUPTIONS = f"{MANAGER}/most-disruptions"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
QUEUE = "kueue.x-k8s.io/queue-name"
ELASTIC_IN_QUEUE = "kueue.x-k8s.io/elastic-job"
"""The annotation of a Job that asks Kueue to let it be resized while it runs. Kueue answers when the Job is made, by a
scheduling gate of that name on its pods, which each has until the queue has admitted it."""

INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
DISRUPTIONS = "batch.kubernetes.io/job-index-ignored-failure-count"
TRACKED = "batch.kubernetes.io/job-tracking"
"""The finalizer of pods that a Job has yet to count."""
RUN = "batch.kubernetes.io/controller-uid"

CONTAINER = "instance"
"""The container of a pod that is the instance."""

HOME = pods.HOME

PORT = 8000
"""At which an instance that serves HTTP does so."""


def labels(job: str, kind: str) -> dict[str, str]:
    """Return the labels of everything of a job."""
    return {MANAGED_BY: MANAGER, JOB: job, KIND: kind}


def selector(job: str = "") -> str:
    """Return the label selector of everything of a job, or of all jobs."""
    ours = f"{MANAGED_BY}={MANAGER}"
    return f"{ours},{JOB}={job}" if job else f"{ours},{JOB}"


def is_of(labels: Mapping[str, str], job: str) -> bool:
    """Whether what has these labels is the job's, or the log of an earlier one of its name."""
    return job in (labels.get(JOB), labels.get(LOG_OF))


def secret_name(job: str) -> str:
    return f"{job}-env"


def archive_name(job: str) -> str:
    return f"{job}-log"
