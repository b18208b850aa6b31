"""The example of an elastic ResNet: its page's commands on few pictures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.backends.local_processes import wait_until_gone
from support.demo.jobs import PATIENCE_S, eventually
from support.object_store import files
from support.paths import EXAMPLES, SUPPORT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = EXAMPLES / "collective_resnet"
WRITE, TRAIN = re.findall(r"```sh\n(.*?)\n```", (EXAMPLE / "README.md").read_text(), re.DOTALL)


def changed(command: str, **others: str) -> str:
    """Return the page's command with the example's script by its path, and other values of these flags."""
    command = re.sub(r"\w+\.py", lambda found: str(EXAMPLE / found[0]), command)
    for flag, value in others.items():
        command, count = re.subn(rf"(--{flag}=)\S+", rf"\g<1>{value}", command)
        assert count == 1, flag
    return f"exec {command}"


def test_instances_come_and_go_while_a_resnet_learns(tmp_path: Path, bucket: str, redis_url: str) -> None:
    """1, 2 and 1 instances: the others go on; top-1 and top-5 are told; checkpoints are in an object store."""
    pytest.importorskip("paddle")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "EDL_REDIS_URL": redis_url,
        "EDL_NAMESPACE": "collective-resnet",
        "EDL_WORK_DIR": str(tmp_path / "work"),
        "EDL_LEASE_TTL_S": "30",
        "OMP_NUM_THREADS": "1",
        "GLOG_minloglevel": "2",
        "PYTHONWARNINGS": "ignore",
    }
    write = changed(WRITE, data_dir=str(SUPPORT / "pictures"), rows="48 --test_rows=20")
    subprocess.run(["bash", "-c", write], cwd=tmp_path, env=environ, check=True)

    log = tmp_path / "log"
    train = changed(
        TRAIN,
        batch_size="8",
        total_batch_size="16",
        num_epochs="100000",
        checkpoint=bucket,
        save_steps="10 --fetch_steps=1",
    )
    with log.open("wb") as output:
        run = subprocess.Popen(["bash", "-c", train], cwd=tmp_path, env=environ, stdout=output, stderr=output)

    def train_with(instances: int) -> None:
        before = len(log.read_text())
        subprocess.run(["edl", "resize", "resnet", str(instances)], cwd=tmp_path, env=environ, check=True)
        eventually(lambda: f", {instances} instances" in log.read_text()[before:], log, of=run)

    try:
        eventually(lambda: ", 1 instances" in log.read_text(), log, of=run)
        train_with(2)
        train_with(1)
        before = len(log.read_text())
        eventually(
            lambda: re.search(r"epoch \d+: acc1 \d+\.\d\d%, acc5 \d+\.\d\d%", log.read_text()[before:]), log, of=run
        )
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE_S) == 0, log.read_text()[-3000:]
    finally:
        run.kill()
        run.wait()
        wait_until_gone(tmp_path / "work")
    assert any(file.endswith("/manifest.json") for file in files().find(bucket.removeprefix("s3://")))
