"""What the objects of a job, as the cluster has them, say of it. Pure."""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import msgspec

from edl_runtime.backends.base import SUSPENDED, InstancePhase, InstanceStatus, JobStatus, Phase, Scaling
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.manifests import MOST_DISRUPTIONS, MOST_LIVES
from edl_runtime.backends.kubernetes.reserving import kubernetes_name, reserved
from edl_runtime.backends.kubernetes.templates import instance_of, things
from edl_runtime.decoding import Decoder
from edl_runtime.errors import EX_CONFIG
from edl_runtime.exit_status import ending
from edl_runtime.specs import Bounds

Manifest = Mapping[str, Any]

_NOTHING: Mapping[str, str] = MappingProxyType({})

LAST_LINES = 30
"""How many lines of a failed instance's log go into the status."""

SETTLED_S = 10.0
"""An instance of a pool that has run for so long has come up."""

_NO_SUCH_IMAGE = (
    "not found",
    "code = notfound",
    "manifest unknown",
    "does not exist",
    "invalid reference format",
    "no match for platform",
    "401 unauthorized",
    "403 forbidden",
)
"""What a registry answers that is there: the image is not, or nobody may pull it without `pod.pull_secrets`.

All else that keeps an image from being pulled, as a name that does not resolve, may be over soon.
"""
_NEVER_PULLED = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_PULLING_FAILED = frozenset({"ErrImagePull", "ImagePullBackOff"}) | _NEVER_PULLED
_NOT_CREATED = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_CANT_START = frozenset({"StartError", "ContainerCannotRun", "RunContainerError", "CreateContainerError"})
_NEVER_RUN = ("runAsNonRoot", "breaks non-root policy")
_NEVER_CREATED = (
    "violates PodSecurity",
    "no PriorityClass with name",
    "usage per Container is",
    "usage per Pod is",
    "must specify",
    " is invalid: ",
)
"""What is wrong with pods that the cluster refuses for ever. A quota may be raised, and a service account made."""

_NOT_MADE_YET = frozenset({"ContainerCreating", "PodInitializing"})
_NO_DELAY = frozenset(
    {
        "BackOff",
        "Created",
        "Failed",
        "FailedScheduling",
        "FailedToRetrieveImagePullSecret",
        "Killing",
        "Pulled",
        "Scheduled",
        "Started",
        "Unhealthy",
    }
)
"""Events of pods that say nothing of why a container is not made yet; there are many of them."""

EVENTS_OF_PODS = ",".join(["involvedObject.kind=Pod", *(f"reason!={reason}" for reason in sorted(_NO_DELAY))])
"""All others, as a field selector."""

_ID = re.compile(r"\b[0-9a-f]{64}\b")

