"""The policy that docs/how-to/rescaling.md shows as one's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.autoscale.jobs import job

from edl_runtime.autoscale.cluster.snapshot import ClusterSnapshot
from edl_runtime.autoscale.planner import RescalingRules, make_plan
from edl_runtime.autoscale.policy.interface import check_policy_name
from edl_runtime.autoscale.policy.model import Target
from edl_runtime.backends.interface import Capacity, NodeCapacity
from edl_runtime.errors import SpecError
from edl_runtime.specs import Bounds

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "rescaling.md"
NODE = NodeCapacity(name="node", total={"cpu": 4.0}, free={"cpu": 4.0})
JOBS = tuple(
    job(name, Bounds(least, 9), 1.0, 0, pending=1, created_at=created_at)
    for name, least, created_at in (("third", 2, 3.0), ("first", 2, 1.0), ("second", 1, 2.0))
)
SURVEY = ClusterSnapshot(at=10.0, jobs=JOBS, capacity=Capacity(nodes=(NODE,)))


def test_the_policy_in_the_documents_makes_a_plan() -> None:
    """It makes a plan: the jobs that came first have their minimum, the third has no room."""
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "def " in code)
    names: dict[str, Any] = {}
    exec(code, names)
    found = make_plan(SURVEY, RescalingRules(), names["first_come"])
    assert {one.name: one.target for one in found.targets} == {"first": 2, "second": 1, "third": 0}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "got 'None as its answer', allowed is a Target for each job"),
        ({}, "got \"None for 'third'\", allowed is a Target with a number of instances"),
        (dict.fromkeys(("third", "first", "second"), 2), "got \"2 for 'third'\""),
        (dict.fromkeys(("third", "first", "second"), Target(instances=-5, reason="odd")), "instances=-5"),
        (dict.fromkeys(("third", "first", "second"), Target(instances="2", reason="odd")), "instances='2'"),
        (
            dict.fromkeys(("third", "first", "second"), Target(instances=10, reason="odd")),
            "got \"10 instances for 'third'\", allowed is 0, or 2 to 9",
        ),
    ],
)
def test_a_wrong_answer_of_a_policy_is_an_error(answer: Any, words: str) -> None:
    """It names the job and what is allowed."""

    def policy(*_: object, **__: object) -> Any:
        return answer

    with pytest.raises(SpecError, match=re.escape(words)):
        make_plan(SURVEY, RescalingRules(), policy)


@pytest.mark.parametrize("name", ["mine.:first_come", "mine..x:first_come", ".mine:first_come", "mine", "mine:a.b", 1])
def test_a_name_that_can_be_none_is_a_mistake(name: object) -> None:
    """Before anybody looks for it."""
    with pytest.raises(SpecError, match="policy"):
        check_policy_name(name)
