"""What a pod says of its instance: phase, exit status, what is wrong with it and whether that can mend. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from edl_runtime.backends.interface import InstancePhase, InstanceStatus
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.manifests import MAX_STARTS
from edl_runtime.backends.kubernetes.pod_template import mappings_at
from edl_runtime.errors import EX_CONFIG
from edl_runtime.exit_status import describe_exit
from edl_runtime.parsing import JsonDecoder

Manifest = Mapping[str, Any]

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

_CREATING = frozenset({"ContainerCreating", "PodInitializing"})

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

POD_EVENT_SELECTOR = ",".join(["involvedObject.kind=Pod", *(f"reason!={reason}" for reason in sorted(_NO_DELAY))])
"""All others, as a field selector."""

_ID = re.compile(r"\b[0-9a-f]{64}\b")

_NO_RUNTIME = ("No module named edl_runtime", "No module named 'edl_runtime'", '"python": executable file not found')


class ObservedInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as its pod tells of it, and what is wrong with it.

    `permanent`: no restart mends that.
    """

    status: InstanceStatus
    last_lines: tuple[str, ...] = ()
    result: dict[str, Any] | None = None
    ended_at: float = 0.0
    permanent: bool = False

    @property
    def problem(self) -> str:
        """What is wrong with it, for people."""
        return self.status.reason


def observed_trainer(pod: Manifest, *, given_up: bool, most_disruptions: int) -> ObservedInstance:
    restarts = _earlier_pods(pod)
    container = container_status(pod)
    terminated = mapping_in(container, "state").get("terminated")
    phase = _phase(pod, container)
    exit_code = _exit_code(terminated)
    index = index_of(pod)
    disrupted = condition(pod, "DisruptionTarget") is not None and not given_up and phase != "succeeded"
    disruptions = int(mapping_in(pod, "metadata", "annotations").get(names.DISRUPTIONS, 0)) + disrupted
    problem, permanent = _start_problem(pod, index)
    if not problem and phase == "failed":
        problem, permanent = _exit_problem(pod, index, terminated)
        if given_up and exit_code == EX_CONFIG:
            problem = f"{problem}, which says that it can never work as configured"
        elif given_up:
            problem = f"instance {index} ended {restarts + 1} times, the last time it {describe_end(pod, terminated)}"
    if disrupted or (disruptions > most_disruptions and phase != "succeeded"):
        problem = _disruption_problem(pod, index, disruptions, most_disruptions)
    seen = _observed(
        pod,
        index,
        phase=phase,
        restarts=restarts,
        disruptions=disruptions,
        disrupted=disrupted,
        exit_code=exit_code,
        given_up=given_up,
        problem=problem,
        permanent=permanent and not disrupted,
        wrote=(terminated or mapping_in(_failed_before(pod), "state", "terminated")) if phase == "failed" else None,
    )
    ended_at = unix_time(terminated.get("finishedAt")) if terminated else 0.0
    return msgspec.structs.replace(seen, result=_result(terminated), ended_at=ended_at)


def observed_pool_pod(pod: Manifest, index: int, now: float) -> ObservedInstance:
    container = container_status(pod)
    state = mapping_in(container, "state")
    ended = state.get("terminated") or mapping_in(container, "lastState").get("terminated")
    restarts = int(container.get("restartCount", 0))
    exit_code = _exit_code(ended)
    settled = "running" in state and now >= _started(pod, container) + SETTLED_S
    given_up = exit_code == EX_CONFIG and not settled  # the kubelet tries it again, now and then
    down = "running" not in state and ended is not None
    disrupted = condition(pod, "DisruptionTarget") is not None
    phase: InstancePhase = "failed" if given_up or down else _phase(pod, container)
    problem, permanent = _start_problem(pod, index)
    if given_up:
        problem = f"instance {index} exited with {EX_CONFIG}, which says that it can never work as configured"
    elif down and restarts >= MAX_STARTS - 1 and not problem:
        problem = f"instance {index} ended {restarts + 1} times, the last time it {describe_end(pod, ended)}"
    if not problem and down:
        ending_of, permanent = _exit_problem(pod, index, ended)
        problem = ending_of if permanent else ""
    if disrupted:
        problem, permanent = f"instance {index} {describe_end(pod, ended)} and is replaced", False
    return _observed(
        pod,
        index,
        phase=phase,
        restarts=restarts,
        disruptions=int(disrupted),
        disrupted=disrupted,
        exit_code=exit_code if phase == "failed" else None,
        given_up=given_up,
        problem=problem,
        permanent=permanent,
        wrote=ended if problem else None,
    )


