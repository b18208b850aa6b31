"""The library's loggers. A line that can't be written, as on a full disk, ends nothing."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def get_logger(name: str) -> Any:
    """Return a structlog logger. Unless the program configures structlog, it writes to stderr.

    structlog's default is stdout, where log lines would be mixed with a script's output.
    """
    return _Logger(name)


def log_to_stderr(level: int = logging.NOTSET) -> None:
    """Configure structlog to write to stderr what is of this level or above, because stdout is for output."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level), logger_factory=lambda *_: _stderr_logger
    )


class StderrLogger:
    """Writes lines to stderr, and raises nothing if it can't.

    The first line that it can write again follows how many it could not.
    """

    def __init__(self) -> None:
        self._unwritten = 0
        self._cause = ""

    def msg(self, line: str) -> None:
        lost = f"({self._unwritten} lines of this log could not be written: {self._cause})\n"
        try:
            sys.stderr.write(f"{lost if self._unwritten else ''}{line}\n")
            sys.stderr.flush()
        except OSError as error:
            self._unwritten += 1
            self._cause = str(error)
        else:
            self._unwritten = 0

    log = debug = info = warning = warn = error = err = critical = exception = fatal = failure = msg


_stderr_logger = StderrLogger()


class _Logger:
    """Looks up the configuration for each line, because a program may configure structlog after its imports."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        if structlog.is_configured():
            return getattr(structlog.get_logger(self._name), method)  # noqa: TID251 -- the only place for it
        return getattr(structlog.wrap_logger(_stderr_logger), method)
