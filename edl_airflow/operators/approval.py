"""Asks a person whether jobs may shrink, in Airflow's own way: the task waits as `awaiting_input`, in no process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk.execution_time.comms import CreateHITLDetailPayload

from edl_airflow.results import RescalingTarget
from edl_airflow.supervisor import ask_person

if TYPE_CHECKING:
    from airflow.sdk import Context

APPROVE, REJECT = "Approve", "Reject"
"""What a person may answer: the words of Airflow's ApprovalOperator."""

_ROW = re.compile(r"\| (?P<name>\S+) \| \d+ \| (?P<target>\d+) \| .*")


def is_asked_already(context: Context) -> bool:
    """Whether another run of the DAG has asked by this task, and waits for the answer."""
    ti: Any = context["ti"]
    waiting = ti.get_ti_count(
        dag_id=ti.dag_id, task_ids=[ti.task_id], map_index=ti.map_index, states=["awaiting_input"]
    )
    return bool(waiting)


def ask_to_shrink(context: Context, shrinks: Sequence[RescalingTarget], *, default: str) -> dict[str, int]:
    """Ask, and return what the answer will be about: what the jobs on the shown question should have, by name.

    That may be another question: Airflow keeps a task's first one for its later tries, and for when it is cleared.
    `default` is the answer when time is over.
    """
    shown = ask_person(
        CreateHITLDetailPayload(
            ti_id=context["ti"].id,
            options=[APPROVE, REJECT],
            subject=question_subject(shrinks),
            body=table(shrinks),
            defaults=[default],
            params={},
            assigned_users=[],
        )
    )
    return targets_in(shown.body or "")


def read_answer(event: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether it was approved, and who has said so; nobody ("") when time was over."""
    user = event["responded_by_user"]
    return APPROVE in event["chosen_options"], "" if user is None else str(user["name"])


def question_subject(shrinks: Sequence[RescalingTarget]) -> str:
    """Return the question in a line."""
    if len(shrinks) == 1:
        (one,) = shrinks
        return f"Shrink {one['name']} from {one['instances']} to {one['target']}?"
    return f"Shrink {len(shrinks)} jobs and pools?"


def table(targets: Sequence[RescalingTarget]) -> str:
    """Return a table in Markdown."""
    lines = ["| job or pool | has | should have | why |", "| --- | ---: | ---: | --- |"]
    for one in targets:
        why = " ".join(one["reason"].split()).replace("|", "\\|")
        lines.append(f"| {one['name']} | {one['instances']} | {one['target']} | {why} |")
    return "\n".join(lines)


def targets_in(table: str) -> dict[str, int]:
    """Return what jobs and pools should have by a `table`, by name."""
    rows = map(_ROW.fullmatch, table.splitlines())
    return {row["name"]: int(row["target"]) for row in rows if row}
