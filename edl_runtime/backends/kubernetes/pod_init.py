"""The first process of an instance's pod: `python -P -m edl_runtime.backends.kubernetes.pod_init COMMAND…`.

A first process has no default signal handlers, and orphans become its children, so no training script should be one.
SIGTERM is passed on to the command alone. When that has ended, what it left behind is killed, its result becomes the
pod's termination message, and this process ends with its exit status; 128 and the signal's number for one that a
signal has ended, as shells have it. Who was told to go counts as ended by SIGTERM even if it ends well: 0 would say
that all work is done, and a trainer whose node is drained has to go on elsewhere.

A first process does not hear a signal that it has no handler for yet. So this imports only what is loaded at once.
"""

from __future__ import annotations

import os
import sys

from edl_runtime.backends.local.instance_wrapper import run

TERMINATION_MESSAGE = "/dev/termination-log"


def main(command: list[str]) -> int:
    """Run the command and return this process's exit status."""
    lifeline, _held = os.pipe()
    told: list[int] = []
    exit_status = run(command, lifeline, told) or (-told[0] if told else 0)
    _defer_to_trigger(os.environ["EDL_RESULT_FILE"])
    return exit_status if exit_status >= 0 else 128 - exit_status


def _defer_to_trigger(result: str) -> None:
    if not os.path.exists(result):  # noqa: PTH110 - pathlib would double the time that a start takes
        return
    import shutil

    try:
        shutil.copyfile(result, TERMINATION_MESSAGE)
    except OSError as error:  # how the command ended counts for more
        print(f"edl: can't hand over the result in {result}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the log


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
