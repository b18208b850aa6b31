"""The next step for a TrainingJob, and its status, by its object and its Job."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from edl_runtime.backends.interface import InstanceStatus, JobStatus, Scaling
from edl_runtime.controller.reconcile import Step, next_step
from edl_runtime.controller.resource import FINALIZER, RECORDED, Resource
from edl_runtime.controller.status import Pace, Problem, events_of, events_of_start, status_of
from edl_runtime.errors import SpecError
from edl_runtime.monitor.reports import Standstill
from edl_runtime.specs import Bounds

NOW = 1_800_000_000.0


def resource(size: int | None = None, *, status: dict[str, Any] | None = None, **metadata: Any) -> Resource:
    """Return a TrainingJob of 2 to 8 trainers."""
    trainer: dict[str, Any] = {"entrypoint": "python train.py", "min-instance": 2, "max-instance": 8}
    if size is not None:
        trainer["instances"] = size
    about = {"name": "example", "namespace": "edl", "uid": "u1", "resourceVersion": "7", "generation": 3}
    return Resource(
        {
            "apiVersion": "paddlepaddle.org/v1",
            "kind": "TrainingJob",
            "metadata": {**about, "finalizers": [FINALIZER], **metadata},
            "spec": {"image": "train:1", "trainer": trainer},
            "status": status or {},
        }
    )


def job(wanted: int = 2, running: int = 2, **more: Any) -> JobStatus:
    """Return the Job that was made for it."""
    instances = tuple(InstanceStatus(index=index, phase="running", started_at=1.0) for index in range(running))
    scaling = Scaling(bounds=Bounds(2, 8), resources={})
    given = {"token": resource().token, "phase": "running", "instances": instances, "scaling": scaling}
    return JobStatus(name="example", kind="trainer", digest="d", wanted=wanted, **{"created_at": 1.0, **given, **more})


@pytest.mark.parametrize(
    ("seen", "known", "step"),
    [
        (resource(finalizers=[]), None, Step("add-finalizer")),
        (resource(), None, Step("submit")),
        (resource(), job(starting=True), Step("submit")),
        (resource(0), None, None),
        (resource(), job(phase="failed", token="edl-submit/0"), Step("delete", token="edl-submit/0")),
        (resource(), job(token="edl-submit/0"), Step("submit")),
        (resource(), job(token=f"{resource().owner}/older"), Step("submit")),
        (resource(), job(phase="succeeded", token=f"{resource().owner}/older"), None),
        (resource(2), job(), None),
        (resource(deletionTimestamp="now"), job(), Step("delete", token=resource().token)),
        (resource(deletionTimestamp="now"), job(token="edl-submit/0"), Step("remove-finalizer")),
        (resource(deletionTimestamp="now"), None, Step("remove-finalizer")),
        (resource(deletionTimestamp="now", finalizers=["other"]), job(), None),
        (resource(deletionTimestamp="now", finalizers=[FINALIZER, "orphan"]), job(), Step("remove-finalizer")),
        (resource(2, status={"phase": "failed"}), job(phase="failed"), Step("delete", token=resource().token)),
        (resource(2, status={"phase": "failed"}), job(phase="failed", running=0), None),
        (resource(2, status={"phase": "succeeded"}), None, None),
    ],
    ids=[
        "the finalizer comes before the Job",
        "then the Job",
        "an interrupted start is completed",
        "none while the size is 0",
        "an ended job of the name makes room",
        "a running one does not: submitting says whose it is",
        "another spec restarts the training",
        "but not one that has ended",
        "nothing is to do",
        "deleting stops the Job first",
        "never one of others",
        "then the object may go",
        "what others wait for is theirs",
        "an orphaned Job goes on",
        "pods of a failed Job are ended",
        "once",
        "an ended training is not started again",
    ],
)
def test_the_next_step(seen: Resource, known: JobStatus | None, step: Step | None) -> None:
    """By the object and the Job of its name."""
    assert next_step(seen, known) == step


@pytest.mark.parametrize(
    ("seen", "known", "step"),
    [
        (resource(2), job(), Step("delete", token=resource().token)),
        (resource(2), None, Step("remove-finalizer")),
        (resource(2, finalizers=[]), None, None),
    ],
    ids=["its Job ends first", "then it may go", "nothing is begun"],
)
def test_in_a_namespace_that_is_deleted(seen: Resource, known: JobStatus | None, step: Step | None) -> None:
    """The object is not being deleted yet: that comes after all pods are gone."""
    assert next_step(seen, known, in_terminating_namespace=True) == step


@pytest.mark.parametrize(
    ("size", "applied", "wanted", "step"),
    [
        (None, 0, 2, Step("record-size", size=2)),
        (4, 2, 2, Step("resize", size=4)),
        (2, 3, 4, Step("record-size", size=4)),
        (2, 3, 0, Step("record-size", size=0)),
        (3, 2, 4, Step("resize", size=3)),
        (0, 2, 2, Step("resize")),
        (9, 2, 2, None),
        (1, 2, 2, None),
    ],
    ids=[
        "is recorded at first, so that `kubectl scale` can change it",
        "of the spec is given to the Job",
        "of the Job is recorded, as after `edl resize` or a rescaling",
        "0 too, as of a suspended one",
        "of the spec counts if both have changed",
        "0 suspends",
        "above the maximum changes nothing",
        "below the minimum changes nothing",
    ],
)
def test_a_size(size: int | None, applied: int, wanted: int, step: Step | None) -> None:
    """Of a spec of generation 3: whichever of spec and Job has changed since it was applied counts."""
    status = {"phase": "running", "appliedGeneration": applied}
    assert next_step(resource(size, status=status), job(wanted)) == step


def test_a_recorded_size_is_nobodys_wish() -> None:
    """A pass that resizes the Job before the status is written keeps its size."""
    recorded = resource(2, status={"appliedGeneration": 2}, annotations={RECORDED: "3"})
    assert next_step(recorded, job(5)) == Step("record-size", size=5)
    scaled = resource(2, status={"appliedGeneration": 2}, annotations={RECORDED: "2"})
    assert next_step(scaled, job(5)) == Step("resize", size=2)
    assert recorded.training_job().trainer.pod == resource(2).training_job().trainer.pod


def test_labels_and_sizes_make_no_other_spec() -> None:
    """The Job goes on; another image restarts it."""
    plain, other = resource(), copy.deepcopy(resource().manifest)
    other["spec"]["image"] = "train:2"
    assert plain.token == resource(5, labels={"team": "a"}, generation=9).token != Resource(other).token
    assert plain.token != resource(uid="u2").token


def test_sizes_settle_wherever_a_controller_is_killed() -> None:
    """After any order of changes and kills, spec and Job have one size: a person's last one, if nothing came later."""
    chance = random.Random(19)
    for _ in range(300):
        size, wanted, generation, status, person = 2, 2, 1, {"appliedGeneration": 1}, None
        for change in [*(chance.choice(["scale", "rescale", "kill"]) for _ in range(6)), "finish"]:
            if change == "scale":
                size = person = chance.randint(2, 8)
                generation += 1
            elif change == "rescale":
                wanted = chance.randint(2, 8)
                person = person if generation != status["appliedGeneration"] else None
            for _ in range(9 if change == "finish" else chance.randint(0, 2)):
                seen = resource(size, status=status, generation=generation)
                step = next_step(seen, job(wanted))
                if step is None:
                    status = status_of(seen, job(wanted), None, NOW)
                elif step.action == "resize":
                    wanted = step.size
                else:
                    size, generation = step.size, generation + 1
        assert size == wanted
        assert person in (None, size)


