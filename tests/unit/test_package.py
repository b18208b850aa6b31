"""What `make build` makes: the wheel and the source distribution."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest
from support.packages import build_distributions
from support.paths import ROOT

import edl_runtime

pytestmark = pytest.mark.slow

COPIED = ("dags", "examples", "plugins")
"""What people copy into an Airflow or a project of theirs."""


class Distributions(NamedTuple):
    wheel: Path
    source: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    return Distributions(*build_distributions(tmp_path_factory.mktemp("dist")))


@pytest.fixture(scope="module")
def in_wheel(built: Distributions) -> set[str]:
    with zipfile.ZipFile(built.wheel) as opened:
        return set(opened.namelist())


@pytest.fixture(scope="module")
def in_source(built: Distributions) -> set[str]:
    with tarfile.open(built.source) as opened:
        return {str(PurePosixPath(*PurePosixPath(one.name).parts[1:])) for one in opened if one.isfile()}


def of_repository(*folders: str) -> Iterator[str]:
    """Yield the paths of the files that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    yield from filter(None, done.stdout.split("\0"))


def metadata(built: Distributions) -> Message:
    with zipfile.ZipFile(built.wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(opened.read(name).decode())


def test_the_wheel_has_the_two_packages_and_nothing_else(in_wheel: set[str]) -> None:
    """Lua scripts and data files too; no tests, no scripts of this repository."""
    packages = {name for name in in_wheel if ".data/" not in name and ".dist-info/" not in name}
    assert packages == set(of_repository("edl_airflow", "edl_runtime"))


def test_the_wheel_has_what_people_copy(in_wheel: set[str]) -> None:
    """DAGs, plugins and examples, side by side as they are here, below share/edl-airflow of the environment."""
    (data,) = {name.split("/", 1)[0] for name in in_wheel if ".data/" in name}
    assert {name for name in in_wheel if name.startswith(data)} == {
        f"{data}/data/share/edl-airflow/{name}" for name in of_repository(*COPIED)
    }


def test_the_source_distribution_has_everything_but_tests(in_source: set[str]) -> None:
    """And nothing of an editor, a build or a run."""
    left_out = {"tests", ".ci", ".github", ".gitignore"}
    wanted = {name for name in of_repository() if name.split("/", 1)[0] not in left_out}
    assert wanted - in_source == set()
    made = {name for name in in_source if name == "PKG-INFO" or name.startswith("edl_airflow.egg-info/")}
    assert in_source - wanted - made == set()


def test_the_metadata_say_what_an_index_shows(built: Distributions) -> None:
    """Version, license, Pythons, links, and that it is a provider of Airflow."""
    found = metadata(built)
    assert (found["Name"], found["Version"]) == ("edl-airflow", edl_runtime.__version__)
    assert (found["License-Expression"], found["License-File"]) == ("Apache-2.0", "LICENSE")
    classifiers = found.get_all("Classifier", [])
    assert "Framework :: Apache Airflow :: Provider" in classifiers
    named = {tuple(map(int, one.split(" :: ")[-1].split("."))) for one in classifiers if ":: Python :: 3." in one}
    oldest, newest = min(named), max(named)
    assert set(found["Requires-Python"].split(",")) == {
        f">={oldest[0]}.{oldest[1]}",
        f"<{newest[0]}.{newest[1] + 1}",
    }
    links = found.get_all("Project-URL", [])
    assert links
    assert all(", https://" in link for link in links)


def test_an_index_accepts_them(built: Distributions) -> None:
    """Twine finds nothing to complain about."""
    command = [sys.executable, "-m", "twine", "check", "--strict", *built]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
