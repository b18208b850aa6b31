"""What is said of a job, from objects as an API server has them (recorded, and cut to what matters)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from edl_runtime.backends.interface import SUSPENDED, InstanceStatus, JobStatus, Origin, Scaling
from edl_runtime.backends.kubernetes.job_status import (
    bounds,
    desired_instances,
    failed_indexes,
    has_ended,
    is_felt_when_suspended,
    job_status,
    lacks_pods,
    refusals,
    trainer_instances,
)
from edl_runtime.backends.kubernetes.kept_fields import read_owner, read_pod
from edl_runtime.backends.kubernetes.manifests import ownership
from edl_runtime.backends.kubernetes.pod_status import (
    POD_EVENT_SELECTOR,
    is_creating_containers,
    is_image_unpullable,
    start_delays,
)
from edl_runtime.specs import Bounds

NOW = 1795338600.0  # 2026-11-22T09:10:00Z
CREATED = "2026-11-22T09:08:44Z"
CREATED_AT = 1795338524.0
INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
DISRUPTIONS = "batch.kubernetes.io/job-index-ignored-failure-count"

RUNNING = {"running": {"startedAt": "2026-11-22T09:08:46Z"}}
PULL = (
    "rpc error: code = NotFound desc = failed to pull and unpack image: failed to resolve reference "
    '"docker.io/library/nothere:1": docker.io/library/nothere:1: not found'
)
NO_GPU = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
START = 'OCI runtime create failed: runc create failed: exec: "nosuchprogram": executable file not found in $PATH'
ROOT = 'breaks non-root policy (pod: "job-0_ml(1b4e)", container: instance)'
RESULT = {"checkpoint": "/data/1", "metrics": {"loss": 0.5}, "not_finite": {"accuracy": 7}}


def ended(exit_code: int, reason: str = "Error", message: str = "", at: str = "2026-11-22T09:08:48Z") -> dict[str, Any]:
    """A container's state that says how it ended."""
    told = {"message": message} if message else {}
    started = "2026-11-22T09:08:45Z"
    return {"terminated": {"exitCode": exit_code, "reason": reason, "startedAt": started, "finishedAt": at, **told}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, **({"message": message} if message else {})}}


def pod(index: int = 0, state: Any = None, phase: str = "Running", **more: Any) -> dict[str, Any]:
    """A pod; `state`: of its container, if it has one; `status`: more of its status; `lives`: those before it."""
    lives = more.pop("lives", 0)
    container = {"name": "instance", "image": "train:1", "state": state, "lastState": {}, "restartCount": 0}
    container |= more.pop("container", {})
    status = {"phase": phase, **({"containerStatuses": [container]} if state else {}), **more.pop("status", {})}
    annotations = {INDEX: str(index), FAILURES: str(lives), DISRUPTIONS: str(more.pop("disruptions", 0))}
    name = more.pop("name", f"job-{index}-{lives}")
    metadata = {"name": name, "creationTimestamp": more.pop("created", CREATED), "annotations": annotations}
    metadata |= {"deletionTimestamp": more.pop("deleted")} if "deleted" in more else {}
    spec = {"nodeName": more["node"]} if "node" in more else {}
    return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def unschedulable(index: int = 0) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_GPU}
    return pod(index, phase="Pending", status={"conditions": [condition]})


def gated(index: int = 0, gate: str = "kueue.x-k8s.io/elastic-job") -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "it has gates"}
    one = pod(index, phase="Pending", status={"conditions": [condition]})
    return {**one, "spec": {"schedulingGates": [{"name": gate}]}}


def owner(kind: str, size: int, **more: Any) -> dict[str, Any]:
    annotations = {
        "edl-airflow/started": "true",
        "edl-airflow/token": "me/1",
        "edl-airflow/digest": "d1",
        "edl-airflow/bounds": f"1:{max(size, 4)}",
        "edl-airflow/wanted": str(more.pop("wanted", size)),
        "edl-airflow/elastic": str(more.pop("elastic", False)).lower(),
        "edl-airflow/created-at": "1.5",
        "edl-airflow/cwd": "/work",
    }
    for name in ("priority", "weight", "resized_at"):
        if name in more:
            annotations[f"edl-airflow/{name.replace('_', '-')}"] = str(more.pop(name))
    if "most_disruptions" in more:
        annotations["edl-airflow/most-disruptions"] = str(more.pop("most_disruptions"))
    labels = {"edl-airflow/job": "job", **more.pop("labels", {})}
    metadata = {"name": "job", "creationTimestamp": CREATED, "labels": labels, "annotations": annotations}
    conditions = [{"type": name, "status": "True", **about} for name, about in more.pop("conditions", {}).items()]
    status = {"conditions": conditions, **more.pop("status", {})}
    return {"kind": kind, "metadata": metadata, "spec": more, "status": status}


def job(instances: int = 1, **more: Any) -> dict[str, Any]:
    completions = more.pop("completions", instances)
    return owner("Job", instances, **{"suspend": False, "completions": completions, "parallelism": completions, **more})


def pool(instances: int = 1, **more: Any) -> dict[str, Any]:
    return owner("Deployment", instances, **{"replicas": instances, **more})


def of(thing: dict[str, Any], *pods: dict[str, Any], now: float = NOW, refusals: tuple[str, ...] = ()) -> JobStatus:
    return job_status(kept_owner(thing), kept_pods(pods), now, refusals)


def kept_owner(thing: dict[str, Any]) -> dict[str, Any]:
    """A Job or Deployment as a cache has it."""
    return {**read_owner(msgspec.json.encode(thing)), "kind": thing["kind"]}


