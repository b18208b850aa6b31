"""What this machine has for instances."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from edl_runtime.backends.base import Capacity


def machine_capacity() -> Capacity:
    """Return this machine's cores, its free memory and its GPUs; other programs' load is not deducted."""
    import psutil

    return Capacity(
        cpus=float(os.cpu_count() or 1),
        free_memory=psutil.virtual_memory().available,
        gpus=count_gpus(os.environ, Path("/proc/driver/nvidia/gpus")),
    )


def count_gpus(environ: Mapping[str, str], driver: Path) -> int:
    """Return how many GPUs programs see: those of CUDA_VISIBLE_DEVICES, or all that the driver lists.

    As CUDA reads it, that list ends before its first invalid entry: "" and "-1" are none.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(list(driver.iterdir())) if driver.is_dir() else 0
    count = 0
    for device in visible.split(","):
        if not device.strip() or device.strip().startswith("-"):
            break
        count += 1
    return count
