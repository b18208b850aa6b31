"""The note of a DAG run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from markdown_it import MarkdownIt

from edl_airflow.plugin import run_note
from edl_airflow.plugin.run_note import MOST_CHARACTERS, is_ours, note_of

TRAINED: dict[str, Any] = {
    "job": "night", "checkpoint": "s3://b/c", "metrics": {"accuracy": 0.91234, "loss": 0.5}, "step": 1200,
    "instances": 3, "generations": 2, "stopped": False, "reason": "",
}  # fmt: skip
DISTILLED: dict[str, Any] = {
    "job": "s", "pool": "p", "checkpoint": "/m", "metrics": {}, "answered": {"a:1": 1000, "b:2": 500},
}  # fmt: skip


def test_the_note_has_a_line_for_each_training() -> None:
    """And for a rescaling; other tasks' results are left out."""
    rescaled = {"targets": [{"target": 1, "instances": 2}], "capacity": {}, "dry_run": False}
    note = note_of([("train", TRAINED), ("other", {"rows": 3}), ("distill", DISTILLED), ("rescale", rescaled)])
    assert note == (
        "**Elastic deep learning**\n\n"
        "- `train`: `accuracy` 0.9123 · `loss` 0.5 · step 1200 · 3 instances, 2 generations · checkpoint `s3://b/c`\n"
        "- `distill`: 1,500 answers of 2 teachers · checkpoint `/m`\n"
        "- `rescale`: has resized 1 of 1 jobs and pools"
    )
    assert note_of([("other", {"rows": 3})]) == ""
    assert "`loss` 0.5 · `auc` not finite since step 9 · step 1200" in note_of(
        [("a", {**TRAINED, "not_finite": {"auc": 9}})]
    )


def test_a_note_fits_into_airflow_s_and_counts_the_rest() -> None:
    """Whatever the number of tasks and the length of their names."""
    for count in (1, 5, 50, 500):
        note = note_of([(f"train_{number}", {**TRAINED, "checkpoint": "x" * 250}) for number in range(count)])
        assert len(note) <= MOST_CHARACTERS
        assert ("more" in note) == (note.count("\n- `") < count)


FOREIGN = [
    "https://evil.example/login", "www.evil.example", "admin@evil.example", "[x](http://evil)\n\n# h", "<b>", "**a**",
    "` www.evil.example `", "``a", "a\\", "\u202ea",
]  # fmt: skip


@pytest.mark.parametrize("foreign", FOREIGN)
def test_what_a_script_says_is_code(foreign: str) -> None:
    """As Airflow's Markdown reads it, which makes links of mere addresses: not a character of it is anything else."""
    result = {
        **TRAINED, "metrics": {foreign: 0.5, "other": foreign}, "checkpoint": foreign, "stopped": True,
        "reason": foreign, "not_finite": {foreign: 7},
    }  # fmt: skip
    note = note_of([("t", result)])
    inline = next(one for one in MarkdownIt().parse(note) if one.type == "inline" and "other" in one.content)
    assert {each.type for each in inline.children or ()} == {"text", "code_inline"}
    codes = [each.content for each in inline.children or () if each.type == "code_inline"]
    assert codes == ["t", codes[1], "other", *[codes[1]] * 4]
    assert "evil" not in "".join(each.content for each in inline.children or () if each.type == "text")
    assert "\u202e" not in note


def test_a_user_s_note_is_left_alone() -> None:
    """Also ours after a user has edited it; one of an earlier end of the run is replaced."""
    ours = SimpleNamespace(user_id=None, content=note_of([("t", TRAINED)]))
    assert is_ours(None)
    assert is_ours(ours)
    for note in (SimpleNamespace(user_id="7", content=ours.content), SimpleNamespace(user_id=None, content="mine")):
        assert not is_ours(note)


def test_a_note_that_fails_does_not_hurt_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged."""
    run_note.write_note(SimpleNamespace(run_id="r", dag_id="d"))  # type: ignore[arg-type]
    (line,) = caplog.records
    assert line.getMessage() == "No note for run r of d"
    assert line.exc_info


def test_lists_and_tables_of_metrics_are_left_out() -> None:
    """Those after them are in the note."""
    metrics = {"seeds": [0, 1], "alone": {"accuracies": [0.8, 0.9]}, "accuracy": 0.949}
    note = note_of([("t", {**TRAINED, "metrics": metrics})])
    assert "`t`: `accuracy` 0.949 · " in note
    assert "seeds" not in note