def kept_pods(pods: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [read_pod(msgspec.json.encode(pod)) for pod in pods]


def phases(status: JobStatus) -> list[tuple[int, str]]:
    return [(one.index, one.phase) for one in status.instances]


def test_a_job_tells_what_it_was_given() -> None:
    """From the annotations that were written when it was made."""
    pods = [pod(0, RUNNING), pod(1, RUNNING, disruptions=2, lives=1, node="n1")]
    status = of(job(2, elastic=True, most_disruptions=7), *pods)
    assert status == JobStatus(
        name="job",
        kind="trainer",
        phase="running",
        token="me/1",
        digest="d1",
        wanted=2,
        instances=(
            InstanceStatus(index=0, phase="running", started_at=CREATED_AT + 2, pod="job-0-0"),
            InstanceStatus(
                index=1, phase="running", started_at=CREATED_AT + 2, restarts=3, disruptions=2, pod="job-1-1", node="n1"
            ),
        ),
        scaling=Scaling(bounds=Bounds(1, 4), resources={"pods": 1.0}),
        created_at=1.5,
        elastic=True,
        cwd="/work",
        most_disruptions=7,
    )
    assert (of(pool()).kind, of(pool()).most_disruptions, of(job()).most_disruptions) == ("pool", None, 20)
    assert (desired_instances(job(2)), bounds(job(2))) == (2, Bounds(1, 4))


@pytest.mark.parametrize(
    ("given", "phase", "exit_code", "reason", "invalid_spec"),
    [
        pytest.param(pod(phase="Pending"), "pending", None, "", False, id="just made"),
        pytest.param(pod(0, waiting("ContainerCreating"), "Pending"), "pending", None, "", False, id="creating"),
        pytest.param(unschedulable(), "pending", None, f"instance 0 can't be scheduled: {NO_GPU}", False, id="no GPU"),
        pytest.param(gated(), "pending", None, "instance 0 waits in Kueue's queue", False, id="not admitted yet"),
        pytest.param(
            pod(0, waiting("ErrImagePull", "dial tcp 10.0.0.1:443: i/o timeout"), "Pending"),
            "pending", None, "instance 0 can't start: ErrImagePull: dial tcp 10.0.0.1:443: i/o timeout", False,
            id="registry away",
        ),
        pytest.param(
            pod(0, waiting("ImagePullBackOff", f'Back-off pulling image "nothere:1": ErrImagePull: {PULL}'), "Pending"),
            "pending", None, f"instance 0 can't start: ErrImagePull: {PULL}", True,
            id="no such image, and it waits to try again",
        ),
        pytest.param(
            pod(0, waiting("ErrImagePull", PULL), "Pending"),
            "pending", None, f"instance 0 can't start: ErrImagePull: {PULL}", True,
            id="no such image",
        ),
        pytest.param(
            pod(0, waiting("CreateContainerConfigError", 'secret "aws" not found'), "Pending"),
            "pending", None, 'instance 0 can\'t start: CreateContainerConfigError: secret "aws" not found', False,
            id="no such secret yet",
        ),
        pytest.param(
            pod(0, waiting("CreateContainerConfigError", f"container's runAsUser {ROOT}"), "Pending"),
            "pending", None, f"instance 0 can't start: CreateContainerConfigError: container's runAsUser {ROOT}", True,
            id="root where that must not be",
        ),
        pytest.param(
            pod(0, ended(128, "StartError", START), "Failed"),
            "failed", 128, f"instance 0 can't start: {START}", True,
            id="no such program",
        ),
        pytest.param(
            pod(0, ended(1, message="/usr/bin/python: No module named edl_runtime\n"), "Failed"),
            "failed", 1, "instance 0 can't start: its image train:1 has no edl_runtime", True,
            id="image without our runtime",
        ),
        pytest.param(
            pod(0, ended(1, message="edl: edl-airflow 0.7 can't run a job of 1.2 (No module named 'edl_runtime.a')\n"),
                "Failed"),
            "failed", 1, "instance 0 can't start: its image train:1 has edl-airflow 0.7, and 1.2 submitted it "
            "(No module named 'edl_runtime.a'): they have to be of one version", True,
            id="image with another version",
        ),
        pytest.param(
            pod(0, ended(1, message="edl: edl-airflow 1.2 can't run a job of 1.2 (No module named 'edl_runtime.a')\n"),
                "Failed"),
            "failed", 1, "instance 0 can't start: its image train:1 has another build of edl-airflow 1.2 "
            "(No module named 'edl_runtime.a'): they have to be of one version", True,
            id="image with another build",
        ),
        pytest.param(pod(0, ended(1), "Failed"), "failed", 1, "instance 0 exited with 1", False, id="bad exit"),
        pytest.param(pod(0, ended(78), "Failed"), "failed", 78, "instance 0 exited with 78", False, id="exit 78"),
        pytest.param(pod(0, ended(255), "Failed"), "failed", 255, "instance 0 exited with 255", False, id="exit 255"),
        pytest.param(
            pod(0, ended(139), "Failed"), "failed", -11, "instance 0 was killed by SIGSEGV", False, id="signal"
        ),
        pytest.param(
            pod(0, ended(137, "OOMKilled"), "Failed"),
            "failed", -9, "instance 0 was killed by SIGKILL (OOMKilled: it took more memory than its limit)", False,
            id="out of memory",
        ),
        pytest.param(
            pod(0, ended(137), "Failed", status={"reason": "Evicted", "message": "Usage exceeds the limit 1Mi. "}),
            "failed", -9, "instance 0 was killed by SIGKILL (Evicted: Usage exceeds the limit 1Mi.)", False,
            id="evicted for what it took",
        ),
        pytest.param(
            pod(phase="Failed", status={"reason": "Evicted", "message": "The node was low on resource: memory."}),
            "failed", None, "instance 0 was ended by the cluster (Evicted: The node was low on resource: memory.)",
            False,
            id="evicted before it had a container",
        ),
        pytest.param(
            pod(phase="Failed", status={"containerStatuses": None}),
            "failed", None, "instance 0 was ended by the cluster (no reason given)", False,
            id="failed for no reason",
        ),
    ],
)  # fmt: skip
def test_an_instance_says_what_is_wrong_with_it(
    given: dict[str, Any], phase: str, exit_code: int | None, reason: str, *, invalid_spec: bool
) -> None:
    """The phase, the exit status, the reason for people, and whether what it was given can't work."""
    status = of(job(2), given, pod(1, RUNNING))
    (instance, _) = status.instances
    assert (instance.phase, instance.exit_code) == (phase, exit_code)
    assert (status.reason, status.invalid_spec) == (reason, invalid_spec)
    assert status.phase == ("failed" if invalid_spec or exit_code is not None else "running")


TRIED = 'failed to pull and unpack image "train:1": failed to resolve reference "docker.io/library/train:1"'
THERE = "https://r/v2/train"
ASKED = f'{TRIED}: failed to do request: Head "{THERE}"'


@pytest.mark.parametrize(
    ("reason", "message", "never"),
    [
        ("InvalidImageName", "Failed to apply default image tag", True),
        ("ErrImageNeverPull", "Container image is not present with pull policy of Never", True),
        ("ErrImagePull", f"rpc error: code = NotFound desc = {TRIED}: docker.io/library/train:1: not found", True),
        ("ErrImagePull", "pull access denied, repository does not exist or may require authorization", True),
        ("ErrImagePull", f"{TRIED}: unexpected status from HEAD request to {THERE}: 401 Unauthorized", True),
        ("ErrImagePull", f"{TRIED}: failed to fetch oauth token: unexpected status: 403 Forbidden", True),
        ("ImagePullBackOff", "Back-off pulling image: ErrImagePull: reading manifest 1: manifest unknown", True),
        ("ErrImagePull", f"{TRIED}: no match for platform in manifest: not found", True),
        ("ErrImagePull", f"{ASKED}: dial tcp: lookup r on 10.0.0.1:53: no such host", False),
        ("ErrImagePull", f"{ASKED}: dial tcp 10.0.0.2:443: i/o timeout", False),
        ("ErrImagePull", f"{ASKED}: dial tcp 10.0.0.2:443: connect: connection refused", False),
        ("ErrImagePull", f"{TRIED}: unexpected status from HEAD request to {THERE}: 503 Service Unavailable", False),
        ("ErrImagePull", f"{TRIED}: 429 Too Many Requests - You have reached your pull rate limit", False),
        ("ErrImagePull", 'Back-off pulling image "registry.example/notfound:1"', False),
    ],
)
def test_only_a_registry_that_answers_that_there_is_none_ends_the_wait(
    reason: str, message: str, *, never: bool
) -> None:
    """The image has to be given another name, or the pod a pull secret; one that does not answer may do so soon."""
    assert is_image_unpullable(reason, message) is never


MOUNT = 'MountVolume.SetUp failed for volume "v" : secret "nosuch" not found'
SANDBOX = "Failed to create pod sandbox: no IP addresses available in range set"


def event(reason: str, message: str, second: int, of_pod: str = "job-0-0", **more: Any) -> dict[str, Any]:
    """An event of a pod, told last at that second."""
    at = {"lastTimestamp": f"2026-11-22T09:08:{second:02}Z", "eventTime": None}
    return {
        "involvedObject": {"kind": "Pod", "uid": f"uid-{of_pod}"},
        "reason": reason,
        "message": message,
        **at,
        **more,
    }


def placed(index: int = 0, state: Any = None, phase: str = "Pending", **more: Any) -> dict[str, Any]:
    """A pod that has its node and no container yet."""
    made = pod(index, state or waiting("ContainerCreating"), phase, node="n1", **more)
    made["metadata"]["uid"] = f"uid-{made['metadata']['name']}"
    return made


def with_events(thing: dict[str, Any], events: list[dict[str, Any]], *pods: dict[str, Any]) -> JobStatus:
    return job_status(kept_owner(thing), kept_pods(pods), NOW, (), start_delays(events, kept_pods(pods)))


@pytest.mark.parametrize("kind", [job, pool])
def test_an_instance_that_is_not_made_yet_tells_why_by_its_events(kind: Any) -> None:
    """By the newest of its own pod; that is no failure, whatever it is."""
    events = [event("FailedCreatePodSandBox", SANDBOX, 9), event("FailedMount", MOUNT, 7)]
    others = [event("FailedMount", "of another pod", 30, "other")]
    for told in ([*events, *others], [*others, *events[::-1]]):
        status = with_events(kind(), told, placed())
        said = f"instance 0 can't start yet: FailedCreatePodSandBox: {SANDBOX}"
        assert (status.phase, status.reason, status.invalid_spec) == ("running", said, False)
        assert [(one.phase, one.reason) for one in status.instances] == [("pending", said)]
    assert with_events(kind(), [], placed()).reason == ""


def test_the_newest_event_is_found_by_either_of_its_times() -> None:
    """Newer writers leave the last time out, and write parts of a second."""
    first, last = event("FailedMount", MOUNT, 7), event("FailedAttachVolume", "in use", 0, lastTimestamp=None)
    last["eventTime"] = "2026-11-22T09:08:07.500000Z"
    assert with_events(job(), [last, first], placed()).reason.endswith("FailedAttachVolume: in use")
    timeless = event("FailedMount", "old", 0, lastTimestamp=None)
    assert with_events(job(), [first, timeless], placed()).reason.endswith(MOUNT)


@pytest.mark.parametrize(
    ("reason", "is_told"),
    [
        ("FailedMount", True),
        ("FailedAttachVolume", True),
        ("FailedMapVolume", True),
        ("FailedCreatePodSandBox", True),
        ("NetworkNotReady", True),
        ("FailedScheduling", False),  # that is over, as the pod has its node
        ("FailedToRetrieveImagePullSecret", False),  # the image may be there for all
        ("Failed", False),  # the container says so itself
        ("DNSConfigForming", False),  # that keeps nothing from starting
        ("PolicyViolation", False),
        ("Pulling", False),
        ("SuccessfulAttachVolume", False),
    ],
)
def test_only_events_tell_that_keep_a_container_from_being_made(reason: str, *, is_told: bool) -> None:
    """Neither those of what was before, nor warnings of something else."""
    assert bool(with_events(job(), [event(reason, "words", 9)], placed()).reason) == is_told
    assert (f"reason!={reason}," in f"{POD_EVENT_SELECTOR},") <= (not is_told)


def test_an_image_that_is_being_pulled_ends_what_was_before() -> None:
    """Volumes are mounted by then, though the pod says until it has its image that nothing of it is ready."""
    before = event("FailedMount", MOUNT, 7)
    for second in (7, 8):
        for events in ([before, event("Pulling", "", second)], [event("Pulling", "", second), before]):
            assert with_events(job(), events, placed()).reason == ""
    again = [before, event("Pulling", "", 8), event("FailedCreatePodSandBox", SANDBOX, 9)]
    assert with_events(job(), again, placed()).reason.endswith(SANDBOX)


def test_a_reason_stays_the_same_from_try_to_try() -> None:
    """So it is no news in a task's log each time, though each sandbox has an id of its own."""
    words = 'Failed to create pod sandbox: failed to setup network for sandbox "{}": no IP addresses available'
    told = {
        with_events(job(), [event("FailedCreatePodSandBox", f"{before}{words.format(one * 64)}", 9)], placed()).reason
        for one in "a1f"
        for before in ("", "(combined from similar events): ")
    }
    assert told == {f"instance 0 can't start yet: FailedCreatePodSandBox: {words.format('...')}"}


READY = {"type": "PodReadyToStartContainers", "status": "True"}


@pytest.mark.parametrize(
    ("given", "is_made"),
    [
        pytest.param(placed(), False, id="creating"),
        pytest.param(placed(0, waiting("PodInitializing")), False, id="initializing"),
        pytest.param(placed(status={"containerStatuses": None}), False, id="no word of containers"),
        pytest.param(
            placed(status={"conditions": [{**READY, "status": "False"}]}), False, id="not ready for containers"
        ),
        pytest.param(placed(status={"conditions": [READY]}), True, id="ready for containers"),
        pytest.param(placed(0, RUNNING, "Running"), True, id="runs"),
        pytest.param(placed(0, waiting("ContainerCreating"), "Running"), True, id="comes again"),
        pytest.param(placed(0, ended(1), "Failed"), True, id="has ended"),
        pytest.param(placed(0, waiting("PodInitializing"), "Failed"), True, id="evicted before"),
        pytest.param(placed(0, waiting("ImagePullBackOff", "later")), True, id="tells a problem itself"),
        pytest.param(
            placed(0, waiting("PodInitializing"), status={"initContainerStatuses": [{"state": RUNNING}]}),
            True,
            id="an init container runs",
        ),
        pytest.param(unschedulable(), True, id="no node"),
        pytest.param(pod(0, waiting("ContainerCreating"), "Pending"), True, id="no node yet"),
    ],
)  # fmt: skip
def test_events_tell_only_of_pods_that_have_no_container_yet(given: dict[str, Any], *, is_made: bool) -> None:
    """They are kept for an hour, so all others have outlived them."""
    given["metadata"]["uid"] = "uid-job-0-0"
    assert is_creating_containers(given) is not is_made
    events = [event("FailedMount", MOUNT, 7)]
    assert ("can't start yet" in with_events(job(), events, given).reason) is not is_made


def test_what_delays_an_instance_is_told_after_all_other_troubles() -> None:
    """Each instance has its own reason; the job's is the one that needs somebody, and of one that failed that alone."""
    events = [event("FailedMount", MOUNT, 7)]
    waits = placed()
    status = with_events(job(2), events, waits, unschedulable(1))
    assert status.reason == f"instance 1 can't be scheduled: {NO_GPU}"
    assert status.instances[0].reason == f"instance 0 can't start yet: FailedMount: {MOUNT}"
    failing = job(2, conditions={"FailureTarget": {"reason": "PodFailurePolicy", "message": "exit code 1"}})
    assert with_events(failing, events, waits).reason == "exit code 1"
    replaced = {**waits, "status": {**waits["status"], "conditions": [EVICTED]}}
    assert "is replaced" in with_events(job(), events, replaced).instances[0].reason


FETCH = {"name": "fetch", "image": "fetch:1", "lastState": {}, "restartCount": 0}


@pytest.mark.parametrize(
    ("before", "phase", "reason", "invalid_spec", "last_lines"),
    [
        (
            ended(4, message="no data\n"), "Failed",
            "instance 0 can't start: its init container 'fetch' exited with 4", False, ("no data",),
        ),
        (
            waiting("ErrImageNeverPull", "Container image is not present"), "Pending",
            "instance 0 can't start: container 'fetch': ErrImageNeverPull: Container image is not present", True, (),
        ),
        (
            waiting("CrashLoopBackOff", "back-off 10s restarting failed container"), "Pending",
            "instance 0 can't start: container 'fetch': CrashLoopBackOff: back-off 10s restarting failed container",
            False, (),
        ),
        (ended(0, "Completed"), "Pending", "", False, ()),
        (RUNNING, "Pending", "", False, ()),
    ],
)  # fmt: skip
def test_an_instance_that_waits_for_another_container_says_so(
    before: dict[str, Any], phase: str, reason: str, last_lines: tuple[str, ...], *, invalid_spec: bool
) -> None:
    """Init containers come from templates; the instance itself only knows that it waits."""
    status = {"initContainerStatuses": [{**FETCH, "state": before}]}
    found = of(job(), pod(0, waiting("PodInitializing"), phase, status=status))
    assert (found.reason, found.invalid_spec, found.last_lines) == (reason, invalid_spec, last_lines)
    assert found.instances[0].phase == phase.lower()


def test_another_container_that_waits_is_no_trouble_of_an_instance_that_runs() -> None:
    """The training goes on."""
    status = of(
        job(), pod(0, RUNNING, status={"initContainerStatuses": [{**FETCH, "state": waiting("ErrImageNeverPull")}]})
    )
    assert (status.phase, status.reason, status.invalid_spec) == ("running", "", False)


@pytest.mark.parametrize("nothing", [None, "missing"])
def test_what_is_missing_or_null_is_no_reason_to_fail(nothing: str | None) -> None:
    """A pod that was just made has no status, and other writers leave out what they like."""

    def holes(*names: str) -> dict[str, Any]:
        return {} if nothing else dict.fromkeys(names)

    bare = {"metadata": {"name": "p", **holes("annotations", "creationTimestamp")}, **holes("status")}
    thin = {**bare, "status": holes("containerStatuses", "conditions", "initContainerStatuses", "phase")}
    slim = {**bare, "status": {"containerStatuses": [{"name": "instance", **holes("state", "lastState")}]}}
    for each in (bare, thin, slim):
        assert phases(of(job(), each)) == phases(of(pool(), each)) == [(0, "pending")]
        assert of(job(), each).instances[0].started_at == 0
    unmarked = {"name": "job", "labels": {"edl-airflow/job": "job"}, **holes("annotations", "creationTimestamp")}
    strange = {**job(3), "metadata": unmarked, **holes("status")}
    assert (of(strange).wanted, of(strange).created_at, of(strange).phase) == (3, 0, "running")
    assert not has_ended(strange)


@pytest.mark.parametrize("text", ["2026-11-22T09:08:46Z", "2026-11-22T09:08:46", "2026-11-22T10:08:46+01:00"])
def test_times_are_those_of_utc(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever whoever reads them is."""
    import time

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert of(job(), pod(0, {"running": {"startedAt": text}})).instances[0].started_at == CREATED_AT + 2
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_job_is_pending_while_it_is_suspended() -> None:
    """With the name of the queue that it waits in, if it is Kueue's."""
    assert (of(job(suspend=True)).phase, of(job(suspend=True)).reason) == ("pending", "suspended")
    queued = job(suspend=True, labels={"kueue.x-k8s.io/queue-name": "gpus"})
    assert of(queued).reason == "suspended: it waits in Kueue's queue 'gpus'"
    assert of(job(labels={"kueue.x-k8s.io/queue-name": "gpus"})).reason == ""


def workload(created: int = 0, **conditions: tuple[str, str]) -> dict[str, Any]:
    """One of Kueue's, as old as the second says; conditions: each with its status and message."""
    found = [{"type": name, "status": status, "message": message} for name, (status, message) in conditions.items()]
    return {"metadata": {"creationTimestamp": f"2026-11-22T09:08:{created:02}Z"}, "status": {"conditions": found}}


NO_QUOTA = "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor default, 1 more needed"
PREEMPTED = "Preempted to accommodate a workload (UID: 7) due to prioritization in the ClusterQueue"
ADMITTED = workload(QuotaReserved=("True", "Quota reserved"), Admitted=("True", "The workload is admitted"))
WAITS = workload(1, QuotaReserved=("False", NO_QUOTA))
IN_QUEUE = {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}}


@pytest.mark.parametrize(
    ("workloads", "why"),
    [
        ([], ""),
        ([WAITS], f": {NO_QUOTA}"),
        ([workload(Evicted=("True", PREEMPTED), QuotaReserved=("False", PREEMPTED))], f": {PREEMPTED}"),
        ([workload(Evicted=("True", PREEMPTED), QuotaReserved=("False", NO_QUOTA))], f": {PREEMPTED}; {NO_QUOTA}"),
        ([workload(QuotaReserved=("True", ""), Admitted=("False", "It has checks."))], ": It has checks"),
        ([workload(3, Finished=("True", "replaced"), QuotaReserved=("False", "old")), WAITS], f": {NO_QUOTA}"),
    ],
    ids=["Kueue says nothing", "no quota", "just preempted", "preempted", "not checked", "an ended one"],
)
def test_a_job_that_waits_in_a_queue_says_why(workloads: list[dict[str, Any]], why: str) -> None:
    """By what Kueue says of its newest Workload that is not admitted."""
    found = job_status(job(suspend=True, **IN_QUEUE), [], NOW, workloads=workloads)
    assert (found.phase, found.reason) == ("pending", f"suspended: it waits in Kueue's queue 'gpus'{why}")


def test_a_job_that_grows_in_a_queue_says_how_many_wait() -> None:
    """A pool's pods wait one by one, behind another gate."""
    there = [pod(0, RUNNING), pod(1, RUNNING)]
    grows = job_status(job(4, **IN_QUEUE), [*there, gated(2), gated(3)], NOW, workloads=[ADMITTED, WAITS])
    assert (grows.phase, grows.reason) == ("running", f"2 of 4 run; 2 wait in Kueue's queue 'gpus': {NO_QUOTA}")
    teachers = [*there, gated(2, "kueue.x-k8s.io/admission")]
    grows = job_status(pool(3, **IN_QUEUE), teachers, NOW, workloads=[WAITS])
    assert (grows.phase, grows.reason) == ("running", f"2 of 3 run; 1 waits in Kueue's queue 'gpus': {NO_QUOTA}")
    assert job_status(job(2, **IN_QUEUE), there, NOW, workloads=[ADMITTED]).reason == ""


QUOTA = 'pods "job-1" is forbidden: exceeded quota: tight, requested: pods=1, used: pods=1, limited: pods=1'
SECURITY = 'pods "job-1" is forbidden: violates PodSecurity "restricted:latest": host namespaces (hostNetwork=true)'


def refused(*told: tuple[int, str], made: tuple[int, ...] = ()) -> JobStatus:
    """Return the status of a job of two whose pods were refused and made, all at seconds of the same minute."""
    events = [{"lastTimestamp": f"2026-11-22T09:08:{second:02}Z", "message": message} for second, message in told]
    pods = [pod(index, RUNNING, created=f"2026-11-22T09:08:{second:02}Z") for index, second in enumerate(made)]
    return of(job(2), *pods, refusals=tuple(refusals(events, pods)))


def test_pods_that_cannot_be_created_are_told_of() -> None:
    """As when the quota is used up; a Deployment says so itself, of a Job only events do, of which the last counts."""
    quota = f"its pods can't be created: {QUOTA}"
    in_force = pool(conditions={"ReplicaFailure": {"reason": "FailedCreate", "message": QUOTA}})
    for status in (refused((2, QUOTA), (1, "no such service account")), of(in_force)):
        assert (status.phase, status.reason, status.invalid_spec) == ("running", quota, False)
    assert of(job(conditions={"Complete": {}}), refusals=("old",)).reason == ""


@pytest.mark.parametrize(
    ("thing", "pods", "lacks"),
    [(job(2), 1, True), (job(2), 2, False), (job(2), 3, False), (job(2, suspend=True), 1, False), (pool(2), 1, False)],
)
def test_only_a_job_that_lacks_pods_is_asked_why(thing: dict[str, Any], pods: int, *, lacks: bool) -> None:
    """Its events cost a request; a Deployment says it itself, and a suspended Job wants none."""
    assert lacks_pods(thing, [pod(index) for index in range(pods)]) is lacks


def test_a_refusal_from_before_the_newest_pod_is_not_told() -> None:
    """The cluster keeps events for an hour; since then it has created a pod, whichever of the job's that is."""
    for made in ((3, 9), (9, 3), (9,)):
        assert refused((6, QUOTA), made=made).reason == ""
    for made in ((3, 6), (3,)):
        assert refused((6, QUOTA), made=made).reason.endswith(QUOTA)


def test_what_is_refused_for_ever_fails_a_job_that_has_no_pods() -> None:
    """Nobody can mend it but whoever wrote the job; what has begun before goes on, as a rule may have come later."""
    status = refused((1, SECURITY))
    assert (status.phase, status.invalid_spec) == ("failed", True)
    status = refused((2, SECURITY), made=(1,))
    assert (status.phase, status.invalid_spec) == ("running", False)
    assert SECURITY in status.reason


def test_a_job_has_succeeded_when_it_says_so() -> None:
    """Also if its pods are gone, and only then: the last one may just have ended."""
    all_done = [pod(0, ended(0, "Completed"), "Succeeded"), pod(1, ended(0, "Completed"), "Succeeded")]
    assert of(job(2), *all_done).phase == "running"
    assert phases(of(job(2), *all_done)) == [(0, "succeeded"), (1, "succeeded")]
    done = job(2, conditions={"Complete": {}}, status={"completedIndexes": "0-1"})
    assert has_ended(done)
    assert [of(done, *pods).phase for pods in (all_done, all_done[:1], [])] == ["succeeded"] * 3


@pytest.mark.parametrize(("kind", "elastic"), [("Failed", False), ("FailureTarget", False), ("FailureTarget", True)])
def test_a_job_that_failed_by_its_policy_tells_of_the_instance_that_did_it(kind: str, *, elastic: bool) -> None:
    """Others were deleted, or just are; without any pod the Job's own words have to do."""
    conditions = {kind: {"reason": "PodFailurePolicy", "message": "Container instance failed with 1"}}
    failed = job(3, elastic=elastic, conditions=conditions)
    culprit = pod(1, ended(1, message="Traceback\nValueError: bad\n"), "Failed")
    others = [pod(0, ended(143), "Failed"), pod(2, RUNNING)]
    for pods in ([culprit], [*others, culprit]):
        status = of(failed, *pods)
        assert (status.phase, status.reason) == ("failed", "instance 1 exited with 1")
        assert status.last_lines == ("Traceback", "ValueError: bad")
    assert (of(failed).phase, of(failed).reason) == ("failed", "Container instance failed with 1")


def test_a_job_that_failed_has_not_succeeded_for_an_instance_that_did() -> None:
    """The pod of the other may be gone with its node."""
    failed = job(2, conditions={"Failed": {"reason": "PodFailurePolicy", "message": "exit code 1"}})
    status = of(failed, pod(0, ended(0, "Completed"), "Succeeded"))
    assert (status.phase, status.reason) == ("failed", "exit code 1")


@pytest.mark.parametrize(
    ("elastic", "exit_code", "phase"),
    [
        (False, 1, "failed"),
        (False, 78, "failed"),
        (False, 143, "running"),  # it was told to go, and comes again
        (False, 137, "failed"),
        (True, 1, "failed"),
        (True, 65, "failed"),
        (True, 78, "running"),
        (True, 143, "running"),
        (True, 137, "running"),
    ],
)
def test_a_bad_end_of_an_instance_is_one_of_the_job_or_of_it_alone(
    exit_code: int, phase: str, *, elastic: bool
) -> None:
    """As the Job's own policy has it, before the Job says so."""
    assert of(job(2, elastic=elastic), pod(0, ended(exit_code), "Failed"), pod(1, RUNNING)).phase == phase


HELD = "job 'nightly' has used the checkpoint folder /data since 9:00"
CONFIG = "command: got 'train.py', allowed is a script that can be read"


@pytest.mark.parametrize(
    ("exit_code", "message", "why"),
    [
        (65, f"step 1\nedl: instance 0: {HELD}\n", f"exited with 65: {HELD}"),
        (78, f"edl: {CONFIG}\n", f"exited with 78, which says that it can never work as configured: {CONFIG}"),
        (65, "no such data\n", "exited with 65: no such data"),
    ],
)
def test_an_elastic_job_that_fails_says_what_its_agent_said(exit_code: int, message: str, why: str) -> None:
    """As on this machine: how it exited explains nothing to a person."""
    failed = {} if exit_code == 65 else {"status": {"failedIndexes": "0"}, "conditions": {"Failed": {}}}
    status = of(job(1, elastic=True, **failed), pod(0, ended(exit_code, message=message), "Failed"))
    assert (status.phase, status.why) == ("failed", f"instance 0 {why}")
    assert (status.reason == status.why) == ("edl: " in message)


def test_an_elastic_job_goes_on_without_those_that_were_given_up() -> None:
    """They are shown until others take their place; the job succeeds with the rest, though its Job has failed."""
    given_up = pod(1, ended(78, message="no such data\n"), "Failed")
    status = of(job(3, elastic=True, status={"failedIndexes": "1"}), pod(0, RUNNING), given_up, pod(2, RUNNING))
    assert (status.phase, status.attainable) == ("running", 2)
    assert status.instances[1].given_up
    assert status.reason == "instance 1 exited with 78, which says that it can never work as configured"
    assert status.last_lines == ("no such data",)
    done = [pod(index, ended(0, "Completed"), "Succeeded") for index in (0, 2)]
    over = {"failedIndexes": "1", "completedIndexes": "0,2"}
    failed = {"Failed": {"reason": "FailedIndexes", "message": "Job has failed indexes"}}
    assert of(job(3, elastic=True, conditions=failed, status=over), done[0], given_up, done[1]).phase == "succeeded"
    assert of(job(3, elastic=True, conditions=failed, status=over), done[0], given_up).phase == "failed"


def test_an_elastic_job_that_is_about_to_end_has_not_failed_for_those_that_were_given_up() -> None:
    """The Job says so in advance, when it may not be known yet that the others have succeeded."""
    given_up = pod(1, ended(78, message="no such data\n"), "Failed")
    ending = {"FailureTarget": {"reason": "FailedIndexes", "message": "Job has failed indexes"}}
    over = {"failedIndexes": "1", "completedIndexes": "0"}
    assert of(job(2, elastic=True, conditions=ending, status=over), pod(0, RUNNING), given_up).phase == "running"
    assert of(job(2, conditions=ending, status=over), pod(0, RUNNING), given_up).phase == "failed"


def test_those_given_up_are_counted_also_when_their_pods_are_gone() -> None:
    """A node takes its pods along, and nobody should wait for an instance that never comes."""
    status = of(job(2, elastic=True, status={"failedIndexes": "1"}), pod(0, RUNNING))
    assert phases(status) == [(0, "running"), (1, "failed")]
    assert (status.phase, status.attainable) == ("running", 1)
    assert status.reason == "instance 1 was given up, and its pod is gone"
    assert [one.started_at for one in status.instances] == [CREATED_AT + 2, CREATED_AT]
    resumed = {"failedIndexes": "1", "startTime": "2026-11-22T09:08:45Z"}
    assert of(job(2, elastic=True, status=resumed), pod(0, RUNNING)).instances[1].started_at == CREATED_AT + 1


@pytest.mark.parametrize(
    ("completions", "wanted_now", "failed", "indexes"),
    [
        (3, 3, "", [0, 1, 2]),
        (4, 3, "0", [1, 2, 3]),  # 3 has taken the place of 0
        (3, 3, "0", [0, 1, 2]),
        (4, 3, "0-1", [1, 2, 3]),  # and nothing that of 1
        (2, 2, "", [0, 1]),  # 2 and 3 have left
        (3, 3, "1,3", [0, 1, 2]),  # 3 was given up, and has left
    ],
)
def test_shown_are_those_that_count(completions: int, wanted_now: int, failed: str, indexes: list[int]) -> None:
    """Neither those that others have taken the place of, nor those that have left."""
    ends = set(failed_indexes({"status": {"failedIndexes": failed}}))
    pods = [
        pod(index, ended(78), "Failed") if index in ends else pod(index, *over)
        for index in range(4)
        for over in [(ended(143), "Failed") if index >= completions else (RUNNING,)]
    ]
    resized = job(wanted_now, completions=completions, elastic=True, status={"failedIndexes": failed})
    seen = trainer_instances(resized, pods)
    assert [one.status.index for one in seen] == indexes
    assert [one.status.index for one in seen if one.status.given_up] == [index for index in indexes if index in ends]


def test_who_has_been_told_to_leave_says_so() -> None:
    """By a resize, a drain or an eviction alike; where it is stays known until it is gone."""
    pods = [pod(0, RUNNING, node="n1"), pod(1, RUNNING, node="n1", deleted="2026-11-22T09:09:44Z")]
    for thing in (job(2), pool(2)):
        told = [(one.node, one.leaving) for one in of(thing, *pods).instances]
        assert told == [("n1", False), ("n1", True)]


def test_of_several_pods_of_an_instance_the_newest_speaks() -> None:
    """By how often it has been started, whatever their order and age in seconds."""
    pods = [
        pod(0, ended(143), "Failed", lives=0),
        pod(0, RUNNING, lives=2, disruptions=1),
        pod(0, ended(137), "Failed", lives=2),
        pod(0, ended(143), "Failed", lives=1, created="2026-11-22T09:09:59Z"),
    ]
    for some in (pods, pods[::-1]):
        (instance,) = of(job(), *some).instances
        assert (instance.phase, instance.restarts) == ("running", 3)


def test_an_instance_that_kept_ending_says_how_often() -> None:
    """Its lives are counted over all pods that it had."""
    status = of(job(2, status={"failedIndexes": "0"}), pod(0, ended(143), "Failed", lives=4), pod(1, RUNNING))
    assert (status.phase, status.reason) == (
        "failed",
        "instance 0 ended 5 times, the last time it was killed by SIGTERM",
    )


EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "evicting"}
PREEMPTED = {**EVICTED, "reason": "PreemptionByScheduler", "message": "preempted by high"}


