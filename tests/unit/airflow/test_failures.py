"""Which failures are tried again, and when."""

from __future__ import annotations

import json
import traceback
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, ExceptionRetryPolicy, RetryAction, RetryDecision, task
from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException, AirflowTaskTimeout
from airflow.serialization.serialized_objects import DagSerialization
from support.airflow.templates import STUDENT, distill

from edl_airflow.cluster_policy import task_policy
from edl_airflow.failures import (
    JobInterruptedError,
    TargetEndedError,
    UserError,
    WaitTimeoutError,
    error_for,
    failing_without_retry,
)
from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.teacher_pool import EdlStopTeacherPoolOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_airflow.retry_policy import EdlRetryPolicy
from edl_airflow.runtime.spec import TaskOutcome
from edl_airflow.sensors.job import EdlJobSensor
from edl_airflow.waits import outage
from edl_runtime.backends.errors import ClusterUnavailableError, JobFailedError, OwnedElsewhereError, SubmitError
from edl_runtime.checkpoint.errors import CheckpointHeldError, FolderHolder
from edl_runtime.discovery.errors import DiscoveryUnavailableError
from edl_runtime.distill.errors import NoPoolError, NoTeacherError, SampleError
from edl_runtime.errors import SpecError
from edl_runtime.registry.errors import PoolMismatchError
from edl_runtime.shards.errors import DatasetChangedError
from edl_runtime.store.errors import MalformedRecordError, RegistryAccessError, RegistryUnavailableError
from edl_runtime.teacher.errors import ModelError

POLICY = EdlRetryPolicy()
AWAY = RegistryUnavailableError("redis:6379", "refused")


def decided(error: BaseException, policy: EdlRetryPolicy = POLICY, **given: Any) -> RetryDecision:
    return policy.evaluate(error, **{"try_number": 1, "max_tries": 3, **given})


@pytest.mark.parametrize(
    "mistake",
    [
        SpecError("bounds", "3:1", "min at most max"),
        PoolMismatchError("p", ["inputs"]),
        ModelError("m", "is no folder"),
        SampleError("x", 3, "a tuple", "arrays"),
        DatasetChangedError(5, 6),
        CheckpointHeldError("/kept", FolderHolder(job="nightly", namespace="default", since=0.0)),
        RegistryAccessError("redis:6379", "WRONGPASS", password_given=True),
        SubmitError("j", 'User "w" cannot create resource "jobs"', lacks_right=True),
        AirflowNotFoundException("no such connection"),
        UserError("exit 78"),
    ],
)
def test_the_users_mistakes_fail_at_once(mistake: Exception) -> None:
    """In their own words, in operators of ours and by the policy of others."""
    with pytest.raises(AirflowFailException) as caught, failing_without_retry():
        raise mistake
    assert str(caught.value) == str(mistake)
    decision = decided(mistake)
    assert (decision.action, decision.retry_delay) == (RetryAction.FAIL, None)
    assert decision.reason == f"a retry can't help: {mistake}"


@pytest.mark.parametrize(("kind", "argument"), [("pool", "teacher_pool"), ("trainer", "job")])
def test_whose_job_it_is_and_how_to_have_ones_own_is_said(kind: Any, argument: str) -> None:
    """In the words of a DAG's author."""
    with pytest.raises(AirflowFailException) as caught, failing_without_retry():
        raise OwnedElsewhereError("digits", kind, "nightly-distill-0123")
    for part in ("'digits'", "'nightly-distill-0123'", "{{ ti.map_index }}", f"leave {argument} out"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "trouble",
    [
        AWAY,
        DiscoveryUnavailableError("http://a", "refused"),
        ClusterUnavailableError("https://a:6443", "refused"),
        NoTeacherError("digits", 300),
        JobInterruptedError("student", "evicted 3 times"),
    ],
)
def test_what_passes_is_waited_for(trouble: Exception) -> None:
    """Twice as long each time, up to a limit."""
    for try_number, seconds in ((1, 30), (2, 60), (3, 120), (5, 480), (6, 600), (4000, 600)):
        decision = decided(trouble, try_number=try_number)
        assert (decision.action, decision.retry_delay) == (RetryAction.RETRY, timedelta(seconds=seconds))
        assert decision.reason == f"it may be over in {seconds} s: {trouble}"


