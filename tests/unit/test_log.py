"""Where the library's logs go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from edl_runtime.distill.teacher_connections import TeacherHealth


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
