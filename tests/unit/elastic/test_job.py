"""A script's job becomes one of elastic trainers."""

from __future__ import annotations

import pytest

from edl_runtime.elastic.job import elastic_job
from edl_runtime.errors import SpecError
from edl_runtime.pods import Pod
from edl_runtime.specs import Bounds, JobSpec

SCRIPT = JobSpec(
    name="digits",
    kind="trainer",
    command=("python", "train.py"),
    bounds=Bounds(1, 1),
    instances=1,
    env={"LR": "0.1"},
    cwd="/src",
    pod=Pod(image="registry.example/train:1"),
)


def test_each_instance_is_an_agent_that_runs_the_script() -> None:
    """It begins with the fewest, unless told otherwise; all else is the script's."""
    job = elastic_job(SCRIPT, Bounds(2, 4), gear="warm")
    agent = ("python", "-P", "-m", "edl_runtime.cli", "agent", "--instances", "2:4", "--gear", "warm", "--")
    assert job.command == (*agent, "python", "train.py")
    assert (job.bounds, job.instances, job.elastic) == (Bounds(2, 4), 2, True)
    assert (job.name, job.env, job.cwd, job.pod) == ("digits", SCRIPT.env, "/src", SCRIPT.pod)
    assert elastic_job(SCRIPT, Bounds(2, 4), start=3).instances == 3


def test_it_begins_within_its_bounds() -> None:
    """The error says which numbers are."""
    with pytest.raises(SpecError, match=r"instances: got 5, allowed is 2 to 4"):
        elastic_job(SCRIPT, Bounds(2, 4), start=5)