@pytest.mark.parametrize(
    ("before", "known", "size", "phase"),
    [
        ("", None, None, "creating"),
        ("creating", job(running=1), 2, "creating"),
        ("creating", job(), 2, "running"),
        ("running", job(4), 4, "scaling"),
        ("scaling", job(4, running=4), 4, "running"),
        ("running", job(0, running=1, phase="pending"), 0, "suspended"),
        ("", None, 0, "suspended"),
        ("running", job(phase="succeeded", running=0), 2, "succeeded"),
        ("succeeded", None, 2, "succeeded"),
        ("failed", job(phase="failed"), 2, "failed"),
    ],
)
def test_phases(before: str, known: JobStatus | None, size: int | None, phase: str) -> None:
    """Creating, running and scaling by turns, then an end that stays."""
    status = status_of(resource(size, status={"phase": before} if before else {}), known, None, NOW)
    assert status["phase"] == phase


def test_a_failed_job_has_the_cause_of_its_output() -> None:
    """In its condition, which `kubectl describe` and `kubectl wait` show, and in its reason."""
    last = ("Traceback (most recent call last):", '  File "t.py", line 1', "KeyError: 'x'")
    failed = job(phase="failed", reason="instance 0 exited with 1", last_lines=last)
    status = status_of(resource(2), failed, None, NOW)
    (condition,) = [one for one in status["conditions"] if one["type"] == "Failed"]
    assert condition["message"] == status["reason"] == "instance 0 exited with 1: KeyError: 'x'"


def conditions(status: dict[str, Any]) -> dict[str, str]:
    return {one["type"]: one["status"] for one in status["conditions"]}


