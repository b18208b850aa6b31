"""`edl checkpoints ls|verify|prune|request`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints.snapshots import flip, reformat, steps_of, store_not_finite, stored
from support.edl_command import Edl, edl_command

from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.checkpoint.file_format import MANIFEST
from edl_runtime.specs import Bounds, JobSpec


@pytest.fixture
def edl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Edl]:
    with edl_command(monkeypatch, capsys, "checkpoints") as run:
        yield run


def test_they_are_shown_newest_first(tmp_path: Path, edl: Edl) -> None:
    """As a table for people and as JSON for programs."""
    store = stored(tmp_path, 7, 123)
    code, printed, _ = edl("ls", tmp_path)
    heading, *lines = printed.splitlines()
    assert code == 0
    assert heading.split() == [
        "GENERATION",
        "STEP",
        "EPOCH",
        "INSTANCES",
        "CREATED",
        "MB",
        "METRICS",
        "NAME",
        "PROBLEM",
    ]
    assert [line.split()[1] for line in lines] == ["123", "7"]
    assert lines[0].rstrip().endswith(store.list()[0].name)
    (newest, _) = json.loads(edl("ls", tmp_path, "--json")[1])
    assert (newest["url"], newest["step"], newest["epoch"]) == (store.list()[0].url, 123, 12)
    assert newest["metrics"] == {"loss": 1 / 124}


def test_those_that_can_not_be_read_are_shown_with_what_is_wrong(tmp_path: Path, edl: Edl) -> None:
    """At their place among the others; `verify` says so, too, and removes nothing."""
    damaged, later, _ = (Path(info.url) for info in stored(tmp_path, 1, 2, 3).list())
    flip(damaged / MANIFEST, at=40)
    reformat(later, 2)
    code, printed, _ = edl("ls", tmp_path)
    assert code == 0
    first, second, third = printed.splitlines()[1:]
    assert first.split()[:2] == ["1", "3"]
    assert f"{damaged.name}  {MANIFEST}: check sum differs" in first
    assert f"{later.name}  format 2, this version reads format 1" in second
    assert third.split()[1] == "1"
    views = json.loads(edl("ls", tmp_path, "--json")[1])
    assert [(view["step"], "format" in view, bool(view["problem"])) for view in views] == [
        (3, False, True),
        (2, False, True),
        (1, True, False),
    ]
    code, printed, _ = edl("verify", tmp_path, "--json")
    assert code == 1
    assert [view["state"] for view in json.loads(printed)] == ["damaged", "of an unknown format", "whole"]
    assert edl("prune", tmp_path, "--keep-last", "1")[1] == f"nothing to remove at {tmp_path}\n"


def test_weights_that_are_not_finite_are_shown(tmp_path: Path, edl: Edl) -> None:
    """By their names, though the files are whole."""
    store = stored(tmp_path, 1)
    (marked,) = store_not_finite(store, 2)
    _, printed, _ = edl("ls", tmp_path)
    first, second = printed.splitlines()[1:]
    assert first.rstrip().endswith(f"{marked.name}  NaN or infinity in model/weight")
    assert second.rstrip().endswith(store.list()[1].name)
    assert json.loads(edl("ls", tmp_path, "--json")[1])[0]["not_finite"] == ["model/weight"]
    code, printed, _ = edl("verify", tmp_path)
    assert code == 0
    assert "whole  NaN or infinity in model/weight" in printed


def test_one_of_an_unknown_format_is_not_verified(tmp_path: Path, edl: Edl) -> None:
    """Exit status 1: a training would not go on from it."""
    newest = stored(tmp_path, 1, 2).list()[0]
    reformat(Path(newest.url), 2)
    assert edl("verify", tmp_path)[0] == 1


@pytest.mark.parametrize(("verb", "status"), [("ls", 0), ("verify", 1)])
def test_a_folder_without_checkpoints_is_reported(tmp_path: Path, edl: Edl, verb: str, status: int) -> None:
    """With the place; there is nothing that a training could go on from."""
    assert edl(verb, tmp_path)[:2] == (status, f"no checkpoints at {tmp_path}\n")


def test_whole_ones_are_verified(tmp_path: Path, edl: Edl) -> None:
    """Exit status 0; one that is still being written is no damage."""
    store = stored(tmp_path, 1, 2)
    (Path(store.list()[0].url) / MANIFEST).unlink()
    code, printed, _ = edl("verify", tmp_path)
    assert code == 0
    assert [line.split()[1] for line in printed.splitlines()] == ["STATE", "unfinished", "whole"]


@pytest.mark.parametrize("file", ["model.safetensors", MANIFEST])
def test_damage_is_found_and_named(tmp_path: Path, edl: Edl, file: str) -> None:
    """Exit status 1, and which file of which checkpoint it is."""
    newest = stored(tmp_path, 1, 2).list()[0]
    os.truncate(Path(newest.url) / file, 20)
    code, printed, _ = edl("verify", tmp_path, "--json")
    assert code == 1
    damaged, whole = json.loads(printed)
    assert (damaged["name"], damaged["state"], whole["state"]) == (newest.name, "damaged", "whole")
    assert damaged["problem"].startswith(f"{file}: ")
    assert file in edl("verify", tmp_path)[1]


@pytest.mark.parametrize("as_json", [False, True], ids=["for people", "as JSON"])
def test_old_checkpoints_are_removed(tmp_path: Path, edl: Edl, *, as_json: bool) -> None:
    """A dry run only lists them; the command also reports that there was nothing to remove."""
    store = stored(tmp_path, 5, 10, 15, 20, 25)
    doomed = [info.name for info in store.list() if info.manifest.step in {5, 15}]
    arguments = ["prune", tmp_path, "--keep-last", "1", "--keep-every", "10", *["--json"] * as_json]
    _, planned, _ = edl(*arguments, "--dry-run")
    assert len(store.list()) == 5
    _, done, _ = edl(*arguments)
    assert steps_of(store) == [25, 20, 10]
    code, again, _ = edl(*arguments)
    assert code == 0
    if as_json:
        listed = [
            sorted((each["name"], each["removed"]) for each in json.loads(text)) for text in (planned, done, again)
        ]
        assert listed == [sorted((name, gone) for name in doomed) for gone in (False, True)] + [[]]
    else:
        assert sorted(planned.splitlines()) == sorted(f"would remove {name}" for name in doomed)
        assert sorted(done.splitlines()) == sorted(f"removed {name}" for name in doomed)
        assert again == f"nothing to remove at {tmp_path}\n"


@pytest.mark.parametrize("place", ["{}/nowhere", "memory://nowhere"])
def test_to_prune_where_nothing_is_is_an_error(tmp_path: Path, edl: Edl, place: str) -> None:
    """Most likely it is a mistake in the name."""
    code, _, complaint = edl("prune", place.format(tmp_path))
    assert code
    assert "nowhere', allowed is an existing folder or prefix with checkpoints" in complaint
    assert not (tmp_path / "nowhere").exists()


def test_wrong_numbers_are_refused(tmp_path: Path, edl: Edl) -> None:
    """To keep none is no retention."""
    assert edl("prune", tmp_path, "--keep-last", "0")[0] == 2


def test_a_request_names_what_a_job_lacks(
    edl: Edl, work_dir: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Redis, a job of that name, trainers that could write one, or that it has not ended."""
    assert "EDL_REDIS_URL" in edl("request", "job")[2]
    given = {"EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace, "EDL_WORK_DIR": str(work_dir)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    code, _, complaint = edl("request", "job")
    assert code == 1
    assert "no job or pool named 'job'" in complaint
    assert str(work_dir) in complaint
    backend, command = LocalBackend(work_dir), ("python", "-c", "import time; time.sleep(600)")
    spec = JobSpec(name="job", kind="trainer", command=command, bounds=Bounds(1, 1), instances=1)
    asyncio.run(backend.submit(spec, token="test", secrets={}))
    assert "only elastic trainings write checkpoints on request" in edl("request", "job")[2]
    asyncio.run(backend.resize("job", 0))
    assert "it is suspended" in edl("request", "job")[2]
    asyncio.run(backend.delete("job"))
