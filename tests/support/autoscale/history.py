"""Points of the past, as `edl monitor` remembers them."""

from __future__ import annotations

from edl_runtime.autoscale.history import JobPoint, Point, State, Use


def past(at: float, *, window: str = "", cpu: Use | None = None, **jobs: int | State) -> Point:
    """Return a point: of each job the number of its instances that ran, or the state that it was in without any."""
    return Point(
        at=at,
        jobs={
            name: JobPoint(running=seen) if isinstance(seen, int) else JobPoint(state=seen)
            for name, seen in jobs.items()
        },
        use={"cpu": cpu} if cpu else {},
        window=window,
    )