def test_what_is_damaged_in_redis_is_tried_again_as_the_task_says() -> None:
    """Nobody has given it, and by then it may have been mended, or have run out."""
    damaged = MalformedRecordError("edl:{default/digits}:group:state", "it lacks 'wall'")
    with pytest.raises(MalformedRecordError), failing_without_retry():
        raise damaged
    assert decided(damaged).action == RetryAction.DEFAULT


def test_the_wait_is_no_longer_at_first_than_the_tasks_own() -> None:
    """Nor than the policy says, which survives JSON as Airflow's own do."""
    hasty: Any = {"task": SimpleNamespace(retry_delay=timedelta(seconds=2))}
    patient: Any = {"task": SimpleNamespace(retry_delay=timedelta(minutes=5))}
    assert decided(AWAY, context=hasty, try_number=3).retry_delay == timedelta(seconds=8)
    assert decided(AWAY, context=patient).retry_delay == timedelta(seconds=30)
    own = EdlRetryPolicy(first_delay=timedelta(seconds=1.5), longest_delay=timedelta(seconds=2))
    own = EdlRetryPolicy.deserialize(json.loads(json.dumps(own.serialize())))
    delays = [decided(AWAY, own, try_number=number).retry_delay for number in (1, 2)]
    assert delays == [timedelta(seconds=1.5), timedelta(seconds=2)]


def test_a_wait_ends_for_a_redis_that_refuses_the_password() -> None:
    """Its own would not end that, as an outage's does."""
    refused = RegistryAccessError("redis:6379", "WRONGPASS", password_given=True)
    assert outage(AWAY) == str(AWAY)
    with pytest.raises(RegistryAccessError):
        outage(refused)


@pytest.mark.parametrize(
    "other",
    [JobFailedError("student", "exit 1"), SubmitError("j", "no disk"), ValueError(), ConnectionError(), OSError()],
)
def test_all_else_is_left_to_the_task(other: Exception) -> None:
    """As it is."""
    assert decided(other) == RetryDecision.default()
    with pytest.raises(type(other)) as caught, failing_without_retry():
        raise other
    assert caught.value is other


def test_our_operators_and_sensors_have_the_policy_unless_they_are_given_another() -> None:
    """Also by `default_args`, and also none at all."""
    made = [
        distill(),
        EdlTrainOperator(task_id="train", trainer=STUDENT),
        EdlResizeOperator(task_id="grow", job="night", instances=2),
        EdlStopTeacherPoolOperator(task_id="stop", teacher_pool="digits"),
        EdlJobSensor(task_id="wait", job="night"),
    ]
    assert [operator.retry_policy for operator in made] == [POLICY] * len(made)
    other = ExceptionRetryPolicy(rules=[])
    with DAG("nightly", schedule=None, default_args={"retry_policy": other}):
        assert EdlTrainOperator(task_id="train", trainer=STUDENT).retry_policy is other
    assert EdlTrainOperator(task_id="train", trainer=STUDENT, retry_policy=None).retry_policy is None


def test_the_policy_is_there_again_when_a_worker_reads_the_dag() -> None:
    """What is serialized is only that there is one; mapped tasks have it too."""
    with DAG("nightly", schedule=None) as dag:
        EdlTrainOperator(task_id="train", trainer=STUDENT)
        EdlTrainOperator.partial(task_id="each", trainer=STUDENT).expand(job=["a", "b"])

        @task(retry_policy=POLICY)
        def report() -> None: ...

        report()
    plain = json.loads(json.dumps(DagSerialization.to_dict(dag)))
    again = DagSerialization.from_dict(plain)
    assert "EdlRetryPolicy" not in json.dumps(plain)
    assert [again.get_task(name).has_retry_policy for name in ("train", "each", "report")] == [True] * 3
    mapped: Any = dag.get_task("each")
    assert mapped.unmap({"job": "a"}).retry_policy == POLICY