_NO_RUNTIME = ("No module named edl_runtime", "No module named 'edl_runtime'", '"python": executable file not found')


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as its pod tells of it, and what is wrong with it.

    `hopeless`: no restart mends that.
    """

    status: InstanceStatus
    last_lines: tuple[str, ...] = ()
    result: dict[str, Any] | None = None
    ended_at: float = 0.0
    hopeless: bool = False

    @property
    def trouble(self) -> str:
        """What is wrong with it, for people."""
        return self.status.reason


def job_status(
    owner: Manifest,
    pods: Sequence[Manifest],
    now: float,
    refusals: Sequence[str] = (),
    delays: Mapping[str, str] = _NOTHING,
) -> JobStatus:
    """Return what a Deployment or Job and its pods say of the job at a time (Unix).

    `refusals` to create pods, and `delays` of pods by name, are what events say.
    """
    annotations = _at(owner, "metadata", "annotations")
    is_pool = owner["kind"] == "Deployment"
    told = pool_instances(pods, now) if is_pool else trainer_instances(owner, pods)
    elastic = annotations.get(names.ELASTIC) == "true"
    phase, about = _pool_phase(owner, told) if is_pool else _trainer_phase(owner, told, elastic=elastic)
    seen = [_delayed(one, delays.get(one.status.pod, "")) for one in told]
    if phase == "running" and about is None:
        about = next((one for one in seen if one.trouble), None)
    refusal = _refusal(owner, refusals) if phase == "running" else ""
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
        wanted=wanted(owner),
        scaling=scaling(owner, pods) if phase in ("pending", "running") and not is_leaving(owner) else None,
        instances=tuple(one.status for one in seen),
        replaced=_replaced(pods) if is_pool else {},
        created_at=float(annotations.get(names.CREATED_AT) or _created(owner)),
        elastic=elastic,
        cwd=annotations.get(names.CWD, ""),
        reason=about.trouble if about else _reason(owner, phase, refusal),
        last_lines=about.last_lines if about else (),
        result=newest.result if newest else None,
        mistaken=never_created or bool(about and about.hopeless),
        most_disruptions=None if is_pool else most_disruptions(owner),
    )


def is_leaving(thing: Manifest) -> bool:
    """Whether somebody has deleted it, though it is still there."""
    return "deletionTimestamp" in thing["metadata"]


def interrupts(job: JobStatus) -> bool:
    """Whether suspending the job is felt: not by trainers none of which has a place yet."""
    return job.kind == "pool" or any(one.node for one in job.instances)


def belongs(pod: Manifest, owner: Manifest) -> bool:
    """Whether the pod is one of this owner, and not of one of its name that is just going."""
    run = pod["metadata"]["labels"].get(names.RUN)
    return run is None or bool(run == owner["metadata"]["uid"])


def lacks_pods(owner: Manifest, pods: Sequence[Manifest]) -> bool:
    """Whether a Job has fewer pods than it should, so that its events may tell why."""
    return owner["kind"] == "Job" and len(pods) < wanted(owner) and not owner["spec"].get("suspend")


def refusals(events: Iterable[Manifest], pods: Sequence[Manifest] = ()) -> list[str]:
    """Return what events say of pods that can't be created, the last at the end.

    Events are kept for an hour, so those from before the newest pod tell of troubles that are over.
    """
    newest = max((pod["metadata"].get("creationTimestamp") or "" for pod in pods), default="")
    told = [(event.get("lastTimestamp") or "", event.get("message", "")) for event in events]
    return [message for at, message in sorted(told, key=lambda one: one[0]) if at >= newest]


def is_being_made(pod: Manifest) -> bool:
    """Whether a pod has its node, and none of its containers yet, so that its events may tell why."""
    status = _at(pod, "status")
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return bool(
        _at(pod, "spec").get("nodeName")
        and status.get("phase") == "Pending"
        and not _condition(pod, "PodReadyToStartContainers")
        and all(_at(one, "state", "waiting").get("reason") in _NOT_MADE_YET for one in containers)
    )


def delays(events: Iterable[Manifest], pods: Iterable[Manifest]) -> dict[str, str]:
    """Return by name which pods have no container yet for a reason, which is what the newest event says.

    As that a volume can't be mounted. An image that is pulled since then says that this is over; the pod itself does
    not know before it has its image.
    """
    found: dict[str, str] = {}
    names_by_uid = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in pods if is_being_made(pod)}
    for event in sorted(events, key=lambda one: (_told_at(one), _is_pulling(one))):
        name = names_by_uid.get(_at(event, "involvedObject").get("uid"))
        if name and _is_delay(event):
            found[name] = f"{event['reason']}: {_lasting(event.get('message') or '')}"
        elif name and _is_pulling(event):
            found.pop(name, None)
    return found


def _is_delay(event: Manifest) -> bool:
    reason = event.get("reason") or ""
    return reason == "NetworkNotReady" or (reason.startswith("Failed") and reason not in _NO_DELAY)


def _lasting(message: str) -> str:
    """Return what stays the same of a message from try to try: each has a sandbox of its own, by an id."""
    return _ID.sub("...", message.removeprefix("(combined from similar events): "))


def _is_pulling(event: Manifest) -> bool:
    return event.get("reason") == "Pulling"


def _told_at(event: Manifest) -> float:
    return _time(event.get("lastTimestamp") or event.get("eventTime"))


def _delayed(one: Seen, delay: str) -> Seen:
    """Return an instance with what keeps it from being made, unless it tells of a trouble itself."""
    if not delay or one.trouble:
        return one
    reason = f"instance {one.status.index} can't start yet: {delay}"
    return msgspec.structs.replace(one, status=msgspec.structs.replace(one.status, reason=reason))


def wanted(owner: Manifest) -> int:
    """Return how many instances were asked for last."""
    size = "replicas" if owner["kind"] == "Deployment" else "completions"
    return int(_at(owner, "metadata", "annotations").get(names.WANTED) or owner["spec"].get(size) or 0)


def pool_size(deployment: Manifest) -> int:
    """Return how many pods the Deployment is to have, as its controller sees it."""
    return int(deployment["spec"].get("replicas") or 0)


def scaling(owner: Manifest, pods: Sequence[Manifest]) -> Scaling | None:
    """Return what decides how many instances a job should have, as it was submitted; None if somebody removed it.

    What an instance reserves is told by the newest of its pods, if there is any: the cluster may have given it more
    than the template asks for, as a LimitRange does.
    """
    annotations, template = _at(owner, "metadata", "annotations"), _at(owner, "spec", "template")
    if names.BOUNDS not in annotations:
        return None
    resized_at = annotations.get(names.RESIZED_AT)
    return Scaling(
        bounds=bounds(owner),
        resources=reserved(max(pods, key=_created, default=template)),
        priority=int(annotations.get(names.PRIORITY) or 0),
        weight=float(annotations.get(names.WEIGHT) or 1),
        resumes=_resumes(owner),
        resized_at=float(resized_at) if resized_at else None,
        queue=_queue(owner),
        node_selector=dict(_at(template, "spec", "nodeSelector")),
        tolerations=_tolerations(template),
        node_terms=_node_terms(template),
    )


def _tolerations(template: Manifest) -> tuple[dict[str, Any], ...]:
    """Return what pods of a template tolerate.

    Where nodes are tainted by the name of a resource that only they have, as for GPUs, the cluster lets pods that ask
    for it tolerate that (its admission plugin ExtendedResourceToleration); a template knows nothing of this.
    """
    given = [dict(toleration) for toleration in things(_at(template, "spec"), "tolerations")]
    extended = [name for name in map(kubernetes_name, reserved(template)) if "/" in name]
    return (*given, *({"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in extended))


def _node_terms(template: Manifest) -> tuple[dict[str, Any], ...] | None:
    """Return the terms of which one has to hold of a node; None where nothing is required of nodes."""
    required = _at(template, "spec", "affinity", "nodeAffinity").get("requiredDuringSchedulingIgnoredDuringExecution")
    return tuple(map(dict, things(required, "nodeSelectorTerms"))) if required else None


def _queue(owner: Manifest) -> str:
    """Return the name of Kueue's queue that a Job is in, empty for none. Of a pool's pods each is for itself there."""
    return str(_at(owner, "metadata", "labels").get(names.QUEUE) or "") if owner["kind"] == "Job" else ""


def _resumes(owner: Manifest) -> bool:
    if owner["kind"] == "Deployment":
        return True
    env = things(instance_of(_at(owner, "spec", "template")), "env")
    kept = [variable for variable in env if variable.get("name") == "EDL_CHECKPOINT"]
    has_checkpoints = any(variable.get("value") or variable.get("valueFrom") for variable in kept)
    is_elastic = _at(owner, "metadata", "annotations").get(names.ELASTIC) == "true"
    return is_elastic and has_checkpoints and not _queue(owner)


def bounds(owner: Manifest) -> Bounds:
    """Return between which numbers it may be resized."""
    return Bounds.parse(owner["metadata"]["annotations"][names.BOUNDS])


def most_disruptions(job: Manifest) -> int:
    """Return how often the cluster may end an instance; one more time, and its job has failed.

    The Job knows no such limit and goes on until it is deleted, which whoever waits for it does at once.
    """
    return int(_at(job, "metadata", "annotations").get(names.MOST_DISRUPTIONS) or MOST_DISRUPTIONS)


def failed_indexes(job: Manifest) -> list[int]:
    """Return the indexes that the Job has given up, sorted, as it writes them: "1,3-5"."""
    text = _at(job, "status").get("failedIndexes") or ""
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
    if instances == wanted(job):
        return before
    if instances < wanted(job):
        instances = max(1, min(instances, living))
    count = index = 0
    while count < instances:
        count += index not in failed
        index += 1
    return index


def has_ended(owner: Manifest) -> bool:
    """Whether a Job has completed or failed, as it says itself."""
    return any(_condition(owner, kind) is not None for kind in ("Complete", "Failed"))


def true_conditions(owner: Manifest) -> list[str]:
    """Return how it fares, as it says itself, sorted."""
    conditions = owner.get("status", {}).get("conditions") or []
    return sorted(one["type"] for one in conditions if one["status"] == "True")


def pool_instances(pods: Iterable[Manifest], now: float) -> list[Seen]:
    """Return a pool's instances."""
    return [_of_pool(pod, index, now) for index, pod in enumerate(pool_pods(pods))]


