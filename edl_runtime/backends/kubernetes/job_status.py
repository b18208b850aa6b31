"""The status of a job: what its Job or Deployment and its pods, as the cluster has them, say of it. Pure."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from edl_runtime.backends.interface import SUSPENDED, InstanceStatus, JobStatus, Phase, Scaling
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.manifests import DEFAULT_MAX_DISRUPTIONS
from edl_runtime.backends.kubernetes.pod_status import (
    ObservedInstance,
    condition,
    created_at,
    describe_end,
    have_ended,
    index_of,
    is_leaving,
    mapping_in,
    observed_pool_pod,
    observed_trainer,
    sorted_by_age,
    unix_time,
    with_delay,
)
from edl_runtime.backends.kubernetes.pod_template import instance_container, mappings_at
from edl_runtime.errors import EX_CONFIG
from edl_runtime.pods import kubernetes_name, reserved_resources
from edl_runtime.specs import Bounds

Manifest = Mapping[str, Any]

_NO_DELAYS: Mapping[str, str] = MappingProxyType({})

_NEVER_CREATED = (
    "violates PodSecurity",
    "no PriorityClass with name",
    "usage per Container is",
    "usage per Pod is",
    "must specify",
    " is invalid: ",
)
"""What is wrong with pods that the cluster refuses for ever. A quota may be raised, and a service account made."""


def job_status(
    owner: Manifest,
    pods: Sequence[Manifest],
    now: float,
    refusals: Sequence[str] = (),
    delays: Mapping[str, str] = _NO_DELAYS,
) -> JobStatus:
    """Return what a Deployment or Job and its pods say of the job at a time (Unix).

    `refusals` to create pods, and `delays` of pods by name, are what events say.
    """
    annotations = mapping_in(owner, "metadata", "annotations")
    is_pool = owner["kind"] == "Deployment"
    told = pool_instances(pods, now) if is_pool else trainer_instances(owner, pods)
    elastic = annotations.get(names.ELASTIC) == "true"
    phase, about = _pool_phase(owner, told) if is_pool else _trainer_phase(owner, told, elastic=elastic)
    seen = [with_delay(one, delays.get(one.status.pod, "")) for one in told]
    if phase == "running" and about is None:
        about = next((one for one in seen if one.problem), None)
    refusal = _creation_failure(owner, refusals) if phase == "running" else ""
    never_created = not pods and any(words in refusal for words in _NEVER_CREATED)
    results = [one for one in seen if one.result is not None]
    newest = max(results, key=lambda one: (one.ended_at, one.status.index), default=None)
    phase = "failed" if never_created else phase
    return JobStatus(
        name=owner["metadata"]["labels"][names.JOB],
        kind="pool" if is_pool else "trainer",
        phase=phase,
        token=annotations.get(names.TOKEN, ""),
        digest=annotations.get(names.DIGEST, ""),
        wanted=desired_instances(owner),
        scaling=scaling(owner, pods) if phase in ("pending", "running") and not is_leaving(owner) else None,
        instances=tuple(one.status for one in seen),
        replaced=_replaced(pods) if is_pool else {},
        created_at=float(annotations.get(names.CREATED_AT) or created_at(owner)),
        elastic=elastic,
        cwd=annotations.get(names.CWD, ""),
        reason=about.problem if about else _reason(owner, phase, refusal),
        last_lines=about.last_lines if about else (),
        result=newest.result if newest else None,
        invalid_spec=never_created or bool(about and about.permanent),
        most_disruptions=None if is_pool else most_disruptions(owner),
    )


def is_felt_when_suspended(job: JobStatus) -> bool:
    """Whether suspending the job is felt: not by trainers none of which has a place yet."""
    return job.kind == "pool" or any(one.node for one in job.instances)


def lacks_pods(owner: Manifest, pods: Sequence[Manifest]) -> bool:
    """Whether a Job has fewer pods than it should, so that its events may tell why."""
    return owner["kind"] == "Job" and len(pods) < desired_instances(owner) and not owner["spec"].get("suspend")


def refusals(events: Iterable[Manifest], pods: Sequence[Manifest] = ()) -> list[str]:
    """Return what events say of pods that can't be created, the last at the end.

    Events are kept for an hour, so those from before the newest pod tell of troubles that are over.
    """
    newest = max((pod["metadata"].get("creationTimestamp") or "" for pod in pods), default="")
    told = [(event.get("lastTimestamp") or "", event.get("message", "")) for event in events]
    return [message for at, message in sorted(told, key=lambda one: one[0]) if at >= newest]


def desired_instances(owner: Manifest) -> int:
    """Return how many instances were asked for last."""
    size = "replicas" if owner["kind"] == "Deployment" else "completions"
    return int(mapping_in(owner, "metadata", "annotations").get(names.WANTED) or owner["spec"].get(size) or 0)


def pool_size(deployment: Manifest) -> int:
    """Return how many pods the Deployment is to have, as its controller sees it."""
    return int(deployment["spec"].get("replicas") or 0)


def scaling(owner: Manifest, pods: Sequence[Manifest]) -> Scaling | None:
    """Return what decides how many instances a job should have, as it was submitted; None if somebody removed it.

    What an instance reserves is told by the newest of its pods, if there is any: the cluster may have given it more
    than the template asks for, as a LimitRange does.
    """
    annotations, template = mapping_in(owner, "metadata", "annotations"), mapping_in(owner, "spec", "template")
    if names.BOUNDS not in annotations:
        return None
    resized_at = annotations.get(names.RESIZED_AT)
    return Scaling(
        bounds=bounds(owner),
        resources=reserved_resources(max(pods, key=created_at, default=template)),
        priority=int(annotations.get(names.PRIORITY) or 0),
        weight=float(annotations.get(names.WEIGHT) or 1),
        resumes=_resumes(owner),
        resized_at=float(resized_at) if resized_at else None,
        queue=_queue(owner),
        node_selector=dict(mapping_in(template, "spec", "nodeSelector")),
        tolerations=_tolerations(template),
        node_terms=_node_terms(template),
    )


def _tolerations(template: Manifest) -> tuple[dict[str, Any], ...]:
    """Return what pods of a template tolerate.

    Where nodes are tainted by the name of a resource that only they have, as for GPUs, the cluster lets pods that ask
    for it tolerate that (its admission plugin ExtendedResourceToleration); a template knows nothing of this.
    """
    given = [dict(toleration) for toleration in mappings_at(mapping_in(template, "spec"), "tolerations")]
    extended = [name for name in map(kubernetes_name, reserved_resources(template)) if "/" in name]
    return (*given, *({"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in extended))


def _node_terms(template: Manifest) -> tuple[dict[str, Any], ...] | None:
    """Return the terms of which one has to hold of a node; None where nothing is required of nodes."""
    required = mapping_in(template, "spec", "affinity", "nodeAffinity").get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    return tuple(map(dict, mappings_at(required, "nodeSelectorTerms"))) if required else None


def _queue(owner: Manifest) -> str:
    """Return the name of Kueue's queue that a Job is in, empty for none. Of a pool's pods each is for itself there."""
    return str(mapping_in(owner, "metadata", "labels").get(names.QUEUE) or "") if owner["kind"] == "Job" else ""


def _resumes(owner: Manifest) -> bool:
    if owner["kind"] == "Deployment":
        return True
    env = mappings_at(instance_container(mapping_in(owner, "spec", "template")), "env")
    kept = [variable for variable in env if variable.get("name") == "EDL_CHECKPOINT"]
    has_checkpoints = any(variable.get("value") or variable.get("valueFrom") for variable in kept)
    is_elastic = mapping_in(owner, "metadata", "annotations").get(names.ELASTIC) == "true"
    return is_elastic and has_checkpoints and not _queue(owner)


def bounds(owner: Manifest) -> Bounds:
    """Return between which numbers it may be resized."""
    return Bounds.parse(owner["metadata"]["annotations"][names.BOUNDS])


def most_disruptions(job: Manifest) -> int:
    """Return how often the cluster may end an instance; one more time, and its job has failed.

    The Job knows no such limit and goes on until it is deleted, which whoever waits for it does at once.
    """
    return int(mapping_in(job, "metadata", "annotations").get(names.MOST_DISRUPTIONS) or DEFAULT_MAX_DISRUPTIONS)


def failed_indexes(job: Manifest) -> list[int]:
    """Return the indexes that the Job has given up, sorted, as it writes them: "1,3-5"."""
    text = mapping_in(job, "status").get("failedIndexes") or ""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def completions_for(job: Manifest, instances: int) -> int:
    """Return how many indexes a Job must have for that many instances.

    Indexes that were given up stay so for ever. So a larger number is made of new ones in their place, and a smaller
    one takes from the top, of those that live.
    """
    before: int = job["spec"]["completions"]
    failed = set(failed_indexes(job))
    living = before - len([index for index in failed if index < before])
    if instances == desired_instances(job):
        return before
    if instances < desired_instances(job):
        instances = max(1, min(instances, living))
    count = index = 0
    while count < instances:
        count += index not in failed
        index += 1
    return index


def has_ended(owner: Manifest) -> bool:
    """Whether a Job has completed or failed, as it says itself."""
    return any(condition(owner, kind) is not None for kind in ("Complete", "Failed"))


def true_conditions(owner: Manifest) -> list[str]:
    """Return how it fares, as it says itself, sorted."""
    conditions = owner.get("status", {}).get("conditions") or []
    return sorted(one["type"] for one in conditions if one["status"] == "True")


def pool_instances(pods: Iterable[Manifest], now: float) -> list[ObservedInstance]:
    """Return a pool's instances."""
    return [observed_pool_pod(pod, index, now) for index, pod in enumerate(pool_pods(pods))]


