"""The commands of docs/how-to/data.md about tasks, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.tasks.durable_redis import DurableRedis

PAGE = (ROOT / "docs/how-to/data.md").read_text()
SECTION = PAGE.partition("\n## cloud_reader")[2].partition("\n## ")[0]
SCRIPT, *_ = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
COMMANDS = re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)
OUTPUT, *_ = re.findall(r"```\n(PASS.*?)```", SECTION, re.DOTALL)
QUEUE, *_ = re.findall(r"```python\n(.*?)```", PAGE.partition("\n### Task queue")[2], re.DOTALL)
URL = "redis://127.0.0.1:6379/0"


@pytest.mark.timeout(300)
def test_three_readers_share_a_data_set(tmp_path: Path) -> None:
    """From an empty folder to what the page prints."""
    (tmp_path / "count.py").write_text(SCRIPT)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
    environ = {**clean, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with DurableRedis(tmp_path / "redis") as server:
        commands = "".join(["set -e\n", *COMMANDS])
        assert commands.count(URL) == 1
        done = subprocess.run(
            ["bash", "-c", commands.replace(URL, server.url)],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert without_ends(done.stdout).endswith(without_ends(OUTPUT)), done.stderr[-3000:]


def without_ends(table: str) -> str:
    return "\n".join(line.rstrip() for line in table.strip().splitlines())


def test_the_queue_alone_is_used_as_shown(redis_url: str, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The example leases a task and finishes it."""
    assert QUEUE.count(f'"{URL}", "default"') == 1
    exec(QUEUE.replace(URL, redis_url).replace('"default"', repr(namespace)), {})
    assert capsys.readouterr().out == "('words/0.txt', 'words/1.txt')\n"