def hit(index: int, before: int, condition: Any = EVICTED, state: Any = RUNNING, phase: str = "Running") -> Any:
    """A pod that the cluster is ending, the successor of `before` that it has ended."""
    return pod(index, state, phase, disruptions=before, status={"conditions": [condition]})


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize(("state", "phase"), [(RUNNING, "Running"), (ended(1), "Failed"), (None, "Failed")])
def test_what_the_cluster_ends_is_counted_and_replaced(state: Any, phase: str, *, elastic: bool) -> None:
    """From the moment that it says so, whatever the instance makes of it."""
    status = of(job(2, elastic=elastic, most_disruptions=3), pod(0, RUNNING), hit(1, 2, PREEMPTED, state, phase))
    told = "instance 1 was ended by the cluster (preempted by high) and is replaced: 3 of at most 3"
    assert (status.phase, status.reason, status.is_disrupted) == ("running", told, False)
    assert [(one.disruptions, one.disrupted, one.reason) for one in status.instances] == [
        (0, False, ""),
        (3, True, told),
    ]


@pytest.mark.parametrize("elastic", [False, True])
def test_what_the_cluster_ends_too_often_fails_the_job(*, elastic: bool) -> None:
    """That is nobody's mistake. Its successor still knows, though the pod that tells why is gone."""
    limited = job(2, elastic=elastic, most_disruptions=2)
    said = "instance 0 was evicted, preempted or lost with its node 3 times, and pod.disruptions is 2"
    for given, reason in ((hit(0, 2), f"{said}; the last time: evicting"), (pod(0, RUNNING, disruptions=3), said)):
        status = of(limited, given, pod(1, RUNNING))
        assert (status.phase, status.reason) == ("failed", reason)
        assert (status.is_disrupted, status.invalid_spec, status.failed_permanently) == (True, False, False)
    assert of(job(2, elastic=elastic, most_disruptions=0), hit(0, 0), pod(1, RUNNING)).phase == "failed"


