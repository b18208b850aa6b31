"""`examples/elastic_train/evaluate.py` with checkpoints and other paths."""

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
    """Run the script on a checkpoint; return its exit status, standard output and error."""
    pytest.importorskip("paddle")  # its import warns
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / "mnist_distill"), *sys.path])

    def call(checkpoint: Path | str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", [SCRIPT.name, str(checkpoint), "--data-dir", str(tmp_path / "data")])
        capsys.readouterr()
        code: object = 0
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        output = capsys.readouterr()
        return (1, output.out, code) if isinstance(code, str) else (code, output.out, output.err)

    return call


def test_a_checkpoint_is_evaluated_if_it_is_of_this_model(tmp_path: Path, evaluate: Evaluate) -> None:
    """A checkpoint of another model is an error with names and shapes."""
    from networks import Convolutions

    arrays = {name: value.numpy() for name, value in Convolutions().state_dict().items()}
    store = stored(tmp_path)
    mine = store.write(Snapshot(generation=1, step=7, arrays={"model": arrays, "optimizer": {}}))
    code, printed, _ = evaluate(mine.url)
    assert code == 0
    result = json.loads(printed.splitlines()[-1])
    assert (result["checkpoint"], result["step"]) == (mine.url, 7)
    assert 0 <= result["accuracy"] <= 1
    code, printed, error = evaluate(store.write(snapshot_at(8)).url)
    assert (code, printed) == (1, "")
    assert "is of another model" in error
    assert "model 'weight': (1000,) there, not here" in error


def test_a_deleted_checkpoint_is_skipped_and_a_wrong_path_is_an_error(tmp_path: Path, evaluate: Evaluate) -> None:
    """Airflow skips a task with status 99; the folder of checkpoints, one that never existed and a typo are errors."""
    folder = tmp_path / "kept"
    gone, newest = (info.url for info in reversed(stored(folder, 1, 2).list()))
    stored(folder, keep_last=1).prune()
    code, _, error = evaluate(gone)
    assert code == 99
    assert "was deleted" in error
    for wrong in (
        folder,
        f"{folder}/",
        newest[:-1],
        newest.replace("kept", "kelt"),
        "memory://none/" + Path(gone).name,
    ):
        code, _, error = evaluate(wrong)
        assert (code, "edl checkpoints ls" in error) == (1, True)
