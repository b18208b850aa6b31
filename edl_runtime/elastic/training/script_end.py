"""The end of a training script: whether it ran to its end, and what is then done."""

from __future__ import annotations

import contextlib
import dis
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType

from edl_runtime.elastic import script_exit
from edl_runtime.elastic.comm.agent_protocol import AgentClient, ScriptFailed
from edl_runtime.log import get_logger

log = get_logger(__name__)


def at_script_end(agent: AgentClient, end: Callable[[], None], is_over: Callable[[], bool]) -> None:
    """Call `end` when the script has run to its end, unless it ends by an error or with a status other than 0.

    If `end` fails, this process reports it and exits with status 1. `is_over`: there is nothing to end any more. Not by
    `atexit`: object store clients can't start any work by then.
    """
    process, script = os.getpid(), RunningScript()

    def end_in_process() -> None:
        if os.getpid() != process or agent.failed:  # the former: in the data loader's processes, which end like this
            return
        if not script.ended_well():
            if not is_over():
                reason = "the script has not run to its end, or exits by `raise SystemExit` instead of sys.exit"
                log.warning("training.not_ended", reason=reason)
            return
        try:
            end()
        except SystemExit:  # it was told to leave, and has
            return
        except BaseException as error:  # noqa: BLE001 -- nothing else reports it, and only os._exit changes the status
            agent.send(ScriptFailed.of(error))
            with contextlib.suppress(OSError):  # a full disk
                traceback.print_exception(error)
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(1)

    threading._register_atexit(end_in_process)  # type: ignore[attr-defined] # noqa: SLF001


class RunningScript:
    """The script that this process runs, watched from now on.

    The interpreter tells nobody how it ends: an error is in `sys.last_value`, a SystemExit nowhere. But a frame keeps
    its last instruction: a script that has run to its end has returned. For any other, the last call of `sys.exit`
    counts, so the status of a plain `raise SystemExit` is not known.
    """

    def __init__(self) -> None:
        self._frame = _script_frame()
        self._error = getattr(sys, "last_value", None)

    def ended_well(self) -> bool:
        """Whether it has run to its end or exits with status 0; call it at the end. An interactive one always has."""
        if hasattr(sys, "ps1") or self._frame is None or _has_returned(self._frame):
            return True
        return script_exit.is_0 and getattr(sys, "last_value", None) is self._error


def _script_frame() -> FrameType | None:
    """Return the frame of the script's file; None if a program in C runs it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    while frame and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("<module>", "__main__"):
        frame = frame.f_back
    return frame


def _has_returned(frame: FrameType) -> bool:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
