"""`examples/elastic_train/evaluate.py`: what it says of a checkpoint, and of what is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints.snapshots import snapshot_at, stored
from support.paths import EXAMPLES

from edl_runtime.checkpoint.snapshot import Snapshot


def evaluate(checkpoint: Path | str, place: Path) -> subprocess.CompletedProcess[str]:
    """Run the script as Airflow does."""
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "elastic_train" / "evaluate.py"), str(checkpoint)]
    environ = {**os.environ, "GLOG_minloglevel": "2"}
    data = ["--data_dir", str(place / "data")]
    return subprocess.run([*command, *data], env=environ, check=False, capture_output=True, text=True, timeout=120)


def test_a_checkpoint_is_evaluated_if_it_is_of_this_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another model is an error with names and shapes, and no accuracy of weights by chance."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "mnist_distill"))
    from networks import Convolutions

    arrays = {name: value.numpy() for name, value in Convolutions().state_dict().items()}
    store = stored(tmp_path)
    mine = store.write(Snapshot(generation=1, step=7, arrays={"model": arrays, "optimizer": {}}))
    done = evaluate(mine.url, tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["checkpoint"], said["step"]) == (mine.url, 7)
    assert 0 <= said["accuracy"] <= 1
    other = evaluate(store.write(snapshot_at(8)).url, tmp_path)
    assert (other.returncode, other.stdout) == (1, "")
    assert "is of another model" in other.stderr
    assert "model 'weight': (1000,) there, not here" in other.stderr
    assert "Traceback" not in other.stderr


def test_only_what_was_a_checkpoint_is_there_no_more(tmp_path: Path) -> None:
    """99 has Airflow skip the task; the place in its stead, a folder that never was and a typo are errors."""
    place = tmp_path / "kept"
    gone, newest = (info.url for info in reversed(stored(place, 1, 2).list()))
    stored(place, keep_last=1).prune()
    done = evaluate(gone, tmp_path)
    assert done.returncode == 99, done.stderr
    assert "is there no more" in done.stderr
    for wrong in (place, f"{place}/", newest[:-1], newest.replace("kept", "kelt"), "memory://none/" + Path(gone).name):
        done = evaluate(wrong, tmp_path)
        assert done.returncode == 1, (wrong, done.stderr)
        assert "edl checkpoints ls" in done.stderr
        assert "Traceback" not in done.stderr
