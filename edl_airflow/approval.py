"""Asks a person whether jobs may shrink, in Airflow's own way: the task waits as `awaiting_input`, in no process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import TaskAwaitingInput
from airflow.sdk.execution_time.hitl import upsert_hitl_detail

from edl_airflow.work import RescalingTarget

if TYPE_CHECKING:
    from airflow.sdk import Context

APPROVE, REJECT = "Approve", "Reject"
"""What a person may answer: the words of Airflow's ApprovalOperator."""


def is_asked_already(context: Context) -> bool:
    """Whether another run of the DAG has asked by this task, and waits for the answer."""
    ti: Any = context["ti"]
    waiting = ti.get_ti_count(
        dag_id=ti.dag_id, task_ids=[ti.task_id], map_index=ti.map_index, states=["awaiting_input"]
    )
    return bool(waiting)


def question(
    context: Context,
    shrinks: Sequence[RescalingTarget],
    *,
    timeout_s: float,
    default: str,
    then: Callable[..., object],
) -> TaskAwaitingInput:
    """Ask, and return what the task has to raise to wait for the answer: for so many seconds, then it is the default.

    The operator's method `then` goes on with the `targets` of the jobs by name and the `event`; see `answer_of`.
    """
    upsert_hitl_detail(
        ti_id=context["ti"].id,
        options=[APPROVE, REJECT],
        subject=subject(shrinks),
        body=table(shrinks),
        defaults=[default],
        params={},
    )
    targets = {one["name"]: one["target"] for one in shrinks}
    return TaskAwaitingInput(
        method_name=then.__name__, kwargs={"targets": targets}, timeout=timedelta(seconds=timeout_s)
    )


def answer_of(event: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether it was approved, and who has said so; nobody ("") when time was over."""
    user = event["responded_by_user"]
    return APPROVE in event["chosen_options"], "" if user is None else str(user["name"])


def subject(shrinks: Sequence[RescalingTarget]) -> str:
    """Return the question in a line."""
    if len(shrinks) == 1:
        (one,) = shrinks
        return f"Shrink {one['name']} from {one['instances']} to {one['target']}?"
    return f"Shrink {len(shrinks)} jobs and pools?"


def table(targets: Sequence[RescalingTarget]) -> str:
    """Return a table in Markdown."""
    lines = ["| job or pool | has | should have | why |", "| --- | ---: | ---: | --- |"]
    for one in targets:
        why = one["reason"].replace("|", "\\|")
        lines.append(f"| {one['name']} | {one['instances']} | {one['target']} | {why} |")
    return "\n".join(lines)
