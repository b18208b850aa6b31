"""Rescaling tasks, without a database, a backend or a Redis."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.airflow.fakes import FakeClient, rendered

from edl_airflow.operators.autoscale import EdlAutoscaleOperator
from edl_runtime.autoscale.history import RescaleOutcome
from edl_runtime.autoscale.planner import RescalingPlan

WINDOWS = {"windows": [{"name": "day", "start": "08:00", "end": "20:00", "sizes": {"cluster": "50%"}}], "default": {}}


def _operator(**given: Any) -> EdlAutoscaleOperator:
    return EdlAutoscaleOperator(task_id="rescale", **given)


def test_values_of_the_form_are_rendered(context: dict[str, Any]) -> None:
    """To text, which says the same; windows stay as they are."""
    context["params"] = {"dry_run": True, "max_load": 0.9}
    task = _operator(windows=WINDOWS, dry_run="{{ params.dry_run }}", max_load="{{ params.max_load }}", lead_s="60")
    task = rendered(task, context)
    assert (task.dry_run, task.max_load, task._rules(windows=None, max_load=1.0).lead_s) == ("True", "0.9", 60)
    assert task.windows["windows"][0]["sizes"] == {"cluster": {"*": "50%"}}


@pytest.mark.parametrize(("dry_run", "link"), [("False", "/edl/?conn=edl_default"), ("True", ""), (True, "")])
def test_a_dry_run_has_no_link(
    context: dict[str, Any], site: FakeClient, capsys: pytest.CaptureFixture[str], dry_run: Any, link: str
) -> None:
    """The page shows the last pass that was made, and this is none; Airflow asks for the link again when it ends."""

    async def rescale(*_: object, **__: object) -> RescaleOutcome:
        return RescaleOutcome(plan=RescalingPlan(at=1.8e9, capacity={}))

    site.rescale = rescale  # type: ignore[attr-defined]
    operator = _operator(dry_run=dry_run)
    operator.execute(context)
    assert "There is no job or pool that can be resized" in capsys.readouterr().out
    (rescaling,) = operator.operator_extra_links
    found = rescaling.get_link(operator, ti_key=context["ti"])
    assert (found.endswith(link), bool(found)) == (True, bool(link))
    assert list(context["ti"].xcoms) == ([rescaling.xcom_key] if link else [])


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"windows": "variable:nobody-has-set-this"}, "an existing Airflow Variable"),
        ({"policy": "no.such.module:decide"}, "no.such.module"),
        ({"policy": "edl_runtime.autoscale.policy.decide:RESIZE_COOLDOWN_S"}, "a function"),
        ({"max_load": "{{ 'high' }}"}, "max_load"),
        ({"edl_conn_id": "none"}, "none"),
    ],
)
def test_mistakes_fail_the_task_at_once(context: dict[str, Any], given: dict[str, Any], expected: str) -> None:
    """Trying again can't help, and the error names what to mend."""
    with pytest.raises(AirflowFailException, match=expected):
        rendered(_operator(**given), context).execute(context)