def pool_pods(pods: Iterable[Manifest]) -> list[Manifest]:
    """Return the pods that are a pool's instances: all the same, so each one's index is its place by age.

    The cluster tells that in seconds, and those of one second go by their names. Without those that have failed as a
    whole, as by an eviction: others take their place.
    """
    return [pod for pod in by_age(pods) if _at(pod, "status").get("phase") != "Failed"]


def _replaced(pods: Iterable[Manifest]) -> dict[str, str]:
    """Return how those of a pool ended that have failed as a whole, and by the cluster: their nodes, mostly."""
    failed = [pod for pod in by_age(pods) if _at(pod, "status").get("phase") == "Failed"]
    lost = {pod["metadata"]["name"]: pod for pod in failed if _condition(pod, "DisruptionTarget") is not None}
    return {name: f"pod {name} {_ending(pod, None)}" for name, pod in lost.items()}


def by_age(pods: Iterable[Manifest]) -> list[Manifest]:
    """Return pods, the oldest first; of a trainer's, which may have begun in the same second, the first life first."""
    return sorted(pods, key=lambda pod: (_lives(pod), _created(pod), pod["metadata"]["name"]))


def trainer_instances(job: Manifest, pods: Iterable[Manifest]) -> list[Seen]:
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
    unreplaced = wanted(job) - (completions - len(failed))
    shown = failed[len(failed) - max(0, min(unreplaced, len(failed))) :]
    staying = completions if wanted(job) else 0
    present = {
        index: _of_trainer(by_age(of_index)[-1], given_up=index in failed, most_disruptions=most_disruptions(job))
        for index, of_index in by_index.items()
        if (index in shown or index not in failed) and (index < staying or not _is_over(of_index))
    }
    gone = {index: _gone(index, job) for index in shown if index not in present}
    return [one for _, one in sorted({**present, **gone}.items())]