def pool_pods(pods: Iterable[Manifest]) -> list[Manifest]:
    """Return the pods that are a pool's instances: all the same, so each one's index is its place by age.

    The cluster tells that in seconds, and those of one second go by their names. Without those that have failed as a
    whole, as by an eviction: others take their place.
    """
    return [pod for pod in sorted_by_age(pods) if mapping_in(pod, "status").get("phase") != "Failed"]


def _replaced(pods: Iterable[Manifest]) -> dict[str, str]:
    """Return how those of a pool ended that have failed as a whole, and by the cluster: their nodes, mostly."""
    failed = [pod for pod in sorted_by_age(pods) if mapping_in(pod, "status").get("phase") == "Failed"]
    lost = {pod["metadata"]["name"]: pod for pod in failed if condition(pod, "DisruptionTarget") is not None}
    return {name: f"pod {name} {describe_end(pod, None)}" for name, pod in lost.items()}


def trainer_instances(job: Manifest, pods: Iterable[Manifest]) -> list[ObservedInstance]:
    """Return a trainer job's instances, each by its newest pod.

    Without those that others have taken the place of, and those that have left by a resize, be it to none; with those
    that were given up and whose pods are gone. An index's newest pod knows how often those before it were ended, and by
    whom; a Job keeps it until its successor is there. Only an index that has left by a resize and comes back begins
    anew.
    """
    by_index: dict[int, list[Manifest]] = defaultdict(list)
    for pod in pods:
        by_index[index_of(pod)].append(pod)
    completions: int = job["spec"]["completions"]
    failed = _failed_below(job, completions)
    unreplaced = desired_instances(job) - (completions - len(failed))
    shown = failed[len(failed) - max(0, min(unreplaced, len(failed))) :]
    staying = completions if desired_instances(job) else 0
    present = {
        index: observed_trainer(
            sorted_by_age(of_index)[-1], given_up=index in failed, most_disruptions=most_disruptions(job)
        )
        for index, of_index in by_index.items()
        if (index in shown or index not in failed) and (index < staying or not have_ended(of_index))
    }
    gone = {index: _observed_missing(index, job) for index in shown if index not in present}
    return [one for _, one in sorted({**present, **gone}.items())]


