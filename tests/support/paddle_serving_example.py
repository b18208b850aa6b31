"""Runs the commands of `examples/paddle_serving/README.md` as they stand there, in another folder and for one epoch."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from support.paths import EXAMPLES, ROOT

EXAMPLE = EXAMPLES / "paddle_serving"
PAGE = (EXAMPLE / "README.md").read_text()
SAVE, TEACHER, PIPELINE, STUDENT = re.findall(r"```sh\n(.*?)\n```", PAGE, re.DOTALL)


def address(server: str, port: int) -> str:
    """Return what the page has as `--distill_teachers` for a server."""
    (found,) = re.findall(rf"\| the {re.escape(server)} \| `(.*)` \|", PAGE)
    return str(found).replace("9292", str(port))


def words(command: str, port: int = 9292) -> list[str]:
    """Return the command's words for this machine: programs and scripts by their paths, another port."""
    programs = {"python": [sys.executable], "edl": [sys.executable, "-m", "edl_runtime.cli"]}
    first, *more = shlex.split(command)
    found = [*programs.get(first, [str(ROOT / first)]), *more]
    return [str(EXAMPLE / word) if word.endswith(".py") else word.replace("9292", str(port)) for word in found]


def train(command: list[str], folder: Path) -> str:
    """Run train_with_fleet.py for one epoch; return what it prints."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
    done = subprocess.run(
        [*command, "--num_epochs", "1"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def accuracy_in(printed: str) -> float:
    (percent,) = re.findall(r"epoch 0: cost .*, accuracy (.*)%", printed)
    return float(percent)