def test_what_the_cluster_ends_is_no_mistake_of_the_jobs() -> None:
    """Its successor may find what it lacked, as an image that is there on another node."""
    bare = ended(1, message="No module named edl_runtime")
    assert of(job(), hit(0, 0, state=bare, phase="Failed")).phase == "running"
    assert not of(job(), hit(0, 0, state=bare, phase="Failed")).invalid_spec


def test_who_has_done_its_work_meanwhile_does_not_fail_the_job() -> None:
    """It is neither replaced nor counted."""
    done = hit(0, 2, state=ended(0, "Completed"), phase="Succeeded")
    over = pod(1, ended(0, "Completed"), "Succeeded", disruptions=9)
    status = of(job(2, most_disruptions=2), done, over)
    assert (status.phase, status.reason) == ("running", "")
    assert [(one.disruptions, one.disrupted) for one in status.instances] == [(2, False), (9, False)]
    assert of(job(2, most_disruptions=2, conditions={"Complete": {}}), over).phase == "succeeded"


def test_a_bad_exit_counts_before_what_the_cluster_did() -> None:
    """It is what the user can mend."""
    status = of(job(2, most_disruptions=0), hit(0, 0), pod(1, ended(1), "Failed"))
    assert (status.phase, status.reason) == ("failed", "instance 1 exited with 1")


