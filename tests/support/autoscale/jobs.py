"""Jobs as a backend would tell of them, with their places."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from edl_runtime.backends.base import InstanceStatus, JobStatus, Scaling
from edl_runtime.specs import Bounds

NOON = datetime(2026, 3, 2, 12, tzinfo=UTC).timestamp()


def job(name: str, bounds: Bounds, cpu: float, have: int, *, pending: int = 0, **more: Any) -> JobStatus:
    """Return a job of elastic trainers with so many instances on the node and so many that wait for a place."""
    scaling = {name: more.pop(name) for name in ("priority", "weight", "resumes", "resized_at") if name in more}
    there = [InstanceStatus(index=index, phase="running", started_at=NOON - 4000, node="node") for index in range(have)]
    waiting = [InstanceStatus(index=have + index, phase="pending", started_at=NOON - 4000) for index in range(pending)]
    phase = "running" if have else "pending"
    given = {"kind": "trainer", "elastic": True, "phase": phase, "created_at": NOON - 5000, **more}
    return JobStatus(
        name=name,
        token="",
        digest="",
        wanted=have + pending,
        instances=(*there, *waiting),
        scaling=Scaling(bounds=bounds, resources={"cpu": cpu}, **{"resumes": True, **scaling}),
        **given,
    )
