"""What a process's exit status says, in words."""

from __future__ import annotations

import signal

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""By SIGKILL: the process itself, or what a shell has run."""

_OUT_OF_MEMORY = "perhaps for want of memory: `dmesg` tells, and a smaller batch takes less"


def describe_exit(exit_code: int, why: str = "") -> str:
    """Say how a process ended, and `why` if that is known: "exited with 1", "was killed by SIGTERM".

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