@pytest.mark.parametrize(("state", "phase"), [(RUNNING, "Running"), (ended(1), "Running")])
def test_a_pool_is_never_ended_too_often(state: Any, phase: str) -> None:
    """Another teacher takes the place of each, so it tells and goes on, also with nobody for a while."""
    for pods in ([], [pod(0, RUNNING, name="b", created="2026-11-22T09:09:00Z")]):
        status = of(pool(2), hit(0, 0, PREEMPTED, state, phase), *pods)
        told = "instance 0 was ended by the cluster (preempted by high) and is replaced"
        assert (status.phase, status.reason) == ("running", told)
        assert (status.instances[0].disrupted, status.instances[0].disruptions) == (True, 1)


def test_the_newest_result_is_that_of_the_job() -> None:
    """By when its instance ended, of two at once the higher index; one without a time is the oldest."""

    def result(index: int, loss: float, at: str) -> dict[str, Any]:
        text = json.dumps({"checkpoint": "", "metrics": {"loss": loss}})
        return pod(index, ended(0, "Completed", text, at), "Succeeded")

    first = result(0, 0.1, "2026-11-22T09:08:48Z")
    second = result(1, 0.2, "2026-11-22T09:08:48Z")
    third = result(2, 0.3, "2026-11-22T09:08:47Z")
    timeless = result(3, 0.4, "")
    for pods in ([first, second, third, timeless], [timeless, third, second, first]):
        assert of(job(4), *pods).result == {"checkpoint": "", "metrics": {"loss": 0.2}}


