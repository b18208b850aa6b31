"""Where the library's log lines go."""

from __future__ import annotations

import sys
from typing import Any

import structlog


def get_logger(name: str) -> Any:
    """Return a logger that writes as the program has configured structlog, or else to stderr.

    Lines on stdout, as structlog has it by default, would be between what a script prints.
    """
    return _Logger(name)


class _Logger:
    """Asks structlog anew for each line: a program may configure it after its imports."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        if structlog.is_configured():
            return getattr(structlog.get_logger(self._name), method)  # noqa: TID251 -- this is where it belongs
        return getattr(structlog.wrap_logger(structlog.PrintLogger(sys.stderr)), method)
