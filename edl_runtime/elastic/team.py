"""The generation that a trainer is in: how it comes in, and how it goes on to the next."""

from __future__ import annotations

import atexit
import os
import secrets
import time
from collections.abc import Callable

from edl_runtime.elastic.groups import Alone, Backend, Group, PaddleGroup
from edl_runtime.elastic.link import Link, Wish
from edl_runtime.elastic.messages import Join, Leave, Lost
from edl_runtime.errors import GroupLostError
from edl_runtime.log import get_logger

MOST_LIVE = 32
"""Groups that a process may have been in: Paddle keeps a few descriptors and threads of each."""

log = get_logger(__name__)

GetReady = Callable[[Join], None]
"""What a rank does before it meets the others of a generation, who wait for it there."""

Enter = Callable[[Group, Join, list[int | None]], None]
"""What brings a new group to one state: it is told the steps that all ranks have come with. Raises GroupLostError."""


class Team:
    """This trainer's place in its present generation, 0 before the first. `names`: of all its processes, by rank."""

    def __init__(self, link: Link, *, most_live: float = MOST_LIVE) -> None:
        """Be in no generation. `most_live`: in how many groups this process may be."""
        self.link = link
        self._most_live = most_live
        self.group: Group = Alone()
        self.generation = 0
        self.instances = 1
        self.name = secrets.token_hex(6)
        self.names = [self.name]
        self._backend: Backend = "gloo"
        self._made = 0

    def choose(self, backend: Backend) -> None:
        """Have groups of this kind from now on, and none when the interpreter ends, in whatever way the script did.

        What a group has in C++ may abort a process that ends with it open, and its exit status would be lost.
        """
        self._backend = backend
        atexit.register(self._close_in, os.getpid())

    @property
    def live(self) -> bool:
        """Whether this process can go on to another generation."""
        return self._backend == "gloo" and self._made < self._most_live

    def next(self, step: int | None, get_ready: GetReady, enter: Enter) -> Leave | None:
        """Wait for the next generation that can be entered, and enter it; return Leave when there is none for us.

        `step`: how many this trainer's state has seen, None if it has no state yet.
        """
        since = time.monotonic()
        while True:
            wish = self._wait()
            if isinstance(wish, Leave):
                return wish
            self.generation, self.instances = wish.generation, wish.instances
            get_ready(wish)
            try:
                self.group = self._grouped(wish, step, enter)
            except GroupLostError as error:
                self.lost(error, step)
            else:
                log.info(
                    "generation.entered",
                    generation=wish.generation,
                    rank=wish.rank,
                    world_size=wish.world_size,
                    took_s=round(time.monotonic() - since, 3),
                )
                return None

    def lost(self, error: GroupLostError, step: int | None) -> None:
        """Let go of the group, so that nobody waits for us, and tell the agent. `step`: as in `next`."""
        self.group.abort()
        log.warning("generation.lost", generation=self.generation, reason=error.reason)
        self.link.say(Lost(generation=self.generation, reason=error.reason, step=step))

    def _close_in(self, process: int) -> None:
        """Do it, but not in a process that the script has forked: the sockets are its parent's."""
        if os.getpid() == process:
            self.group.close()

    def _wait(self) -> Wish:
        while (wish := self.link.wait(self.generation)) is None:
            pass
        return wish

    def _grouped(self, join: Join, step: int | None, enter: Enter) -> Group:
        if join.world_size == 1:
            alone = Alone()
            self.names = [self.name]
            enter(alone, join, [step])
            self.group.close()
            return alone
        group = PaddleGroup(join, self._backend, moved=self.link.moved)
        self._made += 1
        self.link.guard(join.generation, group.abort, forming=True)
        self.link.waits_for((step or 0) + 1)
        try:
            met = group.meet(self.name, step)
            self.group.close()  # nobody waits in the one before any more: all have met
            self.names = met.names
            enter(group, join, met.steps)
            self.link.guard(join.generation, group.abort)
        except BaseException:
            group.close()
            raise
        finally:
            self.link.waits_for(None)
        return group
