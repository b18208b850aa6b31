"""The example that distils texts: trains its teacher, and its students by `edl compare`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.examples import check_refuses_data, compare, real_data, train_teacher
from support.paths import SUPPORT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = "text_distill"
SLICE = f"--data_dir={SUPPORT / 'texts' / 'wordnet'}"


def test_a_student_with_few_labels_learns_from_its_teacher(tmp_path: Path) -> None:
    """On 1,000 glosses of 8 classes, 60 labels: better by far than alone.

    A student of another vocabulary is refused, with an error that names both.
    """
    train_teacher(EXAMPLE, tmp_path, SLICE, "--epochs=6")
    flags = (SLICE, "--labels=60", "--num_epochs=12", "--batch_size=32")
    rows = compare(EXAMPLE, tmp_path, *flags)
    assert rows["service"]["accuracy"]["mean"] > 0.5
    assert rows["service"]["accuracy_gain"]["mean"] > 0.1

    other = tmp_path / "other.json"
    other.write_text('{"split": "words", "length": 24, "vocabulary": ["", "?", "the"]}')
    row = compare(EXAMPLE, tmp_path, *flags, f"--tokenizer={other}", ways="service")["service"]
    (error,) = (line for line in row["last_lines"] if line.startswith("student.py: tokenizer: got"))
    assert str(other) in error
    assert error.count("(digest ") == 2


def test_the_first_look_shows_a_gain(tmp_path: Path) -> None:
    """On 5,000 glosses in 45 classes, 250 of them labelled, as the page has it, with two of its seeds."""
    flags = (f"--data_dir={real_data('wordnet')}", "--rows=5000")
    train_teacher(EXAMPLE, tmp_path, *flags)
    rows = compare(EXAMPLE, tmp_path, *flags, "--student=cnn", "--labels=250")
    assert rows["service"]["accuracy"]["mean"] > 0.3
    assert rows["service"]["accuracy_gain"]["mean"] > 0.02
    rows = compare(EXAMPLE, tmp_path, *flags, "--student=bow", ways="service")
    assert rows["service"]["accuracy"]["mean"] > 0.3


def test_the_smallest_setting_learns_chinese_reviews(tmp_path: Path) -> None:
    """By their characters; the larger class has 52 %."""
    flags = (f"--data_dir={real_data('chinese')}", "--rows=3000")
    train_teacher(EXAMPLE, tmp_path, *flags, "--tokens=characters", "--length=48", "--epochs=2")
    rows = compare(EXAMPLE, tmp_path, *flags, "--num_epochs=2", ways="service")
    assert rows["service"]["accuracy"]["mean"] > 0.6


def test_data_that_cant_be_used_ends_the_scripts(tmp_path: Path) -> None:
    check_refuses_data(EXAMPLE, tmp_path, "got 0 .txt files, allowed is data.noun, ")
