"""What is remembered of a look."""

from __future__ import annotations

from support.autoscale.views import capacity, job, node

from edl_runtime.autoscale.history import JobPoint, Point, Use
from edl_runtime.autoscale.plan import Plan
from edl_runtime.autoscale.present import point


def test_a_point_says_what_ran_and_what_was_reserved() -> None:
    """Of all that had not ended, by name; with the window and what training might use by the plan."""
    found = point(
        [job("b", 0, 2), job("a", 2, resources={"cpu": 0.1}), job("p", 1, kind="pool"), job("x", 0, phase="failed")],
        capacity(node(total={"cpu": 2.0}, used={"cpu": 0.3})),
        Plan(at=1.0, window="night", capacity={"cpu": 1.5}),
    )
    assert found == Point(
        jobs={"a": JobPoint(running=2), "b": JobPoint(state="pending"), "p": JobPoint(running=1, kind="pool")},
        use={"cpu": Use(total=2.0, reserved=0.3, ours=0.2, allowed=1.5)},
        window="night",
    )
    assert list(found.jobs) == ["a", "b", "p"]
