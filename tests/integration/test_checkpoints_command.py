"""`edl checkpoints ls|verify|prune`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner, Result
from support.checkpoints.snapshots import steps_of, stored

from edl_runtime.checkpoint.manifest import MANIFEST
from edl_runtime.cli import edl
from edl_runtime.errors import SpecError


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """The command says where logs go; here that ends with each test, and what others set up stays."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def checkpoints(*words: str | Path) -> Result:
    """Run the command."""
    return CliRunner().invoke(edl, ["checkpoints", *map(str, words)], prog_name="edl")


def test_they_are_shown_newest_first(tmp_path: Path) -> None:
    """As a table for people and as JSON for programs."""
    store = stored(tmp_path, 7, 123)
    done = checkpoints("ls", tmp_path)
    lines = done.stdout.splitlines()
    assert done.exit_code == 0
    assert lines[0].split() == ["GENERATION", "STEP", "EPOCH", "INSTANCES", "CREATED", "MB", "METRICS", "NAME"]
    assert [line.split()[1] for line in lines[1:]] == ["123", "7"]
    assert lines[1].endswith(store.list()[0].name)
    (newest, _) = json.loads(checkpoints("ls", tmp_path, "--json").stdout)
    assert (newest["url"], newest["step"], newest["epoch"]) == (store.list()[0].url, 123, 12)
    assert newest["metrics"] == {"loss": 1 / 124}


def test_where_none_are_that_is_said(tmp_path: Path) -> None:
    """With the place; there is nothing that a training could go on from."""
    assert checkpoints("ls", tmp_path).stdout == f"no checkpoints at {tmp_path}\n"
    verified = checkpoints("verify", tmp_path)
    assert (verified.exit_code, verified.stdout) == (1, f"no checkpoints at {tmp_path}\n")


def test_whole_ones_are_verified(tmp_path: Path) -> None:
    """Exit status 0; one that is still being written is no damage."""
    store = stored(tmp_path, 1, 2)
    (Path(store.list()[0].url) / MANIFEST).unlink()
    done = checkpoints("verify", tmp_path)
    assert done.exit_code == 0
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["STATE", "unfinished", "whole"]


@pytest.mark.parametrize("file", ["model.safetensors", MANIFEST])
def test_damage_is_found_and_named(tmp_path: Path, file: str) -> None:
    """Exit status 1, and which file of which checkpoint it is."""
    store = stored(tmp_path, 1, 2)
    newest = store.list()[0]
    os.truncate(Path(newest.url) / file, 20)
    done = checkpoints("verify", tmp_path, "--json")
    assert done.exit_code == 1
    damaged, whole = json.loads(done.stdout)
    assert (damaged["name"], damaged["state"], whole["state"]) == (newest.name, "damaged", "whole")
    assert damaged["damage"][0].startswith(f"{file}: ")
    assert file in checkpoints("verify", tmp_path).stdout


def test_old_ones_are_removed_as_told(tmp_path: Path) -> None:
    """Only said in a dry run."""
    store = stored(tmp_path, 5, 10, 15, 20, 25)
    wished = ["prune", str(tmp_path), "--keep-last", "1", "--keep-every", "10"]
    said = checkpoints(*wished, "--dry-run")
    assert [line.split()[:2] for line in said.stdout.splitlines()] == [["would", "remove"]] * 2
    assert len(store.list()) == 5
    done = checkpoints(*wished)
    assert [line.split()[1] for line in done.stdout.splitlines()] == [
        line.split()[2] for line in said.stdout.splitlines()
    ]
    assert steps_of(store) == [25, 20, 10]
    again = checkpoints(*wished)
    assert (again.exit_code, again.stdout) == (0, f"nothing to remove at {tmp_path}\n")


def test_what_was_removed_is_told_to_programs(tmp_path: Path) -> None:
    """As JSON, each with whether it is gone already; an empty list where there was nothing to remove."""
    store = stored(tmp_path, 5, 10)
    oldest = store.list()[1].name
    wished = ["prune", str(tmp_path), "--keep-last", "1", "--json"]
    assert json.loads(checkpoints(*wished, "--dry-run").stdout) == [{"name": oldest, "removed": False}]
    assert json.loads(checkpoints(*wished).stdout) == [{"name": oldest, "removed": True}]
    assert json.loads(checkpoints(*wished).stdout) == []


@pytest.mark.parametrize("place", ["{}/nowhere", "memory://nowhere"])
def test_to_prune_where_nothing_is_is_an_error(tmp_path: Path, place: str) -> None:
    """Most likely it is a mistake in the name."""
    done = checkpoints("prune", place.format(tmp_path))
    assert isinstance(done.exception, SpecError)
    assert "nowhere', allowed is a place where checkpoints are kept" in str(done.exception)
    assert not (tmp_path / "nowhere").exists()


def test_wrong_numbers_are_refused(tmp_path: Path) -> None:
    """To keep none is no retention."""
    assert checkpoints("prune", tmp_path, "--keep-last", "0").exit_code == 2
