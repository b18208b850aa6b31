"""`pip install` of our wheel into an Airflow that is there, with that Airflow's own pins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.airflow.releases import NEWEST, OLDEST, Release
from support.packages import UV, build_distributions
from support.paths import DAGS, ROOT

EXTRAS = "airflow,airflow-kubernetes,kubernetes,local"
LOCK = (ROOT / "requirements.lock").read_text()


def test_the_newest_airflow_is_the_one_that_is_tested() -> None:
    """That of the lock, and the oldest is the one that the metadata ask for."""
    assert re.findall(r"^apache-airflow==(\S+)", LOCK, re.MULTILINE) == [NEWEST.version]
    (oldest,) = re.findall(r'"apache-airflow>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    assert OLDEST.version == f"{oldest}.0"


def test_paddle_can_read_tensors_with_the_numpy_of_the_lock() -> None:
    """Its GradScaler reads a scale so when the scale shrinks, on GPUs only."""
    script = "import paddle; assert float(paddle.to_tensor([1.0])) == 1.0"
    subprocess.run([sys.executable, "-c", script], check=True)


class Installed:
    """An environment with an Airflow of its own home, and our wheel."""

    def __init__(self, folder: Path, release: Release) -> None:
        self._bin = folder / "env" / "bin"
        self.data = folder / "env" / "share" / "edl-airflow"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "EDL_", "PYTHON"))}
        self._environ = {
            **kept,
            "AIRFLOW_HOME": str(folder / "home"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.data / "dags"),
        }
        wheel, _ = build_distributions(folder / "dist")
        pins = release.constraints(folder)
        python = self._bin / "python"
        subprocess.run([UV, "venv", "--quiet", "--seed", "--python", sys.executable, folder / "env"], check=True)
        airflow = f"apache-airflow=={release.version}"
        subprocess.run([UV, "pip", "install", "--quiet", "--python", python, "-c", pins, airflow], check=True)
        self.before = self.versions()
        self.run("pip", "install", "--quiet", "-c", str(pins), f"{wheel}[{EXTRAS}]")

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [self._bin / command[0], *command[1:]], env=self._environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    def airflow(self, *command: str) -> list[dict[str, Any]]:
        """Return the rows that a command of Airflow prints."""
        output = self.run("airflow", *command, "--output", "json")
        rows: list[dict[str, Any]] = json.loads(output[output.index("[{") :])
        return rows

    def versions(self) -> dict[str, str]:
        listed = json.loads(self.run("pip", "list", "--format", "json"))
        return {one["name"]: one["version"] for one in listed}


@pytest.fixture(scope="module", params=[OLDEST, NEWEST], ids=lambda release: release.version)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), request.param)


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_pip_adds_the_provider_to_an_airflow(installed: Installed) -> None:
    """No package of Airflow's changes; Airflow has the provider, plugin and DAGs, and the command starts."""
    after = installed.versions()
    assert {name: after[name] for name in installed.before} == installed.before
    installed.run("pip", "check")

    assert "edl-airflow" in {row["package_name"] for row in installed.airflow("providers", "list")}
    assert "edl" in {row["name"] for row in installed.airflow("plugins")}
    assert "teacher" in installed.run("edl", "--help")

    installed.run("airflow", "db", "migrate")
    dags = {Path(row["fileloc"]).name for row in installed.airflow("dags", "list", "--local")}
    assert dags == {file.name for file in DAGS.glob("*.py")}