@pytest.mark.parametrize(
    ("message", "result", "last_lines"),
    [
        (json.dumps(RESULT), RESULT, ()),
        ("one\ntwo\n", None, ("one", "two")),
        ('{"loss": 1}', None, ('{"loss": 1}',)),
        ("[]", None, ("[]",)),
        ('{"checkpoint": "", "met', None, ('{"checkpoint": "", "met',)),
        ("[" * 4096, None, ("[" * 4096,)),
        ("\n".join(map(str, range(50))), None, tuple(map(str, range(20, 50)))),
        ("", None, ()),
    ],
)
def test_a_message_is_a_result_or_the_end_of_a_log(message: str, result: Any, last_lines: tuple[str, ...]) -> None:
    """Whichever the container left."""
    status = of(job(), pod(0, ended(1, message=message), "Failed"))
    assert (status.result, status.last_lines) == (result, last_lines)


def replica(name: str, state: Any, **more: Any) -> dict[str, Any]:
    return pod(0, state, name=name, **more)


def crashed(exit_code: int, restarts: int, message: str = "bad\n", **state: Any) -> dict[str, Any]:
    """An instance of a pool that keeps ending, as it is between two lives."""
    container = {"restartCount": restarts, "lastState": ended(exit_code, message=message)}
    return replica("a", state or waiting("CrashLoopBackOff", "back-off 40s"), container=container)


