"""A worker process before it runs its script: `python -m edl_runtime.elastic.agent.standby …`, started by an agent.

It imports what its script will import, says so, waits for the order to start, and then runs the script as `__main__`,
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

from edl_runtime.elastic.comm.agent_client import SocketAgentClient, die_with_parent
from edl_runtime.elastic.comm.agent_protocol import ScriptFailed, StandbyLoaded
from edl_runtime.elastic.errors import InitNotCalledError
from edl_runtime.errors import EX_CONFIG

NICENESS = 10


def main(arguments: Sequence[str]) -> None:
    """Load, wait and run: `--agent FD,PID [--nice] [--elastic] [--load A,B] [--script] -- COMMAND…`."""
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
    nicer = _give_way() if flags.nice else 0
    client = SocketAgentClient.from_fd(descriptor)
    preload(name for name in flags.load.split(",") if name)
    if flags.elastic and "paddle" in sys.modules:
        from edl_runtime.elastic.training.optimizer_guard import before_each_step

        before_each_step(lambda _: _require_init(client))
    client.send(StandbyLoaded())
    start = client.wait_for_start()
    if nicer:
        _forget_niceness(nicer)
    os.environ.update(start.environ)
    if flags.script:
        run_script(client, flags.command)
    else:
        run_program(client, flags.command)


def preload(modules: Iterable[str]) -> None:
    """Import what can be: whatever is wrong with a module is its script's to find out."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if paddle := sys.modules.get("paddle"):
        paddle.disable_signal_handler()  # else it answers SIGTERM itself, by an error of its own


def run_script(client: SocketAgentClient, command: Sequence[str]) -> None:
    """Run a script as `python SCRIPT ARGUMENTS…` does, and tell the agent how it failed, if it did."""
    sys.argv = list(command)
    sys.path[0] = str(Path(command[0]).resolve().parent)
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ending:
        if ending.code not in (None, 0):
            client.send(ScriptFailed(reason=f"exited: {ending.code}", final=False))
        raise
    except BaseException as error:  # noqa: BLE001 -- the interpreter's own last resort, which a script is used to
        own = error.with_traceback(_below_runpy(error))
        traceback.print_exception(own)
        sys.stderr.flush()
        client.send(ScriptFailed.of(own))
        raise SystemExit(1) from None


def run_program(client: SocketAgentClient, command: Sequence[str]) -> NoReturn:
    """Let a program take this process's place, or tell the agent why it can't, which no other try would mend."""
    try:
        os.execvp(command[0], [*command])  # noqa: S606 -- a program needs no shell
    except OSError as error:
        reason = f"{command[0]} can't be run: {error.strerror}"
        sys.stderr.write(f"edl: {reason}\n")
        client.send(ScriptFailed(reason=reason, final=True))
        sys.exit(EX_CONFIG)


def _require_init(client: SocketAgentClient) -> None:
    if not client.called:
        raise InitNotCalledError


def _below_runpy(error: BaseException) -> TracebackType | None:
    """Return the traceback from the script's own first line on."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _give_way() -> int:
    """Be nicer where that can be undone, and return by how much: less than is meant where 19, the nicest, is near."""
    if not _can_undo_niceness():
        return 0
    before = os.nice(0)
    return os.nice(NICENESS) - before


def _can_undo_niceness() -> bool:
    """Whether who gives way now may stop to do so later: elsewhere than on Linux, and without the right, not."""
    answers: list[bool] = []

    def try_it() -> None:
        try:
            before = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, 0, before + 1)
            os.setpriority(os.PRIO_PROCESS, 0, before)
        except OSError:
            return
        answers.append(True)

    if sys.platform == "linux":  # where a thread has a priority of its own, so that one can try
        trial = threading.Thread(target=try_it)
        trial.start()
        trial.join()
    return bool(answers)


def _forget_niceness(nicer: int) -> None:
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - names only
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, int(thread), os.getpriority(os.PRIO_PROCESS, int(thread)) - nicer)


if __name__ == "__main__":
    main(sys.argv[1:])
