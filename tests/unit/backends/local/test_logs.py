"""Reading the ends of logs without reading the rest."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from edl_runtime.backends.local import job_folders


@pytest.mark.parametrize("ends_with_newline", [True, False])
@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
def test_a_tail_is_what_the_last_lines_are_wherever_blocks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, *, ends_with_newline: bool
) -> None:
    """For lines of all lengths, empty ones among them, and every number of lines."""
    monkeypatch.setattr(job_folders, "_BLOCK", block)
    lengths = random.Random(1)
    written = ["x" * lengths.choice([0, 1, 6, 7, 8, 30]) for _ in range(40)] + ["end"]
    log = tmp_path / "0.log"
    log.write_text("\n".join(written) + "\n" * ends_with_newline)
    for count in range(45):
        assert job_folders.tail(log, count) == written[max(0, 41 - count) :]


def test_a_tail_of_nothing_is_empty(tmp_path: Path) -> None:
    """A log that is empty or not there has no lines."""
    (tmp_path / "0.log").touch()
    assert job_folders.tail(tmp_path / "0.log", 3) == []
    assert job_folders.tail(tmp_path / "1.log", 3) == []


async def test_a_line_without_end_is_read_in_parts(tmp_path: Path) -> None:
    """A program that writes no newlines can't fill the reader's memory."""
    (tmp_path / "0.log").write_bytes(b"x" * 3 * job_folders.LONGEST_LINE + b"\nnext\r\n")
    texts = [line.text async for line in job_folders.follow_run(tmp_path, ended=lambda: True)]
    assert [len(text) for text in texts[:3]] == [job_folders.LONGEST_LINE] * 3
    assert "".join(texts[:-1]) == "x" * 3 * job_folders.LONGEST_LINE
    assert texts[-1] == "next"
