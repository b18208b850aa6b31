"""Where, how often and how many: what a user says of checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.snapshots import stored

from edl_runtime.errors import CheckpointStoreError, SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Checkpoint

NOBODY = 65534


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Be nobody, if this is a user who may do anything."""
    me = os.geteuid()
    if me == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(me)


def test_one_is_written_every_five_minutes_unless_told_otherwise() -> None:
    """By steps only if by steps was asked for."""
    assert Checkpoint(url="x").every_s == 300
    assert Checkpoint(url="x", every_steps=10).every_s is None
    assert Checkpoint(url="x", every_steps=10, every_s=5) == Checkpoint(url="x", every_steps=10, every_s=5.0)


@pytest.mark.parametrize(
    "spec",
    [
        Checkpoint(url="s3://bucket/job"),
        Checkpoint(url="/a b/c", every_steps=50, keep_last=5, keep_every=1000),
        Checkpoint(url="x", every_steps=50, every_s=0.5),
    ],
)
def test_it_goes_through_the_environment(spec: Checkpoint) -> None:
    """From whoever starts a training to the training."""
    settings = RuntimeSettings.from_env(spec.to_env())
    assert settings.checkpoint_spec() == spec
    assert RuntimeSettings.from_env(settings.to_env()).checkpoint_spec() == spec
    assert RuntimeSettings().checkpoint_spec() is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"url": ""}, r"checkpoint\.url: got ''"),
        ({"every_steps": 0}, r"checkpoint\.every_steps: got 0"),
        ({"every_steps": True}, r"checkpoint\.every_steps: got True"),
        ({"every_s": 0}, r"checkpoint\.every_s: got 0"),
        ({"every_s": float("nan")}, r"checkpoint\.every_s: got nan"),
        ({"keep_last": 0}, r"checkpoint\.keep_last: got 0, allowed is a whole number, 1 or more"),
        ({"keep_last": None}, r"checkpoint\.keep_last: got None"),
        ({"keep_every": -5}, r"checkpoint\.keep_every: got -5"),
    ],
)
def test_what_can_not_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    """With the field, what was given and what is allowed."""
    with pytest.raises(SpecError, match=message):
        Checkpoint(**{"url": "x", **wrong})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("EDL_CHECKPOINT_EVERY_STEPS", "-1"),
        ("EDL_CHECKPOINT_EVERY_STEPS", "often"),
        ("EDL_CHECKPOINT_EVERY_S", "nan"),
        ("EDL_CHECKPOINT_KEEP_LAST", "0"),
        ("EDL_CHECKPOINT_KEEP_EVERY", "-1"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, text: str) -> None:
    """As it stands in the environment."""
    with pytest.raises(SpecError, match=variable):
        RuntimeSettings.from_env({"EDL_CHECKPOINT": "x", variable: text})


def test_a_path_without_permission_is_told_at_the_start(tmp_path: Path) -> None:
    """With the path, the reason and what to do."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    message = rf"can't be kept at {locked}/job \(PermissionError.*check that this process may read and write there"
    with without_rights(), pytest.raises(CheckpointStoreError, match=message):
        stored(locked / "job").check()