def _observed(
    pod: Manifest,
    index: int,
    *,
    phase: InstancePhase,
    restarts: int,
    disruptions: int,
    disrupted: bool,
    exit_code: int | None,
    given_up: bool,
    problem: str,
    permanent: bool,
    wrote: Manifest | None,
) -> ObservedInstance:
    """Return an instance as it is shown. `wrote`: how the container ended whose last lines tell of the problem."""
    status = InstanceStatus(
        index=index,
        phase=phase,
        started_at=_started(pod, container_status(pod)),
        restarts=restarts,
        disruptions=disruptions,
        disrupted=disrupted,
        exit_code=exit_code,
        given_up=given_up,
        pod=pod["metadata"]["name"],
        node=mapping_in(pod, "spec").get("nodeName") or "",
        leaving=is_leaving(pod),
        reason=problem,
    )
    return ObservedInstance(status=status, last_lines=_last_lines(wrote), permanent=permanent)


def sorted_by_age(pods: Iterable[Manifest]) -> list[Manifest]:
    """Return pods, the oldest first; of a trainer's, which may have begun in the same second, the first life first."""
    return sorted(pods, key=lambda pod: (_earlier_pods(pod), created_at(pod), pod["metadata"]["name"]))


def index_of(pod: Manifest) -> int:
    """Return which instance of its Job a pod is."""
    return int(mapping_in(pod, "metadata", "annotations").get(names.INDEX, 0))


def _earlier_pods(pod: Manifest) -> int:
    """Return how many pods of its index there were before."""
    annotations = mapping_in(pod, "metadata", "annotations")
    return sum(int(annotations.get(name, 0)) for name in (names.FAILURES, names.DISRUPTIONS))


def is_leaving(thing: Manifest) -> bool:
    """Whether somebody has deleted it, though it is still there."""
    return "deletionTimestamp" in thing["metadata"]


def is_pod_of(pod: Manifest, owner: Manifest) -> bool:
    """Whether the pod is one of this owner, and not of one of its name that is just going."""
    run = pod["metadata"]["labels"].get(names.RUN)
    return run is None or bool(run == owner["metadata"]["uid"])


def have_ended(pods: Iterable[Manifest]) -> bool:
    return all(mapping_in(pod, "status").get("phase") in ("Succeeded", "Failed") for pod in pods)


def is_creating_containers(pod: Manifest) -> bool:
    """Whether a pod has its node, and none of its containers yet, so that its events may tell why."""
    status = mapping_in(pod, "status")
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return bool(
        mapping_in(pod, "spec").get("nodeName")
        and status.get("phase") == "Pending"
        and not condition(pod, "PodReadyToStartContainers")
        and all(mapping_in(one, "state", "waiting").get("reason") in _CREATING for one in containers)
    )


def start_delays(events: Iterable[Manifest], pods: Iterable[Manifest]) -> dict[str, str]:
    """Return by name which pods have no container yet for a reason, which is what the newest event says.

    As that a volume can't be mounted. An image that is pulled since then says that this is over; the pod itself does
    not know before it has its image.
    """
    found: dict[str, str] = {}
    names_by_uid = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in pods if is_creating_containers(pod)}
    for event in sorted(events, key=lambda one: (_event_time(one), _is_pulling(one))):
        name = names_by_uid.get(mapping_in(event, "involvedObject").get("uid"))
        if name and _is_delay(event):
            found[name] = f"{event['reason']}: {_without_ids(event.get('message') or '')}"
        elif name and _is_pulling(event):
            found.pop(name, None)
    return found


