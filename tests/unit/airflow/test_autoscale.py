"""Rescaling tasks and their questions, without a database, a backend or a Redis."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from support.airflow.fakes import MadeUpSite, rendered
from support.airflow.human_questions import ShownQuestions

from edl_airflow.approval import answer_of, ask, subject, table, targets_in
from edl_airflow.failures import is_passing
from edl_airflow.operators.autoscale import EdlAutoscaleOperator, rows
from edl_airflow.work import RescalingTarget
from edl_runtime.autoscale.plan import Plan
from edl_runtime.autoscale.rescale import Rescaled
from edl_runtime.errors import ClusterUnavailableError

WINDOWS = {"windows": [{"name": "day", "start": "08:00", "end": "20:00", "sizes": {"cluster": "50%"}}], "default": {}}


def _operator(**given: Any) -> EdlAutoscaleOperator:
    return EdlAutoscaleOperator(task_id="rescale", **given)


def test_seconds_may_be_text() -> None:
    """As from a setting: it says the same as the number."""
    assert _operator(lead_s="60")._rules(windows=None, max_load=1.0).lead_s == 60


def test_values_of_the_form_are_rendered(context: dict[str, Any]) -> None:
    """To text, which says the same; windows stay as they are."""
    context["params"] = {"dry_run": True, "max_load": 0.9}
    task = _operator(windows=WINDOWS, dry_run="{{ params.dry_run }}", max_load="{{ params.max_load }}")
    task = rendered(task, context)
    assert (task.dry_run, task.max_load) == ("True", "0.9")
    assert task.windows["windows"][0]["sizes"] == {"cluster": {"*": "50%"}}


def test_the_log_has_an_aligned_table() -> None:
    """A dry run's targets are nowhere else."""
    assert rows(TARGETS) == [
        "NAME  NOW  TARGET  REASON",
        "a       5       3  shrinks from 5 to 3: a | b",
        "b       2       0  is suspended, with a checkpoint: no room",
    ]
    assert rows([{**TARGETS[0], "name": "longer", "instances": 1000}]) == [
        "NAME     NOW  TARGET  REASON",
        "longer  1000       3  shrinks from 5 to 3: a | b",
    ]
    assert rows([]) == ["No job or pool that can be resized is there"]


@pytest.mark.parametrize(("dry_run", "link"), [("False", "/edl/rescaling/edl_default"), ("True", ""), (True, "")])
def test_a_dry_run_has_no_link(
    context: dict[str, Any], site: MadeUpSite, monkeypatch: pytest.MonkeyPatch, dry_run: Any, link: str
) -> None:
    """The page shows the last pass that was made, and this is none; Airflow asks for the link again when it ends."""

    async def rescale(*_: object, **__: object) -> Rescaled:
        return Rescaled(plan=Plan(at=1.8e9, capacity={}))

    monkeypatch.setattr(site, "rescale", rescale, raising=False)
    operator = _operator(dry_run=dry_run)
    operator.execute(context)
    (rescaling,) = operator.operator_extra_links
    assert rescaling.get_link(operator, ti_key=context["ti"]).endswith(link)
    assert bool(rescaling.get_link(operator, ti_key=context["ti"])) == bool(link)
    assert list(context["ti"].xcoms) == ([rescaling.xcom_key] if link else [])


def test_a_cluster_that_is_away_is_no_mistake(
    context: dict[str, Any], site: MadeUpSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is one that passes, so that the task is tried again."""

    async def rescale(*_: object, **__: object) -> None:
        raise ClusterUnavailableError("127.0.0.1:6443", "connection refused")

    monkeypatch.setattr(site, "rescale", rescale, raising=False)
    with pytest.raises(ClusterUnavailableError) as caught:
        _operator().execute(context)
    assert is_passing(caught.value)


TARGETS = [
    RescalingTarget(name="a", kind="trainer", instances=5, target=3, reason="shrinks from 5 to 3: a | b"),
    RescalingTarget(name="b", kind="pool", instances=2, target=0, reason="is suspended, with a checkpoint: no room"),
]


def test_a_question_says_what_shrinks_and_why(context: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line and in a table."""
    context["ti"].id = uuid4()
    questions = ShownQuestions(monkeypatch)
    assert ask(context, TARGETS, default="Reject") == {"a": 3, "b": 0}
    (told,) = questions.asked
    assert (told["ti_id"], told["subject"]) == (context["ti"].id, "Shrink 2 jobs and pools?")
    assert subject(TARGETS[:1]) == "Shrink a from 5 to 3?"
    assert table(TARGETS).splitlines()[2:] == [
        "| a | 5 | 3 | shrinks from 5 to 3: a \\| b |",
        "| b | 2 | 0 | is suspended, with a checkpoint: no room |",
    ]


def test_an_answer_is_about_the_question_that_is_shown(
    context: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow shows a task's first question again when it is tried again: nobody has seen what it asks then."""
    context["ti"].id = uuid4()
    ShownQuestions(monkeypatch)
    ask(context, TARGETS, default="Reject")
    later = [RescalingTarget(name="c", kind="trainer", instances=9, target=0, reason="is suspended")]
    assert ask(context, later, default="Approve") == {"a": 3, "b": 0}


def test_a_reason_does_not_add_rows_to_the_table() -> None:
    """Policies of one's own may say anything."""
    odd = RescalingTarget(name="a", kind="trainer", instances=5, target=3, reason="no\n| b | 5 | 0 | room |")
    assert targets_in(table([odd])) == {"a": 3}


@pytest.mark.parametrize(
    ("event", "answer"),
    [
        ({"chosen_options": ["Approve"], "responded_by_user": {"id": "1", "name": "ada"}}, (True, "ada")),
        ({"chosen_options": ["Reject"], "responded_by_user": {"id": "1", "name": "ada"}}, (False, "ada")),
        ({"chosen_options": ["Reject"], "responded_by_user": None, "timedout": True}, (False, "")),
        ({"chosen_options": ["Approve"], "responded_by_user": None, "timedout": True}, (True, "")),
    ],
)
def test_an_answer_is_a_persons_or_the_default(event: dict[str, Any], answer: tuple[bool, str]) -> None:
    """Only a person's has a name."""
    assert answer_of(event) == answer
