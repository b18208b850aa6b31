"""How a task is retried, by what it has failed of."""

from __future__ import annotations

import json
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, ExceptionRetryPolicy, RetryAction, RetryDecision, task
from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException
from airflow.serialization.serialized_objects import DagSerialization
from support.airflow.templates import distill

from edl_airflow.failures import JobInterruptedError, UsersMistakeError
from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.teacher_pool import EdlStopTeacherPoolOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_airflow.retry_policy import EdlRetryPolicy
from edl_airflow.sensors.job import EdlJobSensor
from edl_runtime.errors import (
    ClusterUnavailableError,
    DatasetChangedError,
    DiscoveryUnavailableError,
    JobFailedError,
    ModelError,
    NoTeacherError,
    RegistryUnavailableError,
    SampleError,
    SpecError,
    SubmitError,
)
from edl_runtime.specs import TrainerSpec

POLICY = EdlRetryPolicy()
TRAINER = TrainerSpec(command=("python", "train.py"))
AWAY = RegistryUnavailableError("redis:6379", "refused")


def decided(error: BaseException, policy: EdlRetryPolicy = POLICY, **given: Any) -> RetryDecision:
    return policy.evaluate(error, **{"try_number": 1, "max_tries": 3, **given})


@pytest.mark.parametrize(
    "mistake",
    [
        SpecError("bounds", "3:1", "min at most max"),
        ModelError("m", "is no folder"),
        SampleError("x", 3, "a tuple", "arrays"),
        DatasetChangedError(5, 6),
        AirflowNotFoundException("no such connection"),
        UsersMistakeError("exit 78"),
    ],
)
def test_the_users_mistakes_fail_at_once(mistake: Exception) -> None:
    """With what is wrong as the reason."""
    decision = decided(mistake)
    assert (decision.action, decision.retry_delay) == (RetryAction.FAIL, None)
    assert decision.reason == f"trying again can't help: {mistake}"


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
        assert decision.reason == f"it may pass within {seconds} s: {trouble}"


def test_the_wait_is_no_longer_at_first_than_the_tasks_own() -> None:
    """Nor than the policy says."""
    hasty: Any = {"task": SimpleNamespace(retry_delay=timedelta(seconds=2))}
    patient: Any = {"task": SimpleNamespace(retry_delay=timedelta(minutes=5))}
    assert decided(AWAY, context=hasty, try_number=3).retry_delay == timedelta(seconds=8)
    assert decided(AWAY, context=patient).retry_delay == timedelta(seconds=30)
    own = EdlRetryPolicy(first_delay=timedelta(seconds=5), longest_delay=timedelta(seconds=6))
    assert [decided(AWAY, own, try_number=n).retry_delay for n in (1, 2)] == [
        timedelta(seconds=5),
        timedelta(seconds=6),
    ]


@pytest.mark.parametrize(
    "other",
    [JobFailedError("student", "exit 1"), SubmitError("j", "no disk"), ValueError(), ConnectionError(), OSError()],
)
def test_all_else_is_left_to_the_task(other: Exception) -> None:
    """Also what is none of our errors."""
    assert decided(other) == RetryDecision.default()


def test_it_survives_json() -> None:
    """As Airflow's own policies do."""
    policy = EdlRetryPolicy(first_delay=timedelta(seconds=1.5))
    assert EdlRetryPolicy.deserialize(json.loads(json.dumps(policy.serialize()))) == policy


def test_our_operators_and_sensors_have_it_unless_they_are_given_another() -> None:
    """Also by `default_args`, and also none at all."""
    made = [
        distill(),
        EdlTrainOperator(task_id="train", trainer=TRAINER),
        EdlResizeOperator(task_id="grow", job="night", instances=2),
        EdlStopTeacherPoolOperator(task_id="stop", teacher_pool="digits"),
        EdlJobSensor(task_id="wait", job="night"),
    ]
    assert [operator.retry_policy for operator in made] == [POLICY] * len(made)
    other = ExceptionRetryPolicy(rules=[])
    with DAG("nightly", schedule=None, default_args={"retry_policy": other}):
        assert EdlTrainOperator(task_id="train", trainer=TRAINER).retry_policy is other
    assert EdlTrainOperator(task_id="train", trainer=TRAINER, retry_policy=None).retry_policy is None


def test_it_is_there_again_when_a_worker_reads_the_dag() -> None:
    """What is serialized is only that there is one; mapped tasks have it too."""
    with DAG("nightly", schedule=None) as dag:
        EdlTrainOperator(task_id="train", trainer=TRAINER)
        EdlTrainOperator.partial(task_id="each", trainer=TRAINER).expand(job=["a", "b"])

        @task(retry_policy=POLICY)
        def report() -> None: ...

        report()
    plain = json.loads(json.dumps(DagSerialization.to_dict(dag)))
    again = DagSerialization.from_dict(plain)
    assert "EdlRetryPolicy" not in json.dumps(plain)
    assert [again.get_task(name).has_retry_policy for name in ("train", "each", "report")] == [True] * 3
    mapped: Any = dag.get_task("each")
    assert mapped.unmap({"job": "a"}).retry_policy == POLICY


def test_what_our_operators_raise_for_mistakes_needs_no_policy() -> None:
    """Airflow asks none about it."""
    assert issubclass(UsersMistakeError, AirflowFailException)
