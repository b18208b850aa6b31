"""The first process of an instance's pod, with a command as its arguments; `pod_template.START` starts it.

PID 1 has no default signal handlers and adopts orphans, so no training script should be it. SIGTERM is passed on to the
command alone. When that ends, its descendants are killed, its result becomes the pod's termination message, and this
process exits with its status, or 128 and the signal's number. A command that ends well after SIGTERM counts as ended by
SIGTERM: 0 would mean that all work is done, but a trainer whose node is drained has to continue elsewhere.

Signals that come before their handler is set are lost for PID 1, so this imports only what loads fast.
"""

from __future__ import annotations

import os
import sys

from edl_runtime.backends.local.instance_wrapper import run

TERMINATION_MESSAGE = "/dev/termination-log"


def main(command: list[str]) -> int:
    lifeline, _held = os.pipe()
    received: list[int] = []
    exit_status = run(command, lifeline, received) or (-received[0] if received else 0)
    _write_termination_message(os.environ["EDL_RESULT_FILE"])
    return exit_status if exit_status >= 0 else 128 - exit_status


def _write_termination_message(result: str) -> None:
    if not os.path.exists(result):  # noqa: PTH110 - pathlib would double the time that a start takes
        return
    import shutil

    try:
        shutil.copyfile(result, TERMINATION_MESSAGE)
    except OSError as error:  # the command's exit status matters more
        print(f"edl: can't copy the result {result} to {TERMINATION_MESSAGE}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the log
