"""What a process does so that it does not outlive the one that has started it."""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the system kill this process when `parent` dies, which has just started it, where it can (Linux).

    Raises SystemExit if that has died by now.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("edl: the process that started this one is gone")
