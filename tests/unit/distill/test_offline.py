"""Answers of teachers in a folder."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from edl_runtime.distill.offline import RecordedAnswers


def test_a_batch_may_have_more_rows_than_a_query_has_variables(tmp_path: Path) -> None:
    """`teacher_batch_size` has no limit, SQLite's queries have."""
    answers = {b"%d" % number: b"answer" for number in range(40_000)}
    recorded = RecordedAnswers(tmp_path)
    recorded._database.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 32_766)  # its default; some builds allow more
    recorded.keep(answers)
    assert recorded.find([*answers, b"unknown"]) == answers
    recorded.close()
