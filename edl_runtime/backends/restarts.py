"""When an instance is started again after it ended, and when it or its job is given up. Pure.

That is for pools and for elastic trainers that a signal has ended or that exit with EX_CONFIG, which speaks for the
instance alone; whatever else a trainer exits with is how its job has ended.
"""

from __future__ import annotations

import msgspec

from edl_runtime.errors import EX_CONFIG
from edl_runtime.exit_status import describe_exit


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How patient a job is with an instance that keeps ending: a pool in any way, elastic trainers by signals.

    It waits `initial_delay_s` before it starts the instance again, twice as long each further time, at most
    `max_delay_s`. Who lived `healthy_after_s` starts with a clean record. After `max_short_lives` in a row that
    were shorter, whatever their exit status, the job fails, unless it is a pool with another instance to go on with.

    A trainer that has ended more than `max_hourly_exits` times within an hour fails its job however long it lived: it
    ends before it has written a checkpoint, every 300 s by default, and would begin anew for ever.
    """

    initial_delay_s: float = 0.2
    max_delay_s: float = 5.0
    healthy_after_s: float = 10.0
    max_short_lives: int = 5
    max_hourly_exits: int = 10


class Restart(msgspec.Struct, frozen=True):
    """Start it again after `delay_s`; it has had `short_lives` in a row, for `reason` once these are too many."""

    delay_s: float
    short_lives: int
    reason: str = ""


class GiveUpInstance(msgspec.Struct, frozen=True):
    """Don't start it again, for `reason`; the others go on, if there are enough."""

    reason: str


class FailJob(msgspec.Struct, frozen=True):
    """Fail the job, for `reason`."""

    reason: str


def decide_restart(
    policy: RestartPolicy, exit_code: int, lived_s: float, short_lives: int, *, others: bool, within_an_hour: int = 0
) -> Restart | GiveUpInstance | FailJob:
    """Decide on an instance that ended after `lived_s`, with `short_lives` in a row before this one.

    - `others`: whether it is a pool with another instance that runs or has not had too many short lives yet.
    - `within_an_hour`: how often it has ended by now, if it is a trainer; 0 for a pool's.
    """
    if exit_code == EX_CONFIG:
        return GiveUpInstance(f"{describe_exit(exit_code)}, which says that it can never work as configured")
    if within_an_hour > policy.max_hourly_exits:
        return FailJob(f"ended {within_an_hour} times within an hour, the last time it {describe_exit(exit_code)}")
    if lived_s >= policy.healthy_after_s:
        return Restart(policy.initial_delay_s, 0)
    short_lives += 1
    delay_s = min(policy.initial_delay_s * 2 ** (min(short_lives, 32) - 1), policy.max_delay_s)
    if short_lives < policy.max_short_lives:
        return Restart(delay_s, short_lives)
    times = f"{short_lives} times in a row within {policy.healthy_after_s:.0f} s of its start"
    reason = f"ended {times}, the last time it {describe_exit(exit_code)}"
    return Restart(delay_s, short_lives, reason) if others else FailJob(reason)
