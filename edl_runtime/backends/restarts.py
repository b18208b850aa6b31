"""Whether an instance that has ended is restarted, given up, or fails its job. Pure.

For instances of pools, and for elastic trainers ended by a signal or EX_CONFIG; other exits of trainers end their job.
"""

from __future__ import annotations

import msgspec

from edl_runtime.errors import EX_CONFIG, EX_DRAINED
from edl_runtime.exit_status import describe_exit


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of restarts.

    The delay before a restart starts at `initial_delay_s` and doubles up to `max_delay_s`. An instance that ran for
    `healthy_after_s` starts again from zero. `max_short_lives` shorter runs in a row fail the job, unless it is a pool
    with another instance that works.

    More than `max_hourly_exits` of a trainer within an hour fail its job, however long each run was: it may end each
    time before it writes a checkpoint, which it does every 300 s by default, and would never finish.
    """

    initial_delay_s: float = 0.2
    max_delay_s: float = 5.0
    healthy_after_s: float = 10.0
    max_short_lives: int = 5
    max_hourly_exits: int = 10


class Restart(msgspec.Struct, frozen=True):
    """Restart it after `delay_s`. `reason`: set once it has had too many `short_lives` in a row."""

    delay_s: float
    short_lives: int
    reason: str = ""


class GiveUpInstance(msgspec.Struct, frozen=True):
    """Don't restart it; the job continues if enough others are left."""

    reason: str


class FailJob(msgspec.Struct, frozen=True):
    reason: str


def decide_restart(
    policy: RestartPolicy, exit_code: int, lived_s: float, short_lives: int, *, others: bool, within_an_hour: int = 0
) -> Restart | GiveUpInstance | FailJob:
    """Decide on an instance that ended after `lived_s`, with `short_lives` in a row before.

    - `others`: it is a pool with another instance that runs or may still be restarted.
    - `within_an_hour`: how often a trainer has ended in the last hour; 0 for a pool's instance.
    """
    if exit_code == EX_DRAINED:
        return Restart(policy.initial_delay_s, short_lives)
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