def _failed_below(job: Manifest, completions: int) -> list[int]:
    return [index for index in failed_indexes(job) if index < completions]


def _gone(index: int, job: Manifest) -> Seen:
    """Return an instance of which only the Job knows, which has started it at once when it was begun or resumed."""
    reason = f"instance {index} was given up, and its pod is gone"
    began = _time(_at(job, "status").get("startTime")) or _created(job)
    return Seen(status=InstanceStatus(index=index, phase="failed", started_at=began, given_up=True, reason=reason))


def _is_over(pods: Iterable[Manifest]) -> bool:
    return all(_at(pod, "status").get("phase") in ("Succeeded", "Failed") for pod in pods)


def index_of(pod: Manifest) -> int:
    """Return which instance of its Job a pod is."""
    return int(_at(pod, "metadata", "annotations").get(names.INDEX, 0))


def _lives(pod: Manifest) -> int:
    """Return how many pods of its index there were before."""
    annotations = _at(pod, "metadata", "annotations")
    return sum(int(annotations.get(name, 0)) for name in (names.FAILURES, names.DISRUPTIONS))


def _of_trainer(pod: Manifest, *, given_up: bool, most_disruptions: int) -> Seen:
    restarts = _lives(pod)
    container = container_of(pod)
    terminated = _at(container, "state").get("terminated")
    phase = _phase(pod, container)
    exit_code = _exit_code(terminated)
    index = index_of(pod)
    disrupted = _condition(pod, "DisruptionTarget") is not None and not given_up and phase != "succeeded"
    disruptions = int(_at(pod, "metadata", "annotations").get(names.DISRUPTIONS, 0)) + disrupted
    trouble, hopeless = _cannot_start(pod, index)
    if not trouble and phase == "failed":
        trouble, hopeless = _how_it_ended(pod, index, terminated)
        if given_up and exit_code == EX_CONFIG:
            trouble = f"{trouble}, which says that it can never work as configured"
        elif given_up:
            trouble = f"instance {index} ended {restarts + 1} times, the last time it {_ending(pod, terminated)}"
    if disrupted or (disruptions > most_disruptions and phase != "succeeded"):
        trouble = _how_disrupted(pod, index, disruptions, most_disruptions)
    seen = _seen(
        pod,
        index,
        phase=phase,
        restarts=restarts,
        disruptions=disruptions,
        disrupted=disrupted,
        exit_code=exit_code,
        given_up=given_up,
        trouble=trouble,
        hopeless=hopeless and not disrupted,
        wrote=(terminated or _at(_failed_before(pod), "state", "terminated")) if phase == "failed" else None,
    )
    ended_at = _time(terminated.get("finishedAt")) if terminated else 0.0
    return msgspec.structs.replace(seen, result=_result(terminated), ended_at=ended_at)


