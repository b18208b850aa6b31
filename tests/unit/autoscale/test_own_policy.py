"""The policy that docs/rescaling.md shows as one's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from edl_runtime.autoscale.plan import Rules, plan
from edl_runtime.autoscale.survey import Survey
from edl_runtime.backends.base import Capacity, JobStatus, NodeCapacity, Scaling
from edl_runtime.specs import Bounds

PAGE = Path(__file__).parents[3] / "docs" / "rescaling.md"


def test_it_is_one() -> None:
    """It makes a plan: the jobs that came first have their minimum, the third has no room."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    jobs = [
        JobStatus(
            name=name,
            kind="trainer",
            elastic=True,
            phase="pending",
            token="",
            digest="",
            wanted=1,
            created_at=created_at,
            scaling=Scaling(bounds=Bounds(least, 9), resources={"cpu": 1.0}),
        )
        for name, least, created_at in (("third", 2, 3.0), ("first", 2, 1.0), ("second", 1, 2.0))
    ]
    node = NodeCapacity(name="node", total={"cpu": 4.0}, free={"cpu": 4.0})
    found = plan(Survey(at=10.0, jobs=tuple(jobs), capacity=Capacity(nodes=(node,))), Rules(), names["first_come"])
    assert {one.name: one.target for one in found.targets} == {"first": 2, "second": 1, "third": 0}
