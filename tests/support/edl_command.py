"""The `edl` command in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from edl_runtime.cli import main

Edl = Callable[..., tuple[int, str, str]]


@contextmanager
def edl_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *always: str) -> Iterator[Edl]:
    """Yield a function that runs `edl` with arguments after `always`, without a Redis.

    It returns the exit status, standard output and standard error.
    """
    monkeypatch.delenv("EDL_REDIS_URL", raising=False)

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["edl", *always, *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    yield run
