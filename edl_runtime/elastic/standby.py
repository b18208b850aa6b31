"""A trainer's process before it is one: `python -m edl_runtime.elastic.standby …`, begun by an agent.

It imports what its script will import, says so, waits to be told to start, and then is that script: `__main__`, with
its arguments. A program that is no Python script takes its place when told to start.
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

from edl_runtime.elastic.link import AgentLink
from edl_runtime.elastic.messages import Failed, Loaded
from edl_runtime.elastic.parent import end_with
from edl_runtime.elastic.step_hook import before_each_step
from edl_runtime.errors import EX_CONFIG, InitNotCalledError

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
    end_with(agent)
    nicer = _give_way() if flags.nice else 0
    link = AgentLink.from_fd(descriptor)
    load(name for name in flags.load.split(",") if name)
    if flags.elastic and "paddle" in sys.modules:
        before_each_step(lambda _: _refuse_unless_called(link))
    link.say(Loaded())
    start = link.wait_for_start()
    if nicer:
        _forget_niceness(nicer)
    os.environ.update(start.environ)
    if flags.script:
        run_script(link, flags.command)
    else:
        run_program(link, flags.command)


def load(modules: Iterable[str]) -> None:
    """Import what can be: whatever is wrong with a module is its script's to find out."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if paddle := sys.modules.get("paddle"):
        paddle.disable_signal_handler()  # else it answers SIGTERM itself, by an error of its own


def run_script(link: AgentLink, command: Sequence[str]) -> None:
    """Run a script as `python SCRIPT ARGUMENTS…` does, and tell the agent how it failed, if it did."""
    sys.argv = list(command)
    sys.path[0] = str(Path(command[0]).resolve().parent)
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ending:
        if ending.code not in (None, 0):
            link.say(Failed(reason=f"exited: {ending.code}", final=False))
        raise
    except BaseException as error:  # noqa: BLE001 -- the interpreter's own last resort, which a script is used to
        own = error.with_traceback(_below_runpy(error))
        traceback.print_exception(own)
        sys.stderr.flush()
        link.say(Failed.of(own))
        raise SystemExit(1) from None


def run_program(link: AgentLink, command: Sequence[str]) -> NoReturn:
    """Let a program take this process's place, or tell the agent why it can't, which no other try would mend."""
    try:
        os.execvp(command[0], [*command])  # noqa: S606 -- a program needs no shell
    except OSError as error:
        reason = f"{command[0]} can't be run: {error.strerror}"
        sys.stderr.write(f"edl: {reason}\n")
        link.say(Failed(reason=reason, final=True))
        sys.exit(EX_CONFIG)


def _refuse_unless_called(link: AgentLink) -> None:
    if not link.called:
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