def test_a_mapped_task_fails_once_by_what_an_upstream_task_returns() -> None:
    """Nobody can know it when the DAG file is read."""
    with DAG("nightly", schedule=None):

        @task
        def scripts() -> list[str]: ...  # type: ignore[empty-body]

        each: Any = EdlTrainOperator.partial(task_id="each").expand(trainer=scripts())
    task_policy(each)
    with pytest.raises(SpecError, match="trainer: got") as caught:
        each.unmap({"trainer": "python x"})
    assert decided(caught.value, each.retry_policy).action == RetryAction.FAIL


TRACEBACK = (
    "epoch 1",
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "    step(batch)",
    "    ^^^^^^^^^^^",
    "ValueError: loss is not a number",
    "at step 7",
)


@pytest.mark.parametrize(
    ("lines", "head"),
    [
        (TRACEBACK, "'j' failed: exit 1: ValueError: loss is not a number"),
        (("reading", "no such data set"), "'j' failed: exit 1: no such data set"),
        (("  indented",), "'j' failed: exit 1"),
        ((), "'j' failed: exit 1"),
    ],
)
def test_the_most_useful_line_comes_first(lines: tuple[str, ...], head: str) -> None:
    """What a traceback ends with, before the lines that lead to it."""
    logged = str(error_for(TaskOutcome(ended="failed", name="j", reason="exit 1", last_lines=lines), 5))
    assert logged.splitlines()[0] == head
    assert [f"  {line}" for line in lines] == logged.splitlines()[2:]


def test_our_errors_come_without_frames_of_ours() -> None:
    """Where in the library it was raised helps nobody who reads a task's log; other errors keep their frames."""

    def deep(error: Exception, levels: int = 20) -> None:
        if levels:
            deep(error, levels - 1)
        raise error

    for error, has_frames in ((SpecError("a", 1, "2"), False), (AWAY, False), (ZeroDivisionError(), True)):
        with pytest.raises(Exception) as caught, failing_without_retry():  # noqa: PT011
            deep(error)
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert ("deep" in frames) == has_frames
        assert caught.value.__suppress_context__ != has_frames


@pytest.mark.parametrize(
    ("ended", "changes", "error", "expected"),
    [
        ("ready", {}, None, ""),
        ("succeeded", {}, None, ""),
        ("failed", {"reason": "exit 1", "last_lines": ("Traceback", "boom")}, JobFailedError, "boom"),
        ("failed", {"last_lines": ("boom",), "permanent": True}, UserError, "boom"),
        ("failed", {"last_lines": ("boom",), "transient": True}, JobInterruptedError, "boom"),
        ("no_teacher", {}, NoTeacherError, "'j' after 5 s"),
        ("no_pool", {"reason": "none has it"}, NoPoolError, "waited 5 s for pool 'j': none has it; start it, or"),
        ("timed_out", {}, AirflowTaskTimeout, "execution_timeout"),
        ("gone", {"reason": "it was there"}, TargetEndedError, "'j' has ended: it was there"),
        ("impossible", {"reason": "it has no agents"}, UserError, "'j': it has no agents"),
        ("not_yet", {"reason": "it is still running"}, WaitTimeoutError, "5 s for 'j': it is still running"),
        ("taken_over", {}, JobFailedError, "a later try"),
    ],
)
def test_each_outcome_has_its_error(ended: Any, changes: Any, error: type[Exception] | None, expected: str) -> None:
    """What went well has none."""
    found = error_for(TaskOutcome(ended=ended, name="j", **changes), 5)
    assert type(found) is (error or type(None))
    assert expected in str(found or "")
