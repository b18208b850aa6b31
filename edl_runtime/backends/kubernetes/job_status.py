"""Status of a job from its Job or Deployment, pods and events. Pure."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from edl_runtime.backends.interface import (
    MAX_REASON_LENGTH,
    SUSPENDED,
    InstanceStatus,
    JobStatus,
    Origin,
    Phase,
    Scaling,
)
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.manifests import DEFAULT_MAX_DISRUPTIONS
from edl_runtime.backends.kubernetes.pod_status import (
    ObservedInstance,
    condition,
    created_at,
    describe_end,
    index_of,
    is_gated_by_queue,
    is_leaving,
    message_of,
    observed_pool_pod,
    observed_trainer,
    pod_has_ended,
    sorted_by_age,
    unix_time,
    with_delay,
)
from edl_runtime.backends.kubernetes.pod_template import instance_container, mapping_at, mappings_at
from edl_runtime.backends.kubernetes.workload_status import waiting_message
from edl_runtime.errors import EX_CONFIG, SpecError
from edl_runtime.parsing import JsonDecoder
from edl_runtime.pods import Manifest, kubernetes_name, reserved_resources
from edl_runtime.specs import MOST_INSTANCES, Bounds, check_priority, check_weight

_NEVER_CREATED = (
    "violates PodSecurity",
    "no PriorityClass with name",
    "usage per Container is",
    "usage per Pod is",
    "must specify",
    " is invalid: ",
)
"""Permanent reasons to refuse pods; a quota may be raised, and a service account created."""


def job_status(
    owner: Manifest,
    pods: Sequence[Manifest],
    now: float,
    refusals: Sequence[str] = (),
    delays: Mapping[str, str] | None = None,
    *,
    workloads: Iterable[Manifest] = (),
) -> JobStatus:
    """Return the status of a Deployment or Job at a Unix time.

    `refusals` to create pods and `delays` of pods by name come from events. `workloads`: Kueue's, if it waits in a
    queue.
    """
    annotations = mapping_at(owner, "metadata", "annotations")
    is_pool = owner["kind"] == "Deployment"
    observed = pool_instances(pods, now) if is_pool else trainer_instances(owner, pods)
    elastic = _is_elastic(owner)
    phase, about = _pool_phase(owner, observed) if is_pool else _trainer_phase(owner, observed, elastic=elastic)
    seen = [with_delay(one, (delays or {}).get(one.status.pod, "")) for one in observed]
    if phase == "running" and about is None:
        about = next((one for one in seen if one.problem), None)
    refusal = _creation_failure(owner, refusals) if phase == "running" else ""
    never_created = not pods and any(words in refusal for words in _NEVER_CREATED)
    results = [one for one in seen if one.result is not None]
    newest = max(results, key=lambda one: (one.ended_at, one.status.index), default=None)
    phase = "failed" if never_created else phase
    reason = about.problem if about else _reason(owner, phase, refusal)
    gated = {pod["metadata"]["name"] for pod in _gated(pods)}
    is_active = phase in ("pending", "running")
    if is_active and is_queued(owner, pods) and (about is None or about.status.pod in gated):
        running = sum(one.status.phase == "running" for one in seen)
        reason = _queue_reason(owner, running, len(gated), waiting_message(workloads))
    return JobStatus(
        name=owner["metadata"]["labels"][names.JOB],
        kind="pool" if is_pool else "trainer",
        phase=phase,
        token=annotations.get(names.TOKEN, ""),
        origin=_origin(annotations),
        digest=annotations.get(names.DIGEST, ""),
        wanted=desired_instances(owner),
        scaling=scaling(owner, pods) if is_active and not is_leaving(owner) else None,
        instances=tuple(one.status for one in seen),
        replaced=_replaced(pods) if is_pool else {},
        created_at=float(annotations.get(names.CREATED_AT) or created_at(owner)),
        elastic=elastic,
        starting=names.STARTED not in annotations,
        cwd=annotations.get(names.CWD, ""),
        reason=reason,
        last_lines=about.last_lines if about else (),
        result=newest.result if newest else None,
        invalid_spec=never_created or bool(about and about.permanent),
        most_disruptions=None if is_pool else most_disruptions(owner),
    )


def unreadable_status(owner: Manifest, why: str) -> JobStatus:
    """Return the status of a job that somebody has changed so that no more can be said of it. Nothing resizes it."""
    annotations, is_pool = mapping_at(owner, "metadata", "annotations"), owner["kind"] == "Deployment"
    return JobStatus(
        name=owner["metadata"]["labels"][names.JOB],
        kind="pool" if is_pool else "trainer",
        phase="running",
        token=annotations.get(names.TOKEN, ""),
        origin=_origin(annotations),
        digest=annotations.get(names.DIGEST, ""),
        wanted=min(owner["spec"].get("replicas" if is_pool else "completions") or 0, MOST_INSTANCES),
        created_at=created_at(owner),
        reason=why,
    )


_origin_decoder = JsonDecoder(Origin)


def _origin(annotations: Mapping[str, Any]) -> Origin | None:
    """Return whose task has started the job; None, too, for what this version can't read."""
    try:
        return _origin_decoder.decode(annotations[names.ORIGIN]) if annotations.get(names.ORIGIN) else None
    except msgspec.DecodeError:
        return None


