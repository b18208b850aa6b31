"""The objects of a job. Pure.

A pool is a Deployment, a trainer job an elastic Indexed Job. It owns all other objects, so they are deleted with it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

import msgspec

from edl_runtime.backends.interface import Origin
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.pod_template import Manifest, pod_template
from edl_runtime.errors import EX_CONFIG, SpecError
from edl_runtime.pods import Pod
from edl_runtime.specs import Bounds, JobSpec

MAX_STARTS = 5
"""How often an instance of a trainer job is started before it is given up. Evictions and preemptions do not count."""

DEFAULT_MAX_DISRUPTIONS = 20
"""How often the cluster may end an instance of a trainer job by default."""

TTL_AFTER_FINISHED_S = 7 * 24 * 3600
"""How long a trainer job that has ended is kept, with its pods and their logs."""

TERMINATED = 128 + signal.SIGTERM
"""Exit status after SIGTERM. The Job's failure policy applies to instances that leave by a resize, too."""

_SIGNALS = [128 + number for number in range(1, 65)]
"""Exit statuses of all signals."""


def job_manifest(
    spec: JobSpec,
    *,
    token: str,
    created_at: float,
    defaults: Pod,
    owned_by: Manifest | None = None,
    origin: Origin | None = None,
) -> Manifest:
    """Return the Deployment or Job, without instances at first.

    `defaults`: the connection's Pod. `owned_by`: the object that it is deleted with.
    Raises SpecError for a relative `cwd`, a secret in a template, and a spec without an image.
    """
    if spec.cwd and not spec.cwd.startswith("/"):
        raise SpecError("cwd", spec.cwd, "an absolute path, as in '/data': pods have no folder in common")
    pod = (spec.pod or Pod()).over(defaults)
    labels = {**pod.labels, **names.labels(spec.name, spec.kind), **({names.QUEUE: pod.queue} if pod.queue else {})}
    metadata: Manifest = {
        "name": spec.name,
        "labels": labels,
        "annotations": {
            **({names.ELASTIC_IN_QUEUE: "true"} if _is_resized_in_queue(spec, pod) else {}),
            **pod.annotations,
            **ownership(token, origin),
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
        **({"ownerReferences": [{**owner_reference(owned_by), "controller": True}]} if owned_by else {}),
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
            "suspend": True,  # until its Secret exists
            "completionMode": "Indexed",
            "parallelism": spec.instances,
            "completions": spec.instances,
            "backoffLimitPerIndex": MAX_STARTS - 1,
            "maxFailedIndexes": max_failed_indexes(spec.instances, spec.bounds, elastic=spec.elastic),
            "podReplacementPolicy": "Failed",  # not beside a pod that still writes its checkpoint
            "podFailurePolicy": {"rules": _failure_rules(elastic=spec.elastic)},
            "ttlSecondsAfterFinished": TTL_AFTER_FINISHED_S,
            "template": template,
        },
    }


def ownership(token: str, origin: Origin | None) -> dict[str, str]:
    """Return the annotations that change when a job is adopted."""
    return {names.TOKEN: token, names.ORIGIN: msgspec.json.encode(origin).decode() if origin else ""}


def owner_reference(owner: Manifest) -> Manifest:
    """Return what names `owner` in an object that the cluster deletes with it."""
    api_version = {"Job": "batch/v1", "Deployment": "apps/v1", "TrainingJob": "paddlepaddle.org/v1"}[owner["kind"]]
    metadata = owner["metadata"]
    return {"apiVersion": api_version, "kind": owner["kind"], "name": metadata["name"], "uid": metadata["uid"]}


def _is_resized_in_queue(spec: JobSpec, pod: Pod) -> bool:
    return spec.kind == "trainer" and spec.bounds.min < spec.bounds.max and bool(pod.queue)


def max_failed_indexes(completions: int, bounds: Bounds, *, elastic: bool) -> int:
    """Return how many indexes a Job may give up before it ends all others: none, unless its trainers are elastic.

    An elastic instance that exits with EX_CONFIG is given up alone. One that signals end too often fails its job; the
    Job can't tell the two apart, so its other pods run until the waiting task deletes it.
    """
    return max(0, completions - bounds.min) if elastic else 0


def _max_disruptions(pod: Pod) -> int:
    return DEFAULT_MAX_DISRUPTIONS if pod.disruptions is msgspec.UNSET else pod.disruptions


def secret_manifest(spec: JobSpec, secrets: Mapping[str, str]) -> Manifest:
    """Return the Secret with the job's secret variables."""
    metadata = {"name": names.secret_name(spec.name), "labels": names.labels(spec.name, spec.kind)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": dict(secrets)}


def disruption_budget_manifest(spec: JobSpec) -> Manifest:
    """Return the budget that lets drained nodes evict one instance of a pool at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": spec.name, "labels": names.labels(spec.name, spec.kind)},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {names.JOB: spec.name}}},
    }


def _failure_rules(*, elastic: bool) -> list[Manifest]:
    """Return the pod failure policy of a trainer job, see `JobSpec.elastic`."""
    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    if not elastic:
        return [disrupted, _exits("FailJob", "NotIn", [0, TERMINATED])]
    return [disrupted, _exits("FailIndex", "In", [EX_CONFIG]), _exits("FailJob", "NotIn", [0, *_SIGNALS])]


def _exits(action: str, operator: str, values: list[int]) -> Manifest:
    codes = {"containerName": names.CONTAINER, "operator": operator, "values": values}
    return {"action": action, "onExitCodes": codes}
