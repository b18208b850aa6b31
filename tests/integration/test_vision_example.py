"""The example that distils pictures: trains its teacher, and its student by `edl compare`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.examples import check_refuses_data, compare, real_data, train_teacher
from support.paths import EXAMPLES, SUPPORT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = "vision_distill"


def test_a_student_with_few_labels_learns_from_its_teacher(tmp_path: Path) -> None:
    """On 500 pictures, 20 labels: better by far than alone, and than chance, a tenth. Its curves are drawn."""
    data = f"--data_dir={SUPPORT / 'pictures'}"
    assert "saved as an inference model" in train_teacher(EXAMPLE, tmp_path, data, "--num_epochs=8")
    assert "teacher is up to date" in train_teacher(EXAMPLE, tmp_path, data, "--num_epochs=8")
    rows = compare(EXAMPLE, tmp_path, data, "--labels=20", "--num_epochs=8", "--batch_size=20")
    assert rows["service"]["accuracy"]["mean"] > 0.5
    assert rows["service"]["accuracy_gain"]["mean"] > 0.08

    pytest.importorskip("matplotlib")
    command = [sys.executable, str(EXAMPLES / EXAMPLE / "curves.py"), "curves", "curves.svg", "--teacher=teacher"]
    table = subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert [line.partition(":")[0] for line in table[:3]] == ["teacher", "alone, 20 labels", "distilled, 20 labels"]
    assert "distilled, 20 labels" in Path(table[-1]).read_text()


def test_the_first_look_shows_a_gain(tmp_path: Path) -> None:
    """On 6,000 pictures of the real data set, 100 of them labelled, as the page has it, with two of its seeds."""
    folder = real_data("fashion")
    flags = (f"--data_dir={folder}", "--rows=6000")
    train_teacher(EXAMPLE, tmp_path, *flags, "--num_epochs=3")
    rows = compare(EXAMPLE, tmp_path, *flags, "--num_epochs=3", "--labels=100")
    assert rows["service"]["accuracy"]["mean"] > 0.65
    assert rows["service"]["accuracy_gain"]["mean"] > 0.02


def test_data_that_cant_be_used_ends_the_scripts(tmp_path: Path) -> None:
    check_refuses_data(EXAMPLE, tmp_path, "got neither, allowed is a folder of IDX files")