def is_felt_when_suspended(job: JobStatus) -> bool:
    """Whether suspending the job stops anything: not for trainers none of which has a node yet."""
    return job.kind == "pool" or any(one.node for one in job.instances)


def is_queued(owner: Manifest, pods: Sequence[Manifest]) -> bool:
    """Whether a job, or some of its pods, wait in a queue of Kueue's; its Workloads may explain why."""
    if names.QUEUE not in owner["metadata"]["labels"] or desired_instances(owner) == 0:
        return False
    return bool(owner["spec"].get("suspend")) or bool(_gated(pods))


def _gated(pods: Iterable[Manifest]) -> list[Manifest]:
    return [pod for pod in pods if is_gated_by_queue(pod) and not is_leaving(pod)]


def _queue_reason(owner: Manifest, running: int, gated: int, message: str) -> str:
    """Return the reason of a job that Kueue has not admitted, or not all of it."""
    queue = f"Kueue's queue {owner['metadata']['labels'][names.QUEUE]!r}"
    if owner["spec"].get("suspend"):
        text = f"suspended: it waits in {queue}"
    else:
        text = f"{running} of {desired_instances(owner)} run; {gated} {'waits' if gated == 1 else 'wait'} in {queue}"
    return f"{text}: {message}" if message else text


def lacks_pods(owner: Manifest, pods: Sequence[Manifest]) -> bool:
    """Whether a Job has too few pods; its events may explain why."""
    return owner["kind"] == "Job" and len(pods) < desired_instances(owner) and not owner["spec"].get("suspend")


def refusals(events: Iterable[Manifest], pods: Sequence[Manifest] = ()) -> list[str]:
    """Return why pods could not be created, the newest reason last.

    Events are kept for an hour; those from before the newest pod are outdated.
    """
    newest = max((pod["metadata"].get("creationTimestamp") or "" for pod in pods), default="")
    messages = [(event.get("lastTimestamp") or "", event.get("message", "")) for event in events]
    return [message for at, message in sorted(messages, key=lambda one: one[0]) if at >= newest]


def desired_instances(owner: Manifest) -> int:
    """Return the requested number of instances. Raises SpecError, ValueError for one that there can't be."""
    size = "replicas" if owner["kind"] == "Deployment" else "completions"
    wanted = mapping_at(owner, "metadata", "annotations").get(names.WANTED) or owner["spec"].get(size) or 0
    if not 0 <= int(wanted) <= MOST_INSTANCES:
        raise SpecError(names.WANTED, wanted, f"0 to {MOST_INSTANCES:,}")
    return int(wanted)


def scaling(owner: Manifest, pods: Sequence[Manifest]) -> Scaling | None:
    """Return the job's scaling, None if its annotations were removed.

    Resources are those of its newest pod, if there is one: the cluster may add to the template, as by a LimitRange.
    """
    annotations, template = mapping_at(owner, "metadata", "annotations"), mapping_at(owner, "spec", "template")
    if names.BOUNDS not in annotations:
        return None
    resized_at = annotations.get(names.RESIZED_AT)
    return Scaling(
        bounds=bounds(owner),
        resources=reserved_resources(max(pods, key=created_at, default=template)),
        priority=check_priority(int(annotations.get(names.PRIORITY) or 0)),
        weight=check_weight(float(annotations.get(names.WEIGHT) or 1)),
        resumes=_resumes(owner),
        pool=str(_variable(owner, "EDL_POOL").get("value") or ""),
        resized_at=float(resized_at) if resized_at else None,
        resized_for=_resized_for(annotations),
        queue=_queue(owner),
        queue_resizes=bool(_queue(owner)) and is_gated_by_queue(template),
        node_selector=dict(mapping_at(template, "spec", "nodeSelector")),
        tolerations=tolerations_of(template),
        node_terms=_node_terms(template),
    )


