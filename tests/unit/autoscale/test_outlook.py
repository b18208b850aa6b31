"""What the policy would decide in the next traffic windows."""

from __future__ import annotations

from datetime import UTC, datetime

from support.autoscale.jobs import capacity, job, node

from edl_runtime.autoscale.cluster.snapshot import ClusterSnapshot
from edl_runtime.autoscale.outlook import MOST_WINDOWS, expected_plans, past_spans
from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.autoscale.traffic.schema import to_windows
from edl_runtime.specs import Bounds

NOON = datetime(2026, 11, 26, 12, tzinfo=UTC).timestamp()
HOUR = 3600.0
WINDOWS = to_windows(
    {
        "windows": [
            {"name": "day", "start": "08:00", "end": "20:00", "sizes": {"cluster": {"cpu": 2}}},
            {"name": "night", "start": "20:00", "end": "08:00", "sizes": {"cluster": {"cpu": 6}}},
        ]
    }
)


def test_the_next_windows_have_the_sizes_that_the_policy_would_give() -> None:
    """With the jobs and nodes of now, and no look further ahead than asked for."""
    jobs = (job("a", Bounds(1, 10), 1.0, 2),)
    snapshot = ClusterSnapshot(at=NOON, jobs=jobs, capacity=capacity(node(total={"cpu": 8.0}, used={"cpu": 2.0})))
    plans = expected_plans(snapshot, RescalingRules(windows=WINDOWS), until=NOON + 21 * HOUR)
    assert [(plan.name, (plan.at - NOON) / HOUR) for plan in plans] == [("night", 8.0), ("day", 20.0)]
    assert plans[0].end == plans[1].at
    assert plans[0].targets["a"] > plans[1].targets["a"] > 0
    many = expected_plans(snapshot, RescalingRules(windows=WINDOWS), until=NOON + 1000 * HOUR)
    assert len(many) == MOST_WINDOWS
    assert expected_plans(snapshot, RescalingRules(), until=NOON + 1000 * HOUR) == []


def test_the_windows_of_the_last_day_are_known() -> None:
    """With the one that holds."""
    names = [span.name for span in past_spans(WINDOWS, since=NOON - 24 * HOUR, until=NOON)]
    assert names == ["day", "night", "day"]
