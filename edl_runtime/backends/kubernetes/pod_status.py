"""Status of an instance from its pod: phase, exit status, problem, and whether that is permanent. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from edl_runtime.backends.errors import with_agents_words
from edl_runtime.backends.interface import InstanceStatus, Phase
from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.manifests import MAX_STARTS
from edl_runtime.backends.kubernetes.pod_template import mapping_at, mappings_at
from edl_runtime.errors import EX_CONFIG, EX_DRAINED
from edl_runtime.exit_status import describe_exit
from edl_runtime.parsing import JsonDecoder
from edl_runtime.pods import Manifest

LAST_LINES = 30
"""How many lines of a failed instance's log go into the status."""

SETTLED_S = 10.0
"""A pool's instance that has run for so long has started well."""

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
"""Messages for images that do not exist or need `pod.pull_secrets`. Other pull errors, as of DNS, may be temporary."""

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
"""Frequent events of pods that do not explain why a container is not created yet."""

POD_EVENT_SELECTOR = ",".join(["involvedObject.kind=Pod", *(f"reason!={reason}" for reason in sorted(_NO_DELAY))])
"""Field selector of all other events of pods."""

_ID = re.compile(r"\b[0-9a-f]{64}\b")

_NO_RUNTIME = ("No module named edl_runtime", "No module named 'edl_runtime", '"python": executable file not found')

_OTHER_VERSION = re.compile(r"edl: edl-airflow (\S+) can't run a job of (\S+) \((No module named .*)\)")
"""What `pod_template.START` says."""


class ObservedInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as seen by its pod. `permanent`: no restart can repair its problem."""

    status: InstanceStatus
    last_lines: tuple[str, ...] = ()
    result: dict[str, Any] | None = None
    ended_at: float = 0.0
    permanent: bool = False

    @property
    def problem(self) -> str:
        return self.status.reason


def observed_trainer(pod: Manifest, *, given_up: bool, most_disruptions: int, elastic: bool) -> ObservedInstance:
    restarts = _earlier_pods(pod)
    container = container_status(pod)
    terminated = mapping_at(container, "state").get("terminated")
    phase = _phase(pod, container)
    exit_code = _exit_code(terminated)
    index = index_of(pod)
    disrupted = condition(pod, "DisruptionTarget") is not None and not given_up and phase != "succeeded"
    disruptions = int(mapping_at(pod, "metadata", "annotations").get(names.DISRUPTIONS, 0)) + disrupted
    logged = (terminated or mapping_at(_failed_before(pod), "state", "terminated")) if phase == "failed" else None
    last_lines = _last_lines(logged)
    problem, permanent = _start_problem(pod, index)
    if not problem and phase == "failed":
        problem, permanent = _exit_problem(pod, index, terminated)
        if given_up and exit_code == EX_CONFIG:
            problem = f"{problem}, which says that it can never work as configured"
        elif given_up:
            problem = f"instance {index} ended {restarts + 1} times, the last time it {describe_end(pod, terminated)}"
        if elastic and not permanent:
            problem = with_agents_words(problem, index, last_lines)
    if disrupted or (disruptions > most_disruptions and phase != "succeeded"):
        problem = _disruption_problem(pod, index, disruptions, most_disruptions)
    status = _instance_status(
        pod,
        index=index,
        phase=phase,
        restarts=restarts,
        disruptions=disruptions,
        disrupted=disrupted,
        exit_code=exit_code,
        given_up=given_up,
        reason=problem,
    )
    return ObservedInstance(
        status=status,
        last_lines=last_lines,
        result=_result(terminated),
        ended_at=unix_time(terminated.get("finishedAt")) if terminated else 0.0,
        permanent=permanent and not disrupted,
    )


def observed_pool_pod(pod: Manifest, index: int, now: float) -> ObservedInstance:
    container = container_status(pod)
    state = mapping_at(container, "state")
    ended = state.get("terminated") or mapping_at(container, "lastState").get("terminated")
    restarts = int(container.get("restartCount", 0))
    exit_code = _exit_code(ended)
    settled = "running" in state and now >= _started(pod, container) + SETTLED_S
    given_up = exit_code == EX_CONFIG and not settled  # though the kubelet restarts it now and then
    ends = "running" not in state and ended is not None
    drained = ends and exit_code == EX_DRAINED  # the kubelet starts the next teacher
    down = ends and not drained
    disrupted = condition(pod, "DisruptionTarget") is not None
    phase: Phase = "failed" if given_up or down else "pending" if drained else _phase(pod, container)
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
    status = _instance_status(
        pod,
        index=index,
        phase=phase,
        restarts=restarts,
        disruptions=int(disrupted),
        disrupted=disrupted,
        exit_code=exit_code if phase == "failed" else None,
        given_up=given_up,
        reason=problem,
    )
    return ObservedInstance(status=status, last_lines=_last_lines(ended if problem else None), permanent=permanent)


def _instance_status(pod: Manifest, **fields: Any) -> InstanceStatus:
    return InstanceStatus(
        started_at=_started(pod, container_status(pod)),
        pod=pod["metadata"]["name"],
        node=mapping_at(pod, "spec").get("nodeName") or "",
        leaving=is_leaving(pod),
        **fields,
    )


def sorted_by_age(pods: Iterable[Manifest]) -> list[Manifest]:
    """Sort pods, the oldest first. Pods of one index may start in the same second, so their count comes first."""
    return sorted(pods, key=lambda pod: (_earlier_pods(pod), created_at(pod), pod["metadata"]["name"]))


def index_of(pod: Manifest) -> int:
    return int(mapping_at(pod, "metadata", "annotations").get(names.INDEX, 0))


def _earlier_pods(pod: Manifest) -> int:
    """Return how many pods its index had before."""
    annotations = mapping_at(pod, "metadata", "annotations")
    return sum(int(annotations.get(name, 0)) for name in (names.FAILURES, names.DISRUPTIONS))


def is_leaving(thing: Manifest) -> bool:
    """Whether it is being deleted."""
    return "deletionTimestamp" in thing["metadata"]


def is_pod_of(pod: Manifest, owner: Manifest) -> bool:
    """Whether the pod is of this owner, not of an earlier one with its name."""
    run = pod["metadata"]["labels"].get(names.RUN)
    return run is None or bool(run == owner["metadata"]["uid"])


def pod_has_ended(pod: Manifest) -> bool:
    return mapping_at(pod, "status").get("phase") in ("Succeeded", "Failed")


def is_creating_containers(pod: Manifest) -> bool:
    """Whether a pod is scheduled but has no container yet; its events may explain why."""
    status = mapping_at(pod, "status")
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return bool(
        mapping_at(pod, "spec").get("nodeName")
        and status.get("phase") == "Pending"
        and not condition(pod, "PodReadyToStartContainers")
        and all(mapping_at(one, "state", "waiting").get("reason") in _CREATING for one in containers)
    )


def start_delays(events: Iterable[Manifest], pods: Iterable[Manifest]) -> dict[str, str]:
    """Return by pod name why pods have no container yet, from their newest events, as that a volume can't be mounted.

    A later "Pulling" event ends such a delay; the pod's own status shows that only once it has its image.
    """
    found: dict[str, str] = {}
    names_by_uid = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in pods if is_creating_containers(pod)}
    for event in sorted(events, key=lambda one: (_event_time(one), one.get("reason") == "Pulling")):
        name, reason = names_by_uid.get(mapping_at(event, "involvedObject").get("uid")), event.get("reason") or ""
        if name and (reason == "NetworkNotReady" or (reason.startswith("Failed") and reason not in _NO_DELAY)):
            message = (event.get("message") or "").removeprefix("(combined from similar events): ")
            found[name] = f"{reason}: {_ID.sub('...', message)}"  # each attempt has another sandbox id
        elif name and reason == "Pulling":
            found.pop(name, None)
    return found


def _event_time(event: Manifest) -> float:
    return unix_time(event.get("lastTimestamp") or event.get("eventTime"))


def with_delay(one: ObservedInstance, delay: str) -> ObservedInstance:
    """Add a delay as the instance's problem, if it has none yet."""
    if not delay or one.problem:
        return one
    reason = f"instance {one.status.index} can't start yet: {delay}"
    return msgspec.structs.replace(one, status=msgspec.structs.replace(one.status, reason=reason))


def container_status(pod: Manifest) -> Manifest:
    """Return the status of the instance's container, empty if there is none yet."""
    return next(
        (one for one in mapping_at(pod, "status").get("containerStatuses") or [] if one["name"] == names.CONTAINER), {}
    )


def _failed_before(pod: Manifest) -> Manifest:
    """Return the status of the first failed init container, empty if none has failed."""
    before = mapping_at(pod, "status").get("initContainerStatuses") or []
    return next((one for one in before if mapping_at(one, "state", "terminated").get("exitCode")), {})


def _phase(pod: Manifest, container: Manifest) -> Phase:
    state = mapping_at(container, "state")
    if terminated := state.get("terminated"):
        return "failed" if terminated["exitCode"] else "succeeded"
    if "running" in state:
        return "running"
    phases: dict[str, Phase] = {"Failed": "failed", "Succeeded": "succeeded"}
    return phases.get(mapping_at(pod, "status").get("phase", ""), "pending")


def _exit_code(terminated: Manifest | None) -> int | None:
    """Return a container's exit status, negative for a signal instead of 128 + its number."""
    if not terminated:
        return None
    code: int = terminated["exitCode"]
    return 128 - code if 128 < code <= 128 + 64 else code