def _resized_for(annotations: Mapping[str, Any]) -> str:
    return str(annotations.get(names.RESIZED_FOR) or "")[:MAX_REASON_LENGTH]


def tolerations_of(template: Manifest) -> tuple[dict[str, Any], ...]:
    """Return the template's tolerations, and those that the admission plugin ExtendedResourceToleration adds to pods.

    Those are for taints named after an extended resource that the pod requests, as on GPU nodes.
    """
    given = [dict(toleration) for toleration in mappings_at(mapping_at(template, "spec"), "tolerations")]
    extended = [name for name in map(kubernetes_name, reserved_resources(template)) if "/" in name]
    return (*given, *({"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in extended))


def _node_terms(template: Manifest) -> tuple[dict[str, Any], ...] | None:
    """Return the node selector terms of which one has to match, None if there are none."""
    required = mapping_at(template, "spec", "affinity", "nodeAffinity").get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    return tuple(map(dict, mappings_at(required, "nodeSelectorTerms"))) if required else None


def _queue(owner: Manifest) -> str:
    """Return a Job's Kueue queue, empty for none. Kueue queues a pool's pods one by one."""
    return str(mapping_at(owner, "metadata", "labels").get(names.QUEUE) or "") if owner["kind"] == "Job" else ""


def _is_elastic(owner: Manifest) -> bool:
    return bool(mapping_at(owner, "metadata", "annotations").get(names.ELASTIC) == "true")


def _resumes(owner: Manifest) -> bool:
    if owner["kind"] == "Deployment":
        return True
    checkpoint = _variable(owner, "EDL_CHECKPOINT")
    return _is_elastic(owner) and bool(checkpoint.get("value") or checkpoint.get("valueFrom")) and not _queue(owner)


def _variable(owner: Manifest, name: str) -> Mapping[str, Any]:
    """Return an environment variable of the instances, empty if there is none."""
    env = mappings_at(instance_container(mapping_at(owner, "spec", "template")), "env")
    return next((variable for variable in reversed(env) if variable.get("name") == name), {})


def bounds(owner: Manifest) -> Bounds:
    return Bounds.parse(owner["metadata"]["annotations"][names.BOUNDS])


def most_disruptions(job: Manifest) -> int:
    """Return how often the cluster may end an instance before its job has failed.

    A Job has no such limit: it runs until it is deleted, which the waiting task does at once.
    """
    return int(mapping_at(job, "metadata", "annotations").get(names.MOST_DISRUPTIONS) or DEFAULT_MAX_DISRUPTIONS)


def failed_indexes(job: Manifest) -> list[int]:
    """Return the indexes that the Job has given up, which it writes as "1,3-5"."""
    text = mapping_at(job, "status").get("failedIndexes") or ""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def completions_for(job: Manifest, instances: int) -> int:
    """Return how many indexes a Job must have for that many instances.

    Given-up indexes stay given up, so a larger job needs new ones in their place; a smaller job loses the highest
    living ones.
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
    return any(condition(owner, kind) is not None for kind in ("Complete", "Failed"))


def true_conditions(owner: Manifest) -> list[str]:
    conditions = owner.get("status", {}).get("conditions") or []
    return sorted(one["type"] for one in conditions if one["status"] == "True")


def pool_instances(pods: Iterable[Manifest], now: float) -> list[ObservedInstance]:
    return [observed_pool_pod(pod, index, now) for index, pod in enumerate(pool_pods(pods))]


def pool_pods(pods: Iterable[Manifest]) -> list[Manifest]:
    """Return the pods that are a pool's instances, by age: the position is the index.

    Failed pods, as by an eviction, are left out: others replace them.
    """
    return [pod for pod in sorted_by_age(pods) if mapping_at(pod, "status").get("phase") != "Failed"]


def _replaced(pods: Iterable[Manifest]) -> dict[str, str]:
    """Return by name how pods of a pool ended that the cluster has evicted."""
    failed = [pod for pod in sorted_by_age(pods) if mapping_at(pod, "status").get("phase") == "Failed"]
    lost = {pod["metadata"]["name"]: pod for pod in failed if condition(pod, "DisruptionTarget") is not None}
    return {name: f"pod {name} {describe_end(pod, None)}" for name, pod in lost.items()}


def trainer_instances(job: Manifest, pods: Iterable[Manifest]) -> list[ObservedInstance]:
    """Return a trainer job's instances, each by its newest pod, which counts the failures of those before it.

    Given-up instances that were replaced, and those that left by a resize, are left out; given-up ones whose pods were
    deleted are included.
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
            sorted_by_age(of_index)[-1],
            given_up=index in failed,
            most_disruptions=most_disruptions(job),
            elastic=_is_elastic(job),
        )
        for index, of_index in by_index.items()
        if (index in shown or index not in failed) and (index < staying or not all(map(pod_has_ended, of_index)))
    }
    gone = {index: _observed_missing(index, job) for index in shown if index not in present}
    return [one for _, one in sorted({**present, **gone}.items())]


def _failed_below(job: Manifest, completions: int) -> list[int]:
    return [index for index in failed_indexes(job) if index < completions]


def _observed_missing(index: int, job: Manifest) -> ObservedInstance:
    """Return a given-up instance whose pod was deleted. It started when the Job started or resumed."""
    reason = f"instance {index} was given up, and its pod is gone"
    began = unix_time(mapping_at(job, "status").get("startTime")) or created_at(job)
    return ObservedInstance(
        status=InstanceStatus(index=index, phase="failed", started_at=began, given_up=True, reason=reason)
    )


def _pool_phase(owner: Manifest, seen: Sequence[ObservedInstance]) -> tuple[Phase, ObservedInstance | None]:
    """Return a pool's phase and the instance that explains it. A pool fails when no instance is left."""
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
    """Return a trainer job's phase and the instance that explains it."""
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
    """Whether the Job has failed or is about to.

    Elastic trainers that are about to fail for given-up indexes may still have succeeded; the ended Job will show it.
    """
    target = condition(job, "FailureTarget")
    is_failing = target is not None and not (elastic and target.get("reason") == "FailedIndexes")
    return is_failing or condition(job, "Failed") is not None


def _all_left_have_succeeded(job: Manifest, seen: Sequence[ObservedInstance]) -> bool:
    """Whether all indexes but the given-up ones have succeeded. A Job with given-up indexes counts as failed."""
    completions: int = job["spec"]["completions"]
    left = [one.status.phase for one in seen if not one.status.given_up]
    return set(left) == {"succeeded"} and len(left) >= completions - len(_failed_below(job, completions))


def _is_instance_only(one: ObservedInstance, *, elastic: bool) -> bool:
    """Whether a failed instance does not fail the job: it is restarted, or given up alone."""
    exit_code = one.status.exit_code
    if one.status.disrupted or exit_code is None or (elastic and exit_code == EX_CONFIG):
        return True
    restarted = exit_code < 0 if elastic else exit_code == -signal.SIGTERM
    return restarted and not one.status.given_up


def _creation_failure(owner: Manifest, refusals: Sequence[str]) -> str:
    """Return why no further pods are created, from a Deployment's condition or a Job's events."""
    if failure := condition(owner, "ReplicaFailure"):
        return message_of(failure)
    return refusals[-1] if refusals else ""


def _reason(owner: Manifest, phase: Phase, refusal: str) -> str:
    """Return the reason of a job where no instance has one."""
    if phase == "pending" and desired_instances(owner) == 0:
        return _resized_for(mapping_at(owner, "metadata", "annotations")) or SUSPENDED
    if phase == "pending":
        return "suspended"
    kinds = ("Failed", "FailureTarget") if phase == "failed" else ()
    for failure in filter(None, (condition(owner, kind) for kind in kinds)):
        return message_of(failure)
    return f"its pods can't be created: {refusal}" if refusal else ""
