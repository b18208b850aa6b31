"""The example of digits: what its flags take, and how it hides labels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.paths import EXAMPLES

EXAMPLE = EXAMPLES / "mnist_distill"


@pytest.fixture
def student(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The student's script, imported as it is run: with its folder on the path."""
    pytest.importorskip("paddle")
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import student

    yield student
    for name in ("student", "batches", "digits", "networks", "flags"):
        if name not in before:
            del sys.modules[name]


WRONG = [
    ("--labels", "105"),
    ("--labels", "5"),
    ("--labels", "0"),
    ("--labels", "3860"),
    ("--labels", "many"),
    ("--seeds", "0"),
    ("--epochs", "0"),
    ("--batch-size", "5000"),
    ("--batch-size", "0"),
    ("--temperature", "0"),
    ("--temperature", "nan"),
    ("--weight", "1.5"),
    ("--use_distill_service", "maybe"),
    ("--distill_teachers", "nowhere"),
]


@pytest.mark.parametrize(("flag", "value"), WRONG)
def test_a_flag_that_would_train_on_something_else_is_refused(
    student: ModuleType, flag: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script ends at once, and says what was given and what is allowed."""
    monkeypatch.setattr(sys, "argv", ["student.py", f"{flag}={value}"])
    with pytest.raises(SystemExit) as ended:
        student.main()
    assert ended.value.code == 2
    assert f"argument {flag}: got '{value}', allowed is" in capsys.readouterr().err


@pytest.mark.slow
def test_as_many_labels_are_known_as_were_asked_for(student: ModuleType, tmp_path: Path) -> None:
    """As many of each digit, up to all of the rarest one's; another number is an error and not another number."""
    digits = student.load_digits(tmp_path)
    assert len(digits.labels) == student.TRAINED_ON
    for keep in (10, 100, student.MOST_LABELS):
        hidden = student.hide_labels(digits.labels, keep, seed=0)
        known = hidden[hidden != student.UNLABELLED]
        assert np.bincount(known).tolist() == [keep // 10] * 10
    for keep in (0, 5, 105, student.MOST_LABELS + 10):
        with pytest.raises(ValueError, match="multiple of 10"):
            student.hide_labels(digits.labels, keep, seed=0)
