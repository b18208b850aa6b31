"""Parent process of one instance's command: `python -I -S instance_wrapper.py FDS TO COMMAND…`.

FDS: the descriptors "LIFELINE,LOCK", or the first alone. The supervisor holds the other end of the lifeline; when that
closes, the command and all its descendants are killed. The lock is held while anything of the job runs. SIGTERM goes to
the command alone, as on Kubernetes, or with TO as "group" rather than "command" to its process group. When the command
ends, its descendants are killed and this process exits as it did.

Each instance has one, so this imports only what loads fast.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Container, Iterator

NOT_RUN = 127
"""Exit status of a command that could not be run, as in shells."""

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(spare: Container[int] = (), *, options: int = 0) -> bool:
    """Kill and reap all descendants but the children in `spare`; return whether none is left.

    `options`: of waitpid, WNOHANG to return before all have died: one may live on for long, in a call to a driver or to
    NFS. Needs `adopt_orphans()`, so Linux only.
    """
    # grandchildren become children as their parents die, hence the loop
    while left := [pid for pid in children() if pid not in spare]:
        dying = 0
        for pid in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                dying += os.waitpid(pid, options)[0] == 0
        if dying == len(left):
            return False
    return True


def children() -> Iterator[int]:
    """Yield the ids of this process's children; none but on Linux."""
    if sys.platform != "linux":
        return
    parent = str(os.getpid())
    for entry in os.listdir("/proc"):  # noqa: PTH208 - pathlib would double the time that a start takes
        if entry.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:  # noqa: PTH123 - as above
                if stat.read().rpartition(")")[2].split()[1] == parent:  # state and parent follow "(name)"
                    yield int(entry)


def run(command: list[str], lifeline: int, received: list[int] | None = None, *, to_group: bool = False) -> int:
    """Run the command until it ends or `lifeline` closes. Return its exit status, negative for a signal.

    `received`: collects the SIGTERMs that were passed on. `to_group`: to the command's process group.
    """
    adopt_orphans()
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    terminations: list[int] = []
    received = [] if received is None else received

    def on_terminate(number: int, _: object) -> None:
        terminations.append(number)
        received.append(number)

    signal.signal(signal.SIGTERM, on_terminate)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        child = os.posix_spawnp(
            command[0],
            command,
            os.environ,
            setpgroup=0,
            setsigmask=[],
            setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
        )
    except OSError as error:
        with contextlib.suppress(OSError):  # a full disk
            print(f"edl: can't run {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True)  # noqa: T201 - the log
        return NOT_RUN
    exit_status = _wait(child, lifeline, woken, terminations, os.killpg if to_group else os.kill)
    _kill_group(child)  # all at once, so that few are left to fork meanwhile
    if exit_status is None:
        os.kill(child, signal.SIGKILL)  # it may have left its group
        exit_status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    kill_descendants()
    return exit_status


def _wait(
    child: int, lifeline: int, woken: int, terminations: list[int], send: Callable[[int, int], None]
) -> int | None:
    """Reap the child and return its exit status, or return None when the lifeline closes, without reaping it."""
    while True:
        readable, _, _ = select.select([lifeline, woken], [], [])
        if lifeline in readable:
            return None
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
        while terminations:
            send(child, terminations.pop())
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    return os.waitstatus_to_exitcode(ended[1])


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it is empty; macOS raises PermissionError then
        os.killpg(leader, signal.SIGKILL)


def _end_as(exit_status: int) -> None:
    if exit_status >= 0:
        os._exit(exit_status)
    number = -exit_status
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def main(arguments: list[str]) -> None:
    descriptors = [int(word) for word in arguments[0].split(",")]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    _end_as(run(arguments[2:], descriptors[0], to_group=arguments[1] == "group"))


if __name__ == "__main__":
    main(sys.argv[1:])
