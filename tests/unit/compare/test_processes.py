"""What a comparison shows of what its processes say."""

from __future__ import annotations

from pathlib import Path

from edl_runtime.compare.processes import LAST_LINES, TAIL_BYTES, last_lines


def test_the_last_lines_of_a_log_are_found_at_its_end(tmp_path: Path) -> None:
    """Those that say anything, of a log that may be empty, short, or too long to be read each time."""
    log = tmp_path / "log"
    log.write_text("")
    assert last_lines(log) == []
    log.write_text("one\n\n  two\n   \n")
    assert last_lines(log) == ["one", "  two"]
    log.write_text("".join(f"{number} \n" for number in range(TAIL_BYTES)))
    assert last_lines(log) == [str(number) for number in range(TAIL_BYTES - LAST_LINES, TAIL_BYTES)]
    log.write_bytes(b"e\xcc\x81\n" + b"\xff" * (2 * TAIL_BYTES))
    assert [len(line) for line in last_lines(log)] == [TAIL_BYTES]
