"""Process exit statuses as text."""

from __future__ import annotations

import signal

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Killed by SIGKILL: the process itself, or the child of a shell."""

_OUT_OF_MEMORY = "perhaps out of memory: see `dmesg`, and try a smaller batch"


def describe_exit(exit_code: int, why: str = "") -> str:
    """Return for example "exited with 1" or "was killed by SIGTERM", with `why` if given.

    `exit_code` is negative for a signal.
    """
    why = why or (_OUT_OF_MEMORY if exit_code in _KILLED else "")
    return f"{_exit_or_signal(exit_code)} ({why})" if why else _exit_or_signal(exit_code)


def _exit_or_signal(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exited with {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