@pytest.mark.parametrize(
    ("given", "phase", "instance", "reason"),
    [
        pytest.param(crashed(3, 1), "running", ("failed", 3, False), "", id="it comes again"),
        pytest.param(
            crashed(3, 4), "failed", ("failed", 3, False), "instance 0 ended 5 times, the last time it exited with 3",
            id="too often",
        ),
        pytest.param(crashed(75, 9), "running", ("pending", None, False), "", id="drained, and the next one begins"),
        pytest.param(crashed(3, 4, **RUNNING), "running", ("running", None, False), "", id="up again"),
        pytest.param(
            crashed(78, 1), "failed", ("failed", 78, True),
            "instance 0 exited with 78, which says that it can never work as configured",
            id="exit 78",
        ),
        pytest.param(
            crashed(78, 1, running={"startedAt": "2026-11-22T09:09:55Z"}), "failed", ("failed", 78, True),
            "instance 0 exited with 78, which says that it can never work as configured",
            id="exit 78, and tried again just now",
        ),
        pytest.param(
            crashed(78, 1, **RUNNING), "running", ("running", None, False), "", id="exit 78 once, and it has settled"
        ),
        pytest.param(
            crashed(1, 1, "No module named edl_runtime"), "failed", ("failed", 1, False),
            "instance 0 can't start: its image train:1 has no edl_runtime",
            id="image without our runtime",
        ),
        pytest.param(
            replica("a", waiting("ErrImagePull", PULL), phase="Pending"), "failed", ("pending", None, False),
            f"instance 0 can't start: ErrImagePull: {PULL}",
            id="no such image",
        ),
        pytest.param(
            replica("a", waiting("ContainerCreating"), phase="Pending"), "running", ("pending", None, False), "",
            id="creating",
        ),
    ],
)  # fmt: skip
def test_a_pool_fails_when_it_has_no_instance_to_go_on_with(
    given: dict[str, Any], phase: str, instance: tuple[str, int | None, bool], reason: str
) -> None:
    """With another one that works it goes on, and still says what is wrong."""
    status = of(pool(), given)
    (one,) = status.instances
    assert (status.phase, status.reason) == (phase, reason)
    assert (one.phase, one.exit_code, one.given_up) == instance
    assert status.last_lines == (("bad",) if reason and instance[1] in (3, 78) else status.last_lines)
    both = of(pool(2), given, replica("b", RUNNING))
    assert (both.phase, both.reason) == ("running", reason)


def test_a_pool_without_an_instance_to_go_on_with_tells_of_the_youngest() -> None:
    """It was the last to be tried."""
    older, younger = crashed(78, 1, "old\n"), crashed(78, 1, "new\n")
    younger["metadata"] |= {"name": "b", "creationTimestamp": "2026-11-22T09:08:45Z"}
    status = of(pool(2), younger, older)
    assert (status.phase, status.last_lines) == ("failed", ("new",))
    assert status.reason.startswith("instance 1 exited with 78")


def test_the_instances_of_a_pool_are_numbered_by_age() -> None:
    """One that was evicted has been replaced, and counts no more."""
    pods = [
        replica("c", RUNNING, created="2026-11-22T09:08:50Z"),
        replica("b", RUNNING, created="2026-11-22T09:08:45Z"),
        replica("a", RUNNING, created="2026-11-22T09:08:45Z", container={"restartCount": 7}),
        replica("0", None, created="2026-11-22T09:08:40Z", phase="Failed", status={"reason": "Evicted"}),
    ]
    assert [(one.index, one.restarts) for one in of(pool(3), *pods).instances] == [(0, 7), (1, 0), (2, 0)]
    assert of(pool(3)).phase == "running"


