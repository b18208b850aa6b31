"""The example of JobServer and JobClient, by its page's commands: pods come and go while a network is trained."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.backends.local_processes import wait_until_gone
from support.demo.jobs import PATIENCE_S, Demo, eventually
from support.examples import real_data
from support.network.ports import free_ports
from support.paths import SUPPORT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAINERS = re.compile(r"^step (\d+): (\d+) trainers$", re.MULTILINE)


def sets_of_trainers(demo: Demo) -> list[int]:
    """Return how many trainers there were, from each change to the next."""
    pytest.importorskip("paddle")
    log = demo.folder / "resnet_pod" / "pod_0_0" / "log" / "workerlog.0"
    return [int(trainers) for _, trainers in TRAINERS.findall(log.read_text())] if log.exists() else []


def change(demo: Demo, server: subprocess.Popen[bytes], client: subprocess.Popen[bytes], *, to: int) -> None:
    """Have the server change its pods, and wait until so many trainers train together."""
    before = len(sets_of_trainers(demo))
    server.send_signal(signal.SIGUSR1)
    eventually(lambda: sets_of_trainers(demo)[before:] == [to], demo.client_log, of=client)


def test_pods_leave_and_join_a_training_that_goes_on(tmp_path: Path) -> None:
    """The last pod leaves and another joins, without a restart of the first; a stopped client leaves a checkpoint."""
    demo = Demo(tmp_path, *free_ports(1))
    flags = ("--num_epochs=100000", "--pause_s=0.05")
    with demo.example(*flags, data=SUPPORT / "pictures") as (server, client):
        eventually(lambda: sets_of_trainers(demo)[-1:] == [2], demo.client_log, of=client)
        change(demo, server, client, to=1)
        change(demo, server, client, to=2)
        client.terminate()
        assert client.wait(PATIENCE_S) == 0
    wait_until_gone(tmp_path)
    assert len(list((tmp_path / "fleet_checkpoints").glob("step-*/manifest.json"))) == 1
    assert (tmp_path / "resnet_pod" / "pod_0_0" / "log" / "workerlog.0").read_text().count("worker.started") == 1
    assert "pod.failed" not in demo.client_log.read_text()


def accuracy_of(demo: Demo, seed: int, changes: Sequence[int]) -> float:
    """Train 2,000 pictures to the end, and return the accuracy on the 10,000 that are held out."""
    flags = (f"--seed={seed}", "--rows=2000", "--num_epochs=20", f"--pause_s={0.2 if changes else 0}")
    with demo.example(*flags, data=real_data("fashion")) as (server, client):
        eventually(lambda: sets_of_trainers(demo)[-1:] == [2], demo.client_log, of=client)
        for trainers in changes:
            change(demo, server, client, to=trainers)
        assert client.wait(1200) == 0, demo.client_log.read_text()
    (reached,) = re.findall(r"accuracy (0\.\d+)", demo.trainer_logs())
    return float(reached)


@pytest.mark.deep
@pytest.mark.timeout(3000)
def test_six_changes_of_the_pods_cost_no_accuracy(tmp_path: Path) -> None:
    """Over three seeds, the mean is that of undisturbed runs within the spread that seeds make: a point."""
    reached: dict[str, list[float]] = {"six changes": [], "undisturbed": []}
    for seed in range(3):
        for name, changes in (("six changes", (1, 2) * 3), ("undisturbed", ())):
            demo = Demo(tmp_path / f"{name}-{seed}", *free_ports(1))
            demo.folder.mkdir()
            reached[name].append(accuracy_of(demo, seed, changes))
    changed, undisturbed = (sum(all_seeds) / 3 for all_seeds in reached.values())
    assert abs(changed - undisturbed) < 0.01, reached
    assert min(reached["six changes"]) > 0.8, reached
    (tmp_path / "accuracy.json").write_text(json.dumps(reached))
