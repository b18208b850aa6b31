"""What local instances are given of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl_runtime.backends.local.capacity import count_gpus
from edl_runtime.backends.local.environment import base_environment


def test_only_what_programs_need_passes_to_instances() -> None:
    """The environment is chosen by what is known to be harmless, so that no new kind of secret slips through."""
    harmless = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "PYTHONPATH": "/lib",
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "1",
    }
    secret = {"AIRFLOW__CORE__FERNET_KEY": "x", "_AIRFLOW_X": "x", "EDL_REDIS_URL": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    assert base_environment(harmless | secret) == harmless


@pytest.mark.parametrize(
    ("visible", "gpus"), [("", 0), ("-1", 0), ("0", 1), ("0,1", 2), ("0,-1,1", 1), ("GPU-1a,MIG-2", 2)]
)
def test_visible_gpus_are_counted_as_cuda_does(tmp_path: Path, visible: str, gpus: int) -> None:
    """The variable wins over the driver, and ends at its first invalid entry."""
    (tmp_path / "0000:01:00.0").mkdir()
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == gpus


def test_without_the_variable_the_driver_is_asked(tmp_path: Path) -> None:
    """A machine without the driver has no GPUs."""
    (tmp_path / "0000:01:00.0").mkdir()
    assert count_gpus({}, tmp_path) == 1
    assert count_gpus({}, tmp_path / "nothing") == 0
