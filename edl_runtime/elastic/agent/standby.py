"""A worker process before it runs its script: `python -m edl_runtime.elastic.agent.standby …`, started by an agent.

It imports what its script will import, reports that, waits for StartScript, and then runs the script as `__main__`,
with its arguments. A program that is no Python script replaces this process when it is started.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from edl_runtime.elastic.comm.agent_protocol import ScriptFailed, SocketAgentClient, StandbyLoaded, die_with_parent
from edl_runtime.elastic.errors import InitNotCalledError
from edl_runtime.errors import EX_CONFIG

NICENESS = 10
"""How much lower the priority of a standby is while it loads beside a worker that trains."""


def main(arguments: Sequence[str]) -> None:
    """Preload, wait and run: `--agent FD,PID [--nice] [--elastic] [--load A,B] [--script] -- COMMAND…`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", required=True)
    parser.add_argument("--nice", action="store_true")
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--load", default="")
    parser.add_argument("--script", action="store_true")
    parser.add_argument("command", nargs="+")
    flags = parser.parse_args(arguments)
    descriptor, agent = map(int, flags.agent.split(","))
    die_with_parent(agent)
    lowered = _lower_priority() if flags.nice else 0
    client = SocketAgentClient.from_fd(descriptor)
    preload(name for name in flags.load.split(",") if name)
    if flags.elastic and "paddle" in sys.modules:
        from edl_runtime.elastic.training.optimizer_step import before_each_step

        before_each_step(lambda _: _require_init(client))
    client.send(StandbyLoaded(gpu=sees_gpu()))
    start = client.wait_for_start()
    if lowered:
        _restore_priority(lowered)
    os.environ.update(start.environ)
    if flags.script:
        run_script(client, flags.command)
    else:
        run_program(client, flags.command)


def preload(modules: Iterable[str]) -> None:
    """Import modules; errors are left for the script to find."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if paddle := sys.modules.get("paddle"):
        paddle.disable_signal_handler()  # else it turns SIGTERM into an error


def sees_gpu() -> bool | None:
    """Whether Paddle has CUDA and sees a device; None where it is not imported. Errors are left for the script."""
    with contextlib.suppress(Exception):
        if paddle := sys.modules.get("paddle"):
            return bool(paddle.device.cuda.device_count())
    return None


def run_script(client: SocketAgentClient, command: Sequence[str]) -> None:
    """Run a script as `python SCRIPT ARGUMENTS…` does, and report an error to the agent."""
    sys.argv = list(command)
    sys.path[0] = str(Path(command[0]).resolve().parent)
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ending:
        if ending.code not in (None, 0):
            client.send(ScriptFailed(reason=f"exited: {ending.code}", final=False))
        sys.exit(ending.code)  # which is noted, unlike `raise SystemExit`
    except BaseException as error:  # noqa: BLE001 -- handled as the interpreter does: printed, status 1
        own = error.with_traceback(_below_runpy(error))
        with contextlib.suppress(OSError):  # a full disk: the agent is told all the same
            traceback.print_exception(own)
            sys.stderr.flush()
        client.send(ScriptFailed.of(own))
        raise SystemExit(1) from None


def run_program(client: SocketAgentClient, command: Sequence[str]) -> NoReturn:
    """Replace this process by a program, or report that it can't be run, which no retry would change."""
    try:
        os.execvp(command[0], [*command])  # noqa: S606 -- a program needs no shell
    except OSError as error:
        reason = f"{command[0]} can't be run: {error.strerror}"
        with contextlib.suppress(OSError):  # as above
            sys.stderr.write(f"edl: {reason}\n")
        client.send(ScriptFailed(reason=reason, final=True))
        sys.exit(EX_CONFIG)


def _require_init(client: SocketAgentClient) -> None:
    if not client.called:
        raise InitNotCalledError


def _below_runpy(error: BaseException) -> TracebackType | None:
    """Return the traceback from the script's first line on."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _lower_priority() -> int:
    """Raise the niceness of this process, and return by how much: 0 where that could not be undone.

    It is tried in a thread, which on Linux has a niceness of its own: a capability to lower it does not tell, because
    that of a user namespace, as of a rootless container, has no effect on priorities.
    """
    can_restore = []

    def try_both_ways() -> None:
        with contextlib.suppress(OSError):
            os.nice(1)
            os.nice(-1)
            can_restore.append(True)

    if sys.platform == "linux":
        trial = threading.Thread(target=try_both_ways)
        trial.start()
        trial.join()
    before = os.nice(0)
    return os.nice(NICENESS) - before if can_restore else 0


def _restore_priority(lowered: int) -> None:
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - names only
        with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, int(thread), os.getpriority(os.PRIO_PROCESS, int(thread)) - lowered)


if __name__ == "__main__":
    main(sys.argv[1:])