def _of_pool(pod: Manifest, index: int, now: float) -> Seen:
    container = container_of(pod)
    state = _at(container, "state")
    ended = state.get("terminated") or _at(container, "lastState").get("terminated")
    restarts = int(container.get("restartCount", 0))
    exit_code = _exit_code(ended)
    settled = "running" in state and now >= _started(pod, container) + SETTLED_S
    given_up = exit_code == EX_CONFIG and not settled  # the kubelet tries it again, now and then
    down = "running" not in state and ended is not None
    disrupted = _condition(pod, "DisruptionTarget") is not None
    phase: InstancePhase = "failed" if given_up or down else _phase(pod, container)
    trouble, hopeless = _cannot_start(pod, index)
    if given_up:
        trouble = f"instance {index} exited with {EX_CONFIG}, which says that it can never work as configured"
    elif down and restarts >= MOST_LIVES - 1 and not trouble:
        trouble = f"instance {index} ended {restarts + 1} times, the last time it {_ending(pod, ended)}"
    if not trouble and down:
        ending_of, hopeless = _how_it_ended(pod, index, ended)
        trouble = ending_of if hopeless else ""
    if disrupted:
        trouble, hopeless = f"instance {index} {_ending(pod, ended)} and is replaced", False
    return _seen(
        pod,
        index,
        phase=phase,
        restarts=restarts,
        disruptions=int(disrupted),
        disrupted=disrupted,
        exit_code=exit_code if phase == "failed" else None,
        given_up=given_up,
        trouble=trouble,
        hopeless=hopeless,
        wrote=ended if trouble else None,
    )


def _seen(
    pod: Manifest,
    index: int,
    *,
    phase: InstancePhase,
    restarts: int,
    disruptions: int,
    disrupted: bool,
    exit_code: int | None,
    given_up: bool,
    trouble: str,
    hopeless: bool,
    wrote: Manifest | None,
) -> Seen:
    """Return an instance as it is shown. `wrote`: how the container ended whose last lines tell of the trouble."""
    status = InstanceStatus(
        index=index,
        phase=phase,
        started_at=_started(pod, container_of(pod)),
        restarts=restarts,
        disruptions=disruptions,
        disrupted=disrupted,
        exit_code=exit_code,
        given_up=given_up,
        pod=pod["metadata"]["name"],
        node=_at(pod, "spec").get("nodeName") or "",
        leaving=is_leaving(pod),
        reason=trouble,
    )
    return Seen(status=status, last_lines=_last_lines(wrote), hopeless=hopeless)


def _pool_phase(owner: Manifest, seen: Sequence[Seen]) -> tuple[Phase, Seen | None]:
    """Return how a pool fares and which instance tells why: it fails when it has none to go on with."""
    if wanted(owner) == 0:
        return "pending", None
    troubled = [one for one in seen if one.trouble]
    lost = [one for one in troubled if not one.status.disrupted and (one.hopeless or one.status.phase == "failed")]
    if seen and len(lost) == len(seen):
        return "failed", lost[-1]
    return "running", troubled[0] if troubled else None


def _trainer_phase(job: Manifest, seen: Sequence[Seen], *, elastic: bool) -> tuple[Phase, Seen | None]:
    """Return how a trainer job fares and which instance tells why."""
    troubled = [one for one in seen if one.trouble]
    deciding = [one for one in troubled if one.status.phase == "failed" and not _is_for_itself(one, elastic=elastic)]
    ended_by_cluster = [one for one in troubled if one.status.disruptions > most_disruptions(job)]
    if _condition(job, "Complete") or (elastic and has_ended(job) and _all_left_have_succeeded(job, seen)):
        return "succeeded", None
    if _has_failed(job, elastic=elastic) or deciding or ended_by_cluster or any(one.hopeless for one in troubled):
        about = [*deciding, *ended_by_cluster, *(one for one in troubled if one.hopeless), *reversed(troubled)]
        return "failed", about[0] if about else None
    if job["spec"].get("suspend"):
        return "pending", None
    return "running", troubled[0] if troubled else None