def _failed_below(job: Manifest, completions: int) -> list[int]:
    return [index for index in failed_indexes(job) if index < completions]


def _observed_missing(index: int, job: Manifest) -> ObservedInstance:
    """Return an instance of which only the Job knows, which has started it at once when it was begun or resumed."""
    reason = f"instance {index} was given up, and its pod is gone"
    began = unix_time(mapping_in(job, "status").get("startTime")) or created_at(job)
    return ObservedInstance(
        status=InstanceStatus(index=index, phase="failed", started_at=began, given_up=True, reason=reason)
    )


def _pool_phase(owner: Manifest, seen: Sequence[ObservedInstance]) -> tuple[Phase, ObservedInstance | None]:
    """Return how a pool fares and which instance tells why: it fails when it has none to go on with."""
    if desired_instances(owner) == 0:
        return "pending", None
    troubled = [one for one in seen if one.problem]
    lost = [one for one in troubled if not one.status.disrupted and (one.permanent or one.status.phase == "failed")]
    if seen and len(lost) == len(seen):
        return "failed", lost[-1]
    return "running", troubled[0] if troubled else None


def _trainer_phase(
    job: Manifest, seen: Sequence[ObservedInstance], *, elastic: bool
) -> tuple[Phase, ObservedInstance | None]:
    """Return how a trainer job fares and which instance tells why."""
    troubled = [one for one in seen if one.problem]
    deciding = [one for one in troubled if one.status.phase == "failed" and not _is_instance_only(one, elastic=elastic)]
    ended_by_cluster = [one for one in troubled if one.status.disruptions > most_disruptions(job)]
    if condition(job, "Complete") or (elastic and has_ended(job) and _all_left_have_succeeded(job, seen)):
        return "succeeded", None
    if _has_failed(job, elastic=elastic) or deciding or ended_by_cluster or any(one.permanent for one in troubled):
        about = [*deciding, *ended_by_cluster, *(one for one in troubled if one.permanent), *reversed(troubled)]
        return "failed", about[0] if about else None
    if job["spec"].get("suspend"):
        return "pending", None
    return "running", troubled[0] if troubled else None


