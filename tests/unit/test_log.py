"""Where the library's logs go."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Callable, Iterator

import pytest
import structlog

from edl_runtime.distill.teacher_connections import TeacherHealth
from edl_runtime.log import get_logger, log_to_stderr


@pytest.fixture(autouse=True)
def not_configured() -> Iterator[None]:
    """As in a program that knows nothing of structlog."""
    before, was_configured = structlog.get_config(), structlog.is_configured()
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    if was_configured:
        structlog.configure(**before)


def test_logs_leave_stdout_to_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    """Which structlog would write to by default, between what a script prints."""
    TeacherHealth("a:1").quarantine("garbage")
    told = capsys.readouterr()
    assert "teacher.quarantined" in told.err
    assert told.out == ""


def test_logs_go_where_the_program_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Also when it configures structlog after it has imported the library."""
    lines = structlog.testing.CapturingLoggerFactory()
    structlog.configure(logger_factory=lines, processors=[structlog.processors.JSONRenderer()])
    TeacherHealth("a:1").quarantine("garbage")
    [line] = lines.logger.calls
    assert line.method_name == "warning"
    assert "garbage" in line.args[0]
    assert capsys.readouterr() == ("", "")


class Disk(io.StringIO):
    """A file on a disk that is full at first."""

    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


@pytest.mark.parametrize("configure", [log_to_stderr, None])
def test_a_line_that_cant_be_written_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, configure: Callable[[], None] | None
) -> None:
    """The first line that can be written tells how many could not, once."""
    if configure:
        configure()
    disk = Disk()
    monkeypatch.setattr(sys, "stderr", disk)
    log = get_logger("test")
    log.warning("first")
    log.error("second")
    disk.full = False
    log.info("third")
    log.info("fourth")
    told, third, fourth = disk.getvalue().splitlines()
    assert told == "(2 lines of this log could not be written: [Errno 28] No space left on device)"
    assert "third" in third
    assert "fourth" in fourth
