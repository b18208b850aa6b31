"""`examples/elastic_train/evaluate.py`: what it says of a checkpoint, and of what is none."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints.snapshots import snapshot_at, stored
from support.paths import EXAMPLES

from edl_runtime.checkpoint.file_format import Snapshot

SCRIPT = EXAMPLES / "elastic_train" / "evaluate.py"

Evaluate = Callable[[Path | str], tuple[object, str, str]]


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Run the script on a checkpoint; return how it exits, and what it prints and says of errors."""
    pytest.importorskip("paddle")  # which warns as it is imported
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / "mnist_distill"), *sys.path])

    def call(checkpoint: Path | str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", [SCRIPT.name, str(checkpoint), "--data-dir", str(tmp_path / "data")])
        capsys.readouterr()
        code: object = 0
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        return (1, said.out, code) if isinstance(code, str) else (code, said.out, said.err)

    return call


def test_a_checkpoint_is_evaluated_if_it_is_of_this_model(tmp_path: Path, evaluate: Evaluate) -> None:
    """One of another model is an error with names and shapes, and no accuracy of weights by chance."""
    from networks import Convolutions

    arrays = {name: value.numpy() for name, value in Convolutions().state_dict().items()}
    store = stored(tmp_path)
    mine = store.write(Snapshot(generation=1, step=7, arrays={"model": arrays, "optimizer": {}}))
    code, printed, _ = evaluate(mine.url)
    assert code == 0
    said = json.loads(printed.splitlines()[-1])
    assert (said["checkpoint"], said["step"]) == (mine.url, 7)
    assert 0 <= said["accuracy"] <= 1
    code, printed, error = evaluate(store.write(snapshot_at(8)).url)
    assert (code, printed) == (1, "")
    assert "is of another model" in error
    assert "model 'weight': (1000,) there, not here" in error


def test_only_what_was_a_checkpoint_is_there_no_more(tmp_path: Path, evaluate: Evaluate) -> None:
    """99 has Airflow skip the task; the place in its stead, a folder that never was and a typo are errors."""
    place = tmp_path / "kept"
    gone, newest = (info.url for info in reversed(stored(place, 1, 2).list()))
    stored(place, keep_last=1).prune()
    code, _, error = evaluate(gone)
    assert code == 99
    assert "was deleted" in error
    for wrong in (place, f"{place}/", newest[:-1], newest.replace("kept", "kelt"), "memory://none/" + Path(gone).name):
        code, _, error = evaluate(wrong)
        assert (code, "edl checkpoints ls" in error) == (1, True)