def _has_failed(job: Manifest, *, elastic: bool) -> bool:
    """Whether the Job says that it has failed, or is about to end for that.

    Of elastic trainers one that is about to end for the indexes that were given up has none that goes on; how those
    ended that are left is known once it has ended itself.
    """
    target = condition(job, "FailureTarget")
    is_failing = target is not None and not (elastic and target.get("reason") == "FailedIndexes")
    return is_failing or condition(job, "Failed") is not None


def _all_left_have_succeeded(job: Manifest, seen: Sequence[ObservedInstance]) -> bool:
    """Whether all indexes but those that were given up have; a Job that has given up some says that it failed."""
    completions: int = job["spec"]["completions"]
    left = [one.status.phase for one in seen if not one.status.given_up]
    return set(left) == {"succeeded"} and len(left) >= completions - len(_failed_below(job, completions))


def _is_instance_only(one: ObservedInstance, *, elastic: bool) -> bool:
    """Whether a failed instance says nothing of the job: the Job starts it again, or gives it up alone."""
    exit_code = one.status.exit_code
    if one.status.disrupted or exit_code is None or (elastic and exit_code == EX_CONFIG):
        return True
    restarted = exit_code < 0 if elastic else exit_code == -signal.SIGTERM
    return restarted and not one.status.given_up


def _creation_failure(owner: Manifest, refusals: Sequence[str]) -> str:
    """Return why the cluster creates no further pods, by what a Deployment says itself and the events of a Job."""
    if failure := condition(owner, "ReplicaFailure"):
        return str(failure.get("message") or failure.get("reason", ""))
    return refusals[-1] if refusals else ""


def _reason(owner: Manifest, phase: Phase, refusal: str) -> str:
    """Return what is to be said where no instance tells why."""
    if phase == "pending" and desired_instances(owner) == 0:
        return SUSPENDED
    if phase == "pending":
        queue = _queue(owner)
        return f"suspended: it waits in Kueue's queue {queue!r}" if queue else "suspended"
    kinds = ("Failed", "FailureTarget") if phase == "failed" else ()
    for failure in filter(None, (condition(owner, kind) for kind in kinds)):
        return str(failure.get("message") or failure.get("reason", ""))
    return f"its pods can't be created: {refusal}" if refusal else ""
