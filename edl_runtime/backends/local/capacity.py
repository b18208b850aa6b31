"""Resources of this machine, and what instances reserve of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from edl_runtime.backends.interface import Capacity, JobStatus, NodeCapacity, Scaling
from edl_runtime.settings import count_gpus
from edl_runtime.specs import JobSpec

NODE_NAME = "localhost"
"""Name of this machine as a node."""


def machine_total() -> dict[str, float]:
    import psutil

    return {
        "cpu": float(os.cpu_count() or 1),
        "memory": float(psutil.virtual_memory().total),
        "gpu": float(count_gpus(os.environ)),
    }


def free_capacity(jobs: Iterable[JobStatus], total: Mapping[str, float]) -> Capacity:
    """Return what the running instances of these jobs leave of `total`; those that are leaving count as gone."""
    free = dict(total)
    for job in jobs:
        staying = sum(one.phase == "running" and not one.leaving for one in job.instances)
        for name, much in (job.scaling.resources if job.scaling else {}).items():
            if name in free:
                free[name] = max(0.0, free[name] - staying * much)
    return Capacity(nodes=(NodeCapacity(name=NODE_NAME, total=dict(total), free=free),))


def scaling_of(spec: JobSpec, total: Mapping[str, float]) -> Scaling:
    """Return the scaling of a new job.

    Its instances reserve what their pods would of the resources in `total`, or else one core. Nothing enforces that.
    """
    asked = spec.pod.reserves() if spec.pod else {}
    asked = {name: much for name, much in asked.items() if much and total.get(name)}
    return Scaling(
        bounds=spec.bounds,
        resources=asked or {"cpu": 1.0},
        priority=spec.priority,
        weight=spec.weight,
        resumes=spec.kind == "pool" or (spec.elastic and bool(spec.env.get("EDL_CHECKPOINT"))),
    )
