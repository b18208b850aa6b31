"""What this machine has for instances, and what of it they reserve."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from edl_runtime.backends.interface import Capacity, JobStatus, NodeCapacity, Scaling
from edl_runtime.settings import count_gpus
from edl_runtime.specs import JobSpec

NODE_NAME = "localhost"
"""The node that all instances are on."""


def machine_total() -> dict[str, float]:
    """Return this machine's cores, its memory and its GPUs."""
    import psutil

    return {
        "cpu": float(os.cpu_count() or 1),
        "memory": float(psutil.virtual_memory().total),
        "gpu": float(count_gpus(os.environ)),
    }


def free_capacity(jobs: Iterable[JobStatus], total: Mapping[str, float]) -> Capacity:
    """Return what is free of `total` beside the instances of these jobs, but for those that are leaving."""
    free = dict(total)
    for job in jobs:
        staying = sum(one.phase == "running" and not one.leaving for one in job.instances)
        for name, much in (job.scaling.resources if job.scaling else {}).items():
            if name in free:
                free[name] = max(0.0, free[name] - staying * much)
    return Capacity(nodes=(NodeCapacity(name=NODE_NAME, total=dict(total), free=free),))


def scaling_of(spec: JobSpec, total: Mapping[str, float]) -> Scaling:
    """Return what decides on the size of a job that is about to start.

    It reserves what its pods would, of what a machine with so much in `total` has at all, and a core where that is
    nothing: its processes start whatever they would ask for as pods.
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
