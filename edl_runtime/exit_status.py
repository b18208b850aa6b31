"""Process exit statuses as text."""

from __future__ import annotations

import signal
from pathlib import Path

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Killed by SIGKILL: the process itself, or the child of a shell."""

OUT_OF_MEMORY = "out of memory: try a smaller batch"
"""Why a process was killed, if the system has told that it kills for want of memory."""

_PERHAPS_OUT_OF_MEMORY = "perhaps out of memory: see `dmesg`, and try a smaller batch"


def describe_exit(exit_code: int, why: str = "") -> str:
    """Return for example "exited with 1" or "was killed by SIGTERM", with `why` if given.

    `exit_code` is negative for a signal.
    """
    why = why or (_PERHAPS_OUT_OF_MEMORY if exit_code in _KILLED else "")
    return f"{_exit_or_signal(exit_code)} ({why})" if why else _exit_or_signal(exit_code)


def oom_kills() -> int:
    """Return how many processes the system has killed for want of memory so far; 0 where it does not count them."""
    try:
        counts = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counts.splitlines() if line.startswith("oom_kill ")), 0)


def _exit_or_signal(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exited with {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
