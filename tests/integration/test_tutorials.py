"""The tutorials, from an empty folder: their files as they stand there, and then their commands in order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.docs_pages import blocks
from support.network.ports import free_ports
from support.paths import ROOT

from edl_runtime.store.redis_server import RedisServer

TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = sorted(page.stem for page in TUTORIALS.glob("*.md") if page.stem != "index")
NAMED = re.compile(r"# (?P<path>[\w/]+\.(?:py|yaml))\n")


def write_files(page: str, folder: Path) -> list[Path]:
    """Write the files whose names their first lines have; return the DAG files."""
    for line, _, block in blocks(TUTORIALS / f"{page}.md", "python", "yaml"):
        named = NAMED.match(block)
        assert named, f"{page}:{line} names no file"
        (folder / named["path"]).parent.mkdir(exist_ok=True)
        (folder / named["path"]).write_text(block)
    for windows in folder.glob("*.yaml"):
        (folder / "dags" / windows.name).write_text(windows.read_text())
    return sorted(folder.glob("dags/*.py"))


@pytest.mark.parametrize("page", PAGES)
def test_its_dags_are_dags(page: str, tmp_path: Path) -> None:
    """A file makes a DAG of its own name, with tasks."""
    for file in write_files(page, tmp_path):
        named = re.sub(r"(?ms)^(with DAG\(.*?\)):$", r"\1 as dag:", file.read_text())
        made: dict[str, Any] = {"__file__": str(file)}
        exec(compile(named, str(file), "exec"), made)
        assert made["dag"].dag_id == file.stem
        assert made["dag"].tasks


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("distil-a-table", r"accuracy 0\.9\d\d"),
        ("distil-your-own-model", r"accuracy 0\.9\d\d"),
        (
            "make-your-script-elastic",
            r"(?s)after 16 steps.*after 8000 steps.*resumed[^\n]*instances 0 1.*\b8000 +1000\b",
        ),
        ("make-a-pytorch-script-elastic", r"(?s)0 of 2 begins after step 0\b.* 0 of 1 begins after step [1-9].*: done"),
        ("llm-teachers", r"(?s)learned: from 7\.\d\d to 3\.\d\d bits.*edl_gateway_answers_total\{pool=.chars.\} 24"),
        ("follow-traffic", r"(?s)default.*day"),
    ],
)
def test_its_commands_do_what_it_says(page: str, printed: str, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    commands = "".join(block for _, _, block in blocks(TUTORIALS / f"{page}.md", "sh"))
    tools = tmp_path / "tools"
    tools.mkdir()
    if "torch-python" in commands:
        torch = os.environ.get("EDL_TORCH_PYTHON") or pytest.skip("EDL_TORCH_PYTHON names no Python with PyTorch")
        command = tools / "torch-python"  # no link, through which an interpreter finds no packages of its environment
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(torch)} "$@"\n')
        command.chmod(0o755)
    pytest.importorskip("mlxtend")  # of the extra `demo`, with scikit-learn
    shown = sorted({*re.findall(r"\b900\d\b", commands)})
    ports = dict(zip(shown, map(str, free_ports(len(shown))), strict=True))
    commands = re.sub(r"\b900\d\b", lambda found: ports[found[0]], commands)
    # `edl resize` is typed by a person, who waits until the job is there
    commands = re.sub(r"edl resize (\w+)", r"until edl jobs \1 >/dev/null 2>&1; do sleep 0.2; done; \g<0>", commands)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
    with RedisServer(tmp_path / "redis") as redis:
        environ = {
            **clean,
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "EDL_WORK_DIR": str(tmp_path / "work"),
            "EDL_REDIS_URL": redis.url,
            "EDL_LEASE_TTL_S": "30",
            "EDL_TEACHER_WAIT_S": "240",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        done = subprocess.run(
            ["bash", "-m", "-c", f"set -e\n{commands}"],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
    assert re.search(printed, done.stdout), f"{done.stdout[-3000:]}{done.stderr[-2000:]}"
