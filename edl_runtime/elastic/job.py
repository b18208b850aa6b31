"""A job that runs a training script → one of elastic trainers. Pure."""

from __future__ import annotations

import msgspec

from edl_runtime.elastic.messages import Gear
from edl_runtime.specs import Bounds, JobSpec

LEAVE_WITHIN_S = 30.0
"""Between SIGTERM and SIGKILL of an elastic trainer: it finishes its step, and may write a checkpoint."""


def elastic_job(
    spec: JobSpec, bounds: Bounds, *, gear: Gear = "live", start: int | None = None, grace_s: float = LEAVE_WITHIN_S
) -> JobSpec:
    """Return the job whose instances are agents, each an `edl agent` that runs `spec`'s command.

    It has `start` of them to begin with, by default the fewest. They start with -P: a module beside the script is the
    script's, and no file there takes the place of a library of the agent's. Raises SpecError for a `start` outside
    `bounds`.
    """
    agent = ("python", "-P", "-m", "edl_runtime.cli", "agent", "--instances", str(bounds), "--gear", gear, "--")
    return msgspec.structs.replace(
        spec,
        command=(*agent, *spec.command),
        bounds=bounds,
        instances=bounds.min if start is None else start,
        elastic=True,
        grace_s=grace_s,
    )