def _has_failed(job: Manifest, *, elastic: bool) -> bool:
    """Whether the Job says that it has failed, or is about to end for that.

    Of elastic trainers one that is about to end for the indexes that were given up has none that goes on; how those
    ended that are left is known once it has ended itself.
    """
    target = _condition(job, "FailureTarget")
    is_failing = target is not None and not (elastic and target.get("reason") == "FailedIndexes")
    return is_failing or _condition(job, "Failed") is not None


def _all_left_have_succeeded(job: Manifest, seen: Sequence[Seen]) -> bool:
    """Whether all indexes but those that were given up have; a Job that has given up some says that it failed."""
    completions: int = job["spec"]["completions"]
    left = [one.status.phase for one in seen if not one.status.given_up]
    return set(left) == {"succeeded"} and len(left) >= completions - len(_failed_below(job, completions))


def _is_for_itself(one: Seen, *, elastic: bool) -> bool:
    """Whether a failed instance says nothing of the job: the Job starts it again, or gives it up alone."""
    exit_code = one.status.exit_code
    if one.status.disrupted or exit_code is None or (elastic and exit_code == EX_CONFIG):
        return True
    restarted = exit_code < 0 if elastic else exit_code == -signal.SIGTERM
    return restarted and not one.status.given_up


def _refusal(owner: Manifest, refusals: Sequence[str]) -> str:
    """Return why the cluster creates no further pods, by what a Deployment says itself and the events of a Job."""
    if failure := _condition(owner, "ReplicaFailure"):
        return str(failure.get("message") or failure.get("reason", ""))
    return refusals[-1] if refusals else ""


def _reason(owner: Manifest, phase: Phase, refusal: str) -> str:
    """Return what is to be said where no instance tells why."""
    if phase == "pending" and wanted(owner) == 0:
        return SUSPENDED
    if phase == "pending":
        queue = _queue(owner)
        return f"suspended: it waits in Kueue's queue {queue!r}" if queue else "suspended"
    kinds = ("Failed", "FailureTarget") if phase == "failed" else ()
    for failure in filter(None, (_condition(owner, kind) for kind in kinds)):
        return str(failure.get("message") or failure.get("reason", ""))
    return f"its pods can't be created: {refusal}" if refusal else ""


def container_of(pod: Manifest) -> Manifest:
    """Return what is said of the container that is the instance, empty if nothing is yet."""
    return next(
        (one for one in _at(pod, "status").get("containerStatuses") or [] if one["name"] == names.CONTAINER), {}
    )


def _failed_before(pod: Manifest) -> Manifest:
    """Return the init container that has failed, so that the instance was never started; empty if none has."""
    before = _at(pod, "status").get("initContainerStatuses") or []
    return next((one for one in before if _at(one, "state", "terminated").get("exitCode")), {})


def _at(thing: Manifest, *path: str) -> Manifest:
    """Return what is there, empty if that is missing or null."""
    for part in path:
        thing = thing.get(part) or {}
    return thing


def _phase(pod: Manifest, container: Manifest) -> InstancePhase:
    state = _at(container, "state")
    if terminated := state.get("terminated"):
        return "failed" if terminated["exitCode"] else "succeeded"
    if "running" in state:
        return "running"
    phases: dict[str, InstancePhase] = {"Failed": "failed", "Succeeded": "succeeded"}
    return phases.get(_at(pod, "status").get("phase", ""), "pending")


def _exit_code(terminated: Manifest | None) -> int | None:
    """Return a process's exit status, negative for a signal, where the container has 128 and its number."""
    if not terminated:
        return None
    code: int = terminated["exitCode"]
    return 128 - code if 128 < code <= 128 + 64 else code


def _ending(pod: Manifest, terminated: Manifest | None) -> str:
    if disruption := _condition(pod, "DisruptionTarget"):
        return f"was ended by the cluster ({disruption.get('message') or disruption.get('reason', '')})"
    code = _exit_code(terminated)
    status = _at(pod, "status")
    why = ": ".join(text.strip() for text in (status.get("reason"), status.get("message")) if text)
    if code is None:
        return f"was ended by the cluster ({why or 'no reason given'})"
    if terminated and _is_oom(terminated):
        why = "OOMKilled: it took more memory than its limit"
    return ending(code, why)