def test_conditions_keep_the_time_of_their_last_transition() -> None:
    """It changes with the status, not with the message."""
    first = status_of(resource(2), job(running=1), None, NOW)
    assert conditions(first) == {"Accepted": "True", "Running": "False"}
    second = status_of(resource(2, status=first), job(), None, NOW + 60)
    times = {one["type"]: one["lastTransitionTime"] for one in second["conditions"]}
    assert times == {"Accepted": "2027-01-15T08:00:00Z", "Running": "2027-01-15T08:01:00Z"}
    ended = status_of(resource(2, status=second), job(phase="failed", running=0, reason="no data"), None, NOW + 90)
    assert conditions(ended) == {"Accepted": "True", "Running": "False", "Failed": "True"}
    assert (ended["reason"], ended["selector"]) == (
        "no data",
        "app.kubernetes.io/managed-by=edl-airflow,edl-airflow/job=example",
    )
    later = status_of(resource(2, status=ended), None, None, NOW + 999)
    assert {**later, "instances": 0} == ended


@pytest.mark.parametrize(
    ("pace", "running", "status", "reason"),
    [
        (Pace("5%"), 2, "True", ""),
        (Pace("5%", Standstill("NoStep", "no step for 2m 5s")), 2, "False", "no step for 2m 5s"),
        (Pace("", Standstill("NotHeard", "no report for 2m 5s")), 1, "Unknown", "no report for 2m 5s"),
        (Pace("5%", None, "restarted 2 times"), 2, "True", "restarted 2 times"),
        (Pace("5%", Standstill("NoStep", "no step for 2m 5s"), "restarted"), 2, "False", "no step for 2m 5s"),
        (Pace("5%", None, "restarted 2 times"), 0, None, ""),
        (Pace(), 2, None, ""),
        (Pace("5%", Standstill("NoStep", "no step for 2m 5s")), 0, None, ""),
    ],
    ids=[
        "it makes steps",
        "it stands still",
        "who knows",
        "it repeats its steps",
        "it repeats none",
        "it repeated its steps",
        "nothing is known so far",
        "nothing of it runs",
    ],
)
def test_whether_a_training_makes_steps_is_a_condition(
    pace: Pace, running: int, status: str | None, reason: str
) -> None:
    """While it runs; its reason is that of the training, unless there is a worse one."""
    seen = status_of(resource(2), job(running=running), None, NOW, pace)
    assert (conditions(seen).get("Progressing"), seen["reason"]) == (status, reason)
    worse = status_of(resource(2), job(running=running, reason="no image"), None, NOW, pace)
    assert (conditions(worse).get("Progressing"), worse["reason"]) == (status, "no image")
    for ended in (job(phase="failed", running=running), None):
        after = status_of(resource(2, status={**seen, "phase": "failed"}), ended, None, NOW, pace)
        assert "Progressing" not in conditions(after)


def test_a_size_that_is_not_allowed_is_a_condition() -> None:
    """It says what is allowed and what the job keeps; this spec is not applied."""
    status = status_of(resource(9, status={"phase": "running", "appliedGeneration": 2}), job(), None, NOW)
    accepted = status["conditions"][0]
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSize")
    assert accepted["message"] == ("spec.trainer.instances: got 9, allowed is 2 to 8, or 0 to suspend; the job keeps 2")
    assert (status["reason"], status["appliedGeneration"]) == (accepted["message"], 2)


def test_events_are_of_changes() -> None:
    """A new size with its reason, a problem once, an end."""
    running = status_of(resource(2), job(), None, NOW)
    seen = resource(4, status=running)
    (resized,) = events_of(seen, status_of(seen, job(4), None, NOW), why="grows to 4")
    assert resized == ("Normal", "Resized", "resized from 2 to 4: grows to 4")
    problem = Problem("InvalidSpec", str(SpecError("spec.image", "", "an image")))
    refused = status_of(resource(), None, problem, NOW)
    (warning,) = events_of(resource(), refused)
    assert (warning.type, warning.reason) == ("Warning", "InvalidSpec")
    assert list(events_of(resource(status=refused), refused)) == []
    (ended,) = events_of(seen, status_of(seen, job(phase="succeeded"), None, NOW))
    assert ended.reason == "Completed"
    done = resource(4, status=status_of(seen, job(phase="succeeded"), None, NOW))
    assert list(events_of(done, status_of(done, None, None, NOW))) == []
    leaving = resource(2, status=running, deletionTimestamp="now")
    (stopping,) = events_of(leaving, status_of(leaving, job(), None, NOW))
    assert stopping.message == "stopping: waits for 2 instances to write a last checkpoint and end"


@pytest.mark.parametrize(
    ("before", "reasons"),
    [
        (None, ["Created", "ManifestNote"]),
        (job(starting=True), ["Created", "ManifestNote"]),
        (job(), ["Restarted", "ManifestNote"]),
        (job(created_at=2.0), []),
    ],
    ids=["a start", "one that was interrupted", "another spec", "the same Job under another token"],
)
def test_the_events_of_a_submit(before: JobStatus | None, reasons: list[str]) -> None:
    """A restart is one, too: somebody may ask later why the training was stopped."""
    assert [one.reason for one in events_of_start(before, job(created_at=2.0), ["port is ignored"])] == reasons