def test_a_pool_tells_which_pods_were_evicted() -> None:
    """Their node ends them as failed at once; not those that failed by themselves, nor those that are going yet."""
    low = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "TerminationByKubelet",
        "message": "The node was low on resource: memory.",
    }
    evicted = {"phase": "Failed", "status": {"reason": "Evicted", "conditions": [low]}}
    pods = [
        replica("c", RUNNING),
        replica("b", ended(137), created="2026-11-22T09:08:42Z", **evicted),
        replica("a", None, created="2026-11-22T09:08:41Z", **evicted),
        replica("broken", ended(3), phase="Failed"),
        replica("going", RUNNING, status={"conditions": [low]}),
    ]
    status = of(pool(2), *pods)
    why = "was ended by the cluster (The node was low on resource: memory.)"
    assert list(status.replaced.items()) == [("a", f"pod a {why}"), ("b", f"pod b {why}")]
    assert [(one.pod, one.disrupted) for one in status.instances] == [("c", False), ("going", True)]
    assert status.phase == "running"
    assert of(job(), pod(0, ended(137), **evicted)).replaced == {}


def template(*env: dict[str, Any]) -> dict[str, Any]:
    resources = {"requests": {"cpu": "500m", "nvidia.com/gpu": "1"}, "limits": {"memory": "1Gi"}}
    return {"spec": {"containers": [{"name": "instance", "resources": resources, "env": list(env)}]}}


GPU_NODES = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
"""What the cluster lets pods tolerate that ask for a GPU."""

CHECKPOINT = {"name": "EDL_CHECKPOINT", "value": "s3://b/job"}


def test_a_job_tells_what_decides_its_size_until_it_has_ended() -> None:
    """From its annotations, and what its pods ask for from their template."""
    term = {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]}
    placing = {
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "batch", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}},
    }
    pods = template(CHECKPOINT, {"name": "EDL_POOL", "value": "teachers"})
    thing = job(template={"spec": pods["spec"] | placing}, elastic=True, priority=-5, weight=0.5, resized_at=17.25)
    expected = Scaling(
        bounds=Bounds(1, 4),
        resources={"cpu": 0.5, "memory": float(1 << 30), "gpu": 1.0, "pods": 1.0},
        priority=-5,
        weight=0.5,
        resumes=True,
        pool="teachers",
        resized_at=17.25,
        node_selector={"zone": "a"},
        tolerations=({"key": "batch", "operator": "Exists"}, GPU_NODES),
        node_terms=(term,),
    )
    assert of(thing).scaling == expected
    thing["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpus"
    queued = msgspec.structs.replace(expected, queue="gpus", resumes=False)
    assert of(thing).scaling == queued
    admits_each = {"spec": {**thing["spec"]["template"]["spec"], **gated()["spec"]}}
    elastic = {**thing, "spec": {**thing["spec"], "template": admits_each}}
    assert of(elastic).scaling == msgspec.structs.replace(queued, queue_resizes=True)
    del thing["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    teachers = of(pool(labels={"kueue.x-k8s.io/queue-name": "gpus"})).scaling
    assert teachers
    assert (teachers.queue, teachers.resumes) == ("", True)
    assert of({**thing, "spec": {**thing["spec"], "suspend": True}}).scaling == expected
    assert of(job(conditions={"Complete": {}})).scaling is None
    assert of(job(conditions={"Failed": {}})).scaling is None
    thing["metadata"]["deletionTimestamp"] = "2026-11-22T09:08:44Z"
    assert of(thing).scaling is None


def test_a_job_that_waits_for_its_first_place_is_not_interrupted() -> None:
    """By being suspended; a pool's students wait for it in any case."""
    waiting = [unschedulable(0), unschedulable(1)]
    assert not is_felt_when_suspended(of(job(2), *waiting))
    assert is_felt_when_suspended(of(job(2), unschedulable(0), pod(1, RUNNING, node="n1")))
    assert is_felt_when_suspended(of(pool(2), *waiting))


def test_what_an_instance_reserves_is_what_the_newest_pod_was_given() -> None:
    """Where a LimitRange or a webhook has changed what the template asks for."""
    limited = {"containers": [{"name": "instance", "resources": {"requests": {"cpu": "300m"}}}]}
    pods = [pod(0, RUNNING), pod(1, RUNNING, created="2026-11-22T09:08:45Z") | {"spec": limited}]
    status = of(job(2, template=template()), *pods)
    assert status.scaling
    assert status.scaling.resources == {"cpu": 0.3, "pods": 1.0}


@pytest.mark.parametrize(
    ("thing", "resumes"),
    [
        (job(elastic=True, template=template({"name": "EDL_CHECKPOINT", "valueFrom": {"fieldRef": {}}})), True),
        (job(elastic=True, template=template({"name": "EDL_CHECKPOINT", "value": ""})), False),
        (job(elastic=True, template=template()), False),
        (job(template=template(CHECKPOINT)), False),
    ],
    ids=["from elsewhere", "empty", "none", "not elastic"],
)
def test_who_goes_on_where_it_was_says_so(thing: dict[str, Any], *, resumes: bool) -> None:
    """Of trainers those that are elastic and have a place for checkpoints."""
    scaling = of(thing).scaling
    assert scaling is not None
    assert scaling.resumes is resumes


def test_a_suspended_job_has_no_instances_but_those_that_leave() -> None:
    """Its Job keeps the last pod of each index, and how that ended is nobody's problem."""
    thing = job(2, wanted=0, suspend=True, conditions={"Suspended": {}})
    left = pod(0, ended(143), phase="Failed")
    status = of(thing, left, pod(1, RUNNING))
    assert (status.phase, status.wanted, status.reason) == ("pending", 0, SUSPENDED)
    assert phases(status) == [(1, "running")]
    assert of(thing, left, pod(1, ended(143), phase="Failed")).instances == ()
    assert of(job(2, suspend=True)).reason == "suspended"
    given_up = job(1, completions=2, wanted=0, suspend=True, elastic=True, status={"failedIndexes": "0"})
    assert of(given_up, left).instances == ()


def test_a_suspended_pool_has_not_failed_whatever_its_last_pods_say() -> None:
    """They were told to leave."""
    thing = pool(replicas=0, wanted=0)
    assert (of(thing).phase, of(thing).reason, of(thing).is_suspended) == ("pending", SUSPENDED, True)
    status = of(thing, pod(0, ended(78)))
    assert (status.phase, status.reason, status.attainable) == ("pending", SUSPENDED, 0)


def test_whose_task_a_job_is_of_is_read_from_what_its_manifest_has() -> None:
    """None where no task has started it, and for what another version, or somebody, has written there instead."""
    origin = Origin(airflow="a", dag_id="nightly", run_id="manual__2026-11-29T00:00:00+00:00", task_id="train")
    found = {}
    for name, owned in {"a task": ownership("me/1", origin), "nobody": ownership("me/1", None)}.items():
        given = job()
        given["metadata"]["annotations"] |= owned
        found[name] = job_status(given, [], NOW).origin
    assert found == {"a task": origin, "nobody": None}
    for strange in ('{"airflow": 1}', msgspec.json.encode(msgspec.structs.replace(origin, dag_id="d" * 251)).decode()):
        given["metadata"]["annotations"]["edl-airflow/origin"] = strange
        assert job_status(given, [], NOW).origin is None
