"""A job's spec → the objects that run it. Pure.

A pool is a Deployment, a trainer job an elastic Indexed Job. Either owns all else of it, so deleting it deletes all.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import msgspec

from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.pod_template import pod_template
from edl_runtime.errors import EX_CONFIG, SpecError
from edl_runtime.pods import Pod
from edl_runtime.specs import Bounds, JobSpec

Manifest = dict[str, Any]

MAX_STARTS = 5
"""How often an instance of a trainer job is started, in all, before it is given up: its pod's own failures count,
a pod that was evicted or preempted does not."""

DEFAULT_MAX_DISRUPTIONS = 20
"""How often the cluster may end an instance of a trainer job, unless its spec says otherwise."""

TTL_AFTER_FINISHED_S = 7 * 24 * 3600
"""How long a trainer job that has ended is kept, with its pods and their logs, unless it is deleted before."""

TERMINATED = 128 + signal.SIGTERM
"""Exit status of an instance that was told to go: a Job judges also those that leave by a resize."""

_SIGNALS = [128 + number for number in range(1, 65)]
"""Exit statuses that stand for a signal."""


def job_manifest(spec: JobSpec, *, token: str, created_at: float, defaults: Pod) -> Manifest:
    """Return the Deployment or Job, which has no instances yet. `defaults`: of what its spec leaves open.

    Raises SpecError for a relative `cwd`, a secret in a template, and a spec without an image.
    """
    if spec.cwd and not spec.cwd.startswith("/"):
        raise SpecError("cwd", spec.cwd, "an absolute path, as in '/data': pods have no folder in common")
    pod = (spec.pod or Pod()).over(defaults)
    labels = {**pod.labels, **names.labels(spec.name, spec.kind)}
    metadata = {
        "name": spec.name,
        "labels": labels,
        "annotations": {
            **({names.ELASTIC_IN_QUEUE: "true"} if _is_resized_in_queue(spec, pod) else {}),
            **pod.annotations,
            names.TOKEN: token,
            names.DIGEST: spec.digest,
            names.BOUNDS: str(spec.bounds),
            names.PRIORITY: str(spec.priority),
            names.WEIGHT: repr(spec.weight),
            names.WANTED: str(spec.instances),
            names.ELASTIC: str(spec.elastic).lower(),
            names.CREATED_AT: repr(created_at),
            names.CWD: spec.cwd,
            **({names.MOST_DISRUPTIONS: str(_max_disruptions(pod))} if spec.kind == "trainer" else {}),
        },
    }
    template = pod_template(spec, defaults)
    if spec.kind == "pool":
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "replicas": 0,
                "revisionHistoryLimit": 0,
                "selector": {"matchLabels": {names.JOB: spec.name}},
                "template": template,
            },
        }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "suspend": True,
            "completionMode": "Indexed",
            "parallelism": spec.instances,
            "completions": spec.instances,
            "backoffLimitPerIndex": MAX_STARTS - 1,
            "maxFailedIndexes": max_failed_indexes(spec.instances, spec.bounds, elastic=spec.elastic),
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _failure_rules(elastic=spec.elastic)},
            "ttlSecondsAfterFinished": TTL_AFTER_FINISHED_S,
            "template": template,
        },
    }


def _is_resized_in_queue(spec: JobSpec, pod: Pod) -> bool:
    return spec.kind == "trainer" and spec.bounds.min < spec.bounds.max and names.QUEUE in pod.labels


def max_failed_indexes(completions: int, bounds: Bounds, *, elastic: bool) -> int:
    """Return how many indexes of a Job may be given up before it ends all others: none, but of elastic trainers.

    Of these, one that says itself that it can't work leaves the others to go on. One that signals have ended too often
    fails its job, and so says the status; the Job counts both alike, so its other pods run until it is deleted, which
    whoever waits for it does at once. To end them sooner would take somebody of ours in the cluster.
    """
    return max(0, completions - bounds.min) if elastic else 0


def _max_disruptions(pod: Pod) -> int:
    return DEFAULT_MAX_DISRUPTIONS if pod.disruptions is msgspec.UNSET else pod.disruptions


def secret_manifest(spec: JobSpec, secrets: Mapping[str, str]) -> Manifest:
    """Return the Secret with the variables that are written nowhere else."""
    metadata = {"name": names.secret_name(spec.name), "labels": names.labels(spec.name, spec.kind)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": dict(secrets)}


def disruption_budget_manifest(spec: JobSpec) -> Manifest:
    """Return what keeps all but one of a pool's instances where they are while nodes are drained."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": spec.name, "labels": names.labels(spec.name, spec.kind)},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {names.JOB: spec.name}}},
    }


def _failure_rules(*, elastic: bool) -> list[Manifest]:
    """Return what a failed pod of a trainer job means: see `JobSpec.elastic`."""
    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    if not elastic:
        return [disrupted, _exits("FailJob", "NotIn", [0, TERMINATED])]
    return [disrupted, _exits("FailIndex", "In", [EX_CONFIG]), _exits("FailJob", "NotIn", [0, *_SIGNALS])]


def _exits(action: str, operator: str, values: list[int]) -> Manifest:
    codes = {"containerName": names.CONTAINER, "operator": operator, "values": values}
    return {"action": action, "onExitCodes": codes}
