"""What the policy would decide when the next traffic windows begin, with the jobs and nodes of now. Pure.

Declared windows decide, as what will be measured by then is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from edl_runtime.autoscale.cluster.snapshot import ClusterSnapshot
from edl_runtime.autoscale.planner import RescalingRules, make_plan
from edl_runtime.autoscale.traffic.windows import DeclaredWindows, WindowSpan

MOST_WINDOWS = 6
"""How many coming windows are looked at."""

MOST_SPANS = 100
"""Windows of the past that are returned, the newest."""


class ExpectedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The targets by name when the window `name` begins, `at` a time in Unix seconds; `end`: None for no end."""

    name: str
    at: float
    end: float | None
    targets: dict[str, int]


def expected_plans(snapshot: ClusterSnapshot, rules: RescalingRules, *, until: float) -> list[ExpectedPlan]:
    """Return the plans of the windows that begin after the snapshot and before `until`, at most MOST_WINDOWS."""
    found: list[ExpectedPlan] = []
    for span in _spans(rules.windows, snapshot.at, until) if rules.windows else ():
        if span.start is None or span.start.timestamp() <= snapshot.at:
            continue
        at = span.start.timestamp()
        plan = make_plan(
            msgspec.structs.replace(snapshot, at=at, forecast=None), msgspec.structs.replace(rules, lead_s=0.0)
        )
        end = span.end.timestamp() if span.end else None
        targets = {target.name: target.target for target in plan.targets}
        found.append(ExpectedPlan(name=span.name, at=at, end=end, targets=targets))
        if len(found) == MOST_WINDOWS:
            break
    return found


def past_spans(windows: DeclaredWindows, *, since: float, until: float) -> list[WindowSpan]:
    """Return the windows that held between two times, in Unix seconds, oldest first; at most the newest MOST_SPANS."""
    return list(_spans(windows, since, until))[-MOST_SPANS:]


def _spans(windows: DeclaredWindows, since: float, until: float) -> Iterator[WindowSpan]:
    return windows.spans(datetime.fromtimestamp(since, UTC), lead_s=until - since)
