"""How many instances a job or pool has in a traffic window. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from edl_runtime.autoscale.traffic import Size, Sizes
from edl_runtime.backends.base import JobStatus, Scaling

_ALL = Size(1.0, share=True)


class Wanted(NamedTuple):
    """How many instances it shall have, 0 for none for now, and why, in words."""

    instances: int
    reason: str


def own_size(sizes: Sizes, status: JobStatus) -> Size | None:
    """Return what the window says of the job or pool itself, None if nothing."""
    return (sizes.pools if status.kind == "pool" else sizes.jobs).get(status.name)


def wanted_in(window: str, sizes: Sizes, status: JobStatus, scaling: Scaling, room: Mapping[str, float]) -> Wanted:
    """Return how many instances a job or pool shall have in a window that leaves training this `room`.

    As many as the window says, and without a size of its own as many as there is room for in what training may use, at
    most its maximum. With less than its minimum it is suspended, if it goes on later where it was, and else keeps that.
    """
    kind: Literal["jobs", "pools"] = "pools" if status.kind == "pool" else "jobs"
    size = own_size(sizes, status)
    asked = Sizes(**{kind: {status.name: size or _ALL}})
    most = asked.most(kind, status.name, scaling.resources, room)
    low, high = scaling.bounds.min, scaling.bounds.max
    said = f"window {window!r} has {_in_words(size)}"
    if most is None or most >= high:
        return Wanted(high, said if most == high else f"{said}, and its most is {high}")
    if size is None or size.share:
        said = f"{said}, which is {most}"
    if most >= low:
        return Wanted(most, said)
    if scaling.resumes or status.is_suspended:
        return Wanted(0, f"{said}, and its least is {low}: it waits until there is more")
    return Wanted(low, f"{said}, and its least is {low}, which it keeps: it would not go on where it was")


def _in_words(size: Size | None) -> str:
    if size is None:
        return "no size for it but what training may use"
    return f"{size} of what training may use for it" if size.share else f"{size} for it"
