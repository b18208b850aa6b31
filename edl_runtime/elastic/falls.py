"""Trainers that ended and were not to, and when that is the end of their job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from edl_runtime.elastic.messages import Failed
from edl_runtime.errors import EX_CONFIG, RegistryUnavailableError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys
from edl_runtime.store.client import run_script

if TYPE_CHECKING:
    from redis.asyncio import Redis

MOST_FALLS = 3
"""So often a trainer that fell is replaced without progress in between. Those of several instances in one generation
are one: when a rank ends, others may because of it."""

LONG_LIFE_S = 60.0
"""A plain script does not tell of its steps; one that ran for so long has come on."""

KEPT_MS = 24 * 3600 * 1000


class Fall(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer has ended that was not to.

    - `exit_code`: negative for a signal. `said`: what its script said last, if anything.
    - `killed`: why its agent killed it, "" if that did not.
    - `elastic`: its script joined generations by itself.
    - `generation`: the last that its instance was told to be in, 0 for none. `was_up`: this trainer was up in that.
    """

    exit_code: int
    said: Failed | None
    killed: str
    elastic: bool
    generation: int
    was_up: bool
    lived_s: float

    @property
    def reason(self) -> str:
        """Why, in words."""
        if self.killed:
            return f"its trainer was killed, for {self.killed}"
        if self.said:
            return self.said.reason
        if self.exit_code == 0:
            return "its script ended before it had gone through all of its data, which every rank has to"
        ended = f"exited with {self.exit_code}" if self.exit_code > 0 else f"was ended by signal {-self.exit_code}"
        return f"its trainer {ended}"

    @property
    def final(self) -> bool:
        """Whether no other trainer would fare better, whatever was before."""
        return self.exit_code == 0 or self.wrong_input

    @property
    def wrong_input(self) -> bool:
        """Whether the script says that what it was given is wrong."""
        return self.said is not None and self.said.final


class Verdict(msgspec.Struct, frozen=True):
    """The job has failed: why, and what the agent exits with."""

    reason: str
    status: int


async def judge(client: Redis, settings: RuntimeSettings, fall: Fall, *, step: int, stepped: bool) -> Verdict | None:
    """Return how the job has failed by this fall, None if the trainer is to be replaced.

    `step`: the last that it did. `stepped`: whether anybody of the job has finished a step in this run: an elastic
    script that fails by itself before that fails at once.
    """
    said = f"instance {settings.instance}: {fall.reason}"
    if fall.final or (fall.elastic and fall.exit_code > 0 and not stepped):
        return Verdict(said, EX_CONFIG if fall.wrong_input else 1)
    if await _count(client, settings, fall, step) <= MOST_FALLS:
        return None
    return Verdict(f"{said}; no progress since {MOST_FALLS} others were replaced", 1)


async def _count(client: Redis, settings: RuntimeSettings, fall: Fall, step: int) -> int:
    """Return how often trainers of the job have fallen without progress in between, 1 if Redis can't tell."""
    long_life = not fall.elastic and fall.lived_s >= LONG_LIFE_S
    key = keys.trainer_falls(settings.namespace, settings.job)
    arguments: list[str | int] = [settings.run, settings.instance, fall.generation, step, int(long_life), KEPT_MS]
    try:
        return int(await run_script(client, "trainers_fall", [key], arguments))
    except RegistryUnavailableError:
        return 1
