"""The last status that a script has given to `sys.exit`, or to `exit` or `quit`."""

from __future__ import annotations

import builtins
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

is_0 = False
"""Whether there was such a call, and the last one in the main thread was with status 0."""


def watch() -> None:
    """Note the status from now on. For `sys.exit(main())` call it before `main`: `sys.exit` is looked up first."""
    for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        if hasattr(module, name):
            setattr(module, name, _noted(getattr(module, name)))


def _noted(leave: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(leave)  # so that pickle finds it, too
    def note_and_leave(*status: object, **named: object) -> Any:
        global is_0  # noqa: PLW0603 -- a process has one script
        if threading.current_thread() is threading.main_thread():
            given = (*status, *named.values())
            is_0 = all(each is None or (isinstance(each, int) and not each) for each in given)
        return leave(*status, **named)

    return note_and_leave
