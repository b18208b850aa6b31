"""The example of word2vec: its page's commands as they stand there, and its benchmark."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.examples import real_data
from support.paths import BENCHMARKS, EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = EXAMPLES / "word2vec"
PAGE = (EXAMPLE / "README.md").read_text()
COMMANDS = re.findall(r"```sh\n(.*?)\n```", PAGE, re.DOTALL)[1].splitlines()
PROGRAMS = {"python": [sys.executable], "edl": [sys.executable, "-P", "-m", "edl_runtime.cli"]}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    pytest.importorskip("paddle")
    pytest.importorskip("pyarrow")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
    quiet = {"GLOG_minloglevel": "2", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return {**clean, **quiet, "EDL_WORK_DIR": str(tmp_path / "work"), "EDL_LEASE_TTL_S": "30"}


def run(command: str, folder: Path, environ: dict[str, str]) -> str:
    """Run a command of the page in another folder; return what it prints."""
    program, *words = shlex.split(command.replace("../../.datasets/wordnet", str(real_data("wordnet"))))
    words = [str(EXAMPLE / word) if word.endswith(".py") else word for word in words]
    done = subprocess.run(
        [*PROGRAMS[program], *words], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_its_commands_run_as_they_stand(tmp_path: Path, environ: dict[str, str]) -> None:
    """N-grams become shards, the model learns from them, and what it saved says which words are alike."""
    prepared, trained, listed = (run(command, tmp_path, environ) for command in COMMANDS)
    assert re.search(r"^train: 31,315 n-grams in 1 shards$", prepared, re.MULTILINE)
    assert prepared.endswith("53 words\n")
    shown = re.findall(
        r"Pass (\d+), Batch (\d+), Cost (\d+\.\d{6}), \{'classification_error_evaluator': [\d.]+\}", trained
    )
    assert [(number, batch) for number, batch, _ in shown] == [(p, b) for p in "01" for b in ("100", "200")]
    assert float(shown[-1][2]) < float(shown[0][2])
    errors = re.findall(r"Pass (\d+), Testing metrics \{'classification_error_evaluator': ([\d.]+)\}", trained)
    assert [number for number, _ in errors] == ["0", "1"]
    assert all(float(error) < 0.5 for _, error in errors)
    assert re.fullmatch(r"(a|in): (\S+ -?[01]\.\d\d, ){4}\S+ -?[01]\.\d\d\n(?s:.*)", listed)
    words = (tmp_path / "model" / "word_dict").read_text().splitlines()
    rows = (tmp_path / "model" / "embedding_table").read_text().splitlines()
    assert [row.count(",") for row in rows] == [31] * len(words)
    assert words == (tmp_path / "few" / "word_dict").read_text().splitlines()


@pytest.mark.deep
def test_instances_that_come_and_go_do_not_change_what_is_learnt(tmp_path: Path, environ: dict[str, str]) -> None:
    """From one to three and back while it trains, beside one and three all the time: the benchmark, on few n-grams."""
    run(COMMANDS[0], tmp_path, environ)
    command = [sys.executable, str(BENCHMARKS / "word2vec.py"), "--data", "few", "--seeds", "1", "--batch_size", "64"]
    command += ["--pause_s", "0.05", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["apart"] <= 0.01
    assert [set(errors) for errors in found["errors"]] == [{"1", "3", "1-3-1"}]