def _is_delay(event: Manifest) -> bool:
    reason = event.get("reason") or ""
    return reason == "NetworkNotReady" or (reason.startswith("Failed") and reason not in _NO_DELAY)


def _without_ids(message: str) -> str:
    """Return what stays the same of a message from try to try: each has a sandbox of its own, by an id."""
    return _ID.sub("...", message.removeprefix("(combined from similar events): "))


def _is_pulling(event: Manifest) -> bool:
    return event.get("reason") == "Pulling"


def _event_time(event: Manifest) -> float:
    return unix_time(event.get("lastTimestamp") or event.get("eventTime"))


def with_delay(one: ObservedInstance, delay: str) -> ObservedInstance:
    """Return an instance with what keeps it from being made, unless it tells of a problem itself."""
    if not delay or one.problem:
        return one
    reason = f"instance {one.status.index} can't start yet: {delay}"
    return msgspec.structs.replace(one, status=msgspec.structs.replace(one.status, reason=reason))


def container_status(pod: Manifest) -> Manifest:
    """Return what is said of the container that is the instance, empty if nothing is yet."""
    return next(
        (one for one in mapping_in(pod, "status").get("containerStatuses") or [] if one["name"] == names.CONTAINER), {}
    )


def _failed_before(pod: Manifest) -> Manifest:
    """Return the init container that has failed, so that the instance was never started; empty if none has."""
    before = mapping_in(pod, "status").get("initContainerStatuses") or []
    return next((one for one in before if mapping_in(one, "state", "terminated").get("exitCode")), {})


def _phase(pod: Manifest, container: Manifest) -> InstancePhase:
    state = mapping_in(container, "state")
    if terminated := state.get("terminated"):
        return "failed" if terminated["exitCode"] else "succeeded"
    if "running" in state:
        return "running"
    phases: dict[str, InstancePhase] = {"Failed": "failed", "Succeeded": "succeeded"}
    return phases.get(mapping_in(pod, "status").get("phase", ""), "pending")


def _exit_code(terminated: Manifest | None) -> int | None:
    """Return a process's exit status, negative for a signal, where the container has 128 and its number."""
    if not terminated:
        return None
    code: int = terminated["exitCode"]
    return 128 - code if 128 < code <= 128 + 64 else code


def describe_end(pod: Manifest, terminated: Manifest | None) -> str:
    if disruption := condition(pod, "DisruptionTarget"):
        return f"was ended by the cluster ({disruption.get('message') or disruption.get('reason', '')})"
    code = _exit_code(terminated)
    status = mapping_in(pod, "status")
    why = ": ".join(text.strip() for text in (status.get("reason"), status.get("message")) if text)
    if code is None:
        return f"was ended by the cluster ({why or 'no reason given'})"
    if terminated and _is_oom(terminated):
        why = "OOMKilled: it took more memory than its limit"
    return describe_exit(code, why)


def _disruption_problem(pod: Manifest, index: int, times: int, most: int) -> str:
    """Say of an instance that the cluster has ended so many times that it is replaced, or that it was too often."""
    disruption = condition(pod, "DisruptionTarget")
    last = (disruption.get("message") or disruption.get("reason", "")) if disruption else ""
    if times <= most:
        return f"instance {index} was ended by the cluster ({last}) and is replaced: {times} of at most {most}"
    said = f"instance {index} was evicted, preempted or lost with its node {times} times, and pod.disruptions is {most}"
    return f"{said}; the last time: {last}" if last else said


def _is_oom(terminated: Manifest) -> bool:
    return bool(terminated.get("reason") == "OOMKilled")


