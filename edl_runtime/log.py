"""The library's loggers."""

from __future__ import annotations

import sys
from typing import Any

import structlog


def get_logger(name: str) -> Any:
    """Return a structlog logger. Unless the program configures structlog, it writes to stderr.

    structlog's default is stdout, where log lines would be mixed with a script's output.
    """
    return _Logger(name)


class _Logger:
    """Looks up the configuration for each line, because a program may configure structlog after its imports."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        if structlog.is_configured():
            return getattr(structlog.get_logger(self._name), method)  # noqa: TID251 -- the only place for it
        return getattr(structlog.wrap_logger(structlog.PrintLogger(sys.stderr)), method)
