"""The bounded buffer behind the page's log."""

from __future__ import annotations

import sys

from edl_airflow.plugin.log_tail import BYTES_BESIDE, LogBuffer
from edl_runtime.backends.interface import LogLine

BYTES_OF_LINE = sys.getsizeof("line 00") + BYTES_BESIDE


def _texts(buffer: LogBuffer, cursor: str = "", tail: int = 100) -> list[str]:
    return [line.text for line in buffer.part(cursor, tail=tail, ended=False).lines]


def test_a_cursor_goes_on_where_the_last_answer_ended() -> None:
    """Each line is there once, however they are asked for."""
    buffer = LogBuffer()
    cursor, read = "", []
    for number in range(100):
        buffer.add(LogLine(number % 3, str(number)))
        if number % 7 == 0:
            part = buffer.part(cursor, tail=100, ended=False)
            assert not part.reset
            read += [line.text for line in part.lines]
            cursor = part.cursor
    assert read + _texts(buffer, cursor) == [str(number) for number in range(100)]


def test_the_oldest_lines_are_dropped_and_counted() -> None:
    """By number and by size; a cursor to a dropped line does not hold."""
    buffer = LogBuffer(most_lines=10, most_bytes=7 * BYTES_OF_LINE)
    buffer.add(LogLine(0, "first"))
    cursor = buffer.part("", tail=100, ended=False).cursor
    for number in range(20):
        buffer.add(LogLine(0, f"line {number:02}"))
    part = buffer.part("", tail=3, ended=True)
    assert [line.text for line in part.lines] == ["line 17", "line 18", "line 19"]
    assert part.left_out == 18
    assert part.ended
    again = buffer.part(cursor, tail=100, ended=False)
    assert again.reset
    assert len(again.lines) == 7


def test_a_cursor_of_another_buffer_starts_again() -> None:
    """As after a restart, of another process, and anything else that somebody sends."""
    buffer = LogBuffer()
    buffer.add(LogLine(0, "one"))
    for cursor in (
        f"{LogBuffer().id}-1",
        f"{buffer.id}-2",
        f"{buffer.id}-",
        f"{buffer.id}--1",
        "-",
        "x",
        f"{buffer.id}-٣",
    ):
        part = buffer.part(cursor, tail=9, ended=False)
        assert part.reset, cursor
        assert [line.text for line in part.lines] == ["one"]