def _how_disrupted(pod: Manifest, index: int, times: int, most: int) -> str:
    """Say of an instance that the cluster has ended so many times that it is replaced, or that it was too often."""
    disruption = _condition(pod, "DisruptionTarget")
    last = (disruption.get("message") or disruption.get("reason", "")) if disruption else ""
    if times <= most:
        return f"instance {index} was ended by the cluster ({last}) and is replaced: {times} of at most {most}"
    said = f"instance {index} was evicted, preempted or lost with its node {times} times, and pod.disruptions is {most}"
    return f"{said}; the last time: {last}" if last else said


def _is_oom(terminated: Manifest) -> bool:
    return bool(terminated.get("reason") == "OOMKilled")


def _how_it_ended(pod: Manifest, index: int, terminated: Manifest | None) -> tuple[str, bool]:
    message = (terminated or {}).get("message") or ""
    if any(words in message for words in _NO_RUNTIME):
        image = container_of(pod).get("image", "")
        return f"instance {index} can't start: its image {image} has no edl_runtime", True
    if terminated and terminated.get("reason") in _CANT_START:
        return f"instance {index} can't start: {message}", True
    if not terminated and (before := _failed_before(pod)):
        ended = ending(_exit_code(before["state"]["terminated"]) or 0)
        return f"instance {index} can't start: its init container {before['name']!r} {ended}", False
    return f"instance {index} {_ending(pod, terminated)}", False


def _cannot_start(pod: Manifest, index: int) -> tuple[str, bool]:
    """Return why an instance that is to come does not, and whether it never will."""
    for container in _waiting(pod):
        waiting = container["state"]["waiting"]
        reason, message = waiting.get("reason") or "", waiting.get("message") or ""
        whose = "" if container["name"] == names.CONTAINER else f"container {container['name']!r}: "
        trouble = f"instance {index} can't start: {whose}{reason}: {message}"
        if reason in _PULLING_FAILED:
            return trouble, is_never_pulled(reason, message)
        if reason in _NOT_CREATED:
            return trouble, any(words in message for words in (*_NO_RUNTIME, *_NEVER_RUN))
        if reason == "CrashLoopBackOff" and whose:
            return trouble, False
    if waits_in_queue(pod):
        return f"instance {index} waits in Kueue's queue", False
    scheduled = _condition(pod, "PodScheduled", status="False")
    if scheduled:
        return f"instance {index} finds no place: {scheduled.get('message') or scheduled.get('reason', '')}", False
    return "", False


def waits_in_queue(pod_or_template: Manifest) -> bool:
    """Whether Kueue has yet to admit a pod, of an elastic Job; of a template, whether it will decide on each pod."""
    return any(
        gate.get("name") == names.ELASTIC_IN_QUEUE for gate in things(_at(pod_or_template, "spec"), "schedulingGates")
    )


def _waiting(pod: Manifest) -> list[Manifest]:
    """Return the containers that an instance which has not started waits for, itself among them."""
    status = _at(pod, "status")
    if _at(container_of(pod), "state").keys() & {"running", "terminated"}:
        return []
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return [one for one in containers if _at(one, "state", "waiting")]


def is_never_pulled(reason: str, message: str) -> bool:
    """Whether an image that can't be pulled for that reason has to be given another name, or a pull secret."""
    return reason in _NEVER_PULLED or any(words in message.lower() for words in _NO_SUCH_IMAGE)


def _last_lines(terminated: Manifest | None) -> tuple[str, ...]:
    message = (terminated or {}).get("message") or ""
    return tuple(message.splitlines()[-LAST_LINES:]) if _result(terminated) is None else ()


def _result(terminated: Manifest | None) -> dict[str, Any] | None:
    """Return the result that was left as a termination message, which may be the end of a log in its place."""
    message = (terminated or {}).get("message") or ""
    try:
        found = Decoder(Any).decode(message)
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) and found.keys() == {"checkpoint", "metrics"} else None


def _started(pod: Manifest, container: Manifest) -> float:
    for part in ("running", "terminated"):
        if started := _time(_at(container, "state", part).get("startedAt")):
            return started
    return _created(pod)


def _created(thing: Manifest) -> float:
    return _time(thing["metadata"].get("creationTimestamp"))


def _time(text: str | None) -> float:
    """Return a moment, which without a zone is one of UTC, as Unix time; 0 for none."""
    if not text:
        return 0.0
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _condition(thing: Manifest, kind: str, *, status: str = "True") -> Manifest | None:
    conditions = _at(thing, "status").get("conditions") or []
    return next((one for one in conditions if one.get("type") == kind and one.get("status") == status), None)
