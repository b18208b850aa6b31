"""The `edl` command from its first moment on: SIGTERM ends it also while it imports.

The first process of a container has no default signal handlers: a SIGTERM that comes before a command has set its own
would be lost, and the command would go on until it is killed. So this imports nothing else first.
"""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the `edl` command with this process's arguments and exit, see `edl_runtime.cli.main`."""
    signal.signal(signal.SIGTERM, _end)
    from edl_runtime import cli

    cli.main()


def _end(number: int, _: object) -> None:
    """End by the signal, as by default, until the command handles it itself."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the first process of a container outlives it
