"""How a training ends: its last checkpoint, its result, and what becomes of it where a script leaves its loop early."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Literal

from edl_runtime.elastic.link import Link
from edl_runtime.elastic.messages import Failed, Finished
from edl_runtime.elastic.saving import Saver
from edl_runtime.elastic.standing import Standing
from edl_runtime.elastic.team import Team
from edl_runtime.result import write_result
from edl_runtime.settings import RuntimeSettings

STORE_AWAY_S = 600.0
"""How long the last checkpoint of what is all trained is tried to be written: nothing else has these weights."""

LEAVE_SHARE = 0.5
"""What of an instance's grace it tries so where it was told to leave; after 0.8 of it its agent kills it."""

LINGER_S = 0.2
"""How long the sockets stay open after the last step: who is slower may not have read all that it needs from them."""


class Ending:
    """The end of a training, of which there is one. `over`: it has come."""

    def __init__(self, standing: Standing, team: Team, saver: Saver, settings: RuntimeSettings) -> None:
        self.over = False
        self._standing = standing
        self._team = team
        self._saver = saver
        self._settings = settings
        self._result_url: str | None = None

    @property
    def saved(self) -> bool:
        """Whether this process has written the last checkpoint, or would have, where any are kept."""
        return self._result_url is not None

    def save(self, *, leaves: bool = False) -> None:
        """Write the last checkpoint and the result, unless this process has; wait for a store that is away.

        `leaves`: since this instance was told to, so its time is short. Raises CheckpointError.
        """
        if not self.saved:
            patience_s = LEAVE_SHARE * self._settings.grace_s if leaves else STORE_AWAY_S
            self._result_url = self._saver.save_now(partial(self._standing.snapshot, durable=True), patience_s)
            self.write_result()

    def end(self, why: Literal["done", "left"]) -> None:
        """Let go of the group and tell the agent."""
        self.over = True
        group = self._team.group
        if group.world_size > 1:
            time.sleep(LINGER_S)
        group.close()
        self._saver.close()
        self._team.link.say(Finished(step=self._standing.steps, why=why))

    def write_result(self) -> None:
        """Leave the checkpoint's place and the metrics for whoever runs this script."""
        metrics = self._standing.told_metrics()
        write_result(checkpoint=self._result_url or "", metrics=metrics, settings=self._settings)


def at_script_end(link: Link, end: Callable[[], None]) -> None:
    """Call `end` once the script has run to its end, and not into an error.

    If that raises an error, the agent is told and this process ends with status 1. By `atexit` it would be too late:
    what connects to object stores can't begin any work by then.
    """
    threading._register_atexit(_end_in, os.getpid(), link, end)  # type: ignore[attr-defined] # noqa: SLF001


def _end_in(process: int, link: Link, end: Callable[[], None]) -> None:
    """Do it, but not in the processes that load data, which end in the same way."""
    if os.getpid() != process or link.failed or getattr(sys, "last_value", None) is not None:
        return
    try:
        end()
    except SystemExit:  # it was told to leave, and has
        return
    except BaseException as error:  # noqa: BLE001 -- the last to hear of it; and only so can the status be changed
        traceback.print_exception(error)
        link.say(Failed.of(error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