def _exit_problem(pod: Manifest, index: int, terminated: Manifest | None) -> tuple[str, bool]:
    message = (terminated or {}).get("message") or ""
    if any(words in message for words in _NO_RUNTIME):
        image = container_status(pod).get("image", "")
        return f"instance {index} can't start: its image {image} has no edl_runtime", True
    if terminated and terminated.get("reason") in _CANT_START:
        return f"instance {index} can't start: {message}", True
    if not terminated and (before := _failed_before(pod)):
        ended = describe_exit(_exit_code(before["state"]["terminated"]) or 0)
        return f"instance {index} can't start: its init container {before['name']!r} {ended}", False
    return f"instance {index} {describe_end(pod, terminated)}", False


def _start_problem(pod: Manifest, index: int) -> tuple[str, bool]:
    """Return why an instance that is to come does not, and whether it never will."""
    for container in _waiting(pod):
        waiting = container["state"]["waiting"]
        reason, message = waiting.get("reason") or "", waiting.get("message") or ""
        whose = "" if container["name"] == names.CONTAINER else f"container {container['name']!r}: "
        problem = f"instance {index} can't start: {whose}{reason}: {message}"
        if reason in _PULLING_FAILED:
            return problem, is_image_unpullable(reason, message)
        if reason in _NOT_CREATED:
            return problem, any(words in message for words in (*_NO_RUNTIME, *_NEVER_RUN))
        if reason == "CrashLoopBackOff" and whose:
            return problem, False
    if is_gated_by_queue(pod):
        return f"instance {index} waits in Kueue's queue", False
    scheduled = condition(pod, "PodScheduled", status="False")
    if scheduled:
        return f"instance {index} finds no place: {scheduled.get('message') or scheduled.get('reason', '')}", False
    return "", False


def is_gated_by_queue(pod_or_template: Manifest) -> bool:
    """Whether Kueue has yet to admit a pod, of an elastic Job; of a template, whether it will decide on each pod."""
    return any(
        gate.get("name") == names.ELASTIC_IN_QUEUE
        for gate in mappings_at(mapping_in(pod_or_template, "spec"), "schedulingGates")
    )


def _waiting(pod: Manifest) -> list[Manifest]:
    """Return the containers that an instance which has not started waits for, itself among them."""
    status = mapping_in(pod, "status")
    if mapping_in(container_status(pod), "state").keys() & {"running", "terminated"}:
        return []
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return [one for one in containers if mapping_in(one, "state", "waiting")]


def is_image_unpullable(reason: str, message: str) -> bool:
    """Whether an image that can't be pulled for that reason has to be given another name, or a pull secret."""
    return reason in _NEVER_PULLED or any(words in message.lower() for words in _NO_SUCH_IMAGE)


def _last_lines(terminated: Manifest | None) -> tuple[str, ...]:
    message = (terminated or {}).get("message") or ""
    return tuple(message.splitlines()[-LAST_LINES:]) if _result(terminated) is None else ()


def _result(terminated: Manifest | None) -> dict[str, Any] | None:
    """Return the result that was left as a termination message, which may be the end of a log in its place."""
    message = (terminated or {}).get("message") or ""
    try:
        found = JsonDecoder(Any).decode(message)
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) and found.keys() == {"checkpoint", "metrics"} else None


def _started(pod: Manifest, container: Manifest) -> float:
    for part in ("running", "terminated"):
        if started := unix_time(mapping_in(container, "state", part).get("startedAt")):
            return started
    return created_at(pod)


def created_at(thing: Manifest) -> float:
    return unix_time(thing["metadata"].get("creationTimestamp"))


def mapping_in(thing: Manifest, *path: str) -> Manifest:
    """Return what is there, empty if that is missing or null."""
    for part in path:
        thing = thing.get(part) or {}
    return thing


def unix_time(text: str | None) -> float:
    """Return a moment, which without a zone is one of UTC, as Unix time; 0 for none."""
    if not text:
        return 0.0
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def condition(thing: Manifest, kind: str, *, status: str = "True") -> Manifest | None:
    conditions = mapping_in(thing, "status").get("conditions") or []
    return next((one for one in conditions if one.get("type") == kind and one.get("status") == status), None)