def describe_end(pod: Manifest, terminated: Manifest | None) -> str:
    if disruption := condition(pod, "DisruptionTarget"):
        return f"was ended by the cluster ({message_of(disruption)})"
    code = _exit_code(terminated)
    status = mapping_at(pod, "status")
    why = ": ".join(text.strip() for text in (status.get("reason"), status.get("message")) if text)
    if code is None:
        return f"was ended by the cluster ({why or 'no reason given'})"
    if terminated and terminated.get("reason") == "OOMKilled":
        why = "OOMKilled: it took more memory than its limit"
    return describe_exit(code, why)


def _disruption_problem(pod: Manifest, index: int, times: int, most: int) -> str:
    """Describe a disruption: the instance is replaced, or it was one too many."""
    disruption = condition(pod, "DisruptionTarget")
    last = message_of(disruption) if disruption else ""
    if times <= most:
        return f"instance {index} was ended by the cluster ({last}) and is replaced: {times} of at most {most}"
    problem = f"instance {index} was evicted, preempted or lost with its node {times} times"
    return f"{problem}, and pod.disruptions is {most}" + (f"; the last time: {last}" if last else "")


def _exit_problem(pod: Manifest, index: int, terminated: Manifest | None) -> tuple[str, bool]:
    message = (terminated or {}).get("message") or ""
    can_not = f"instance {index} can't start: its image {container_status(pod).get('image', '')}"
    if other := _OTHER_VERSION.search(message):
        there, ours, missing = other.groups()
        has = (
            f"another build of edl-airflow {ours}" if there == ours else f"edl-airflow {there}, and {ours} submitted it"
        )
        return f"{can_not} has {has} ({missing}): they have to be of one version", True
    if any(words in message for words in _NO_RUNTIME):
        return f"{can_not} has no edl_runtime", True
    if terminated and terminated.get("reason") in _CANT_START:
        return f"instance {index} can't start: {message}", True
    if not terminated and (before := _failed_before(pod)):
        ended = describe_exit(_exit_code(before["state"]["terminated"]) or 0)
        return f"instance {index} can't start: its init container {before['name']!r} {ended}", False
    return f"instance {index} {describe_end(pod, terminated)}", False


def _start_problem(pod: Manifest, index: int) -> tuple[str, bool]:
    """Return why a pending instance does not start, and whether that is permanent."""
    for container in _waiting(pod):
        waiting = container["state"]["waiting"]
        reason, message = waiting.get("reason") or "", waiting.get("message") or ""
        if reason == "ImagePullBackOff" and (failed := message.partition("ErrImagePull: ")[2]):
            reason, message = "ErrImagePull", failed  # it is one failure, also while the kubelet waits to try again
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
    if unscheduled := condition(pod, "PodScheduled", status="False"):
        return f"instance {index} can't be scheduled: {message_of(unscheduled)}", False
    return "", False


def is_gated_by_queue(pod_or_template: Manifest) -> bool:
    """Whether Kueue has yet to admit a pod; for the template of a Job, whether it admits each of its pods."""
    gates = mappings_at(mapping_at(pod_or_template, "spec"), "schedulingGates")
    return any(gate.get("name") in names.QUEUE_GATES for gate in gates)


def _waiting(pod: Manifest) -> list[Manifest]:
    """Return the waiting containers of an instance that has not started, init containers included."""
    status = mapping_at(pod, "status")
    if mapping_at(container_status(pod), "state").keys() & {"running", "terminated"}:
        return []
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return [one for one in containers if mapping_at(one, "state", "waiting")]


def is_image_unpullable(reason: str, message: str) -> bool:
    """Whether a pull failed for good: the image needs another name or a pull secret."""
    return reason in _NEVER_PULLED or any(words in message.lower() for words in _NO_SUCH_IMAGE)


def _last_lines(terminated: Manifest | None) -> tuple[str, ...]:
    message = (terminated or {}).get("message") or ""
    return tuple(message.splitlines()[-LAST_LINES:]) if _result(terminated) is None else ()


def _result(terminated: Manifest | None) -> dict[str, Any] | None:
    """Return the result in the termination message, None if that is the end of the log."""
    message = (terminated or {}).get("message") or ""
    try:
        found = JsonDecoder(Any).decode(message)
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) and found.keys() - {"not_finite"} == {"checkpoint", "metrics"} else None


def _started(pod: Manifest, container: Manifest) -> float:
    for part in ("running", "terminated"):
        if started := unix_time(mapping_at(container, "state", part).get("startedAt")):
            return started
    return created_at(pod)


def created_at(thing: Manifest) -> float:
    return unix_time(thing["metadata"].get("creationTimestamp"))


def unix_time(text: str | None) -> float:
    """Return an ISO 8601 time, UTC by default, as Unix time; 0 for none."""
    if not text:
        return 0.0
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def message_of(condition: Manifest) -> str:
    return str(condition.get("message") or condition.get("reason", ""))


def condition(thing: Manifest, kind: str, *, status: str = "True") -> Manifest | None:
    conditions = mapping_at(thing, "status").get("conditions") or []
    return next((one for one in conditions if one.get("type") == kind and one.get("status") == status), None)
